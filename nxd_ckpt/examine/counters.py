"""Rules for the counters of a run: optimizer steps, scheduler, positions in the data. Pure.

Numbers that agree in one tag agree in the next tag of the same run. So most rules first check that a counter follows
the optimizer's steps in the earlier tag, and report only then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.suggestions import first_of

_POSITION = {
    *("step", "steps", "iteration", "iterations", "iter", "it", "batch", "batches", "sample", "samples", "example"),
    *("examples", "consumed", "position", "pos", "offset", "yielded", "index", "cursor", "seen", "processed", "tokens"),
}
_NO_POSITION = {
    *("epoch", "epochs", "size", "max", "min", "total", "per", "every", "interval", "warmup", "save", "log", "eval"),
    *("limit", "length", "seed", "seq", "workers", "accumulation", "frequency", "freq"),
    *("start", "end", "stop", "sizes"),
}
_STEPS = {"step", "steps", "iteration", "iterations", "iter"}


@dataclass(frozen=True)
class Progress:
    """State of a run's counters when a tag was saved.

    Attributes:
        steps: the optimizer's steps of each parameter, by global rank; empty for optimizers that count none.
        stages: the pipeline stage of each parameter, where there are several.
        values: single values by name, such as "scheduler/last_epoch" and "user_content/step".
        of_ranks: values that each rank saved for itself, by rank.
    """

    steps: Mapping[str, Mapping[int, int]]
    values: Mapping[str, Any]
    stages: Mapping[str, int] = field(default_factory=dict)
    of_ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

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
    for where, values_before, values_after in _values(before, after):
        for name, value in values_before.items():
            was = whole_number(value)
            now = whole_number(values_after.get(name))
            if was is None or now is None or not _counts_steps(name):
                continue
            rate = max(1, -(-was // before.step)) if before.step else 1
            if now - was >= rate:
                moved[f"{where}{name}"] = was, now
    return moved


def _common_ranks(before: Progress, after: Progress) -> list[int]:
    return sorted(before.of_ranks.keys() & after.of_ranks.keys())


def _values(before: Progress, after: Progress) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the values before and after: those of the whole tag, then those of each rank, which is named in front."""
    yield "", before.values, after.values
    for rank in _common_ranks(before, after):
        yield f"rank {rank}: ", before.of_ranks[rank], after.of_ranks[rank]


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


def check_scheduler(before: Progress, after: Progress) -> Iterator[Finding]:
    """Report a scheduler that followed the optimizer's steps and no longer does."""
    was, now = (whole_number(tag.values.get("scheduler/last_epoch")) for tag in (before, after))
    if was is None or now is None or not before.steps or not after.steps:
        return
    if before.step is None or after.step is None or after.step <= before.step:
        return
    expected = was + after.step - before.step
    if abs(was - before.step) <= 1 < before.step and now != expected:
        yield problem(
            "scheduler",
            "scheduler/last_epoch",
            f"expected {expected}, found {now}: at the tag before it was {was} at the optimizer's step {before.step}, "
            f"which is at step {after.step} now",
        )
    elif abs(now - expected) == 1 < after.step - before.step:
        yield doubt(
            "scheduler",
            "scheduler/last_epoch",
            f"it grew by {now - was}, the optimizer's steps by {after.step - before.step}; a loss scaler that skips "
            "steps explains this",
        )


def check_positions(before: Progress, after: Progress) -> Iterator[Finding]:
    """Report positions in the data that left their steady rate."""
    if before.step is None or after.step is None or after.step <= before.step:
        return
    if before.step > 1:  # at the first step too much is equal by chance
        for where, values_before, values_after in _values(before, after):
            yield from _positions(where, values_before, values_after, (before.step, after.step))


def _real(value: Any) -> float | None:
    try:
        return None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _positions(
    where: str, before: Mapping[str, Any], after: Mapping[str, Any], steps: tuple[int, int]
) -> Iterator[Finding]:
    for name in before:
        was = whole_number(before[name])
        now = whole_number(after.get(name))
        if not _is_position(name) or was is None or now is None or was <= 0 or was % steps[0]:
            continue
        if now == was and name.startswith(("scheduler/", "optim/")):  # a setting; their counts are checked elsewhere
            continue
        rate = was // steps[0]
        off = now - rate * steps[1]
        if not off:
            continue
        message = (
            f"{where}expected {rate * steps[1]} at step {steps[1]}, found {now}; it was {was} at step {steps[0]}"
        )
        if abs(off) == rate or off == 1:
            yield problem("position", name, message)
        elif now == was:
            yield doubt("position", name, f"{message}: it did not move")
        elif abs(off) < rate:
            yield doubt("position", name, f"{message}; a last batch that is smaller explains this")


def _is_position(name: str) -> bool:
    """True if the name is that of a position in the data or a count of steps.

    Streams that take turns move irregularly, so they do not count.
    """
    if "/shared/states/" in name:
        return False
    words = _words(name)
    return bool(words & _POSITION) and not words & _NO_POSITION


def _counts_steps(name: str) -> bool:
    if name.startswith(("scheduler/", "optim/")):
        return name == "scheduler/last_epoch"
    return bool(_words(name) & _STEPS) and _is_position(name)


def _words(name: str) -> set[str]:
    """Return the words of the last part of a name that is no number: global and step for ``trainer/globalStep``."""
    last = next((part for part in reversed(name.split("/")) if not part.isdigit()), "")
    return set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last).lower()))
