"""What NxD's own unit tests of checkpoints check (test/unit_test/checkpoint), of ours: what comes back, and the files.

They save before the first step, when an optimizer has no tensors yet, as one rank of a job with tensor and pipeline
parallelism, on stand-ins for the other ranks; here all ranks save.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, convert, copy_checkpoint, load_checkpoint
from tests.interop.files import unpickled
from tests.interop.saving import save_as_every_rank
from tests.live.doubles import ShardedOptimizer
from tests.tag.equality import difference

RANKS = [Topology(tp=2, pp=2).at(rank) for rank in range(4)]
MODEL, OPTIMIZER = (f"{part}/dp_rank_00_tp_rank_01_pp_rank_01.pt" for part in ("model", "optim"))
"""The files of the last rank."""


def parts_of(rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A rank's stage of a model, and a ZeRO-1 optimizer of it that has made no step; with master weights, if those are
    more precise."""
    torch.manual_seed(rank)
    stage = {f"layer_{RANKS[rank].pp_rank}": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4)}
    model, masters = torch.nn.ModuleDict(stage).to(dtype), dtype == torch.bfloat16
    optimizer = ShardedOptimizer(model.parameters(), rank, [[rank]], lr=1e-3, save_master_weights=masters)
    return {"model": model, "optimizer": optimizer}


def in_bfloat16(rank: int) -> dict[str, Any]:
    return parts_of(rank, torch.bfloat16)


def states(parts: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in parts.items()}


def save_and_load(directory: Path, tag: str, load: dict[str, Any], what: Any = parts_of, **options: Any) -> Path:
    """What every rank saves it loads, by the tag's name and as the latest; the tag's directory."""
    saved = {rank: what(rank) for rank in range(4)}
    save_as_every_rank(directory, tag, RANKS, saved.__getitem__, use_xser=True, **options)
    for rank, topology in enumerate(RANKS):
        for wanted in (tag, None):
            fresh = what(rank)
            with torch.no_grad():
                for parameter in fresh["model"].parameters():
                    parameter.fill_(7)
            load_checkpoint(directory, wanted, **fresh, topology=topology, **load)
            assert None is difference(states(saved[rank])["optimizer"], states(fresh)["optimizer"])
            assert None is difference(dict(saved[rank]["model"].state_dict()), dict(fresh["model"].state_dict()))
    return directory / tag


def is_one_of_nxds(tag: Path, *references: str) -> bool:
    """Both markers, and every file of references with its directory of tensors."""
    files = [tag / "done", tag / "checkpoint", *(tag / file for file in references)]
    return all(file.is_file() for file in files) and all((tag / f"{file}.tensors").is_dir() for file in references)


@pytest.mark.both
def test_what_nxds_tests_expect_of_a_checkpoint_is_there(tmp_path: Path) -> None:
    """Saved before the first step: the optimizer's directory of tensors is there, and empty."""
    tag = save_and_load(tmp_path / "ckpts", "unittest", {})
    assert is_one_of_nxds(tag, MODEL, OPTIMIZER)
    assert [] == list((tag / f"{OPTIMIZER}.tensors").iterdir())
    assert {} == unpickled(tag / OPTIMIZER)["base_state"]


@pytest.mark.both
def test_the_optimizer_is_a_torch_dcp_directory(tmp_path: Path) -> None:
    tag = save_and_load(tmp_path / "ckpts", "unittest_dcp", {"use_zero1_dcp": True}, use_zero1_dcp=True)
    assert is_one_of_nxds(tag, MODEL)
    assert [True, True] == [(tag / "optim" / file).is_file() for file in (".metadata", "__0_0.distcp")]


@pytest.mark.both
def test_master_weights_stand_for_lower_precision_ones(tmp_path: Path) -> None:
    """Master weights stand for them: the model's directory of tensors is there, and empty."""
    left_out = {"avoid_saving_lower_precision_weights": True}
    tag = save_and_load(tmp_path / "ckpts", "unittest-z1-dist", {}, in_bfloat16, **left_out)
    assert is_one_of_nxds(tag, MODEL, OPTIMIZER)
    assert [] == list((tag / f"{MODEL}.tensors").iterdir())


@pytest.mark.both
def test_conversions_and_copies_make_empty_directories_too(tmp_path: Path) -> None:
    how = {"use_xser": True, "avoid_saving_lower_precision_weights": True}
    save_as_every_rank(tmp_path / "saved", "unittest", RANKS, in_bfloat16, **how)
    tags = [tmp_path / name / "unittest" for name in ("saved", "copied", "resharded", "cut")]
    copy_checkpoint(tags[0], tags[1])
    convert(tags[0], tags[2], to="tag")
    convert(tags[0], tags[3], to="tag", optimizer_form="zero1", dp=2)
    assert [True] * 4 == [is_one_of_nxds(tag, MODEL, OPTIMIZER) for tag in tags]


@pytest.mark.xla
def test_torch_xla_reads_the_checkpoint(tmp_path: Path) -> None:
    import torch_xla.utils.serialization as xser

    tag = save_and_load(tmp_path / "ckpts", "unittest", {})
    expected = states(parts_of(3))
    assert None is difference(dict(expected["model"]), xser.load(str(tag / MODEL)))
    assert None is difference({}, xser.load(str(tag / OPTIMIZER))["base_state"])
