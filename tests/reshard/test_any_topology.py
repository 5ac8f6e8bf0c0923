"""What one job saved, every rank of any other job gets its part of: bit for bit, model and optimizer."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from nxd_ckpt import Partition, Topology, load_checkpoint
from tests.interop.saving import save_as_every_rank
from tests.reshard.ranks import Live, fresh, load_rank, save_job
from tests.reshard.strategies import Case, cases
from tests.reshard.transformer import layout_of, weights_of
from tests.reshard.whole import Layout, Weight, expected
from tests.tag.equality import difference

PAIRS = [
    ("dp2tp2", "dp4"),
    ("dp4", "dp3"),
    ("dp3", "dp4"),
    ("dp1", "dp8"),
    ("dp8", "dp1"),
    ("tp4", "tp1"),
    ("tp1", "tp2"),
    ("tp2", "tp3"),
    ("dp4tp2", "dp3tp2"),
    ("dp2tp2", "pp2tp2"),
    ("pp2", "tp2"),
    ("tp2pp2", "dp3pp1"),
    ("dp2pp2", "dp4pp2"),
    ("dp2", "dp2tp2pp2"),
]
EXPERT_PAIRS = [
    ("dp2ep2", "dp1"),
    ("dp1", "dp2ep2"),
    ("dp4ep2", "dp2ep2"),
    ("dp4ep2", "dp4ep4"),
    ("dp2ep2tp2", "dp3ep3pp2"),
    ("dp4ep2", "tp2"),
]
FILES = {"zero1-pt": (True, False), "plain-xser": (False, True), "zero1-xser": (True, True), "plain-pt": (False, False)}
"""With ZeRO-1 or without, in files of either kind."""


def moves(pairs: list[tuple[str, str]]) -> list[Any]:
    """Every pair with every kind of files. `make test` takes every second pair, with the kinds in turn."""
    return [
        pytest.param(
            *pair, *files, id="-".join((*pair, name)), marks=[] if number % 8 == 2 * turn else [pytest.mark.soak]
        )
        for number, pair in enumerate(pairs)
        for turn, (name, files) in enumerate(FILES.items())
    ]


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


@settings(max_examples=5)
@given(case=cases())
def test_every_rank_of_another_job_gets_its_part(case: Case) -> None:
    """Whatever the sizes, cuts, param groups and files: what is loaded is what cutting the whole model gives."""
    check_case(case)


@pytest.mark.soak
@settings(max_examples=500)
@given(case=cases())
def test_every_rank_of_many_other_jobs_gets_its_part(case: Case) -> None:
    """The same, for longer."""
    check_case(case)


@pytest.mark.parametrize(("on", "to", "zero1", "use_xser"), moves(PAIRS))
def test_a_transformer_moves(tmp_path: Path, on: str, to: str, zero1: bool, use_xser: bool) -> None:
    """Fused and strided layers, padding, frozen weights and stages; param groups in another order than at the save."""
    weights = weights_of(torch.bfloat16 if zero1 else torch.float32)
    saved, live = layout_of(on, weights, zero1=zero1), layout_of(to, weights, zero1=zero1, reverse=True)
    check(tmp_path, weights, saved, live, use_xser=use_xser)


@pytest.mark.parametrize(("on", "to", "zero1", "use_xser"), moves(EXPERT_PAIRS))
def test_experts_move(tmp_path: Path, on: str, to: str, zero1: bool, use_xser: bool) -> None:
    """Experts that one job spreads over its data-parallel ranks, another spreads over others, or holds whole."""
    weights = weights_of(experts=True)
    saved, live = layout_of(on, weights, zero1=zero1), layout_of(to, weights, zero1=zero1)
    check(tmp_path, weights, saved, live, use_xser=use_xser)


@pytest.mark.parametrize(("on", "to"), [("dp2ep2", "dp4ep2"), ("dp4ep2", "tp2"), ("dp1", "dp2ep2")])
@pytest.mark.one_in(2)
def test_a_param_group_of_experts_alone(tmp_path: Path, on: str, to: str) -> None:
    """It keeps its options, on the outer optimizer too: from there NxD hands them down before every step."""
    weights = [replace(w, options=int(w.name.endswith("experts"))) for w in weights_of(experts=True)]
    check(tmp_path, weights, layout_of(on, weights), layout_of(to, weights, reverse=True))


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


@pytest.mark.parametrize(("on", "to"), [("dp2tp2", "dp3"), ("dp2tp2", "dp3pp2"), ("pp2", "dp2")])
@pytest.mark.one_in(2)
def test_weights_that_were_left_out_are_cut_from_master_weights(tmp_path: Path, on: str, to: str) -> None:
    """Without a file of its own, a weight of another job is its part of the master weights, cast."""
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


def test_python_numbers_and_schedulers_move(tmp_path: Path) -> None:
    """What is not a tensor is the same on every rank of any job."""
    weights = [replace(weight, step=7 if weight.step else None) for weight in weights_of()]
    saved, live = layout_of("dp2", weights), layout_of("dp3", weights)
    save_job(tmp_path, weights, saved, scheduler={"last_epoch": 7})
    for at in live.ranks:
        rank, scheduler = fresh(weights, live, at), {"last_epoch": 0}
        load_rank(tmp_path, rank, scheduler=scheduler, partitions=live.partitions)
        assert {"last_epoch": 7} == scheduler
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
    """Random states and data positions are those of ranks that there are no more: nothing is given to others."""
    weights = weights_of()
    saved, live = layout_of("dp2tp2", weights), layout_of("dp3", weights)
    save_job(tmp_path, weights, saved, rank_content={"position": 1})
    for at in live.ranks:
        rank, content = fresh(weights, live, at), dict[str, int]()
        load_rank(tmp_path, rank, rank_content=content)
        assert {} == content
        assert None is difference(expected(weights, live, at), rank.held())


def test_a_job_whose_ranks_are_strided_moves(tmp_path: Path) -> None:
    """On Trn1 a tensor-parallel group of four strides over the node: coordinates count, not ranks."""
    weights = weights_of()
    strided = layout_of("dp2tp4", weights)
    places = [strided.topology.coordinates_of(rank) for rank in (0, 4, 1, 5, 2, 6, 3, 7)]
    saved = replace(strided, topology=Topology(dp=2, tp=4, rank_map=places))
    check(tmp_path, weights, saved, layout_of("dp3tp2", weights))
