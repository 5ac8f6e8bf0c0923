"""Loads with ``pre_download``, what ``verify=None`` stands for, and what a load says of itself."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.errors import DigestMismatch, InvalidArgument
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, recording
from tests.bad_input.live import jobs, topologies
from tests.interop.saving import save_as_every_rank
from tests.support.damage import flip

SHAPES = {"large": (3 * 2**20,), "small": (5,), "scalar": ()}


def model(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def save(path: Path, value: float, tag: str = "one", **options: Any) -> None:
    with Checkpointer(path, durable=False) as checkpointer:
        checkpointer.save(tag, model(value), **options)


def load(storage: Storage, tag: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    Checkpointer("unused", storage=storage).load(tag, state, **options)
    return state


def assert_is(value: float, state: dict[str, torch.Tensor]) -> None:
    assert SHAPES == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert all(torch.equal(torch.full_like(tensor, value), tensor) for tensor in state.values())


def as_store(path: Path) -> MemoryStorage:
    """An object store that holds what a directory does."""
    store = MemoryStorage()
    for file in path.rglob("*"):
        if file.is_file():
            store.write(str(file.relative_to(path)), file.read_bytes())
    return store


def payload(log: list[Operation]) -> int:
    return sum(operation.nbytes for operation in log if operation.name in ("read_into", "read_ranges"))


@pytest.mark.parametrize("use_xser", [False, True])
def test_each_file_is_downloaded_once(tmp_path: Path, use_xser: bool) -> None:
    """All is verified and loaded from the copies, and a second load, as of another rank, downloads none."""
    save(tmp_path / "run", 1.0, use_xser=use_xser)
    log: list[Operation] = []
    store = HookedStorage(as_store(tmp_path / "run"), recording(log))
    state = sum(tensor.nbytes for tensor in model(1.0).values())

    assert_is(1.0, load(store, pre_download=True, work_dir=tmp_path / "work"))
    assert state < payload(log) < 1.1 * state
    log.clear()
    assert_is(1.0, load(store, pre_download=True, work_dir=tmp_path / "work"))
    assert payload(log) < 0.1 * state


def test_only_what_the_rank_needs_is_downloaded(tmp_path: Path) -> None:
    """Not another rank's shard of a ZeRO-1 optimizer."""
    saved, live = jobs(2, zero1=True), jobs(2, zero1=True, seed=1)
    save_as_every_rank(tmp_path / "run", "one", topologies(saved), lambda rank: saved[rank].parts, durable=False)
    job = live[0]
    Checkpointer(tmp_path / "run", topology=Topology(dp=2, rank=0)).load(
        "one", **job.parts, pre_download=True, work_dir=tmp_path / "work"
    )
    copies = {file.name for file in (tmp_path / "work").rglob("files/*/*/*")}
    assert {"dp_rank_00_tp_rank_00_pp_rank_00.pt"} == copies
    assert saved[0].saved_picture()["model"] == job.saved_picture()["model"]
    assert saved[0].saved_picture()["optimizer"] == job.saved_picture()["optimizer"]


def test_a_tag_that_was_saved_again_is_downloaded_again(tmp_path: Path) -> None:
    """Copies are of one save: those of another under the same name are not loaded."""
    for value in (1.0, 2.0):
        save(tmp_path / "run", value)
        state = load(LocalStorage(tmp_path / "run"), pre_download=True, work_dir=tmp_path / "work")
        assert_is(value, state)


def test_a_damaged_copy_is_refused_once(tmp_path: Path) -> None:
    """Nothing is changed then, and the next load downloads the file anew."""
    save(tmp_path / "run", 1.0)
    store, work = as_store(tmp_path / "run"), tmp_path / "work"
    load(store, pre_download=True, work_dir=work)
    [copy] = work.rglob("files/one/model/*.pt")
    flip(copy)

    state = model(7.0)
    with pytest.raises(DigestMismatch, match=r"tensor 'model/large'.*load again to download them"):
        Checkpointer("unused", storage=store).load("one", state, pre_download=True, work_dir=work)
    assert_is(7.0, state)
    assert_is(1.0, load(store, pre_download=True, work_dir=work))


@pytest.mark.parametrize(("pre_download", "expected"), [(False, 1), (True, 1)])
def test_nothing_is_downloaded_twice_by_default(tmp_path: Path, pre_download: bool, expected: int) -> None:
    """From an object store; on a file system everything is verified first, which takes a second reading."""
    save(tmp_path / "run", 1.0)
    options: dict[str, Any] = {"pre_download": True, "work_dir": tmp_path / "work"} if pre_download else {}
    passes = []
    for storage in (as_store(tmp_path / "run"), LocalStorage(tmp_path / "run")):
        log: list[Operation] = []
        assert_is(1.0, load(HookedStorage(storage, recording(log)), **options))
        passes.append(round(payload(log) / (12 * 2**20)))
    assert [expected, 1 if pre_download else 2] == passes


def test_a_work_dir_alone_is_refused(tmp_path: Path) -> None:
    """It would be ignored silently."""
    save(tmp_path / "run", 1.0)
    with pytest.raises(InvalidArgument, match="pre_download=True"):
        load(LocalStorage(tmp_path / "run"), work_dir=tmp_path / "work")


def test_each_phase_of_a_load_leaves_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With its bytes and seconds, through the package's logger."""
    save(tmp_path / "run", 1.0)
    caplog.set_level(logging.INFO, "nxd_ckpt")
    caplog.clear()
    load(LocalStorage(tmp_path / "run"), pre_download=True, work_dir=tmp_path / "work")
    lines = [record.getMessage() for record in caplog.records]
    assert ["downloaded", "loaded"] == [line.split()[0] for line in lines]
    where = re.escape(f"{tmp_path}/run/one")
    assert all(re.fullmatch(rf"\w+ {where}: 12\.0 MiB in \d+\.\d\d s", line) for line in lines)
