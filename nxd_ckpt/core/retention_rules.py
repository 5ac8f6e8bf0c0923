"""Retention: rules, and a pure function that divides tags into those to keep and those to remove.

A tag stays if any rule keeps it, if it is pinned, or if it is the newest. So every policy keeps at least one tag.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from nxd_ckpt.core.arguments import Count, Kind, at_least_1, read
from nxd_ckpt.core.limits import is_text
from nxd_ckpt.core.option_classes import Options
from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.core.tags import TagInfo, in_order, step_of, undecided
from nxd_ckpt.errors import InvalidArgument

Metrics: TypeAlias = Mapping[str, float | None]
"""Metrics of the training that a save recorded, by name; None if a value was not finite."""


@dataclass(frozen=True)
class Rule(Options, ABC):
    """Base of the rules here, so that type checkers know what a list of several of them holds."""

    @abstractmethod
    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        """Return those of the ``tags``, oldest first, that the rule keeps."""


@dataclass(frozen=True)
class Last(Rule):
    """A rule that keeps the newest ``count`` tags, of which the tag ``including`` is one, however old it is."""

    count: Count
    including: str | None = None

    def __str__(self) -> str:
        return f"last {self.count}" + (f" with {self.including}" if self.including else "")

    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        older = [info for info in tags[: -self.count] if info.tag == self.including]
        return [*older, *tags[-max(self.count - len(older), 1) :]]


@dataclass(frozen=True)
class Every(Rule):
    """A rule that keeps each tag whose step is a multiple of ``steps``.

    The step is the last number after a word such as "step" or "iter", otherwise the last number in the name; decimals
    never count, and epochs only without any other number. So it is 300 for "300", "step_300", "epoch1-step300" and
    "step300-epoch1". A tag without a number has no step.
    """

    steps: Count

    def __str__(self) -> str:
        return f"every {self.steps}"

    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        steps = {info.tag: step_of(info.tag) for info in tags}
        return [info for info in tags if (step := steps[info.tag]) is not None and step % self.steps == 0]


@dataclass(frozen=True)
class Best(Rule):
    """A rule that keeps the ``count`` tags with the lowest ``metric``, or with ``mode="max"`` the highest.

    Of equal ones it keeps the newest. How good a tag is that was saved without that metric, or with one that was not
    finite, is not known. Such tags stay until ``count`` tags have the metric, so that a misspelt one removes nothing.
    Those that are older than all that have it, of a time before metrics were given, stay for good.
    """

    metric: str
    count: Count = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.metric:
            raise InvalidArgument("Best() needs the name of a metric, found ''")

    def __str__(self) -> str:
        return f"best {self.count} by {self.metric} ({self.mode})"

    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        sign = 1 if self.mode == "min" else -1
        values = enumerate(self.value(metrics.get(info.tag, {})) for info in tags)
        measured = {place: sign * value for place, value in values if value is not None}
        best = sorted(measured, key=lambda place: (measured[place], -place))[: self.count]
        before = min(measured) if len(measured) >= self.count else len(tags)
        return [tags[place] for place in (*best, *(place for place in range(before) if place not in measured))]

    def value(self, metrics: Metrics) -> float | None:
        """Return the metric of a tag; None if it is absent or not finite."""
        value = metrics.get(self.metric)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Within(Rule):
    """A rule that keeps the tags that were saved at most this long before the newest tag.

    No clock is read, so time that passes without a save removes nothing.
    """

    hours: float = 0
    days: float = 0
    minutes: float = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        values = (self.hours, self.days, self.minutes)
        if not all(0 <= value < math.inf for value in values) or not any(values):
            raise InvalidArgument(
                f"Within() needs a time of more than 0, found hours={self.hours!r}, days={self.days!r}, "
                f"minutes={self.minutes!r}"
            )

    @property
    def seconds(self) -> float:
        return 3600 * (24 * self.days + self.hours) + 60 * self.minutes

    def __str__(self) -> str:
        parts = ((self.days, "d"), (self.hours, "h"), (self.minutes, "min"))
        return f"within {' '.join(f'{value:g} {unit}' for value, unit in parts if value)}"

    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        return [info for info in tags if info.order_time >= tags[-1].order_time - self.seconds]


BY_AGE = (Last, Within)
"""Rules that depend on the time of a tag."""
BY_COUNT = (Last, Best)
"""Rules that keep a number of tags."""


@dataclass(frozen=True)
class Retention:
    """A decision on complete tags, oldest first: the reasons for each of the ``kept``, and the ``surplus`` tags.

    ``counted`` are kept tags in whose place others would be kept if these were not there.
    """

    kept: Mapping[str, tuple[str, ...]]
    surplus: tuple[str, ...]
    counted: frozenset[str] = frozenset()


def decide(
    tags: Iterable[TagInfo], rules: Sequence[Rule], metrics: Mapping[str, Metrics], pinned: Collection[str] = ()
) -> Retention:
    """Decide which tags stay by ``rules``, with the ``metrics`` of each tag and the names of ``pinned`` tags.

    Incomplete tags are never counted and never removed: they may be another program's save in progress.
    """
    complete = in_order(info for info in tags if info.complete)
    reasons: dict[str, list[str]] = {info.tag: [] for info in complete}
    counted = {info.tag for info in complete[-1:]}
    if complete:
        for rule in rules:
            for info in rule.chosen(complete, metrics):
                reasons[info.tag].append(_reason(rule, metrics.get(info.tag, {})))
                counted |= {info.tag} if isinstance(rule, BY_COUNT) else set()
        for tag in reasons.keys() & set(pinned):
            reasons[tag].append("pinned")
        for info in (info for group in undecided(complete) for info in group):
            reasons[info.tag].append("saved at the time of another tag")
        newest = complete[-1].tag
        reasons[newest] = reasons[newest] or ["the newest"]
    return Retention(
        {tag: tuple(why) for tag, why in reasons.items() if why},
        tuple(tag for tag, why in reasons.items() if not why),
        frozenset(counted),
    )


def unknown_metrics(rules: Sequence[Rule], metrics: Mapping[str, Metrics]) -> list[str]:
    """Return a sentence for each rule whose metric no tag has."""
    names = {name for each in metrics.values() for name in each}
    others = first_of(sorted(names)) or "no metrics"
    bests = [rule for rule in rules if isinstance(rule, Best) and metrics]
    return [
        f"Best({best.metric!r}): no tag has the metric {listed([best.metric], names)}; tags have {others}; saves "
        "pass metrics={...}, and rules of the command are METRIC:N"
        for best in bests
        if all(best.value(each) is None for each in metrics.values())
    ]


def _reason(rule: Rule, metrics: Metrics) -> str:
    if isinstance(rule, Best) and rule.value(metrics) is None:
        return f"it has no {rule.metric}"
    return str(rule)


def _kept(value: Any) -> int | None:
    kept: int | None = read(int | None, value)
    return kept if kept in (None, -1) else at_least_1(kept or 0)


def _retained(value: Any) -> Sequence[Rule] | int | None:
    retained: Sequence[Rule] | int | None = read(Sequence[Rule] | Count | None, value)
    if retained == ():
        raise ValueError
    return retained


def _metrics(value: Any) -> Mapping[str, float] | None:
    metrics: Mapping[str, float] | None = read(Mapping[str, float] | None, value)
    if not all(name and is_text(name) for name in metrics or ()):
        raise ValueError
    return metrics


_ALL = "None or -1 (keep all) or at least 1; 0 would delete the checkpoint that was just saved"
_RULES = (
    "the number of newest tags to keep, or a list of rules such as [Last(3), Every(1000), Best('loss', 3), "
    "Within(hours=2)]; None keeps all tags, an empty list would keep none"
)
NumKept = Annotated[int | None, Kind(_ALL, _kept)]
"""Number of newest tags to keep, as NxD has it."""
Retain = Annotated[Sequence[Rule] | int | None, Kind(_RULES, _retained)]
"""Tags to keep: the number of the newest, or rules."""
GivenMetrics = Annotated[
    Mapping[str, float] | None, Kind("numbers by name, such as {'loss': 2.1}, or None", _metrics)
]
"""Metrics of the training, by name, as a save is passed them."""


def rules_of(num_kept_ckpts: int | None, retain: Sequence[Rule] | int | None = None) -> tuple[Rule, ...] | None:
    """Combine both options (`NumKept`, `Retain`) into rules; None keeps all."""
    last = () if num_kept_ckpts in (None, -1) else (Last(num_kept_ckpts or 0),)
    if retain is None:
        return last or None
    return (*([Last(retain)] if isinstance(retain, int) else retain), *last)


def recorded_metrics(metrics: Mapping[str, float] | None) -> dict[str, float | None]:
    """Return `GivenMetrics` as a manifest has them: None for what is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in (metrics or {}).items()}
