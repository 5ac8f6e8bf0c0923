"""``parallel_layers.save`` and ``load``: NxD's files for each model-parallel rank, without a tag."""

import shutil
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, InvalidArgument, KeyMismatch
from tests.drop_in import ranks
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference

pytestmark = pytest.mark.usefixtures("nxd")

FILE = "tp_rank_00_pp_rank_00/checkpoint.pt"


@pytest.fixture
def checkpointing() -> Any:
    """The module, as scripts import it."""
    nxd_ckpt.install()
    return import_module("neuronx_distributed.parallel_layers.checkpointing")


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {**state, "scheduler": {"last_epoch": 4}, "global_step": 5, "epoch": 1}


def test_the_file_and_what_comes_back(tmp_path: Path, checkpointing: Any):
    """torch.load finds the whole dict; a load puts the model's part into the model and returns the rest."""
    saved, fresh = trained(), trained(1)
    state = state_of(*saved)
    assert None is checkpointing.save(state, str(tmp_path / "out"))
    assert None is difference(state, torch.load(tmp_path / "out" / FILE, weights_only=False))
    rest = checkpointing.load(str(tmp_path / "out"), fresh[0])  # the second is the deprecated `model`
    fresh[1].load_state_dict(rest.pop("optimizer"))
    assert {"scheduler": {"last_epoch": 4}, "global_step": 5, "epoch": 1} == rest
    assert None is difference(state, state_of(*fresh))


def test_a_load_without_objects(tmp_path: Path, checkpointing: Any):
    """The whole dict, in which OrderedDicts are OrderedDicts, from a Path."""
    checkpointing.save({"model": OrderedDict(weight=torch.ones(2))}, str(tmp_path))
    loaded = checkpointing.load(tmp_path, sharded=True)
    assert OrderedDict is type(loaded["model"])
    assert None is difference({"model": OrderedDict(weight=torch.ones(2))}, loaded)


def test_the_file_is_the_state_itself(tmp_path: Path, checkpointing: Any):
    """model_key=None: a directory for the model, one for the optimizer; nothing is returned."""
    saved, fresh = trained(), trained(1)
    pairs: list[tuple[Any, Any, str]] = list(zip(saved, fresh, ("model", "optimizer"), strict=True))
    for one, other, name in pairs:
        checkpointing.save(one.state_dict(), str(tmp_path / "step5" / name))
        kept = checkpointing.load(str(tmp_path / "step5" / name), model_or_optimizer=other, model_key=None, strict=0)
        assert None is kept
    assert None is difference(state_of(*saved), state_of(*fresh))


def test_flags_of_a_command_line(tmp_path: Path, checkpointing: Any):
    """"False" is False, as is 0; what is neither is refused."""
    model = torch.nn.Linear(2, 2)
    checkpointing.save(model.state_dict(), tmp_path, down_cast_bf16="False", save_xser=0, master_dp_only="true")
    other = torch.nn.Linear(2, 2, bias=False)
    checkpointing.load(tmp_path, other, model_key=None, strict="False")
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(InvalidArgument, match=r"^strict must be True or False"):
        checkpointing.load(tmp_path, other, model_key=None, strict="perhaps")


def test_an_optimizer_under_its_key(tmp_path: Path, checkpointing: Any):
    saved, fresh = trained(), trained(1)
    checkpointing.save(state_of(*saved), str(tmp_path))
    rest = checkpointing.load(str(tmp_path), model_or_optimizer=fresh[1], model_key="optimizer")
    assert {"model", "scheduler", "global_step", "epoch"} == rest.keys()
    assert None is difference(saved[1].state_dict(), fresh[1].state_dict())


def test_down_cast(tmp_path: Path, checkpointing: Any):
    """down_cast_bf16 halves float32, and leaves everything else and the live tensors."""
    state = {"model": {"w": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}}
    checkpointing.save(state, str(tmp_path), down_cast_bf16=True)
    loaded = checkpointing.load(str(tmp_path))["model"]
    assert [torch.bfloat16, torch.int64, torch.float32] == [
        loaded["w"].dtype,
        loaded["n"].dtype,
        state["model"]["w"].dtype,
    ]


def test_the_directory_is_overwritten_and_others_files_stay(tmp_path: Path, checkpointing: Any):
    """There is no tag: the files are the last save's. What an optimizer or a user wrote beside them is untouched."""
    (tmp_path / "optim.dp_rank_00.tp_rank_00").write_bytes(b"theirs")
    for step in (1, 2):
        checkpointing.save({"global_step": step}, str(tmp_path))
    assert {"global_step": 2} == checkpointing.load(str(tmp_path))
    assert ["optim.dp_rank_00.tp_rank_00", "tp_rank_00_pp_rank_00"] == sorted(path.name for path in tmp_path.iterdir())


def test_what_no_load_could_read_is_left_out(tmp_path: Path, checkpointing: Any, caplog: pytest.LogCaptureFixture):
    checkpointing.save({"global_step": 1, "hparams_type": RankPool}, str(tmp_path))
    assert {"global_step": 1} == checkpointing.load(str(tmp_path))
    assert "checkpoint['hparams_type']" in caplog.text


def test_the_parts_load_as_a_tag(tmp_path: Path, checkpointing: Any):
    saved, fresh = trained(), trained(1)
    checkpointing.save(state_of(*saved), str(tmp_path / "out"))
    assert {"global_step": 5, "epoch": 1} == nxd_ckpt.load_checkpoint(tmp_path / "out", None, *fresh)
    assert None is difference(state_of(*saved), state_of(*fresh))


def test_neuronx_distributeds_own_file(tmp_path: Path, checkpointing: Any):
    (tmp_path / FILE).parent.mkdir()
    torch.save({"model": {"w": torch.ones(2)}, "global_step": 3}, tmp_path / FILE)
    assert None is difference({"model": {"w": torch.ones(2)}, "global_step": 3}, checkpointing.load(str(tmp_path)))


def test_a_whole_file_is_neuronx_distributeds_to_cut(tmp_path: Path, checkpointing: Any):
    """sharded=False, of inference, goes to NxD's own function."""
    with pytest.raises(AssertionError, match="own load was called"):
        checkpointing.load(str(tmp_path / "whole.pt"), model=torch.nn.Linear(2, 2), sharded=False)


def test_errors_name_what_is_missing(tmp_path: Path, checkpointing: Any):
    """No directory; a key that is not there; names of another model; a byte that changed."""
    with pytest.raises(CheckpointNotFound, match="tp_rank_00_pp_rank_00"):
        checkpointing.load(str(tmp_path / "nowhere"))
    checkpointing.save({"model": {"weight": torch.ones(2, 2)}}, str(tmp_path))
    with pytest.raises(KeyMismatch, match=r"'state_dict' .*found model"):
        checkpointing.load(str(tmp_path), torch.nn.Linear(2, 2), model_key="state_dict")
    with pytest.raises(RuntimeError, match="bias"):
        checkpointing.load(str(tmp_path), torch.nn.Linear(2, 2))
    checkpointing.load(str(tmp_path), torch.nn.Linear(2, 2), strict=False)
    data = (tmp_path / FILE).read_bytes()
    ones = torch.ones(2, 2).numpy().tobytes()
    (tmp_path / FILE).write_bytes(data.replace(ones, ones[:-1] + b"\x3e"))
    with pytest.raises(CorruptCheckpoint):
        checkpointing.load(str(tmp_path))


@pytest.mark.parametrize("master_dp_only", [True, False])
def test_ranks(gloo_ranks: RankPool, package: Path, tmp_path: Path, master_dp_only: bool):
    """Each model-parallel rank gets its dict back: that of the first data-parallel rank, or its own."""
    loaded = gloo_ranks.run(_save_and_load, package, tmp_path, master_dp_only)
    assert [0, 1, 0, 1] if master_dp_only else [0, 1, 2, 3] == [one["rank"] for one in loaded]
    ends = [""] if master_dp_only else ["_dp_rank_00", "_dp_rank_01"]
    names = [f"tp_rank_{tp:02d}_pp_rank_00{end}" for tp in range(2) for end in ends]
    assert names == sorted(path.name for path in tmp_path.iterdir())


def _save_and_load(rank: int, package: Path, directory: Path, master_dp_only: bool) -> Any:
    return ranks.save_and_load(rank, package, directory, master_dp_only=master_dp_only)


@pytest.mark.parametrize("at", range(5))
def test_a_save_that_is_interrupted_while_files_move(gloo_ranks: RankPool, package: Path, tmp_path: Path, at: int):
    """Files of all ranks are one save's after it, whichever move of rank 0 fails: the next load moves the rest."""
    assert [["StorageError" if at < 4 else "nothing", 2, rank % 2] for rank in range(4)] == gloo_ranks.run(
        ranks.interrupted, package, tmp_path, at
    )


@pytest.mark.parametrize("ready", [True, False])
def test_what_a_killed_save_leaves(tmp_path: Path, checkpointing: Any, ready: bool):
    """New files that were complete are moved into place by the next load, and others are dropped by the next save."""
    checkpointing.save({"global_step": 2}, str(tmp_path / "new"))
    checkpointing.save({"global_step": 1}, str(tmp_path / "out"))
    hidden = tmp_path / "out" / ".nxd_ckpt.new"
    shutil.copytree(tmp_path / "new", hidden)
    if ready:
        (hidden / "ready").write_bytes(b"1")
    assert {"global_step": 2 if ready else 1} == checkpointing.load(str(tmp_path / "out"))
    checkpointing.save({"global_step": 3}, str(tmp_path / "out"))
    assert {"global_step": 3} == checkpointing.load(str(tmp_path / "out"))
    assert ["tp_rank_00_pp_rank_00"] == [path.name for path in (tmp_path / "out").iterdir()]


def test_a_removal_by_the_first_rank(gloo_ranks: RankPool, package: Path, tmp_path: Path):
    """Lightning removes on the first rank of each host only: that rank waits for no other."""
    assert [["two.ckpt"]] * 4 == gloo_ranks.run(ranks.removed_by_rank_0, package, tmp_path)
