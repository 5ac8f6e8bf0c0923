"""What would be published: an sdist, and a wheel of it that runs the quick start where nothing else is installed."""

import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.docs.markdown import README, REPOSITORY, code_blocks


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist of what is tracked, and a wheel made of it, by their suffix."""
    folder = tmp_path_factory.mktemp("built")
    checkout, dist = folder / "checkout", folder / "dist"
    for name in _tracked():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, checkout / name)
    (checkout / "docs" / "notes.txt").write_text("stray")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), cwd=checkout)
    return {path.suffix: path for path in dist.iterdir()}


def _tracked() -> list[str]:
    """The files of the repository, without the large ones of tests."""
    arguments = ["git", "ls-files", "--", ":!tests/golden", ":!tests/hostile/corpus"]
    listing = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in listing.stdout.splitlines() if (REPOSITORY / name).exists()]


def _run(*command: str, cwd: Path) -> str:
    """Run a program without this process's environment; return what it printed."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done
    return done.stdout


def test_an_index_would_take_them(built: dict[str, Path], tmp_path: Path) -> None:
    assert {".gz", ".whl"} == {*built}
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, built.values())]
    assert 2 == _run(*command, cwd=tmp_path).count("PASS")


def test_the_sdist_has_what_a_reader_needs(built: dict[str, Path]) -> None:
    """The package, the documentation and the examples, and besides what building adds nothing."""
    with tarfile.open(built[".gz"]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    pages = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"}
    building = {"MANIFEST.in", "mkdocs.yml", "pyproject.toml", "setup.py", "tools/documentation.py"}
    building |= {"tests/README.md", "tests/counts.md"}
    folders = ("nxd_ckpt/", "docs/", "examples/")
    expected = pages | building | {name for name in _tracked() if name.startswith(folders)}
    made = {name for name in packed if name.startswith("nxd_ckpt.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert expected == packed - made


def test_the_quick_start_runs_where_it_alone_is_installed(built: dict[str, Path], tmp_path: Path) -> None:
    """With the packages that it says it needs, and no others; the command, too. The wheel was made of the sdist."""
    environment, script = tmp_path / "environment", tmp_path / "quick_start.py"
    venv.create(environment, symlinks=True)
    site_packages = next(environment.glob("lib/python*/site-packages"))
    _link(_required(built[".whl"]), site_packages)
    python = str(environment / "bin" / "python")
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile", str(built[".whl"]))
    _run(sys.executable, "-m", "pip", "--python", python, "install", *options, cwd=tmp_path)
    script.write_text(code_blocks(README, "python")[0] + "\nprint(nxd_ckpt.__file__)")

    printed = _run(python, str(script), cwd=tmp_path).split()
    assert ["0", "step_300", str(site_packages / "nxd_ckpt" / "__init__.py")] == printed
    assert "step_300: ok" in _run(str(environment / "bin" / "nxd-ckpt"), "verify", "checkpoints", cwd=tmp_path)


def _required(wheel: Path) -> set[str]:
    """The names of the distributions that an installation of the wheel brings."""
    [described] = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    declared, required = metadata.PathDistribution(described).requires or [], set[str]()
    while declared:
        needed = [one for one in map(Requirement, declared) if one.marker is None or one.marker.evaluate({"extra": ""})]
        names = {one.name for one in needed} - required
        declared = [line for name in names for line in metadata.requires(name) or []]
        required |= names
    return required


def _link(names: set[str], site_packages: Path) -> None:
    """Put installed distributions into another environment, as links."""
    for distribution in map(metadata.distribution, names):
        for top in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(str(distribution.locate_file(top)))
