"""What the tests of the documentation need of Markdown: code blocks, tables, links and headings."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
FORMAT = DOCS / "format.md"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_blocks(document: Path, language: str) -> list[str]:
    """The blocks of a language, each after as many empty lines that tracebacks show the document's line numbers."""
    text = document.read_text()
    blocks = _BLOCK.finditer(text)
    return ["\n" * text[: block.start(2)].count("\n") + block[2] for block in blocks if block[1] == language]


def prose(document: Path) -> str:
    """The text without its code blocks."""
    return _BLOCK.sub("", document.read_text())


def headings(document: Path) -> list[str]:
    return [line.lstrip("#").strip() for line in prose(document).splitlines() if line.startswith("#")]


def anchors(document: Path) -> set[str]:
    """What a link to a heading of the document may name after its ``#``: as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(document)}


def links(document: Path) -> list[str]:
    """The targets of all links that do not leave the repository."""
    targets: list[str] = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    return [target for target in targets if "://" not in target]


def tables(document: Path) -> dict[str, list[list[str]]]:
    """The rows (lists of cells, without head) of the tables below each heading."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in prose(document).splitlines():
        if line.startswith("#"):
            heading = line.lstrip("#").strip()
        elif line.startswith("|"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return {heading: rows[2:] for heading, rows in found.items()}


def unquoted(cell: str) -> str:
    """A cell without the quotes around it."""
    return cell.strip("`")
