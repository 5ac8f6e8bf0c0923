"""What a broken save or resume leaves in a tag is found: one thing is changed in the tag of a real run, and named."""

import copy
from pathlib import Path

import pytest
import torch

from nxd_ckpt import (
    checkpoint_statistics,
    diff_checkpoints,
    examine_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.core.findings import Finding
from nxd_ckpt.errors import PartLost
from tests.examine.mutants import MUTANTS, STEPS, TOGETHER, Mutant
from tests.examine.runs import Rank, Run, ranks_of, save_ranks

Saved = tuple[Path, list[Rank], list[Rank]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A directory with the earlier tag, and what the ranks held then and a few steps later."""
    directory, run = tmp_path_factory.mktemp("run"), Run().train(STEPS[0])
    before = ranks_of(run)
    save_ranks(directory, "before", before)
    return directory, before, ranks_of(run.train(STEPS[1] - STEPS[0]))


@pytest.mark.parametrize("mutants", TOGETHER, ids=lambda mutants: mutants[0].__name__)
@pytest.mark.one_in(2)
def test_mutants_are_caught(saved: Saved, mutants: tuple[Mutant, ...]) -> None:
    """Each as a problem of its kind that names what is wrong, though others are wrong too."""
    caught(saved, mutants)


def test_a_lost_file_is_a_problem(saved: Saved) -> None:
    """Of any rank's weights or optimizer state, though other ranks have theirs."""
    directory, _, _ = saved
    files = sorted((directory / "before").glob("*/*.pt"))
    lost = [path for path in files if path.parent.name in ("model", "optim", "rank_content")]
    assert {"model", "optim", "rank_content"} == {path.parent.name for path in lost}
    for path in lost:
        aside = path.rename(directory / "aside")
        found = examine_checkpoint(open_checkpoint(directory, "before"))
        aside.rename(path)
        told = [(one.severity, one.kind, path.name in one.message) for one in found.findings]
        assert [("problem", "files", True)] == told, path


def test_a_lost_tensor_file_is_a_problem(tmp_path: Path) -> None:
    """Of xser's, one for each tensor, of weights and of the optimizer: for the doctor, a comparison and statistics."""
    run = Run().train(1)
    save_checkpoint(tmp_path, "t", run.model, run.optimizer, use_xser=True)
    for folder in ("model", "optim"):
        path = next((tmp_path / "t" / folder).glob("*.tensors/tensor_1.pt"))
        aside = path.rename(tmp_path / "aside")
        tag = open_checkpoint(tmp_path)
        told = [(one.severity, one.kind, path.name in one.message) for one in examine_checkpoint(tag).findings]
        assert [("problem", "files", True)] == told
        for call in (checkpoint_statistics, lambda tag: diff_checkpoints(tag, tag)):
            with pytest.raises(PartLost, match=path.name):
                call(open_checkpoint(tmp_path))
        aside.rename(path)


def test_every_tensor_is_examined(tmp_path: Path) -> None:
    """Whatever its shape: factors of a second moment, a state inside of a state, state of no parameter, extra state."""
    bad = torch.tensor([1.0, float("nan"), 2.0])
    weight = torch.nn.Parameter(torch.ones(3, 4))
    entries = {"step": torch.tensor(1.0), "exp_avg_sq_row": bad, "inner": {"deep": bad}}
    group = {"lr": 0.1, "params": [0]}
    optimizer = {"state": {0: entries, "scale": bad}, "param_groups": [group]}
    model = {"w": weight.detach(), "extra": {"mean": bad}}
    save_checkpoint(tmp_path, "t", model, optimizer, param_names=[["w"]])
    found = examine_checkpoint(open_checkpoint(tmp_path))
    names = {"model/extra/mean", "optim/w/exp_avg_sq_row", "optim/w/inner/deep", "optim/state/scale"}
    assert {("values", name) for name in names} == {(one.kind, one.what) for one in found.findings}


def test_state_of_another_shape_is_examined_on_every_rank(tmp_path: Path) -> None:
    """Adafactor's rows and columns under ZeRO-1, of which each rank has its own: one's NaN is found and counted."""
    ranks = ranks_of(Run("adafactor").train(1))
    ranks[2]["optimizer"]["base_state"][4]["col_var"][0, 0] = float("nan")
    save_ranks(tmp_path, "t", ranks)
    tag = open_checkpoint(tmp_path, "t")
    found = examine_checkpoint(tag).findings
    assert [("problem", "values", "optim/3.weight/col_var")] == [(one.severity, one.kind, one.what) for one in found]
    columns = checkpoint_statistics(tag).tensors["optim/3.weight/col_var"]
    assert (2 * 16, 1) == (columns.numel, columns.nans)  # tensor-parallel ranks hold the same


def caught(saved: Saved, mutants: tuple[Mutant, ...]) -> None:
    directory, before, now = saved
    changed, tag = copy.deepcopy(now), "-".join(mutant.__name__[:9] for mutant in mutants)
    for mutant in mutants:
        mutant(copy.deepcopy(before), changed)
    save_ranks(directory, tag, changed)

    found = examine_checkpoint(open_checkpoint(directory, tag), before=open_checkpoint(directory, "before"))

    assert not found
    for mutant in mutants:
        kind, what = MUTANTS[mutant]
        assert [one for one in found.findings if is_it(one, kind, what)], (mutant.__name__, found.findings)


def is_it(finding: Finding, kind: str, what: str) -> bool:
    return finding.severity == "problem" and finding.kind == kind and what in finding.what
