"""What was reported as saved can be loaded: a value that no load would read fails the save, on all ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import close_checkpointers, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.core.manifest import Manifest, Parts, dump_manifest
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import SaveFailed
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal

HALF = "\ud800"
"""Half a character, as the name of a file that was decoded carelessly has it: JSON takes it, and no reader of ours."""


def _saved(rank: int, directory: str, tag: str, name: str) -> str:
    """What comes of a save whose optimizer's parameter has this name on rank 1."""
    own = name if rank == 1 else "w"
    state = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0], "lr": 1.0}]}
    more: dict[str, Any] = {"param_names": [[own]], "zero1_optimizer": True}
    refused = refusal(lambda: save_checkpoint(directory, tag, {"w": torch.ones(2)}, state, **more))
    close_checkpointers()
    return refused or "saved"


def test_an_index_that_no_load_reads_fails_the_save(pair: RankPool, tmp_path: Path) -> None:
    """All ranks learn why, the older tag stays the latest, and loads."""
    one_rank = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0], "lr": 1.0}]}
    save_checkpoint(tmp_path / "alone", "step_1", {"w": torch.ones(2)})
    with pytest.raises(SaveFailed, match=r"no load would read this save.* earlier tags stay: its index: .* half a "):
        save_checkpoint(tmp_path / "alone", "step_2", {"w": torch.ones(2)}, one_rank, param_names=[[HALF]])
    close_checkpointers()
    load_checkpoint(tmp_path / "alone", None, {})
    assert "step_1" == open_checkpoint(tmp_path / "alone").tag

    directory = str(tmp_path / "pair")
    assert ["saved", "saved"] == pair.run(_saved, directory, "step_1", "w")
    outcomes = pair.run(_saved, directory, "step_2", HALF)
    assert [True, True] == ["no load would read this save" in outcome for outcome in outcomes], outcomes
    assert "step_1" == open_checkpoint(directory).tag


@pytest.mark.parametrize(
    "fault",
    [
        {"parts": Parts(model=1)},  # type: ignore[arg-type]
        {"parts": Parts(optimizer="adam")},
        {"metrics": {HALF: 1.0}},
        {"versions": {"torch": 2}},
        {"timings": {"commit_seconds": -1.0}},
        {"ranks": ()},
    ],
    ids=str,
)
def test_a_manifest_that_no_load_reads_is_not_made(fault: dict[str, Any]) -> None:
    """Its reader's own parser decides."""
    made = Manifest("step_1", "run-1", 1.0, Topology(), Parts(model=True), ((1, 1),))  # type: ignore[arg-type]
    assert b'"step_1"' in dump_manifest(made)
    with pytest.raises(SaveFailed, match=r"no load would read this save.*its manifest"):
        dump_manifest(replace(made, **fault))
