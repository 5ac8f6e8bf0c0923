"""Text output: sizes, times, aligned columns, and printing as text or JSON. Does not import torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

_INDENT = "  "
_BELOW = " " * 4
"""Indentation of a line that continues the one above."""
_RED, _GREEN, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[0m"
_BAD = re.compile(r"^(problem|error|damaged):|(?<=  )incomplete(?=  |,|$)|\bis incomplete\b|\b[1-9]\d* problems?\b")
_GOOD = re.compile(r"(?<=  )latest(?=  |,|$)|\bno problems\b")
"""Words of bad and of good news, in columns and at the beginning of lines, not in names."""


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """Replace keywords by flags: ``saved_param_names=`` by ``--param-names``, ``overwrite=True`` by ``--overwrite``.

    A word without ``=`` is a keyword only with an underscore in it: "config" and "mapping" are words too, and ``dp=2``
    states a size, but "dp must be" names it. Nothing in quotes or paths is changed.
    """
    names = "|".join(sorted(flags, key=len, reverse=True))
    keyword = re.compile(rf"(?<![\w/.'\"-])({names})(=True\b|=(?![\w'\"])|(?= must be ))?(?![\w/'\"])")

    def flag(match: re.Match[str]) -> str:
        is_keyword = match[2] is not None or "_" in match[1]
        return flags[match[1]] if is_keyword else match[0]

    return keyword.sub(flag, message)


def shape(sizes: Sequence[int] | None) -> str:
    """Format a shape: ``[4, 8]``; ``?`` if unknown."""
    return "?" if sizes is None else str(list(sizes))


def writer(package: str) -> str:
    return "NxD" if package == "neuronx_distributed" else package


def metric(value: float | None) -> str:
    return "not finite" if value is None else f"{value:g}"


def parts(present: Mapping[str, Any] | None) -> str:
    """List the parts of a tag: ``model, zero1 optimizer, scheduler``."""
    if present is None:
        return "?"
    names = [name.replace("_", " ") for name in ("model", "scheduler", "user_content", "rank_content") if present[name]]
    if present["optimizer"]:
        names.insert(int(present["model"]), f"{present['optimizer']} optimizer")
    return ", ".join(names) or "nothing"


def width() -> int | None:
    """Return the terminal's columns; None if the output goes elsewhere, such as to a file or ``grep``."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, wide: bool = False) -> list[str]:
    """Return lines of left-aligned columns, two spaces apart.

    Rows wider than the terminal continue in a line below, unless ``wide``.
    """
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table_lines = []
    for line in lines:
        for number, columns in enumerate([range(len(widths))] if wide else _folded(widths)):
            cells = "  ".join(line[column].ljust(widths[column]) for column in columns).rstrip()
            if cells or number == 0:
                table_lines.append(f"{_INDENT}{_BELOW * (number > 0)}{cells}".rstrip())
    return table_lines


def _folded(widths: Sequence[int]) -> list[list[int]]:
    """Return the column numbers of each line that a row takes."""
    limit = width()
    column_lines = [list[int]()]
    at = len(_INDENT)
    for column, size in enumerate(widths):
        if limit is not None and column_lines[-1] and at + size > limit:
            column_lines.append([])
            at = len(_INDENT + _BELOW)
        column_lines[-1].append(column)
        at += size + 2
    return column_lines


def fitting_table(head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None) -> list[str]:
    """Return a table without the last columns that exceed ``width``, but with at least the first three.

    A last line names the columns left out. None fits everything.
    """
    lines = [*map(tuple, rows)]
    sizes = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    columns = len(head)
    while width is not None and columns > 3 and sum(sizes[:columns]) + 2 * columns > width:
        columns -= 1
    left_out = head[columns:]
    table_lines = table(head[:columns], [line[:columns] for line in lines], wide=width is None)
    return [*table_lines, f"  (--wide shows {', '.join(left_out)} too)"] if left_out else table_lines


def pairs(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines of names and facts, the facts aligned."""
    lines = list(facts)
    longest = max(len(name) for name, _ in lines)
    limit = width()
    below = " " * (longest + 4)
    shown = [f"  {name.ljust(longest)}  {fact}" for name, fact in lines]
    if limit is None:
        return shown
    return [part for line in shown for part in (_wrapped(line, limit, below) if len(line) > limit else [line])]


def show(document: Mapping[str, Any], lines: Iterable[str], *, as_json: bool, wide: bool = False) -> None:
    """Print a document as JSON, or as ``lines`` with the same content.

    Lines are wrapped at the width of a terminal, unless ``wide``.
    """
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
        return
    limit = None if wide else width()
    for line in map(printable, lines):
        if limit is not None and len(line) > limit:
            line = "\n".join(_wrapped(line, limit, " " * (len(line) - len(line.lstrip())) + _BELOW))
        print(_painted(line))
    sys.stdout.flush()


def red(words: str, stream: TextIO) -> str:
    """Return words in red if ``stream`` is a terminal that shows colours, and NO_COLOR is not set."""
    return f"{_RED}{words}{_PLAIN}" if _shows_colours(stream) else words


def _painted(line: str) -> str:
    """Return a line whose words of good and of bad news are green and red, on a terminal that shows colours."""
    if not _shows_colours(sys.stdout):
        return line
    return _GOOD.sub(f"{_GREEN}\\g<0>{_PLAIN}", _BAD.sub(f"{_RED}\\g<0>{_PLAIN}", line))


def _shows_colours(stream: TextIO) -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def _wrapped(line: str, limit: int, below: str) -> list[str]:
    """Wrap at spaces only: a path stays in one piece."""
    return textwrap.wrap(line, limit, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)


def printable(line: str) -> str:
    """Escape unprintable characters.

    Names come from disk: nothing in them may move the cursor, start a line, or fail to be encoded.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


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
    ranges = []
    product = 1
    for numbers in map(sorted, map(set, columns)):
        product *= len(numbers)
        first = numbers[0]
        last = numbers[-1]
        is_range = last - first + 1 == len(numbers)
        ranges.append(str(first) if first == last else f"{{{first}..{last}}}" if is_range else "*")
    if product != len(names):  # not every combination is there
        return pattern.replace(_GAP, "*")
    return "".join(part + number for part, number in zip(pattern.split(_GAP), [*ranges, ""], strict=True))
