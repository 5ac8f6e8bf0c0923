"""Fixtures and skip rules that every test shares."""

import gc
import os
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore import loaders
from hypothesis import settings

from nxd_ckpt.conversion import tag_writer
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import MemoryStorage
from tests.support.processes import FORKED
from tests.support.rank_pool import RankPool
from tests.support.s3_server import S3Server

# Nothing is downloaded; without this, Hugging Face's libraries wait for a network that need not be there.
os.environ["HF_HUB_OFFLINE"] = "1"
# As ranks of the emulation have it, here too, and in one piece without MLIR's emitters: half the time to compile again.
# Set before torch-xla is imported, which adds a flag of its own: the ranks would take that for the user's choice, and
# compile with LLVM's optimisations.
FLAGS = ["backend_optimization_level=0", "cpu_parallel_codegen_split_count=1", "cpu_use_fusion_emitters=false"]
os.environ.setdefault("XLA_FLAGS", " ".join(f"--xla_{flag}" for flag in FLAGS))

gc.disable()  # until all tests are collected: walking through modules again and again took a third of that time

REPOSITORY = Path(__file__).parents[1]
# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("short", deadline=None, max_examples=25)
settings.register_profile("soak", deadline=None)
settings.load_profile("short")

BUCKET = "bucket"

GOLDEN = REPOSITORY / "tests" / "golden"


@pytest.hookimpl(tryfirst=True)  # before ``-m`` is heeded
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most tests ``plain`` and ``once``, leave most of ``one_in`` to ``soak``, and skip what lacks torch-xla."""
    seen = Counter[str]()
    for item in items:
        if not item.get_closest_marker("xla"):
            item.add_marker("plain")
            if not item.get_closest_marker("both"):
                item.add_marker("once")
        if (sweep := item.get_closest_marker("one_in")) and not item.get_closest_marker("soak"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % sweep.args[0]:
                item.add_marker(pytest.mark.soak)
            seen[test] += 1
    if find_spec("torch_xla") is not None:
        return
    absent = pytest.mark.skip(reason="torch-xla is not installed: pip install '.[xla]'")
    for item in items:
        if item.get_closest_marker("xla"):
            item.add_marker(absent)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the collector of garbage begin, with nothing to walk through."""
    _keep_from_collector(session)
    gc.enable()


def _keep_from_collector(session: pytest.Session) -> None:
    """Keep it away from all that is there: walking through modules and tests took an eighth of all time."""
    gc.freeze()
    session.stash[_MODULES] = len(sys.modules)


_MODULES = pytest.StashKey[int]()
"""Modules that were imported when last all was kept from the collector."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Keep the collector away from what a file, or a test that imported much, leaves behind.

    `close_checkpointers` collects garbage: late in a long run that took half a second, in each of a thousand calls.
    """
    yield
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > item.session.stash[_MODULES] + 20:
        gc.collect()
        _keep_from_collector(item.session)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of checkpoints that neuronx-distributed 0.18 wrote, one sub-directory a configuration.

    Shared by the session: a test that changes something copies it first.
    """
    return _unpacked("nxd-0.18.tar.xz", tmp_path_factory) / "public"


@pytest.fixture(scope="session", params=["0.1", "0.1-objects", "0.1-tables"])
def golden_of_ours(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Directory of checkpoints that nxd_ckpt wrote, one sub-directory a configuration; shared as ``golden`` is.

    They are its first ones, those with trees in indexes, and those with tables of forms and specifications.
    """
    return _unpacked(f"nxd_ckpt-{request.param}.tar.xz", tmp_path_factory) / "ours"


@pytest.fixture(scope="session")
def golden_of_flags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of checkpoints that nxd_ckpt 0.1 wrote with flags that were no bools; shared as ``golden`` is."""
    return _unpacked("nxd_ckpt-0.1-flags.tar.xz", tmp_path_factory) / "flags"


@pytest.fixture(scope="session")
def golden_of_trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of checkpoints that the plug-ins of nxd_ckpt 0.1 wrote, each beside what was saved; shared likewise."""
    return _unpacked("nxd_ckpt-0.1-trainers.tar.xz", tmp_path_factory)


@pytest.fixture(scope="session")
def torch_checkpointing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of checkpoints that torch_checkpointing 0.1.1 wrote, each beside its whole state; shared likewise."""
    return _unpacked("torch_checkpointing-0.1.1.tar.xz", tmp_path_factory)


def _unpacked(tar_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN / tar_name) as tar:
        tar.extractall(unpacked, filter="data")
    return unpacked


@pytest.fixture
def disk(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def store() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server on 127.0.0.1, with :data:`BUCKET`; the clients of this process read boto's data files once."""
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "create_loader", cache(loaders.create_loader))
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a conversion are forked by a server that has imported all; spawned ones take seconds."""
    monkeypatch.setattr(tag_writer, "multiprocessing", SimpleNamespace(get_context=lambda _: FORKED))


@pytest.fixture(scope="session")
def xla_ranks() -> Iterator[RankPool]:
    """Four emulated CPU-XLA ranks, one pool for the whole session."""
    with RankPool(nproc=4, xla=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[RankPool]:
    """Four ranks of a gloo process group, one pool for the whole session."""
    with RankPool(nproc=4) as pool:
        yield pool


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    """Two ranks of a gloo process group, one pool for the whole session."""
    with RankPool(nproc=2) as pool:
        yield pool
