"""A program's surroundings: a stand-in for neuronx-distributed that can be imported, and nothing of it left over."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nxd_ckpt
from tests.drop_in.doubles import write_package


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the stand-in package, for ``sys.path``."""
    return write_package(tmp_path_factory.mktemp("packages"))


@pytest.fixture
def nxd(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in can be imported, and is not imported yet; afterwards it never was, and nothing is installed."""
    monkeypatch.syspath_prepend(package)
    yield
    nxd_ckpt.close_checkpointers()
    nxd_ckpt.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "neuronx_distributed"]:
        del sys.modules[name]
