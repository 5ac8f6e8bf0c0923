"""Rules for the counters of a run: the optimizer's steps, and what else counts steps. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.suggestions import first_of

_STEPS = {"step", "steps", "iteration", "iterations", "iter"}
_SETTINGS = {
    *("epoch", "epochs", "size", "max", "min", "total", "per", "every", "interval", "warmup", "save", "log", "eval"),
    *("limit", "length", "seed", "seq", "workers", "accumulation", "frequency", "freq"),
    *("start", "end", "stop", "sizes"),
}


@dataclass(frozen=True)
class Progress:
    """State of a run's counters when a tag was saved.

    Attributes:
        steps: the optimizer's steps of each parameter, by global rank; empty for optimizers that count none.
        stages: the pipeline stage of each parameter, where there are several.
        values: single values by name, such as "scheduler/last_epoch" and "user_content/step".
    """

    steps: Mapping[str, Mapping[int, int]]
    values: Mapping[str, Any]
    stages: Mapping[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """Steps of the parameter with the most; the scheduler's steps if the optimizer counts none."""
        if self.steps:
            return max(max(ranks.values()) for ranks in self.steps.values())
        return whole_number(self.values.get("scheduler/last_epoch"))


def whole_number(value: Any) -> int | None:
    """Return ``value`` as int if it is a number (or a tensor) without fraction, else None."""
    if isinstance(value, bool) or not hasattr(value, "__int__"):
        return None
    try:
        return int(value) if int(value) == value else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _growth(before: Progress, after: Progress) -> dict[str, int]:
    """Return the increase in steps of each parameter that both tags have."""
    both = before.steps.keys() & after.steps.keys()
    return {name: max(after.steps[name].values()) - max(before.steps[name].values()) for name in both}


def check_ranks(now: Progress) -> Iterator[Finding]:
    """Report ranks whose shards of a parameter have made a different number of steps."""
    behind: dict[tuple[int, int, int], list[str]] = {}
    for name, ranks in now.steps.items():
        usual, _ = Counter(ranks.values()).most_common(1)[0]
        for rank, step in ranks.items():
            if step != usual:
                behind.setdefault((rank, step, usual), []).append(name)
    for (rank, step, usual), names in behind.items():
        yield problem(
            "steps",
            f"rank {rank}",
            f"the optimizer state of rank {rank} is of step {step}, that of other ranks of step {usual}: "
            f"{first_of(names)}",
        )


def check_steps(before: Progress, after: Progress) -> Iterator[Finding]:
    """Report steps that fell, stood still, or grew differently between pipeline stages."""
    grown = _growth(before, after)
    back = sorted(name for name, by in grown.items() if by < 0)
    if back:
        was, now = (max(max(tag.steps[name].values()) for name in back) for tag in (before, after))
        yield problem(
            "steps",
            first_of(back),
            f"the optimizer was at step {was} and is at step {now}: it was not resumed, or is of an earlier tag",
        )
        return
    if grown and not any(grown.values()):
        yield _no_step(before, after)
        return
    by_stage: dict[int, int] = {}
    for name, stage in after.stages.items():
        if name in grown:
            by_stage[stage] = max(by_stage.get(stage, 0), grown[name])
    most = max(by_stage.values(), default=0)
    for stage, by in by_stage.items():
        if by != most:
            yield problem(
                "steps", f"pipeline stage {stage}", f"its optimizer made {by} steps where other stages made {most}"
            )


def moved_counters(before: Progress, after: Progress) -> dict[str, tuple[int, int]]:
    """Return counters that grew by at least one optimizer step, with their values before and after.

    A counter of micro-batches counts several times per optimizer step; its rate is taken from ``before``.
    """
    moved: dict[str, tuple[int, int]] = {}
    for name, value in before.values.items():
        was = whole_number(value)
        now = whole_number(after.values.get(name))
        if was is None or now is None or not _counts_steps(name):
            continue
        rate = max(1, -(-was // before.step)) if before.step else 1
        if now - was >= rate:
            moved[name] = was, now
    return moved


def _no_step(before: Progress, after: Progress) -> Finding:
    """Return the finding for an optimizer without steps: a problem if other counters moved meanwhile."""
    message = f"no parameter made a step: both tags are of step {after.step}"
    moved = moved_counters(before, after)
    if not moved:
        return doubt("steps", "optimizer", message)
    name, (was, now) = next(iter(moved.items()))
    message = f"{message}, but {name} went from {was} to {now}"
    if _scale_fell(before, after):
        return doubt("steps", "optimizer", f"{message}; a loss scaler that skips steps explains this")
    return problem(
        "steps", "optimizer", f"{message}: the optimizer was not saved again, or another one is in use"
    )


def _scale_fell(before: Progress, after: Progress) -> bool:
    """Return whether a loss scaler lowered its scale: it does so when it skips a step."""
    for name, value in before.values.items():
        was = _real(value)
        now = _real(after.values.get(name))
        if _words(name) & {"scale"} and was is not None and now is not None and now < was:
            return True
    return False


def _real(value: Any) -> float | None:
    try:
        return None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _counts_steps(name: str) -> bool:
    """Return whether the name is that of a count of steps: a setting is none."""
    if name.startswith(("scheduler/", "optim/")):
        return name == "scheduler/last_epoch"
    words = _words(name)
    return bool(words & _STEPS) and not words & _SETTINGS


def _words(name: str) -> set[str]:
    """Return the words of the last part of a name that is no number: global and step for ``trainer/globalStep``."""
    last = next((part for part in reversed(name.split("/")) if not part.isdigit()), "")
    return set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last).lower()))
