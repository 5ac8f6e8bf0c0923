"""The pages hang together: links lead somewhere, and the architecture page knows every module."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import REPOSITORY, anchors, code_blocks, headings, links, tables

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
DECISIONS = sorted((REPOSITORY / "docs" / "decisions").glob("*.md"))


def broken(page: Path) -> list[str]:
    """The links of ``page`` whose file, or heading in it, is not there."""
    found = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(REPOSITORY).as_posix() for page in PAGES])
def test_every_relative_link_resolves(page: Path) -> None:
    """Files are there, and so are the headings that links name."""
    assert [] == broken(page)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    """The check finds absent files and headings, and looks past code and other sites."""
    page = tmp_path / "page.md"
    page.write_text(
        "# Some `code`, here\n[a](#some-code-here) [b](#elsewhere) [c](absent.md) [d](page.md#elsewhere) "
        "[e](https://example.org/x)\n```text\n[f](in-code.md)\n```\n"
    )
    assert ["#elsewhere", "absent.md", "page.md#elsewhere"] == broken(page)


def test_installing_is_said_alike() -> None:
    """From a checkout, as no index has the package; messages name the packages that are missing."""
    sources = [*PAGES, *(REPOSITORY / "nxd_ckpt").rglob("*.py")]
    assert [] == [path for path in sources if re.search(r"pip install .*(?<!\./)\bnxd_ckpt", path.read_text())]


def missing_tests(text: str) -> list[str]:
    """The tests, and files of tests, that ``text`` names in code and that are not there."""
    missing = []
    for path, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", text):
        file = REPOSITORY / path
        if not file.exists() or (name and not re.search(rf"^ *def {name}\(", file.read_text(), re.MULTILINE)):
            missing.append(f"{path}::{name}")
    return missing


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(REPOSITORY).as_posix() for page in PAGES])
def test_every_test_that_proves_something_exists(page: Path) -> None:
    assert [] == missing_tests(page.read_text())


def test_the_architecture_page_knows_every_module() -> None:
    """Whatever lies directly in the package has its place in the layers, or beside them."""
    package = REPOSITORY / "nxd_ckpt"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    modules = folders | {path.stem for path in package.glob("*.py") if path.stem != "__init__"}
    (layers,) = code_blocks(ARCHITECTURE, "text")
    named = {name for line in layers.splitlines() for name in line[12:].partition("   ")[0].replace("/", " ").split()}
    beside = {name for name in modules if f"`{name}`" in ARCHITECTURE.read_text()}
    assert [] == sorted(modules - named - beside)


def test_every_place_where_a_change_belongs_exists() -> None:
    rows = tables(REPOSITORY / "CONTRIBUTING.md")["Where a change belongs"]
    named = [part for row in rows for part in row[1].split("`")[1::2]]
    places = [part for part in named if "/" in part or part.endswith(".py")]
    assert len(places) > 8
    assert [] == [place for place in places if not (REPOSITORY / "nxd_ckpt" / place).exists()]


@pytest.mark.parametrize("page", DECISIONS, ids=[page.stem for page in DECISIONS])
def test_decisions_are_numbered_and_complete(page: Path) -> None:
    """Each record's title carries its number, and it states context, decision and consequence."""
    number = 1 + DECISIONS.index(page)
    assert page.name.startswith(f"{number:03d}-")
    assert headings(page)[0].startswith(f"{number:03d}: ")
    text = page.read_text()
    assert [] == [part for part in ("Context", "Decision", "Consequence") if f"**{part}.**" not in text]
