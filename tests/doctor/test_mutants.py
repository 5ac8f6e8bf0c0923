"""What a broken save or resume leaves in a tag is found: one thing is changed in the tag of a real run, and named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.doctor.runs import Rank, Run, ranks_of, save_ranks

pytestmark = [pytest.mark.plain, pytest.mark.once]

STEPS = 10, 13

Mutant = Callable[[list[Rank], list[Rank]], None]
Saved = tuple[Path, list[Rank], list[Rank]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A directory with the earlier tag, and what the ranks held then and a few steps later."""
    directory, run = tmp_path_factory.mktemp("run"), Run().train(STEPS[0])
    before = ranks_of(run)
    save_ranks(directory, "before", before)
    return directory, before, ranks_of(run.train(STEPS[1] - STEPS[0]))


def stale_weight(before: list[Rank], now: list[Rank]) -> None:
    """The buffer of the save before, for one parameter and its master weights."""
    for rank, was in zip(now, before, strict=True):
        rank["model"]["3.weight"] = was["model"]["3.weight"]
        rank["optimizer"]["sharded_master_weights"][4] = was["optimizer"]["sharded_master_weights"][4]


def stale_moment(before: list[Rank], now: list[Rank]) -> None:
    for rank, was in zip(now, before, strict=True):
        rank["optimizer"]["base_state"][0]["exp_avg_sq"] = was["optimizer"]["base_state"][0]["exp_avg_sq"]


def stale_buffer(before: list[Rank], now: list[Rank]) -> None:
    for rank, was in zip(now, before, strict=True):
        rank["model"]["1.running_var"] = was["model"]["1.running_var"]


def optimizer_not_saved(before: list[Rank], now: list[Rank]) -> None:
    """Its state is that of the tag before."""
    for rank, was in zip(now, before, strict=True):
        rank["optimizer"]["base_state"] = was["optimizer"]["base_state"]


def optimizer_left_out(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        del rank["optimizer"]


def optimizer_not_resumed(before: list[Rank], now: list[Rank]) -> None:
    """It began anew at the resume, and counted on in its own way."""
    for rank in now:
        for entries in rank["optimizer"]["base_state"].values():
            entries["exp_avg_sq"] = entries["exp_avg_sq"] * 1e-3
            entries["step"] = torch.tensor(float(STEPS[1]))


def steps_began_anew(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        for entries in rank["optimizer"]["base_state"].values():
            entries["step"] = torch.tensor(3.0)


def weight_shards_swapped(before: list[Rank], now: list[Rank]) -> None:
    """Of the two tensor-parallel ranks."""
    for left, right in ((0, 1), (2, 3)):
        swap(now[left]["model"], now[right]["model"], "0.weight")
        swap(now[left]["optimizer"]["sharded_master_weights"], now[right]["optimizer"]["sharded_master_weights"], 0)


def optimizer_shards_swapped(before: list[Rank], now: list[Rank]) -> None:
    """Of the two data-parallel ranks: master weights do not fit the weights, nor moments those of before."""
    now[0]["optimizer"], now[2]["optimizer"] = now[2]["optimizer"], now[0]["optimizer"]


def rank_a_step_behind(before: list[Rank], now: list[Rank]) -> None:
    for entries in now[3]["optimizer"]["base_state"].values():
        entries["step"] -= 1


def moments_of_another(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        state = rank["optimizer"]["base_state"]
        state[2], state[3] = state[3], state[2]


def second_moment_of_another(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        state = rank["optimizer"]["base_state"]
        swap(state[2], state[3], "exp_avg_sq")


def scheduler_ahead(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        rank["scheduler"]["last_epoch"] += 1


def rate_of_another_step(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        rank["scheduler"]["_last_lr"] = [0.5 * rate for rate in rank["scheduler"]["_last_lr"]]


def loader_behind(before: list[Rank], now: list[Rank]) -> None:
    for rank in now:
        rank["user_content"]["consumed_samples"] -= 8


def loader_of_a_rank_ahead(before: list[Rank], now: list[Rank]) -> None:
    now[2]["rank_content"]["loader"]["num_yielded"] += 1


def weights_not_from_masters(before: list[Rank], now: list[Rank]) -> None:
    for rank, was in zip(now, before, strict=True):
        rank["model"]["3.weight"] = was["model"]["3.weight"]


def not_a_number(before: list[Rank], now: list[Rank]) -> None:
    now[0]["optimizer"]["base_state"][4]["exp_avg"][0, 0] = float("nan")


def swap(one: Any, other: Any, key: Any) -> None:
    one[key], other[key] = other[key], one[key]


MUTANTS: dict[Mutant, tuple[str, str]] = {
    stale_weight: ("weights", "optim/3.weight/master_weights"),
    stale_moment: ("moments", "optim/0.weight/exp_avg_sq"),
    stale_buffer: ("buffers", "model/1.running_var"),
    optimizer_not_saved: ("steps", "0.weight"),
    optimizer_left_out: ("parts", "optimizer"),
    optimizer_not_resumed: ("moments", "optim/0.weight/exp_avg_sq"),
    steps_began_anew: ("steps", ""),
    weight_shards_swapped: ("shards", "model/0.weight"),
    optimizer_shards_swapped: ("rounding", "model/0.weight"),
    rank_a_step_behind: ("steps", "rank 3"),
    moments_of_another: ("moments", "optim/1.weight/exp_avg_sq"),
    second_moment_of_another: ("moments", "exp_avg"),
    scheduler_ahead: ("scheduler", "scheduler/last_epoch"),
    rate_of_another_step: ("scheduler", "optim/param_groups/0/lr"),
    loader_behind: ("position", "user_content/consumed_samples"),
    loader_of_a_rank_ahead: ("position", "rank_content/loader/num_yielded"),
    weights_not_from_masters: ("rounding", "model/3.weight"),
    not_a_number: ("values", "optim/3.weight/exp_avg"),
}


TOGETHER = (
    (stale_weight, stale_moment, stale_buffer, rank_a_step_behind, scheduler_ahead, rate_of_another_step, loader_behind,
     loader_of_a_rank_ahead, not_a_number, moments_of_another),
    (weight_shards_swapped, weights_not_from_masters, second_moment_of_another),
    (optimizer_shards_swapped,),
    (optimizer_not_saved,),
    (optimizer_left_out,),
    (optimizer_not_resumed,),
    (steps_began_anew,),
)


@pytest.mark.parametrize("mutants", TOGETHER, ids=lambda mutants: mutants[0].__name__)
def test_mutants_are_caught(saved: Saved, mutants: tuple[Mutant, ...]) -> None:
    """Each as a problem of its kind that names what is wrong, though others are wrong too."""
    caught(saved, mutants)


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(saved: Saved, mutant: Mutant) -> None:
    """By itself."""
    caught(saved, (mutant,))


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


def caught(saved: Saved, mutants: tuple[Mutant, ...]) -> None:
    directory, before, now = saved
    changed, tag = copy.deepcopy(now), "-".join(mutant.__name__[:9] for mutant in mutants)
    for mutant in mutants:
        mutant(copy.deepcopy(before), changed)
    save_ranks(directory, tag, changed)

    found = examine_checkpoint(open_checkpoint(directory, tag), open_checkpoint(directory, "before"))

    assert not found
    for mutant in mutants:
        kind, what = MUTANTS[mutant]
        assert [one for one in found.findings if is_it(one, kind, what)], (mutant.__name__, found.findings)


def is_it(finding: Finding, kind: str, what: str) -> bool:
    return finding.severity == "problem" and finding.kind == kind and what in finding.what
