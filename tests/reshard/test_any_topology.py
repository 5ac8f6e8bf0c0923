"""What one job saved, every rank of any other job gets its part of: bit for bit, model and optimizer."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from nxd_ckpt import Partition, load_checkpoint
from tests.interop.saving import save_as_every_rank
from tests.reshard.ranks import Live, fresh, load_rank, save_job
from tests.reshard.strategies import Case, cases
from tests.reshard.transformer import layout_of, weights_of
from tests.reshard.whole import Layout, Weight, expected
from tests.tag.equality import difference


def check(directory: Path, weights: list[Weight], saved: Layout, live: Layout, **options: Any) -> None:
    """Save as one job, load as every rank of the other, compare all that a load may change."""
    save_job(directory, weights, saved, **options)
    for at in live.ranks:
        rank = fresh(weights, live, at, stepped=at.rank % 2 == 1)
        content = load_rank(directory, rank, partitions=live.partitions)
        assert {"saved": 1} == content
        assert None is difference(expected(weights, live, at), rank.held())


def check_case(case: Case) -> None:
    with TemporaryDirectory() as directory:
        check(Path(directory), list(case.weights), case.saved, case.live, **case.save_options)


@settings(max_examples=20)
@given(case=cases())
def test_every_rank_of_another_job_gets_its_part(case: Case) -> None:
    """Whatever the sizes, strides of ranks, cuts, stages, experts, param groups, counters and files, and whether master
    weights stand for weights: what is loaded is what cutting the whole model gives."""
    check_case(case)


@pytest.mark.soak
@settings(max_examples=500)
@given(case=cases())
def test_every_rank_of_many_other_jobs_gets_its_part(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize(("on", "to"), [("dp2tp2", "dp4"), ("pp2", "dp3")])
@pytest.mark.one_in(2)
def test_any_part_moves_by_itself(tmp_path: Path, on: str, to: str) -> None:
    """The model without the optimizer and the reverse; names come from ``param_names=`` where no model tells them."""
    weights = weights_of()
    saved, live = layout_of(on, weights), layout_of(to, weights)
    save_job(tmp_path, weights, saved)
    for at in live.ranks:
        wanted, untouched = expected(weights, live, at), fresh(weights, live, at)
        rank = fresh(weights, live, at)
        load_checkpoint(tmp_path, model=rank.model, topology=at, partitions=live.partitions)
        assert None is difference({**untouched.held(), "model": wanted["model"]}, rank.held())
        rank = fresh(weights, live, at)
        load_checkpoint(
            tmp_path, optimizer=rank.optimizer, topology=at, partitions=live.partitions, param_names=live.groups
        )
        assert None is difference({**untouched.held(), "optimizer": wanted["optimizer"]}, rank.held())


@pytest.mark.parametrize(("on", "to"), [("dp2tp2", "dp3"), ("dp2tp2", "dp3pp2")])
def test_weights_that_were_left_out_are_cut_from_master_weights(tmp_path: Path, on: str, to: str) -> None:
    """Without a file of its own, a weight of another job is cut from the master weights. Few random jobs are so."""
    weights = [replace(w, left_out=w.kind == "parameter") for w in weights_of(torch.bfloat16)]
    saved, live = layout_of(on, weights), layout_of(to, weights)
    check(tmp_path, weights, saved, live, use_xser=True, avoid_saving_lower_precision_weights=True)


@pytest.mark.parametrize(
    ("on", "to", "use_xser"),
    [("tp2", "pp2", False), ("pp2", "tp2", True), ("pp2", "dp3", False), ("pp2", "dp2pp2", True)],
)
def test_tied_weights_are_one_or_two(tmp_path: Path, on: str, to: str, use_xser: bool) -> None:
    """An embedding tied to the head is one parameter on one stage, and a copy on each of two stages."""
    weights = [Weight("embed", (24, 3)), Weight("up", (6, 3)), Weight("head", (24, 3), alias="embed")]

    def layout(sizes: str) -> Layout:
        whole = layout_of(sizes, weights)
        groups = (("embed", "up"),) if whole.topology.pp == 1 else (("embed", "up", "head"),)
        return replace(whole, groups=groups)

    check(tmp_path, weights, layout(on), layout(to), use_xser=use_xser)


def test_a_dict_of_parameters_moves(tmp_path: Path) -> None:
    """A state dict that keeps the parameters is cut by their attributes, as a module is."""
    weights = weights_of()
    saved, live = layout_of("dp2tp2", weights), layout_of("tp4", weights)
    save_job(tmp_path, weights, saved)
    for at in live.ranks:
        rank = fresh(weights, live, at)
        load_checkpoint(tmp_path, model=rank.stage.state_dict(keep_vars=True), topology=at, partitions=live.partitions)
        assert None is difference(expected(weights, live, at)["model"], rank.held()["model"])


def test_attributes_that_were_lost_can_be_given(tmp_path: Path) -> None:
    """``partitions=`` says how live parameters are cut whose attributes a device move dropped."""
    weights = weights_of()
    saved, live = layout_of("tp2", weights), layout_of("tp3", weights)
    save_job(tmp_path, weights, saved)
    given = {name: cut for name, cut in live.cuts.items() if cut != Partition()}
    for at in live.ranks:
        rank = fresh(weights, live, at)
        for parameter in rank.stage.parameters():
            vars(parameter).clear()
        load_rank(tmp_path, rank, partitions=given)
        assert None is difference(expected(weights, live, at), rank.held())


def test_state_of_the_optimizer_as_a_whole_moves(tmp_path: Path) -> None:
    """What an optimizer keeps under a name of its own, not under a parameter, belongs to no rank in particular."""
    weights = weights_of()
    saved, live = layout_of("tp2", weights, zero1=False), layout_of("dp3", weights, zero1=False)

    def what(rank: int) -> dict[str, Any]:
        held = Live(weights, saved, saved.topology.at(rank))
        held.fill_optimizer(weights, saved)
        held.optimizer.state["as_a_whole"] = torch.tensor([1.0, 2.0])
        return {"model": held.model, "optimizer": held.optimizer}

    save_as_every_rank(tmp_path, "step_1", saved.ranks, what, durable=False, partitions=saved.partitions)
    for at in live.ranks:
        rank = fresh(weights, live, at)
        load_checkpoint(tmp_path, None, rank.model, rank.optimizer, topology=at, partitions=live.partitions)
        assert None is difference(torch.tensor([1.0, 2.0]), rank.optimizer.state.get("as_a_whole"))
        assert None is difference(expected(weights, live, at), rank.held())


def test_rank_content_stays_behind(tmp_path: Path) -> None:
    """Random states and data positions are those of ranks that there are no more: nothing is given to others. A
    scheduler's are those of all."""
    weights = weights_of()
    saved, live = layout_of("dp2tp2", weights), layout_of("dp3", weights)
    save_job(tmp_path, weights, saved, rank_content={"position": 1}, scheduler={"last_epoch": 7})
    for at in live.ranks:
        rank, content = fresh(weights, live, at), dict[str, int]()
        scheduler = {"last_epoch": 0}
        load_rank(tmp_path, rank, rank_content=content, scheduler=scheduler)
        assert ({}, {"last_epoch": 7}) == (content, scheduler)
        assert None is difference(expected(weights, live, at), rank.held())
