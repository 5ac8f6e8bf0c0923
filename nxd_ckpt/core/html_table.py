"""Small HTML tables for notebooks, in which all names are escaped text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_ROWS = 50
"""Largest number of rows that are shown."""


def html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a heading and a table; rows beyond the limit are only counted."""
    left_out = f"<p>and {len(rows) - _ROWS} more</p>" if len(rows) > _ROWS else ""
    body = "".join(_row("td", row) for row in rows[:_ROWS])
    table = f"<table><thead>{_row('th', head)}</thead><tbody>{body}</tbody></table>" if rows else ""
    return f"<p><b>{_text(title)}</b></p>{table}{left_out}"


def _row(kind: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{kind}>{_text('' if cell is None else cell)}</{kind}>" for cell in cells) + "</tr>"


def _text(value: object) -> str:
    """Escape a value, since names come from disk: no markup, and no marks that turn the direction of text."""
    return escape("".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value)))
