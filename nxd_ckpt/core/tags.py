"""Tags: names of checkpoints in a directory, and their order.

The order of tags is one number, ``order_time`` (seconds since the epoch), never the name: it lies above that of
every tag that existed when the checkpoint was made, so a clock that jumps back cannot reorder them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, TypeAlias

from nxd_ckpt.core.keys import checked_name
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import InvalidArgument, InvalidTag

LATEST = 1e12
"""Times of files count up to here, in seconds since the epoch; what says another is no clock's."""

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

    ``damage`` is what kept the listing from telling more: such a tag is not complete.
    """

    tag: str
    order_time: float
    complete: bool
    ours: bool
    damage: str | None = None


def in_order(tags: Iterable[TagInfo]) -> list[TagInfo]:
    """Oldest first; names only break ties, so that the order is total."""
    return sorted(tags, key=lambda info: (info.order_time, info.tag))


def latest(tags: Iterable[TagInfo]) -> TagInfo | None:
    """The newest complete tag."""
    complete = in_order(info for info in tags if info.complete)
    return complete[-1] if complete else None


def next_order_time(now: float, tags: Iterable[TagInfo]) -> float:
    """``max(now, every existing tag's) + 1``: later than every tag, whatever the clock says."""
    return max([now, *(info.order_time for info in tags)]) + 1.0
