"""The documentation site: it builds without a warning, and its reference leaves no public name out."""

import argparse
import html
import inspect
import re
from pathlib import Path

import pytest

import nxd_ckpt
from nxd_ckpt import dcp, prune, testing, verify
from nxd_ckpt.cli.main import parsers
from tests.docs.markdown import DOCS, REPOSITORY
from tests.support.processes import run_program

_SPHINX = re.compile(r":(?:meth|class|func|mod|attr|exc|data|obj|ref):[`<]|::</p>")

CONFIG = REPOSITORY / "mkdocs.yml"

_BUILD = """
import os, runpy

os.environ["NO_MKDOCS_2_WARNING"] = "1"
runpy.run_module("mkdocs", run_name="__main__")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A broken link or heading, and a page that no menu leads to, fail it."""
    pytest.importorskip("mkdocs", reason="Python 3.10")
    folder = tmp_path_factory.mktemp("site")
    done = run_program(_BUILD, "build", "--strict", "--site-dir", folder, "--config-file", CONFIG)
    assert 0 == done.returncode, done.stderr  # with --quiet it counts no warnings
    return folder


def test_every_file_of_the_documentation_is_a_page(site: Path) -> None:
    """A page of its own for each, and one for each file that pages link to."""
    pages = {page.relative_to(DOCS) for page in DOCS.rglob("*.md")} - {Path("index.md")}
    places: list[str | Path] = [page.with_suffix("") for page in pages]
    outside = ["introduction", "changelog", "contributing", "tests", "licence", "security", "decisions", "examples"]
    places += [*outside, "examples/train_fsdp2", "."]
    assert [] == [place for place in places if not (site / place / "index.html").is_file()]
    assert 'href="../examples/train_fsdp2/"' in (site / "fsdp2" / "index.html").read_text()


def test_the_reference_has_every_public_name(site: Path) -> None:
    """Functions, classes and exceptions of the modules that users import, under the name they import."""
    modules = {module.__name__: module.__all__ for module in (nxd_ckpt, dcp, prune, testing, verify)}
    errors = inspect.getmembers(nxd_ckpt.errors, inspect.isclass)
    modules["nxd_ckpt.errors"] = [name for name, kind in errors if issubclass(kind, nxd_ckpt.errors.CheckpointError)]
    for module, names in modules.items():
        page = (site / "reference" / module / "index.html").read_text()
        shown = [name for name in names if name not in ("__version__", "errors")]
        assert [] == [name for name in shown if f'id="{module}.{name}"' not in page]


def test_the_reference_shows_each_option(site: Path) -> None:
    """In the signature and with its meaning, as ``help()`` does, and not as ``**options``."""
    text = _text(site / "reference" / "nxd_ckpt" / "index.html")
    assert "fallback: bool = False" in text
    assert "**options" not in text


def test_the_page_of_commands_has_every_option(site: Path) -> None:
    """In the help of each command; other names of an option, for existing scripts, are not shown."""
    text = _text(site / "cli" / "index.html")
    for name, parser in parsers()[1].items():
        options = text.partition(f"usage: nxd-ckpt {name} ")[2].partition("usage: ")[0]
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        assert [] == [flag for action in shown for flag in action.option_strings if flag not in options]


def test_docstrings_are_markdown(site: Path) -> None:
    """No page shows a role of Sphinx, or the colons before its code blocks."""
    assert [] == [found for page in site.rglob("*.html") for found in _SPHINX.findall(page.read_text())]


def _text(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page.read_text()))
