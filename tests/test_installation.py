"""What an installation brings: types that a type checker finds, what torch needs to be quiet, one version."""

import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import open_checkpoint, save_checkpoint
from nxd_ckpt.cli.main import main
from tests.docs.markdown import DOCS, README, REPOSITORY, code_blocks

SCRIPT = """
import nxd_ckpt
from nxd_ckpt import convert

def steps(directory: str) -> int:
    checkpoint = nxd_ckpt.open_checkpoint(directory, 300)
    reveal_type(checkpoint.tag)
    content = nxd_ckpt.load_checkpoint(directory)
    return int(content["steps"]) + convert(directory, "hf", to="hf").files

nxd_ckpt.save_checkpoint("run", tag=3.5)
"""


# Not of annotations: a page is a script, whose functions and empty dicts have none, and torch is not installed here.
_OF_SCRIPTS = (
    *("--ignore-missing-imports", "--allow-untyped-defs", "--allow-untyped-calls", "--allow-any-generics"),
    *("--allow-subclassing-any", "--disable-error-code=var-annotated", "--disable-error-code=has-type"),
)


def test_a_type_checker_finds_an_editable_installation(installed: Path, tmp_path: Path) -> None:
    """mypy --strict on scripts elsewhere sees our types, and through them wrong arguments; it finds none in a Python
    block of README and the documentation: what is called, with what, and what may be None."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for page in (README, *DOCS.glob("*.md")):
        if blocks := code_blocks(page, "python"):
            (tmp_path / f"{page.stem.replace('-', '_')}.py").write_text("\n".join(map(str.strip, blocks)))
    names = [path.name for path in tmp_path.iterdir()]
    python = str(installed / "bin" / "python")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, *_OF_SCRIPTS, *names]

    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)

    assert [
        'script.py:7: note: Revealed type is "str"',
        'script.py:9: error: Unsupported operand types for + ("int" and "Mapping[str, int]")  [operator]',
        'script.py:11: error: Argument "tag" to "save_checkpoint" has incompatible type "float"; '
        'expected "str | int | None"  [arg-type]',
        f"Found 2 errors in 1 file (checked {len(names)} source files)",
    ] == done.stdout.splitlines(), done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own that holds nxd_ckpt, editable, and nothing else."""
    folder = tmp_path_factory.mktemp("installation")
    checkout, environment, wheels = (folder / name for name in ("checkout", "environment", "wheels"))
    checkout.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, checkout)
    shutil.copytree(REPOSITORY / "nxd_ckpt", checkout / "nxd_ckpt", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "tests").mkdir()
    build = f"import setuptools.build_meta as build; build.build_editable({str(wheels)!r})"
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    venv.create(environment, symlinks=True)
    [wheel] = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(next(environment.glob("lib/python*/site-packages")))
    return environment


def _metadata(installed: Path) -> metadata.PathDistribution:
    return metadata.PathDistribution(next(installed.glob("lib/python*/site-packages/nxd_ckpt-*.dist-info")))


def test_the_licence_and_numpy_are_installed_with_it(installed: Path) -> None:
    """The first file that a company looks for, by its name in the metadata and as a text. So is NumPy, without which
    `import torch` warns."""
    distribution = _metadata(installed)
    assert "numpy" in (distribution.requires or [])
    assert "Apache-2.0" == distribution.metadata["License-Expression"]
    licence = next(path for path in distribution.files or [] if path.name == "LICENSE")
    assert (REPOSITORY / "LICENSE").read_text() == licence.read_text()


def test_no_binary_is_tracked() -> None:
    """Beside text there are pictures of the docs, and checkpoints and hostile inputs to test with: no libraries."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    paths = [REPOSITORY / name for name in listing.stdout.split("\0") if name]
    binaries = {path for path in paths if path.is_file() and b"\0" in path.read_bytes()}
    globs = ("docs/*.png", "tests/golden/*.tar.xz", "tests/hostile/corpus/*/*")
    expected = {path for pattern in globs for path in REPOSITORY.glob(pattern)}
    assert set() == binaries - expected


def test_there_is_one_version(installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the package, of what is installed, of the command, and of who wrote a checkpoint."""
    assert nxd_ckpt.__version__ == _metadata(installed).version
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert f"nxd-ckpt {nxd_ckpt.__version__}\n" == capsys.readouterr().out
    save_checkpoint(tmp_path, "t", {"w": torch.ones(1)})
    manifest = open_checkpoint(tmp_path).manifest
    assert manifest is not None
    assert nxd_ckpt.__version__ == manifest.versions["nxd_ckpt"]
