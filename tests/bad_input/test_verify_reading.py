"""What ``verify`` finds, and when; and loads whose storage fails, is slow to say so, or is interrupted."""

import errno
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.core.manifest import TensorEntry, load_index
from nxd_ckpt.errors import (
    CorruptCheckpoint,
    DigestMismatch,
    MalformedFile,
    StorageError,
)
from nxd_ckpt.options.execution import Verify
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation, recording
from tests.interop.saving import save_as_every_rank
from tests.protocol.job import until
from tests.support.damage import flip
from tests.support.rank_pool import RankPool

MIB = 2**20
SHAPES: dict[str, tuple[int, ...]] = {
    "large": (9 * MIB // 4,),  # three pieces, the last of 1 MiB
    "block": (MIB,),  # just one
    **{f"small{number}": (number * 5,) for number in range(1, 15)},
    "scalar": (),
    "none": (0, 3),
}


def model(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in one file, in a file for each tensor, and as a tag without our index."""
    found = {}
    for form in ("plain", "xser", "foreign"):
        found[form] = tmp_path_factory.mktemp(form)
        with Checkpointer(found[form], durable=False) as checkpointer:
            checkpointer.save("one", model(1.5), use_xser=form == "xser")
    os.remove(found["foreign"] / "one" / "manifest.json")
    shutil.rmtree(found["foreign"] / "one" / "index")
    return found


@pytest.fixture(params=["plain", "xser", "foreign"])
def copy(request: pytest.FixtureRequest, kept: dict[str, Path], tmp_path: Path) -> tuple[Path, list[TensorEntry]]:
    """A checkpoint to be damaged, and where its tensors lie."""
    shutil.copytree(kept[request.param], tmp_path / "copy")
    source = kept["plain" if request.param == "foreign" else request.param]
    [index] = (source / "one" / "index").iterdir()
    return tmp_path / "copy", list(load_index(index.read_bytes(), index.name).tensors)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Whatever happens in a load, no thread and no open file is left of it."""
    before = set(threading.enumerate())
    yield
    until(lambda: not set(threading.enumerate()) - before)  # an interrupt may come while the load waits for one to end
    gc.collect()
    assert [] == open_below(tmp_path)


def open_below(directory: Path) -> list[str]:
    """The files there that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of listing them, or another test's thread
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(f"{directory}/")]


def load(directory: Path, **options: Any) -> dict[str, torch.Tensor]:
    live = model(0.0)
    Checkpointer(directory).load("one", live, **options)
    return live


@pytest.mark.parametrize("verify", [pytest.param(True, marks=pytest.mark.soak), "reading"])
@pytest.mark.one_in(2)
def test_a_flipped_bit_anywhere_is_found(copy: tuple[Path, list[TensorEntry]], verify: Any, alone: None) -> None:
    """In the first or the last byte of any tensor, among others in one read or in a piece of its own: it is named."""
    directory, entries = copy
    for entry in entries:
        for offset in {entry.offset, entry.offset + entry.nbytes - 1} if entry.nbytes else ():
            flip(directory / "one" / entry.file, offset)
            with pytest.raises(CorruptCheckpoint) as caught:
                load(directory, verify=verify)
            assert entry.name in str(caught.value) or entry.file in str(caught.value)
            flip(directory / "one" / entry.file, offset)
    assert all(torch.equal(value, load(directory, verify=verify)[name]) for name, value in model(1.5).items())


def test_what_an_error_says_of_the_live_state(kept: dict[str, Path], tmp_path: Path) -> None:
    """Verified before, nothing changed; verified while reading, it may have, and the error says so."""
    shutil.copytree(kept["plain"], tmp_path / "copy")
    [file] = (tmp_path / "copy" / "one" / "model").iterdir()
    flip(file)
    cases: list[tuple[Verify, bool]] = [(True, False), ("reading", True)]
    for verify, overwritten in cases:
        live = model(0.0)
        with pytest.raises(DigestMismatch, match="model/large") as caught:
            Checkpointer(tmp_path / "copy").load("one", live, verify=verify)
        assert overwritten == ("partly overwritten: load another tag before training on" in str(caught.value))
        assert overwritten == any(value.any() for value in live.values())


def test_without_verifying_damage_is_loaded(kept: dict[str, Path], tmp_path: Path) -> None:
    """That is what it means: the flipped bit arrives, and nothing else is different."""
    shutil.copytree(kept["plain"], tmp_path / "copy")
    [file] = (tmp_path / "copy" / "one" / "model").iterdir()
    flip(file)
    found = load(tmp_path / "copy", verify=False)
    differing = {name: int((found[name] != value).sum()) for name, value in model(1.5).items()}
    assert {"large": 1} == {name: count for name, count in differing.items() if count}


def load_on_rank(rank: int, directory: Path, verify: Any) -> str | None:
    live = model(0.0)
    try:
        Checkpointer(directory, topology=Topology(tp=2, rank=rank)).load("one", live, verify=verify)
    except DigestMismatch as error:
        return str(error)
    return None


def test_damage_on_one_rank_reaches_both(pair: RankPool, tmp_path: Path) -> None:
    """Each reads a file of its own; the other one raises what this one found."""
    topologies = [Topology(tp=2, rank=rank) for rank in range(2)]
    save_as_every_rank(tmp_path, "one", topologies, lambda rank: {"model": model(1.0 + rank)}, durable=False)
    damaged = tmp_path / "one" / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    flip(damaged)
    for verify in (True, "reading"):
        others, own = pair.run(load_on_rank, tmp_path, verify)
        assert "model/large" in own
        assert f"on rank 1: {own}" == others
    assert [None, None] == pair.run(load_on_rank, tmp_path, False)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of 64 MiB, which is read in 128 pieces, and one behind it."""
    directory = tmp_path_factory.mktemp("long")
    with Checkpointer(directory, durable=False) as checkpointer:
        checkpointer.save("one", {"long": torch.ones(16 * MIB), "last": torch.ones(MIB)})
    return directory


class Pieces(HookedStorage):
    """Counts the reads of whole pieces, and calls ``at(path)`` before the second of them."""

    def __init__(self, directory: Path, at: Callable[[Path], None]) -> None:
        self.local = LocalStorage(directory)
        super().__init__(self.local, self._hook)
        self.seen, self._at, self._lock = 0, at, threading.Lock()

    def _hook(self, operation: Operation) -> None:
        if operation.nbytes < self.local.read_nbytes:
            return
        with self._lock:
            self.seen += 1
            due, after = self.seen == 2, self.seen > 2
        if due:
            self._at(self.local.path(operation.key))
        if after:
            time.sleep(0.2)  # else they might all be read before the thread of the second has its turn again


def fail(error: BaseException) -> Callable[[Path], None]:
    def at(path: Path) -> None:
        raise error

    return at


def interrupt(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)  # until the thread that waits has seen it


def load_long(directory: Path, at: Callable[[Path], None], verify: Any) -> tuple[Pieces, dict[str, torch.Tensor]]:
    storage, live = Pieces(directory, at), {"long": torch.zeros(16 * MIB), "last": torch.zeros(MIB)}
    Checkpointer(directory, storage=storage).load("one", live, verify=verify)
    return storage, live


@pytest.mark.parametrize("verify", [True, "reading", False])
def test_a_read_that_fails_stops_the_others(
    long: Path, verify: Any, alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Soon: no more is read than what other threads were at. Once live state is being changed, the log says so."""
    error = OSError(errno.EIO, "the disk is gone")
    storage = Pieces(long, fail(error))
    live = {"long": torch.zeros(16 * MIB), "last": torch.zeros(MIB)}
    with pytest.raises(StorageError, match="the disk is gone") as caught:
        Checkpointer(long, storage=storage).load("one", live, verify=verify)
    assert error is caught.value.__cause__
    assert ("partly overwritten" in caplog.text) == (verify is not True)
    assert storage.seen <= 2 + 8
    assert 0 == live["last"].sum()


@pytest.mark.parametrize("verify", [True, "reading", False])
def test_an_interrupt_ends_a_load(long: Path, verify: Any, alone: None) -> None:
    """Ctrl-C in the middle of the reading, whichever thread is at it."""
    gc.disable()  # Hypothesis looks at every collection, and Python ignores what is raised there
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            load_long(long, interrupt, verify)
    finally:
        signal.signal(signal.SIGINT, before)
        gc.enable()


@pytest.mark.parametrize("verify", [True, "reading", False])
def test_a_file_cut_off_while_it_is_read(long: Path, tmp_path: Path, verify: Any, alone: None) -> None:
    """It was whole when it was opened: the first tensor that is not there any more is named, and nobody crashes."""
    shutil.copytree(long, tmp_path / "copy")
    with pytest.raises(MalformedFile, match=r"model/long.*shorter than its contents need"):
        load_long(tmp_path / "copy", lambda path: os.truncate(path, 2 * MIB), verify)


@pytest.mark.parametrize("verify", [True, "reading", False])
def test_a_file_is_opened_once_for_each_thread(long: Path, verify: Any) -> None:
    opened: list[str] = []

    def note(operation: Operation) -> None:
        if operation.name == "open" and "/model/" in operation.key:
            opened.append(threading.current_thread().name)

    Checkpointer(long, storage=HookedStorage(LocalStorage(long), note)).load("one", {}, verify=verify)
    assert len(opened) <= 2 + 8  # its structure, and the tensors


@pytest.mark.parametrize("verify", [True, "reading", False])
def test_tiny_tensors_share_reads(tmp_path: Path, verify: Any) -> None:
    """A thousand of them take a few operations, and each gets its own."""
    saved = {f"tiny{number}": torch.full((number % 7 + 1,), float(number)) for number in range(1000)}
    with Checkpointer(tmp_path, durable=False) as checkpointer:
        checkpointer.save("one", saved)
    log: list[Operation] = []
    live = {name: torch.zeros_like(value) for name, value in saved.items()}
    storage = HookedStorage(LocalStorage(tmp_path), recording(log))
    Checkpointer(tmp_path, storage=storage).load("one", live, verify=verify)
    assert all(torch.equal(saved[name], value) for name, value in live.items())
    assert len(log) <= 100
