"""Which cells of docs/compare.md rest on a source older than a year: ``python -m tools.old_sources``."""

from __future__ import annotations

import re
from datetime import date, timedelta
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "compare.md"

_VERSION = re.compile(r"^\| ([^|]+) \|[^|]*\| (\d{4}-\d\d-\d\d) \|$", re.MULTILINE)
_HEADING_OR_CELL = re.compile(r"^## (?P<question>.*\?)$|^\| (?P<project>[^|]+) \|", re.MULTILINE)


def old_cells(text: str, today: date) -> list[str]:
    """Return project, date and question of each cell whose project was read at a version of more than a year ago."""
    dates = {name: date.fromisoformat(day) for name, day in _VERSION.findall(text)}
    question, found = "", []
    for match in _HEADING_OR_CELL.finditer(text):
        question = match["question"] or question
        read = [day for name, day in dates.items() if match["project"] and match["project"] in name]
        if question and read and today - read[0] > timedelta(days=365):
            found.append(f"{match['project']}, {read[0]}: {question}")
    return found


if __name__ == "__main__":
    print(*old_cells(PAGE.read_text(), date.today()), sep="\n")
