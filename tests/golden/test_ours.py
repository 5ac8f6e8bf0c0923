"""What an earlier release of ours wrote loads, verifies and converts as on the day when it was written."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import convert, load_checkpoint, open_checkpoint
from nxd_ckpt.examine.diff import diff_checkpoints
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import lost_files, lost_names, verify_checkpoint
from tests.golden.write_ours import SETUPS
from tests.tag.equality import difference

pytestmark = pytest.mark.both

UNTRAINED = ("frozen", "seen", "head")
"""A frozen parameter, a buffer, and a second name of ``embed``."""


@pytest.mark.parametrize("name", SETUPS)
def test_every_rank_loads_what_it_held(golden_of_ours: Path, name: str) -> None:
    """All of it, on the sizes that it was saved on; and every byte is verified."""
    directory = golden_of_ours / name / "ckpt"
    assert () == verify_checkpoint(directory, "step_2").problems
    assert [None, None] == [lost(LocalStorage(directory), "step_2") for lost in (lost_names, lost_files)]
    for rank in range(4):
        topology = SETUPS[name].topology(rank)
        held = torch.load(golden_of_ours / name / "expected" / f"rank_{rank:04d}.pt", weights_only=False)
        loaded: dict[str, Any] = {"model": {}, "optimizer": {}, "scheduler": {}, "rank_content": {}}
        # Weights that were left out come from master weights, which dicts alone do not name.
        names = [one for one in held["model"] if one not in UNTRAINED] if "avoid" in name else None
        content = load_checkpoint(directory, **loaded, topology=topology, param_names=names and [names])
        assert None is difference(held["model"], loaded["model"])
        assert None is difference(held["scheduler"], loaded["scheduler"])
        assert ({"step": 2}, {"rank": rank}) == (content, loaded["rank_content"])
        if "ep2" in name:  # NxD's state dict has no master weights with expert parallelism; our files do
            held["optimizer"]["sharded_master_weights"] = dict(enumerate(held["shards"]))
        assert None is difference(_in_order(held["optimizer"]), _in_order(loaded["optimizer"]))


@pytest.mark.parametrize("name", ["zero1_dp2_tp2_bf16", "zero1_dp2_tp2_bf16_xser"])
def test_it_is_resharded(golden_of_ours: Path, tmp_path: Path, name: str) -> None:
    directory = golden_of_ours / name / "ckpt"
    convert(directory / "step_2", tmp_path / "step_2", to="tag", dp=1, tp=4)
    found = diff_checkpoints(open_checkpoint(directory), open_checkpoint(tmp_path))
    assert ((), ()) == (found.tensors, found.problems)
    assert found.same_tensors > 20


def _in_order(tree: Any) -> Any:
    """The tree with its keys in order: the order in which state came together says nothing."""
    if not isinstance(tree, dict):
        return tree
    return {key: _in_order(tree[key]) for key in sorted(tree, key=str)}
