"""Tags: names of checkpoints in a directory, with fields that a save fills, and their order.

Tags are ordered by one number, ``order_time`` (seconds since the epoch, with microseconds). It is above that of every
tag that existed when the checkpoint was made, so a clock that jumps back cannot reorder them. Names decide only between
tags of one time; other programs leave such tags if a file system keeps whole seconds. docs/format.md lists the cases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Annotated, Any, TypeAlias

from nxd_ckpt.core.arguments import Kind, plain_mapping, scalar
from nxd_ckpt.core.limits import checked_name, shown
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import InvalidArgument, InvalidTag

LATEST = 1e12
"""Largest time of a file, in seconds since the epoch; no clock shows a later one."""

_PER_SECOND = 1e6
_AFTER = 1e-3
"""Seconds after a whole second at which a save of ours is dated if it cannot wait for the next second.

In a tie with another program's tag of that second, a tag that is so close to it is the later one.
"""

_DECIMAL = re.compile(r"(?<![0-9.])[0-9]+\.[0-9]+(?![0-9]|\.[0-9])")
"""A decimal in a name, such as a loss or a learning rate, which is no step."""
_NUMBER = re.compile(r"([A-Za-z]*)[^A-Za-z0-9]*([0-9]+)")
"""A number in a name, with the word before it, which says what it counts."""
_STEP_WORDS = {"step", "steps", "iter", "iters", "iteration", "iterations", "ba", "batch", "batches"}
_EPOCH_WORDS = {"e", "ep", "epoch", "epochs"}


def _plain_tag(value: Any) -> Any:
    """Return a tag as a str or int. What is neither, the names of tags are checked for (`validate_tag`)."""
    value = value.__fspath__() if hasattr(value, "__fspath__") else scalar(value)
    return str.__str__(value) if isinstance(value, str) else value


Tag: TypeAlias = Annotated[str | int, Kind("a name or a step", _plain_tag)]
"""A tag from a caller. A reader takes 300 for "300" if there is such a tag, else for the newest one of step 300."""


def validate_tag(tag: object) -> str:
    """Return ``str(tag)``; raise InvalidTag unless it is a plain, visible directory name.

    Raises:
        InvalidTag: empty, absolute, with ``/`` or ``\\``, ``..``, a leading dot, a NUL, half a character (a surrogate
            alone), or longer than 255 bytes.
    """
    name = str(tag) if isinstance(tag, (str, int)) and not isinstance(tag, bool) else ""
    if not name:
        raise InvalidTag(f"tag must be a non-empty string such as 'step_300', or an int, found {shown(tag)}")
    if name.startswith(".") and "/" not in name:
        raise InvalidTag(f"tag {name!r:.80} must not begin with '.': such names are hidden and never listed")
    try:
        return checked_name(name)
    except ValueError as error:
        folders, _, last = name.rpartition("/")
        hint = f": end the directory with {folders!r}, and pass {last!r}" if folders and last else ""
        raise InvalidTag(f"tag {error}{hint}") from None


@dataclass(frozen=True)
class TagInfo:
    """One tag in a listing.

    Attributes:
        tag: its name.
        order_time: seconds since the epoch, by which tags are ordered; 0 if unknown.
        complete: True if all of it was saved.
        ours: True if it has a manifest of this package.
        damage: the fault that kept the listing from reading it; such a tag is not complete.
        marked: time of its marker; another time means another save, or a copy.
    """

    tag: str
    order_time: float
    complete: bool
    ours: bool
    damage: str | None = None
    marked: float = field(default=0.0, compare=False)

    @property
    def is_dated(self) -> bool:
        """False if its storage, or a copy tool, kept no time."""
        return self.order_time > 0

    @property
    def is_coarse(self) -> bool:
        """True if its order time is a file's time in whole seconds: it was saved at some moment of that second."""
        return self.complete and not self.ours and self.is_dated and self.order_time % 1 == 0

    @property
    def latest_time(self) -> float:
        """Last microsecond at which it may have been saved."""
        return self.order_time + 1 - 1 / _PER_SECOND if self.is_coarse else self.order_time


def in_order(tags: Iterable[TagInfo]) -> list[TagInfo]:
    """Return the tags, oldest first; tags of one time by the steps in their names, else by name."""
    order: list[TagInfo] = []
    for group in _by_time(tags):
        by_step = group if len(group) == 1 else _by_step(group)
        order += by_step or sorted(group, key=lambda info: (info.order_time, info.tag))
    return order


def undecided(tags: Iterable[TagInfo]) -> list[list[TagInfo]]:
    """Return groups of complete tags of one time whose names do not show which is newer."""
    groups = _by_time(info for info in tags if info.complete)
    return [group for group in groups if len(group) > 1 and not _is_decided_by_step(group)]


def undated(tags: Iterable[TagInfo]) -> list[TagInfo]:
    """Return complete tags of unknown time if others have a time: each may be older or newer than these.

    The tag without a name does not count: it is from an NxD version without tags, and older.
    """
    complete = [info for info in tags if info.complete and info.tag]
    without = [info for info in complete if not info.is_dated]
    return without if len(without) < len(complete) else []


def latest(tags: Iterable[TagInfo]) -> TagInfo | None:
    """Return the newest complete tag."""
    complete = in_order(info for info in tags if info.complete)
    return complete[-1] if complete else None


def next_order_time(now: float, newest: float) -> float:
    """Return the order time of a save at the time ``now``: later than the ``newest`` tag's, whatever the clock says."""
    order_time = max(math.ceil(now * _PER_SECOND), math.ceil(newest * _PER_SECOND) + 1) / _PER_SECOND
    return order_time if order_time > newest else math.nextafter(newest, math.inf)


def seconds_until_after(end: float, now: float) -> float:
    """Return how long a save must wait until its time is after ``end``, and not right after a whole second.

    Right after a whole second it would count as later than another program's save in that second.
    """
    begin = now if now > end else end + 2 / _PER_SECOND
    if 0 < begin % 1 <= _AFTER:
        begin += _AFTER + 2 / _PER_SECOND - begin % 1
    return begin - now


def order_text(order_time: float) -> str:
    """Return an order time as text for the ``done`` marker of an object store."""
    return f"{order_time:.0f}" if order_time == int(order_time) else f"{order_time:.6f}"


def step_of(tag: str) -> int | None:
    """Return the step in a tag's name; None if it has none.

    The step is the last number after a word such as "step" or "iter". Without such a word it is the last number that
    counts no epochs and is no decimal, and otherwise the last number of epochs.
    """
    epoch, step = _epoch_and_step(tag)
    return epoch if step is None else step


def tag_of_step(step: int) -> str:
    """Return the tag that a `Checkpointer` gives a step: "step_300". Raises InvalidTag for no number from 0."""
    if isinstance(step, bool) or step < 0:
        raise InvalidTag(f"tag must be a non-empty string such as 'step_300', or an int from 0, found {shown(step)}")
    return f"step_{step}"


def goes_back(tag: str, before: str) -> bool:
    """Return whether two tags differ in their numbers only, and this one has an earlier epoch or step."""
    counts, earlier = ([-1 if number is None else number for number in _epoch_and_step(name)] for name in (tag, before))
    return re.sub("[0-9]+", "0", tag) == re.sub("[0-9]+", "0", before) and counts < earlier


def _epoch_and_step(tag: str) -> tuple[int | None, int | None]:
    numbers = [(word.lower(), int(digits)) for word, digits in _NUMBER.findall(_DECIMAL.sub("", tag))]
    epochs = [number for word, number in numbers if word in _EPOCH_WORDS]
    steps = [number for word, number in numbers if word in _STEP_WORDS]
    others = [number for word, number in numbers if word not in _EPOCH_WORDS]
    return epochs[-1] if epochs else None, next(reversed(steps or others), None)


def _by_time(tags: Iterable[TagInfo]) -> list[list[TagInfo]]:
    """Return groups of tags of one time, oldest first.

    All tags of a second have one time if one of them has only whole seconds, and another was saved in that second.
    """
    all_tags = list(tags)
    coarse = {info.order_time for info in all_tags if info.is_coarse}
    tied = {second for info in all_tags if (second := info.order_time // 1) in coarse and _offset(info) > _AFTER}
    groups: dict[float, list[TagInfo]] = {}
    for info in all_tags:
        second = info.order_time // 1
        groups.setdefault(second if second in tied else info.order_time, []).append(info)
    return [group for _, group in sorted(groups.items())]


def _offset(info: TagInfo) -> float:
    """Return the seconds since the last whole second."""
    return info.order_time % 1


def _by_step(group: Sequence[TagInfo]) -> list[TagInfo] | None:
    """Return a group in the order of the steps in its names, or of the epochs if no name has a step.

    None unless all names have one, all are different, and the times do not contradict that order.
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


def _is_decided_by_step(group: Sequence[TagInfo]) -> bool:
    """Return whether steps order a group, and the epochs in the names do not contradict that order.

    If a later epoch has an earlier step, each epoch counts its steps from the start.
    """
    order = _by_step(group) or ()
    epochs = [epoch for info in order if (epoch := _epoch_and_step(info.tag)[0]) is not None]
    return bool(order) and epochs == sorted(epochs)


TagValues = Annotated[Mapping[str, Any], Kind("a dict of values by name", plain_mapping)]
"""Values of a template's fields."""

_DIGITS = r"[-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?"
"""Pattern of a field without a value: numbers only. With text "ep{epoch}" would fit "ep3-ba400", too."""


def filled_tag(template: object, values: Mapping[str, Any] | None, known: Mapping[str, Any]) -> object:
    """Fill a template; a name without fields needs no ``values``. Fields may also be named as those of ``known``.

    Raises:
        InvalidArgument: fields without a value, values without a field, attributes or items of values, or a format that
            does not fit.
    """
    if values is None:
        own = _names_in(template)
        forgotten = [field for field in own if field not in known]
        if forgotten:
            raise InvalidArgument(
                f"tag {template!r} has a field for {listed(forgotten, ())} and no value: each save would replace the "
                f"one before. Pass tag_values={{{forgotten[0]!r}: ...}}, or a name without braces"
            )
        if not own:
            return template
    fields = _checked_fields(template, {} if values is None else values)
    chosen = {**{name: known[name] for name in known if name in fields}, **(values or {})}
    missing = [field for field in fields if field not in chosen]
    if missing:
        _refuse(template, f"no value for {listed(missing, list(map(str, chosen)))}")
    return _formatted(str(template), chosen)


class _Field(str):
    """A field without a value, which is filled with itself."""

    def __format__(self, form: str) -> str:
        return "{" + self + "}"


def narrowed(template: object, values: Mapping[str, Any]) -> str:
    """Return the template with the fields that have a value filled. Raises InvalidArgument as `filled_tag` does."""
    unfilled = {field: _Field(field) for field in _checked_fields(template, values)}
    return _formatted(str(template), {**unfilled, **values})


def names_that_fit(template: str) -> re.Pattern[str] | None:
    """Return the pattern of the names that a template may have been filled to; None for a name without fields."""
    if not _names_in(template):
        return None
    fields = Formatter().parse(template)
    return re.compile("".join(re.escape(text) + ("" if field is None else _DIGITS) for text, field, _, _ in fields))


def _checked_fields(template: object, values: Any) -> list[str]:
    """Return the fields of a template. Raises InvalidArgument if it is none, or one of ``values`` has no field."""
    if not isinstance(template, str) or not isinstance(values, Mapping):
        raise InvalidArgument(
            f"tag_values={values!r} with tag={template!r}: expected a dict of values for a tag with fields such as "
            "'ep{epoch}-ba{batch}'"
        )
    try:
        fields = [field for _, field, form, _ in Formatter().parse(template) for field in _fields(field, form)]
    except ValueError as error:
        raise InvalidArgument(f"tag {template!r} is not a valid template: {error}; write '{{{{' for a brace") from error
    unused = [name for name in values if name not in fields]
    if unused:
        missing = [field for field in fields if field not in values]
        lacking = f"no value for {listed(missing, list(map(str, values)))}; " if missing else ""
        _refuse(template, f"{lacking}no field for {listed(map(str, unused), fields)}")
    return fields


def _refuse(template: object, problem: str) -> None:
    raise InvalidArgument(
        f"tag {template!r} and tag_values= do not fit: {problem}; use a field that is a plain name for each value"
    )


def _formatted(template: str, values: Mapping[str, Any]) -> str:
    try:
        return template.format_map(values)
    except Exception as error:  # a value's own formatting may raise anything, and it must reach all ranks
        raise InvalidArgument(f"tag {template!r} cannot be filled with {dict(values)}: {error}") from error


def _names_in(template: object) -> list[str]:
    """Return the fields of a template that are plain names; braces that are no such fields are plain characters."""
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template)] if isinstance(template, str) else []
    except ValueError:
        return []
    return [field for field in fields if field is not None and field.isidentifier()]


def _fields(field: str | None, form: str | None) -> list[str]:
    """Return the names in one field of a template: its own, and those in its format."""
    if field is None:
        return []
    return [field, *(inner for _, inner, _, _ in Formatter().parse(form or "") if inner is not None)]
