"""Which tags to keep: rules, and a pure function from tags to those that stay and those that go.

A tag stays if any rule keeps it, if it is pinned, or if it is the newest. So no policy keeps nothing.
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
"""What a save was told of the training, by name; None for what was not finite."""


@dataclass(frozen=True)
class Last:
    """Keeps the newest ``count`` tags."""

    count: int

    def __post_init__(self) -> None:
        _require_count("Last", self.count)

    def __str__(self) -> str:
        return f"last {self.count}"

    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        return tags[-self.count :]


@dataclass(frozen=True)
class Every:
    """Keeps each tag whose step is a multiple of ``steps``. Its step is the last number in its name, but one that
    follows a word such as "step" or "iter" goes before others, and decimals and epochs are none if there is another.

    So 300 is that of "300", of "step_300", of "epoch1-step300" and of "step300-epoch1". A tag without a number has no
    step.
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
    """Keeps the ``count`` tags with the lowest ``metric``, or with ``mode="max"`` the highest.

    Ties: the newest. It also keeps every tag that was saved without that metric, or with one that was not finite: how
    good they are is not known. So a metric whose name is misspelt removes nothing.
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
        ranked = sorted([(sign * value, info) for value, info in values if value is not None], key=lambda one: one[0])
        return [info for _, info in ranked[: self.count]] + [info for value, info in values if value is None]

    def value(self, metrics: Metrics) -> float | None:
        """The metric of a tag; None where it is absent or not finite."""
        value = metrics.get(self.metric)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Within:
    """Keeps the tags that were saved at most so long before the newest. No clock is asked, so that time which passes
    without a save removes nothing."""

    hours: float = 0
    days: float = 0
    minutes: float = 0

    def __post_init__(self) -> None:
        given = (self.hours, self.days, self.minutes)
        if not all(_is_number(value) and 0 <= value < math.inf for value in given) or not any(given):
            raise InvalidArgument(
                f"Within() needs a time of more than 0, found hours={self.hours!r}, days={self.days!r}, "
                f"minutes={self.minutes!r}"
            )

    @property
    def seconds(self) -> float:
        return 3600 * (24 * self.days + self.hours) + 60 * self.minutes

    def __str__(self) -> str:
        given = ((self.days, "d"), (self.hours, "h"), (self.minutes, "min"))
        return f"within {' '.join(f'{value:g} {unit}' for value, unit in given if value)}"

    def chosen(self, tags: Sequence[TagInfo], metrics: Mapping[str, Metrics]) -> Sequence[TagInfo]:
        return [info for info in tags if info.order_time >= tags[-1].order_time - self.seconds]


Rule: TypeAlias = Last | Every | Best | Within
BY_AGE = (Last, Within)
"""Rules that go by when a tag was saved."""


@dataclass(frozen=True)
class Retention:
    """What becomes of the complete tags of a directory, oldest first: why each of the ``kept`` stays, and which go."""

    kept: Mapping[str, tuple[str, ...]]
    surplus: tuple[str, ...]


def decide(
    tags: Iterable[TagInfo], rules: Sequence[Rule], metrics: Mapping[str, Metrics], pinned: Collection[str] = ()
) -> Retention:
    """What stays by ``rules``, given the ``metrics`` of each tag and the names of those that are ``pinned``.

    Incomplete tags are never counted and never removed: they may be another program's save in progress.
    """
    complete = in_order(info for info in tags if info.complete)
    reasons: dict[str, list[str]] = {info.tag: [] for info in complete}
    if complete:
        for rule in rules:
            for info in rule.chosen(complete, metrics):
                reasons[info.tag].append(_reason(rule, metrics.get(info.tag, {})))
        for tag in reasons.keys() & set(pinned):
            reasons[tag].append("pinned")
        for info in (info for group in undecided(complete) for info in group):
            reasons[info.tag].append("saved at the time of another tag")
        newest = complete[-1].tag
        reasons[newest] = reasons[newest] or ["the newest"]
    return Retention(
        {tag: tuple(why) for tag, why in reasons.items() if why},
        tuple(tag for tag, why in reasons.items() if not why),
    )


def unknown_metrics(rules: Sequence[Rule], metrics: Mapping[str, Metrics]) -> list[str]:
    """For each rule by a metric that no tag has, a sentence that says so."""
    known = {name for one in metrics.values() for name in one}
    return [
        f"Best({rule.metric!r}): no tag has the metric {listed([rule.metric], known)}; "
        f"tags have {first_of(sorted(known)) or 'no metrics'}, and saves pass them as metrics={{...}}"
        for rule in rules
        if isinstance(rule, Best) and metrics and all(rule.value(one) is None for one in metrics.values())
    ]


def _reason(rule: Rule, metrics: Metrics) -> str:
    if isinstance(rule, Best) and rule.value(metrics) is None:
        return f"it has no {rule.metric}"
    return str(rule)


def rules_of(num_kept_ckpts: int | None, retain: Sequence[Rule] | None = None) -> tuple[Rule, ...] | None:
    """What both say together; None keeps all. ``num_kept_ckpts`` is None or -1 (as NxD has it), or ``Last`` so many.

    Raises:
        InvalidArgument: 0 would delete the checkpoint just saved; other negatives and non-integers mean nothing. A
            policy without rules, or of anything else than rules.
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
    if not isinstance(retain, (list, tuple)) or not retain or not all(isinstance(one, Rule) for one in retain):
        raise InvalidArgument(
            f"retain={retain!r}: expected a list of rules such as [Last(3), Every(1000), Best('loss', 3), "
            "Within(hours=2)]; None keeps all tags, and a list without rules would keep none"
        )
    return (*retain, *last)


def recorded_metrics(metrics: Mapping[str, float] | None) -> dict[str, float | None]:
    """What a manifest says of ``metrics``, real numbers by name: floats, and None for what is not finite.

    Raises InvalidArgument for anything else.
    """
    given: Any = {} if metrics is None else metrics
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise InvalidArgument(f"metrics={metrics!r:.200}: expected numbers by name, such as {{'loss': 2.1}}")
    for name, value in given.items():
        if not _is_number(value):
            raise InvalidArgument(
                f"metrics: {name!r} is {value!r:.80}, a {type(value).__name__}; expected a number (float(value) makes "
                "one of a tensor)"
            )
    return {name: _finite(value) for name, value in given.items()}


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
