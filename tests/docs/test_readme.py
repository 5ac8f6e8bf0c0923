"""The README is true, and so is every page whose code runs like its own; it leaves out nothing that is public."""

import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nxd_ckpt
from nxd_ckpt.cli.main import main
from tests.cli.reference import MIGRATED
from tests.docs.markdown import DOCS, README, REPOSITORY, code_blocks, tables, unquoted
from tests.support.s3_server import S3Server

_PRINTS = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
_IMPORTS = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
_DISTRIBUTIONS = {
    "olmo_core": "ai2-olmo-core",
    "neuronx_distributed": "[neuron]",
    "pytorch_lightning": "pytorch-lightning",
    "torch_xla": "[xla]",
}

ERRORS, TABLE_OF_ERRORS = DOCS / "errors.md", "Errors"
LONGEST_README = 7_168  # bytes: it introduces, and the pages below docs/ explain
TESTED_APART = {"cli", "coming-from", "format", "torchtitan", "tutorial-fsdp2", "whole-script"}
TESTED_APART |= {page.stem for page in MIGRATED}
PAGES = [page for page in sorted(DOCS.glob("*.md")) if code_blocks(page, "python")]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    nxd_ckpt.close_checkpointers()


@pytest.fixture
def _s3_in_the_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """``s3://bucket`` is a local server's, for whoever asks the usual places."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


def run(block: str, namespace: dict[str, Any]) -> None:
    exec(compile(block, str(README), "exec"), namespace)


def printed(blocks: list[str]) -> list[str]:
    """What the comments behind calls of print say that they print."""
    return [line for block in blocks for line in _PRINTS.findall(block)]


@pytest.mark.usefixtures("_s3_in_the_environment")
@pytest.mark.parametrize(
    "page", [README, *(page for page in PAGES if page.stem not in TESTED_APART)], ids=lambda page: page.stem
)
def test_every_python_block_runs_and_prints_what_its_comments_say(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pasted one after the other into one process, on plain CPU torch."""
    blocks = code_blocks(page, "python")
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        run(block, namespace)
    expected = printed(blocks)
    assert expected
    assert expected == capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_what_blocks_import_is_named(page: Path) -> None:
    """What neither Python nor an installation of nxd_ckpt brings, the page says how to install."""
    brought = {*sys.stdlib_module_names, "nxd_ckpt", "torch", "numpy", "tqdm"}
    imported = {name for block in code_blocks(page, "python") for name in re.findall(_IMPORTS, block)}
    installed = " ".join(re.findall(r"pip install ([^`\n]*)", page.read_text()))
    assert [] == [name for name in imported - brought if _DISTRIBUTIONS.get(name, name) not in installed]


def test_the_quick_start_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    """Run again in the same directory, it finds its checkpoint and has nothing left to do."""
    quick_start = code_blocks(README, "python")[0]
    namespaces: list[dict[str, Any]] = [{}, {}]
    for namespace in namespaces:
        run(quick_start, namespace)
        nxd_ckpt.close_checkpointers()
    assert [*printed([quick_start]), "300 step_300"] == capsys.readouterr().out.splitlines()
    assert "`300 step_300`" in README.read_text()


def test_the_commands_after_the_quick_start_run() -> None:
    run(code_blocks(README, "python")[0], {})
    commands = re.findall(r"^\$ nxd-ckpt (.*)$", "".join(code_blocks(README, "console")), re.MULTILINE)
    assert [0] * 4 == [main(shlex.split(command)) for command in commands]
    assert {"report.html", "out"} <= {path.name for path in Path.cwd().iterdir()}


def test_the_badges_are_true() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    badges = dict(re.findall(r"shields\.io/badge/(\w+)-(.*)-blue", README.read_text()))
    pythons = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python ::" in name]
    assert project["license"] == badges["licence"].replace("--", "-")
    assert f"{pythons[0]}_to_{pythons[-1]}" == badges["python"]
    assert project["dependencies"][0] == f"torch>={badges['torch'].removesuffix('_or_newer')}"


def test_the_readme_introduces() -> None:
    assert len(README.read_bytes()) <= LONGEST_README


def test_every_exception_is_in_the_table_of_errors() -> None:
    """The table's first column is the exception tree, no more and no less."""
    documented = [unquoted(row[0]) for row in tables(ERRORS)[TABLE_OF_ERRORS]]
    classes = [value for value in vars(nxd_ckpt.errors).values() if inspect.isclass(value)]
    exceptions = [kind.__name__ for kind in classes if issubclass(kind, Exception)]
    assert sorted(exceptions) == sorted(documented)


def test_every_public_name_is_documented() -> None:
    """What ``nxd_ckpt`` exports is in the text or code of the README or of a page."""
    text = "\n".join(page.read_text() for page in [README, *DOCS.glob("*.md")])
    assert [] == [name for name in nxd_ckpt.__all__ if not re.search(rf"\b{name}\b", text)]


def test_ten_tasks_are_short() -> None:
    """At most eight lines each, after the block that they continue from."""
    _, *tasks = code_blocks(DOCS / "ten-tasks.md", "python")
    assert [] == [task for task in tasks if len(list(filter(None, task.splitlines()))) > 8]
    assert 10 == len(tasks)
