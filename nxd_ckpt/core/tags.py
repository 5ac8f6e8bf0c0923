"""Tags: names of checkpoints in a directory, and their order.

The order of tags is one number, ``order_time`` (seconds since the epoch, in microseconds): it lies above that of every
tag that existed when the checkpoint was made, so a clock that jumps back cannot reorder them. Names decide only between
tags of one time, which other programs leave where a file system keeps whole seconds.
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
_DIGITS = 18
"""Digits of a number in a name that count."""

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
    """One tag as a listing shows it. ``order_time`` is in seconds; ``ours`` says that it has a manifest.

    ``damage`` is what kept the listing from telling more: such a tag is not complete. ``marked`` is the time of its
    marker: with another one it is another save, or a copy.
    """

    tag: str
    order_time: float
    complete: bool
    ours: bool
    damage: str | None = None
    marked: float = field(default=0.0, compare=False)


def in_order(tags: Iterable[TagInfo]) -> list[TagInfo]:
    """Oldest first. Of tags of one time, the steps in their names decide, else the names: so the order is total."""
    order = list[TagInfo]()
    for _, group in _by_time(tags):
        by_step = _tell_steps(group)
        order += sorted(group, key=lambda info: (step_of(info.tag) or 0 if by_step else 0, info.tag))
    return order


def undecided(tags: Iterable[TagInfo]) -> list[list[TagInfo]]:
    """Complete tags of one time whose names do not tell which of them is newer, in groups."""
    groups = [group for _, group in _by_time(info for info in tags if info.complete)]
    return [group for group in groups if len(group) > 1 and not _tell_steps(group)]


def latest(tags: Iterable[TagInfo]) -> TagInfo | None:
    """The newest complete tag."""
    complete = in_order(info for info in tags if info.complete)
    return complete[-1] if complete else None


def next_order_time(now: float, newest: float) -> float:
    """The order time of a save at the time ``now``: later than that of the ``newest`` tag, whatever the clock says."""
    order_time = max(math.ceil(now * _PER_SECOND), round(newest * _PER_SECOND) + 1) / _PER_SECOND
    return order_time if order_time > newest else math.nextafter(newest, math.inf)


def same_time(one: float, other: float) -> bool:
    """True for equal times in microseconds: file systems that are finer round differently."""
    return abs(one - other) * _PER_SECOND < 0.75


def order_text(order_time: float) -> str:
    """An order time as ``done`` holds it in a store."""
    return f"{order_time:.0f}" if order_time == int(order_time) else f"{order_time:.6f}"


def step_of(tag: str) -> int | None:
    """The last number in a tag's name; None if it has none."""
    numbers = re.findall("[0-9]+", tag)
    return int(numbers[-1][-_DIGITS:]) if numbers else None


def _by_time(tags: Iterable[TagInfo]) -> list[tuple[float, list[TagInfo]]]:
    groups: dict[float, list[TagInfo]] = {}
    for info in tags:
        groups.setdefault(info.order_time, []).append(info)
    return sorted(groups.items(), key=lambda one: one[0])


def _tell_steps(group: Sequence[TagInfo]) -> bool:
    """True if the names of all have a step, and no two the same."""
    steps = {step_of(info.tag) for info in group}
    return None not in steps and len(steps) == len(group)
