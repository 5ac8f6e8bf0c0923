"""ZeRO-1 optimizers in torch DCP directories, as NxD's ``use_zero1_dcp`` lays them out, and hostile metadata."""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import MalformedFile, OptimizerMismatch, PartNotFound, UnsafePickle
from nxd_ckpt.layouts.nxd_tag import TagLayout
from nxd_ckpt.storage.local import LocalStorage
from tests.tag.equality import difference
from tests.tag.layouts import open_tag, whole

Shards = list[tuple[tuple[int, ...], torch.Tensor]]
"""(offsets, rows) of one tensor, by dp rank."""


def write(directory: Path, entries: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]] | None = None) -> None:
    """A DCP directory: shards in the file of their dp rank, everything else in that of rank 0."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, bytes] = {}
    storage_data = {}
    for name, value in entries.items():
        shards = (
            value if isinstance(value, list) and value and isinstance(value[0], tuple) else [(None, value)]
        )
        for rank, (offsets, content) in enumerate(shards):
            raw = io.BytesIO()
            torch.save(content, raw)
            file = f"__{rank}_0.distcp"
            start = len(files.get(file, b""))
            files[file] = files.get(file, b"") + raw.getvalue()
            index = MetadataIndex(name, offsets, None if offsets is None else rank)
            storage_data[index] = _StorageInfo(file, start, len(raw.getvalue()))
    for file, contents in files.items():
        (directory / file).write_bytes(contents)
    metadata = Metadata({}, planner_data=paths, storage_data=storage_data)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def shards(tensor: torch.Tensor, dp: int) -> Shards:
    parts = tensor.chunk(dp)
    zeros = (0,) * (tensor.dim() - 1)
    return [((rank * len(parts[0]), *zeros), part.clone()) for rank, part in enumerate(parts)]


def moments(seed: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * seed


def open_written(tmp_path: Path) -> TagLayout:
    return open_tag(LocalStorage(tmp_path), "t")


GROUP = {"param_groups.0.lr": 0.1, "param_groups.0.betas": [0.9, 0.95]}


def test_tp_ranks_read_the_entries_of_their_suffix(tmp_path: Path) -> None:
    """Tensors are kept for each tp rank; plain objects once for all; types come back as optimizers hold them."""
    entries = {
        **GROUP,
        "param_groups.0.params": [0, 1],
        "base_state.block.0.weight.step": 3,
        "base_state.bias.step": torch.tensor(3.0),
        "shape_info.0": [4, 2],
        "shape_info.1": [2],
    }
    for tp in range(2):
        entries[f"base_state.block.0.weight.exp_avg|tp-{tp:04d}"] = shards(moments(tp, 4, 2), 2)
        entries[f"base_state.bias.exp_avg|tp-{tp:04d}"] = shards(moments(tp + 2, 2), 2)
    write(tmp_path / "t" / "optim", entries)
    tag = open_written(tmp_path)
    assert {"dp": 2, "tp": 2, "pp": 1, "ep": 1} == tag.topology().sizes
    assert ["block.0.weight", "bias"] == tag.optimizer_names(Coordinates())
    tree = whole(tag, tag.optimizer_tree(Coordinates(dp_rank=1, tp_rank=1)))
    expected = {
        "state": {},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
        "base_state": {
            0: {"step": 3, "exp_avg": moments(1, 4, 2)[2:]},
            1: {"step": torch.tensor(3.0), "exp_avg": moments(3, 2)[1:]},
        },
        "shape_info": {0: torch.Size([4, 2]), 1: torch.Size([2])},
    }
    assert difference(expected, tree) is None


def test_pipeline_stages_have_names_of_their_own(tmp_path: Path) -> None:
    """Upstream keeps one stage's ``shape_info`` and ``params`` for all: each stage's are worked out instead."""
    entries = {
        **GROUP,
        "param_groups.0.params": [0, 1],
        "shape_info.0": [4, 2],
        "shape_info.1": [2],
        "base_state.last.step": 5,
        "base_state.first.step": 5,
        "base_state.first.exp_avg|pp-0000": shards(moments(0, 4, 2), 2),
        "base_state.second.exp_avg|pp-0000": shards(moments(1, 2), 2),
        "base_state.last.exp_avg|pp-0001": shards(moments(2, 6), 2),
    }
    write(tmp_path / "t" / "optim", entries)
    tag = open_written(tmp_path)
    assert ["first", "second"] == tag.optimizer_names(Coordinates())
    assert ["last"] == tag.optimizer_names(Coordinates(pp_rank=1))
    tree = whole(tag, tag.optimizer_tree(Coordinates(pp_rank=1)))
    assert difference({0: {"step": 5, "exp_avg": moments(2, 6)[:3]}}, tree["base_state"]) is None
    assert {0: torch.Size([6])} == tree["shape_info"]
    assert [0] == tree["param_groups"][0]["params"]


def test_the_recorded_order_decides_over_that_of_writing(tmp_path: Path) -> None:
    """Indices follow the order of the state dict, which the writer records beside the entries."""
    first, second = "base_state.first.exp_avg", "base_state.second.exp_avg"
    entries = {second: shards(moments(1, 2), 2), first: shards(moments(0, 2), 2)}
    paths = {name: tuple(name.split(".")) for name in (first, second)}
    write(tmp_path / "t" / "optim", {**entries, "shape_info.0": [2], "shape_info.1": [2]}, paths)
    tree = whole(tag := open_written(tmp_path), tag.optimizer_tree(Coordinates()))
    assert ["first", "second"] == tag.optimizer_names(Coordinates())
    assert difference({0: moments(0, 2)[:1], 1: moments(1, 2)[:1]}, _averages(tree)) is None


def test_parameters_without_state_need_names(tmp_path: Path) -> None:
    """A parameter that never had a gradient has a shape and no state: which it is, only names tell."""
    entries: dict[str, Any] = {"shape_info.0": [2], "shape_info.1": [6], "shape_info.2": [4]}
    entries |= {"base_state.a.exp_avg": shards(moments(0, 2), 2), "base_state.c.exp_avg": shards(moments(2, 4), 2)}
    write(tmp_path / "t" / "optim", entries)
    tag = open_written(tmp_path)
    assert tag.optimizer_names(Coordinates()) is None
    with pytest.raises(OptimizerMismatch, match="2 parameters with state, 3 in all"):
        tag.optimizer_tree(Coordinates())
    assert [0, 2] == list(tag.optimizer_tree(Coordinates(), ["a", "b", "c"])["base_state"])


def test_what_is_not_recorded_is_not_guessed(tmp_path: Path) -> None:
    """Where names are fewer than indices, the caller must give them; then they decide, and are checked."""
    entries: dict[str, Any] = {
        "shape_info.0": [2],
        "shape_info.1": [2],
        "base_state.b.exp_avg": shards(moments(1, 2), 2),
    }
    write(tmp_path / "t" / "optim", entries)
    tag = open_written(tmp_path)
    with pytest.raises(OptimizerMismatch, match="pass the names by index as param_names"):
        tag.optimizer_tree(Coordinates())
    assert [1] == list(tag.optimizer_tree(Coordinates(), ["a", "b"])["base_state"])
    with pytest.raises(OptimizerMismatch, match="parameter 'b'"):
        tag.optimizer_tree(Coordinates(), ["a", "c"])
    sizes = {"shape_info.0": [2], "shape_info.1": [4]}
    averages = {f"base_state.{name}.exp_avg": shards(moments(0, size), 2) for name, size in (("a", 4), ("b", 2))}
    write(tmp_path / "t" / "optim", {**sizes, **averages})
    tag = open_written(tmp_path)
    with pytest.raises(OptimizerMismatch):
        tag.optimizer_tree(Coordinates())  # names in another order than the indices, as shapes show
    assert [1, 0] == list(tag.optimizer_tree(Coordinates(), ["b", "a"])["base_state"])


def test_a_rank_without_shards_is_named(tmp_path: Path) -> None:
    write(tmp_path / "t" / "optim", {"shape_info.0": [2], "base_state.a.exp_avg": shards(moments(0, 2), 2)})
    with pytest.raises(PartNotFound, match=r"no shards for dp 2 tp 0 pp 0; found dp=2 tp=1 pp=1"):
        open_written(tmp_path).optimizer_tree(Coordinates(dp_rank=2))


class Evil:
    """Asks the unpickler for a function."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("__import__('os').abort()",)


@pytest.mark.parametrize("trust", [False, True])
def test_metadata_never_runs_code(tmp_path: Path, trust: bool) -> None:
    """A metadata pickle that names anything but DCP's classes is refused, trusted or not."""
    write(tmp_path / "t" / "optim", {"shape_info.0": [2]})
    (tmp_path / "t" / "optim" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UnsafePickle, match=r"builtins\.eval"):
        open_tag(LocalStorage(tmp_path), "t", trust_pickle=trust).topology()


def test_entries_outside_the_directory_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "t" / "optim", {"shape_info.0": [2]})
    (tmp_path / "t" / "secret.pt").write_bytes(b"x")
    info = {MetadataIndex("shape_info.0"): _StorageInfo("../secret.pt", 0, 1)}
    raw = pickle.dumps(Metadata({}, storage_data=info))
    (tmp_path / "t" / "optim" / ".metadata").write_bytes(raw)
    with pytest.raises(MalformedFile, match=r"'\.\./secret\.pt', which does not exist"):
        open_written(tmp_path).topology()


NEGATIVE = Metadata({}, storage_data={MetadataIndex("shape_info.0"): _StorageInfo("__0_0.distcp", -1, 1)})
GARBLED = [b"", b"not a pickle", *map(pickle.dumps, ([1, 2], Metadata({}), NEGATIVE))]


@pytest.mark.parametrize("raw", GARBLED, ids=["empty", "text", "list", "bare", "negative"])
def test_garbled_metadata_is_named(tmp_path: Path, raw: bytes) -> None:
    """Anything that is not DCP's metadata is reported with its file."""
    write(tmp_path / "t" / "optim", {"shape_info.0": [2]})
    (tmp_path / "t" / "optim" / ".metadata").write_bytes(raw)
    with pytest.raises(MalformedFile, match=r"t/optim/\.metadata"):
        open_written(tmp_path).topology()


def _averages(tree: dict[str, Any]) -> dict[int, torch.Tensor]:
    return {index: state["exp_avg"] for index, state in sorted(tree["base_state"].items())}
