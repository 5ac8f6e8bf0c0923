"""What people read: sizes, times, aligned columns; and where both forms of output leave. Knows no torch."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_BELOW = " " * 4
"""What a line begins with that goes on with the one above."""
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def age(seconds: float) -> str:
    """``3 h``, in the largest unit of which there are two, or one second."""
    for length, unit in _AGES:
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"






def shape(sizes: Sequence[int] | None) -> str:
    """``[4, 8]``; ``?`` where it is not known."""
    return "?" if sizes is None else str(list(sizes))


def writer(package: str) -> str:
    return "NxD" if package == "neuronx_distributed" else package






def parts(held: Mapping[str, Any] | None) -> str:
    """``model, zero1 optimizer, scheduler``."""
    if held is None:
        return "?"
    names = [name.replace("_", " ") for name in ("model", "scheduler", "user_content", "rank_content") if held[name]]
    if held["optimizer"]:
        names.insert(int(held["model"]), f"{held['optimizer']} optimizer")
    return ", ".join(names) or "nothing"


def width() -> int | None:
    """Columns of the terminal; None where the output goes elsewhere, as to a file or to ``grep``."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ", *, wide: bool = False
) -> list[str]:
    """Lines of left-aligned columns, two spaces apart.

    What is too wide for the terminal goes on in a line below, unless it is to be ``wide``.
    """
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    found = []
    for line in lines:
        for number, columns in enumerate([range(len(widths))] if wide else _folded(widths, len(indent))):
            cells = "  ".join(line[column].ljust(widths[column]) for column in columns).rstrip()
            if cells or number == 0:
                found.append(f"{indent}{_BELOW * (number > 0)}{cells}".rstrip())
    return found


def _folded(widths: Sequence[int], indent: int) -> list[list[int]]:
    """The columns of each line that a row takes, by number."""
    limit, found, at = width(), [list[int]()], indent
    for column, size in enumerate(widths):
        if limit is not None and found[-1] and at + size > limit:
            found.append([])
            at = indent + len(_BELOW)
        found[-1].append(column)
        at += size + 2
    return found


def fitting_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None, keep: int = 3
) -> list[str]:
    """:func:`table`, without the last columns that are too much for ``width``, but with the first ``keep``.

    What is left out is said. None fits everything.
    """
    lines = [*map(tuple, rows)]
    sizes = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    columns = len(head)
    while width is not None and columns > keep and sum(sizes[:columns]) + 2 * columns > width:
        columns -= 1
    left_out = head[columns:]
    found = table(head[:columns], [line[:columns] for line in lines], wide=width is None)
    return [*found, f"  (--wide shows {', '.join(left_out)} too)"] if left_out else found


def pairs(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of a name and what there is to say of it, the latter aligned."""
    lines = list(facts)
    longest, limit = max(len(name) for name, _ in lines), width()
    if limit is None:
        return [f"  {name.ljust(longest)}  {fact}" for name, fact in lines]
    below = " " * (longest + 4)
    told = (f"  {name.ljust(longest)}  {fact}" for name, fact in lines)
    return [part for line in told for part in (_wrapped(line, limit, below) if len(line) > limit else [line])]


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_quiet(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress, and say nothing if all is well")


def show(document: Mapping[str, Any], lines: Iterable[str], *, as_json: bool, wide: bool = False) -> None:
    """Print a document, as JSON or as the lines that say the same to people.

    These are broken where a terminal ends, unless they are to be ``wide``.
    """
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
        return
    limit = None if wide else width()
    for line in map(printable, lines):
        print("\n".join(_broken(line, limit)) if limit is not None and len(line) > limit else line)
    sys.stdout.flush()


def _broken(line: str, limit: int) -> list[str]:
    return _wrapped(line, limit, " " * (len(line) - len(line.lstrip())) + _BELOW)


def _wrapped(line: str, limit: int, below: str) -> list[str]:
    """At spaces alone: a path stays in one piece."""
    return textwrap.wrap(line, limit, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)


def printable(line: str) -> str:
    """``line`` with what is not printable escaped.

    Names come from disk: nothing in them may move the cursor, start a line, or fail to be encoded.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    return shown.encode(encoding, "backslashreplace").decode(encoding)
