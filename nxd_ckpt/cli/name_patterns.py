"""Grouping of names that differ only in numbers, such as those of layers: a model of any depth fits a page."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

Form = TypeVar("Form", bound=Hashable)

_GAP = "\0"
_NUMBER = re.compile(r"(?<![^./#])\d+(?![^./])")


def group_names(named: Iterable[tuple[str, Form]]) -> list[tuple[str, int, Form]]:
    """Group names of one pattern and one form, such as ``layers.{0..31}.weight``, with their count, in order.

    ``*`` stands for numbers with gaps, or that differ between places.
    """
    groups: dict[tuple[str, Form], list[str]] = {}
    for name, form in named:
        groups.setdefault((_NUMBER.sub(_GAP, name), form), []).append(name)
    return [(_pattern_of(pattern, names), len(names), form) for (pattern, form), names in groups.items()]


def _pattern_of(pattern: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    columns = zip(*([int(number) for number in _NUMBER.findall(name)] for name in names), strict=True)
    ranges, product = [], 1
    for numbers in map(sorted, map(set, columns)):
        product *= len(numbers)
        first, last = numbers[0], numbers[-1]
        is_range = last - first + 1 == len(numbers)
        ranges.append(str(first) if first == last else f"{{{first}..{last}}}" if is_range else "*")
    if product != len(names):  # not every combination is there
        return pattern.replace(_GAP, "*")
    return "".join(part + number for part, number in zip(pattern.split(_GAP), [*ranges, ""], strict=True))
