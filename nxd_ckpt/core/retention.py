"""Retention: rules, and a pure function that divides tags into those to keep and those to remove.

A tag stays if any rule keeps it, if it is pinned, or if it is the newest. So every policy keeps at least one tag.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias

from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.core.tags import TagInfo, in_order, step_of, undecided
from nxd_ckpt.errors import InvalidArgument

Metrics: TypeAlias = Mapping[str, float | None]
"""Metrics of the training that a save recorded, by name; None if a value was not finite."""


@dataclass(frozen=True)
class Last:
    """A rule that keeps the newest ``count`` tags."""

    count: int

    def __post_init__(self) -> None:
        _require_count("Last", self.count)

    def __str__(self) -> str:
        return f"last {self.count}"

    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        return tags[-self.count :]


@dataclass(frozen=True)
class Every:
    """A rule that keeps each tag whose step is a multiple of ``steps``.

    The step is the last number after a word such as "step" or "iter", otherwise the last number in the name; decimals
    never count, and epochs only without any other number. So it is 300 for "300", "step_300", "epoch1-step300" and
    "step300-epoch1". A tag without a number has no step.
    """

    steps: int

    def __post_init__(self) -> None:
        _require_count("Every", self.steps)

    def __str__(self) -> str:
        return f"every {self.steps}"

    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        steps = {info.tag: step_of(info.tag) for info in tags}
        return [info for info in tags if (step := steps[info.tag]) is not None and step % self.steps == 0]


@dataclass(frozen=True)
class Best:
    """A rule that keeps the ``count`` tags with the lowest ``metric``, or with ``mode="max"`` the highest.

    Of equal ones it keeps the newest. It also keeps every tag that was saved without that metric, or with one that was
    not finite, because their quality is not known. So a metric whose name is misspelt removes nothing.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise InvalidArgument(f"Best() needs the name of a metric, found {self.metric!r}")
        _require_count("Best", self.count)
        if self.mode not in ("min", "max"):
            raise InvalidArgument(f"the mode of Best() must be 'min' or 'max', found {self.mode!r}")

    def __str__(self) -> str:
        return f"best {self.count} by {self.metric} ({self.mode})"

    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        sign = 1 if self.mode == "min" else -1
        values = [(self.value(metrics.get(info.tag, {})), info) for info in reversed(tags)]
        ranked = sorted([(sign * value, info) for value, info in values if value is not None], key=lambda pair: pair[0])
        return [info for _, info in ranked[: self.count]] + [info for value, info in values if value is None]

    def value(self, metrics: Metrics) -> float | None:
        """Return the metric of a tag; None if it is absent or not finite."""
        value = metrics.get(self.metric)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Within:
    """A rule that keeps the tags that were saved at most this long before the newest tag.

    No clock is read, so time that passes without a save removes nothing.
    """

    hours: float = 0
    days: float = 0
    minutes: float = 0

    def __post_init__(self) -> None:
        values = (self.hours, self.days, self.minutes)
        if not all(_is_number(value) and 0 <= value < math.inf for value in values) or not any(values):
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


Rule: TypeAlias = Last | Every | Best | Within
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
    return [
        f"Best({rule.metric!r}): no tag has the metric {listed([rule.metric], names)}; "
        f"tags have {first_of(sorted(names)) or 'no metrics'}, and saves pass them as metrics={{...}}"
        for rule in rules
        if isinstance(rule, Best) and metrics and all(rule.value(each) is None for each in metrics.values())
    ]


def _reason(rule: Rule, metrics: Metrics) -> str:
    if isinstance(rule, Best) and rule.value(metrics) is None:
        return f"it has no {rule.metric}"
    return str(rule)


def rules_of(num_kept_ckpts: int | None, retain: Sequence[Rule] | int | None = None) -> tuple[Rule, ...] | None:
    """Combine both options into rules; None keeps all. ``num_kept_ckpts`` is None, -1 (NxD's) or the count of `Last`.

    Raises:
        InvalidArgument: ``num_kept_ckpts`` is 0 (it would delete the checkpoint just saved), another negative number or
            no integer; or ``retain`` is empty, or has an element that is no rule.
    """
    last: tuple[Rule, ...] = ()
    if num_kept_ckpts is not None and num_kept_ckpts != -1:
        if not _is_count(num_kept_ckpts):
            raise InvalidArgument(
                f"num_kept_ckpts must be None or -1 (keep all) or at least 1, found {num_kept_ckpts!r}; "
                "0 would delete the checkpoint that was just saved"
            )
        last = (Last(num_kept_ckpts),)
    if retain is None:
        return last or None
    if isinstance(retain, int) and _is_count(retain):
        retain = [Last(retain)]
    if not isinstance(retain, (list, tuple)) or not retain or not all(isinstance(rule, Rule) for rule in retain):
        raise InvalidArgument(
            f"retain={retain!r}: expected the number of newest tags to keep, or a list of rules such as [Last(3), "
            "Every(1000), Best('loss', 3), Within(hours=2)]; None keeps all tags, an empty list would keep none"
        )
    return (*retain, *last)


def recorded_metrics(metrics: Mapping[str, float] | None) -> dict[str, float | None]:
    """Return ``metrics``, real numbers by name, as a manifest has them: floats, or None if not finite.

    Raises InvalidArgument for anything else.
    """
    numbers: Any = {} if metrics is None else metrics
    if not isinstance(numbers, Mapping) or not all(isinstance(name, str) and name for name in numbers):
        raise InvalidArgument(f"metrics={metrics!r:.200}: expected numbers by name, such as {{'loss': 2.1}}")
    for name, value in numbers.items():
        if not _is_number(value):
            raise InvalidArgument(
                f"metrics: {name!r} is {value!r:.80}, a {type(value).__name__}; expected a number (float(value) makes "
                "one of a tensor)"
            )
    return {name: _finite(value) for name, value in numbers.items()}


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all floats
        return None
    return number if math.isfinite(number) else None


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require_count(rule: str, value: object) -> None:
    if not _is_count(value):
        raise InvalidArgument(f"{rule}() needs a whole number of at least 1, found {value!r}")
