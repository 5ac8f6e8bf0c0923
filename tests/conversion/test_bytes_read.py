"""Every conversion reads what it needs once, and verifies it as it is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from nxd_ckpt import Partition, Topology, convert, unshard_checkpoint
from nxd_ckpt.output import locations
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.conversion.tags import as_nxd
from tests.hugging_face.reference import Model
from tests.hugging_face.saved import write_model
from tests.interop.saving import save_as_every_rank

AT_MOST = 1.15
"""Of the bytes of the input."""

ROWS, COLUMNS = 6144, 1024
"""24 MiB of fp32: six blocks of digests, and no multiple of one for most ranks."""

CUT = {"rows": 0, "columns": 1}
"""The dimension that each of these is cut along; others are whole on every rank."""

SHAPES = {"rows": (ROWS, COLUMNS), "columns": (COLUMNS, ROWS), "both.bias": (COLUMNS,), "norm": (ROWS, 96)}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """What is asked of the storages of inputs and outputs."""
    found: list[Operation] = []

    def opened(*given: Any, **named: Any) -> Storage:
        return HookedStorage(open_storage(*given, **named), found.append)

    monkeypatch.setattr(locations, "open_storage", opened)
    return found


def read(log: list[Operation]) -> int:
    return sum(operation.nbytes for operation in log if operation.name.startswith("read"))


def state() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return {name: torch.rand(shape, generator=drawn) for name, shape in SHAPES.items()}


def partitions(tp: int) -> dict[str, Partition]:
    return {name: Partition(dim, num_partitions=tp) for name, dim in CUT.items()}


def save_tp(directory: Path, tp: int) -> Path:
    """The model cut over ``tp`` ranks, ours."""
    whole = state()

    def what(rank: int) -> dict[str, Any]:
        return {"model": {**whole, **{name: whole[name].chunk(tp, dim)[rank] for name, dim in CUT.items()}}}

    topologies = [Topology(tp=tp, rank=rank) for rank in range(tp)]
    save_as_every_rank(directory, "step_1", topologies, what, partitions=partitions(tp), durable=False)
    return directory / "step_1"


def save_zero1(directory: Path, dp: int) -> Path:
    """A ZeRO-1 optimizer with two moments of one parameter, on ``dp`` ranks."""
    shards = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4)).chunk(dp)
    names = [["rows"]]

    def what(rank: int) -> dict[str, Any]:
        entries = {0: {"step": torch.tensor(3.0), "exp_avg": shards[rank], "exp_avg_sq": shards[rank] * 2}}
        groups = [{"lr": 0.1, "params": [0]}]
        optimizer = {"state": {}, "param_groups": groups, "base_state": entries, "shape_info": {0: [ROWS, COLUMNS]}}
        return {"model": {"rows": torch.zeros(ROWS, COLUMNS)}, "optimizer": optimizer}

    topologies = [Topology(dp=dp, rank=rank) for rank in range(dp)]
    save_as_every_rank(directory, "step_1", topologies, what, param_names=names, durable=False)
    return directory / "step_1"


def nbytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def save_dcp(directory: Path) -> Path:
    save({"model": state()}, checkpoint_id=directory, no_dist=True)
    return directory


Convert = Callable[[Path, Path], object]

FROM_TAGS: dict[str, tuple[int, Convert]] = {
    "reshard tp2 to tp4": (2, lambda tag, out: convert(tag, out / "step_1", to="tag", tp=4)),
    "reshard tp2 to tp8 xser": (2, lambda tag, out: convert(tag, out / "step_1", to="tag", tp=8, use_xser=True)),
    "reshard tp4 to tp1": (4, lambda tag, out: convert(tag, out / "step_1", to="tag", tp=1)),
    "unshard": (4, lambda tag, out: unshard_checkpoint(tag, out)),
    "unshard to safetensors": (2, lambda tag, out: unshard_checkpoint(tag, out, use_safetensors=True)),
    "to_dcp": (4, lambda tag, out: convert(tag, out, to="dcp")),
    "pack": (2, lambda tag, out: convert(tag, out / "step.tar", to="tar")),
}


@pytest.mark.parametrize("name", FROM_TAGS)
def test_a_tag_is_read_once(tmp_path: Path, log: list[Operation], name: str) -> None:
    """Of ours: whatever the cuts before and after, and however many ranks want a tensor."""
    tp, convert = FROM_TAGS[name]
    tag = save_tp(tmp_path, tp)
    log.clear()
    convert(tag, tmp_path / "out")
    assert read(log) <= AT_MOST * nbytes_of(tag)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("dp", [2, 3, 8])
def test_a_zero1_optimizer_is_read_once(tmp_path: Path, log: list[Operation], dp: int, ours: bool) -> None:
    """From four ranks, of ours and of NxD, whose tensors have one digest each."""
    tag = save_zero1(tmp_path / "in", 4)
    nbytes = nbytes_of(tag)
    log.clear()
    convert(tag if ours else as_nxd(tag), tmp_path / "out" / "step_1", to="tag", optimizer_form="zero1", dp=dp)
    assert read(log) <= AT_MOST * nbytes


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_dcp_directory_is_read_once(tmp_path: Path, log: list[Operation], tp: int) -> None:
    """Its tensors have one digest each."""
    directory = save_dcp(tmp_path / "dcp")
    log.clear()
    convert(directory, tmp_path / "out" / "step_1", to="tag", tp=tp, partitions=partitions(1))
    assert read(log) <= AT_MOST * nbytes_of(directory)


LLAMA = Model(layers=1, heads=8, kv_heads=8, head_dim=128, intermediate=2048, vocab=512)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_hugging_face_model_is_read_once_either_way(tmp_path: Path, log: list[Operation], tp: int) -> None:
    """Into a tag of any sizes, and out of it again; its tensors have no digests."""
    source, tag = tmp_path / "hf", tmp_path / "tags" / "step_1"
    write_model(source, LLAMA)
    log.clear()
    convert(source, tag, to="tag", names="nxd", tp=tp)
    assert read(log) <= AT_MOST * nbytes_of(source)
    log.clear()
    convert(tag, tmp_path / "back", to="hf", config=source)
    assert read(log) <= AT_MOST * nbytes_of(tag)
