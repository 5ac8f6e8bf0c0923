"""Tags: names of checkpoints in a directory, and their order.

The order of tags is one number, ``order_time`` (seconds since the epoch, in microseconds): it lies above that of every
tag that existed when the checkpoint was made, so a clock that jumps back cannot reorder them. Names decide only between
tags of one time, which other programs leave where a file system keeps whole seconds. docs/format.md lists the cases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, TypeAlias

from nxd_ckpt.core.keys import checked_name
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import InvalidArgument, InvalidTag

LATEST = 1e12
"""Times of files count up to here, in seconds since the epoch; what says another is no clock's."""

_PER_SECOND = 1e6
_AFTER = 1e-3
"""Seconds by which a save of ours is dated after a whole second of another program, where it cannot wait for the next:
in a tie, a tag that is so close is the later one."""

_DIGITS = 18
"""Digits of a number in a name that count."""

_DECIMAL = re.compile(r"(?<![0-9.])[0-9]+\.[0-9]+(?![0-9]|\.[0-9])")
"""A loss or a learning rate in a name, which is no step."""
_NUMBER = re.compile(r"([A-Za-z]*)[^A-Za-z0-9]*([0-9]+)")
"""A number in a name, after the word before it, which says what it counts."""
_STEP_WORDS = {"step", "steps", "iter", "iters", "iteration", "iterations", "ba", "batch", "batches"}
_EPOCH_WORDS = {"e", "ep", "epoch", "epochs"}

Tag: TypeAlias = str | int
"""A tag as callers name it: 300 is "300"."""


def validate_tag(tag: object) -> str:
    """``str(tag)``, checked to be a plain, visible directory name.

    Raises:
        InvalidTag: empty, absolute, with ``/`` or ``\\``, ``..``, a leading dot, a NUL, half a character (a surrogate
            alone), or longer than 255 bytes.
    """
    name = str(tag) if isinstance(tag, (str, int)) and not isinstance(tag, bool) else ""
    if not name:
        raise InvalidTag(f"tag must be a non-empty string such as 'step_300', or an int, found {tag!r}")
    if name.startswith(".") and "/" not in name:
        raise InvalidTag(f"tag {name!r:.80} must not begin with '.': such names are hidden and never listed")
    try:
        return checked_name(name)
    except ValueError as error:
        raise InvalidTag(f"tag {error}") from None


def filled_tag(template: object, values: Mapping[str, Any] | None) -> object:
    """The tag that a template such as "ep{epoch}-ba{batch:06d}" becomes; without ``values`` it is a tag as it stands.

    Raises:
        InvalidArgument: fields without a value, values without a field, attributes or items of values, or a format that
            does not fit.
    """
    if values is None:
        return template
    if not isinstance(template, str) or not isinstance(values, Mapping):
        raise InvalidArgument(
            f"tag_values={values!r} with tag={template!r}: expected a dict of values for a tag with fields such as "
            "'ep{epoch}-ba{batch}'"
        )
    try:
        fields = [field for _, field, form, _ in Formatter().parse(template) for field in _fields(field, form)]
    except ValueError as error:
        raise InvalidArgument(f"tag {template!r} is no template: {error}; write '{{{{' for a brace") from error
    missing = [field for field in fields if field not in values]
    unused = [name for name in values if name not in fields]
    problems = [f"no value for {listed(missing, list(map(str, values)))}"] if missing else []
    problems += [f"no field for {listed(map(str, unused), fields)}"] if unused else []
    if problems:
        raise InvalidArgument(
            f"tag {template!r} and tag_values= do not fit: {'; '.join(problems)}; fields are plain names, one for each "
            "value"
        )
    try:
        return template.format_map(values)
    except Exception as error:  # of whatever a value does to format itself; it must reach all ranks
        raise InvalidArgument(f"tag {template!r} cannot be filled with {dict(values)}: {error}") from error


def _fields(field: str | None, form: str | None) -> list[str]:
    """The names in one field of a template: its own, and those in its format."""
    if field is None:
        return []
    return [field, *(inner for _, inner, _, _ in Formatter().parse(form or "") if inner is not None)]


@dataclass(frozen=True)
class TagInfo:
    """One tag as a listing shows it. ``order_time`` is in seconds; ``ours`` says that its manifest describes it.

    ``damage`` is what kept the listing from telling more: such a tag is not complete. ``marked`` is the time of its
    marker: with another one it is another save, or a copy.
    """

    tag: str
    order_time: float
    complete: bool
    ours: bool
    damage: str | None = None
    marked: float = field(default=0.0, compare=False)

    @property
    def is_dated(self) -> bool:
        """False where its storage, or what copied it, kept no time."""
        return self.order_time > 0

    @property
    def is_coarse(self) -> bool:
        """True if its order time is the time of a file in whole seconds: it was saved somewhen in that second."""
        return self.complete and not self.ours and self.is_dated and self.order_time % 1 == 0

    @property
    def latest_time(self) -> float:
        """The last microsecond at which it may have been saved."""
        return self.order_time + 1 - 1 / _PER_SECOND if self.is_coarse else self.order_time


def in_order(tags: Iterable[TagInfo]) -> list[TagInfo]:
    """Oldest first. Of tags of one time, the steps in their names decide, else the names: so the order is total."""
    order = list[TagInfo]()
    for group in _by_time(tags):
        by_step = _by_step(group)
        order += by_step or sorted(group, key=lambda info: (info.order_time, info.tag))
    return order


def undecided(tags: Iterable[TagInfo]) -> list[list[TagInfo]]:
    """Complete tags of one time whose names do not tell which of them is newer, in groups."""
    groups = _by_time(info for info in tags if info.complete)
    return [group for group in groups if len(group) > 1 and not _is_told_by_step(group)]


def undated(tags: Iterable[TagInfo]) -> list[TagInfo]:
    """Complete tags of unknown time beside others of a known one: each may be older or newer than these.

    The one without a name is none: it is of a version that had no tags, and older.
    """
    complete = [info for info in tags if info.complete and info.tag]
    without = [info for info in complete if not info.is_dated]
    return without if len(without) < len(complete) else []


def latest(tags: Iterable[TagInfo]) -> TagInfo | None:
    """The newest complete tag."""
    complete = in_order(info for info in tags if info.complete)
    return complete[-1] if complete else None


def next_order_time(now: float, newest: float) -> float:
    """The order time of a save at the time ``now``: later than that of the ``newest`` tag, whatever the clock says."""
    order_time = max(math.ceil(now * _PER_SECOND), round(newest * _PER_SECOND) + 1) / _PER_SECOND
    return order_time if order_time > newest else math.nextafter(newest, math.inf)


def seconds_until_after(end: float, now: float) -> float:
    """How long a save waits until its time is after ``end``, and not right after a whole second: there it would count
    as later than what another program saves in that second, of which only the second is known."""
    begin = now if now > end else end + 2 / _PER_SECOND
    if 0 < begin % 1 <= _AFTER:
        begin += _AFTER + 2 / _PER_SECOND - begin % 1
    return begin - now


def same_time(one: float, other: float) -> bool:
    """True for equal times in microseconds: file systems that are finer round differently."""
    return abs(one - other) * _PER_SECOND < 0.75


def order_text(order_time: float) -> str:
    """An order time as ``done`` holds it in a store."""
    return f"{order_time:.0f}" if order_time == int(order_time) else f"{order_time:.6f}"


def step_of(tag: str) -> int | None:
    """The step in a tag's name; None if it has none.

    That is the last number after a word such as "step" or "iter"; without one, the last number of all that does not
    count epochs and is no decimal; else the last that counts epochs.
    """
    epoch, step = _epoch_and_step(tag)
    return epoch if step is None else step


def _epoch_and_step(tag: str) -> tuple[int | None, int | None]:
    numbers = [(word.lower(), int(digits[-_DIGITS:])) for word, digits in _NUMBER.findall(_DECIMAL.sub("", tag))]
    epochs = [number for word, number in numbers if word in _EPOCH_WORDS]
    steps = [number for word, number in numbers if word in _STEP_WORDS]
    others = [number for word, number in numbers if word not in _EPOCH_WORDS]
    return epochs[-1] if epochs else None, next(reversed(steps or others), None)


def _by_time(tags: Iterable[TagInfo]) -> list[list[TagInfo]]:
    """Tags of one time, oldest first.

    Those of a second are of one time if one of them is known by that second only, and another was saved in it.
    """
    every = list(tags)
    coarse = {info.order_time for info in every if info.is_coarse}
    tied = {second for info in every if (second := info.order_time // 1) in coarse and _offset(info) > _AFTER}
    groups: dict[float, list[TagInfo]] = {}
    for info in every:
        second = info.order_time // 1
        groups.setdefault(second if second in tied else info.order_time, []).append(info)
    return [group for _, group in sorted(groups.items())]


def _offset(info: TagInfo) -> float:
    """Seconds since the last whole second."""
    return info.order_time % 1


def _by_step(group: Sequence[TagInfo]) -> list[TagInfo] | None:
    """A group in the order of the steps in its names, or of the epochs where no name has a step.

    None unless all have one, no two the same, and what is known of the times does not contradict.
    """
    counts = {info.tag: _epoch_and_step(info.tag) for info in group}
    kind = 1 if any(step is not None for _, step in counts.values()) else 0
    numbers = {tag: count[kind] for tag, count in counts.items()}
    if None in numbers.values() or len(set(numbers.values())) < len(group):
        return None
    order = sorted(group, key=lambda info: numbers[info.tag] or 0)
    exact = [info.order_time for info in order if not info.is_coarse]
    early = [info.order_time for info in order if info.is_coarse or 0 < _offset(info) <= _AFTER]
    return order if exact == sorted(exact) and early == sorted(early) else None


def _is_told_by_step(group: Sequence[TagInfo]) -> bool:
    """True if :func:`_by_step` has an order that the epochs in the names do not contradict.

    Where a later epoch has an earlier step, each epoch counts its steps anew.
    """
    order = _by_step(group) or ()
    epochs = [epoch for info in order if (epoch := _epoch_and_step(info.tag)[0]) is not None]
    return bool(order) and epochs == sorted(epochs)
