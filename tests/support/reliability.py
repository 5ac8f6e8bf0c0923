"""tests/counts.md: what a run of the tests writes into it, of itself."""

import re
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_PAGE = REPOSITORY / "tests" / "counts.md"


def put(place: str, text: str) -> None:
    """Replace what is between the comments ``<!-- PLACE -->`` and ``<!-- end of PLACE -->``."""
    pattern = re.compile(rf"(<!-- {place} -->\n).*?(<!-- end of {place} -->)", re.DOTALL)
    page, count = pattern.subn(lambda found: f"{found[1]}{text}\n{found[2]}", _PAGE.read_text())
    if count != 1:
        raise ValueError(f"{_PAGE} has {count} places for {place!r}, expected one")
    _PAGE.write_text(page)


def rows_of(place: str) -> list[list[str]]:
    """The rows of the table that is there, without its header."""
    found = re.search(rf"<!-- {place} -->\n(.*?)<!-- end of {place} -->", _PAGE.read_text(), re.DOTALL)
    lines = found[1].splitlines() if found is not None else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def add_run(place: str, header: list[str], run: list[str], sums: tuple[str, ...]) -> None:
    """Add a row to a table of runs. Its last row has the sums of the columns that ``sums`` names."""
    runs = [*(row for row in rows_of(place) if row[0] != "all"), run]
    summed = {name: sum(number(row[header.index(name)]) for row in runs) for name in sums}
    last = ["all", *(f"{summed[name]:,}" if name in sums else "" for name in header[1:])]
    put(place, table([*runs, last], header))


def number(cell: str) -> int:
    """What a cell with a count says."""
    return int(cell.replace(",", ""))


def table(rows: Iterable[Iterable[object]], header: Iterable[str] = ("", "")) -> str:
    """Rows as a table of the page."""
    head = list(header)
    lines = [head, ["---"] * len(head), *(list(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |".replace("  ", " ") for cells in lines)


def date_and_commit() -> list[tuple[str, str]]:
    """When and on what the run was."""
    return [("date", f"{datetime.now(timezone.utc):%Y-%m-%d}"), ("commit", commit())]


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
