"""``reshard``: a whole tag as a job of other sizes would have saved it, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Partition, Topology, convert, open_checkpoint
from nxd_ckpt.conversion import tag_writer
from nxd_ckpt.errors import InvalidArgument, TopologyMismatch
from nxd_ckpt.formats.state import SaveState
from nxd_ckpt.saving.plan import SavePlan, plan_save
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.conversion.tags import as_nxd, contents, save_example
from tests.reshard.ranks import fresh, load_rank, save_job
from tests.reshard.transformer import layout_of, weights_of
from tests.reshard.whole import Layout, Weight, expected
from tests.tag.equality import difference


def stages_of(layout: Layout, weights: list[Weight]) -> list[list[str]]:
    """The names on each pipeline stage."""
    last = [layout.topology.at(layout.topology.rank_of(place)) for place in _leaders(layout.topology)]
    return [[weight.name for weight in layout.of_stage(weights, at)] for at in last]


@pytest.mark.parametrize("use_xser", [False, True], ids=["pt", "xser"])
@pytest.mark.parametrize("zero1", [True, False], ids=["zero1", "plain"])
@pytest.mark.parametrize(
    ("on", "to"),
    [
        *[("dp2tp2", "dp3"), ("dp3", "tp2"), ("tp4", "dp2tp2"), ("dp2pp2", "dp3tp2")],
        *[("tp2", "dp2pp2"), ("dp2", "dp2"), ("dp2ep2", "dp4ep4"), ("dp4ep2", "dp2ep2tp2")],
    ],
)
@pytest.mark.one_in(3)
def test_every_rank_gets_its_part(tmp_path: Path, on: str, to: str, zero1: bool, use_xser: bool) -> None:
    """Fused and strided layers, padding, frozen weights, stages, experts: live objects load the result as their own."""
    weights = weights_of(torch.bfloat16 if zero1 else torch.float32, experts="ep" in on)
    before, after = layout_of(on, weights, zero1=zero1), layout_of(to, weights, zero1=zero1)
    save_job(tmp_path, weights, before, use_xser=use_xser)
    untouched = contents(tmp_path / "step_1")
    result = tmp_path / "result" / "step_1"
    sizes: dict[str, Any] = after.topology.sizes

    convert(tmp_path / "step_1", result, to="tag", **sizes, stages=stages_of(after, weights), durable=False)

    assert () == verify_checkpoint(result.parent, "step_1").problems
    assert after.topology == open_checkpoint(result.parent).topology
    for at in after.ranks:
        rank = fresh(weights, after, at)
        assert {"saved": 1} == load_rank(result.parent, rank, partitions=after.partitions)
        assert None is difference(expected(weights, after, at), rank.held())
    assert untouched == contents(tmp_path / "step_1")


@pytest.mark.parametrize(("together", "plans"), [(8, 4), (2, 8)])
def test_ranks_are_planned_once_and_written_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int, plans: int
) -> None:
    """All of these, or two at a time, each planned again once others were planned in between; their files are equal."""
    tag = save_example(tmp_path, 3)
    monkeypatch.setattr(tag_writer, "TOGETHER", 1)
    convert(tag, tmp_path / "alone" / "step_3", to="tag", dp=4)
    ranks: list[int] = []

    def plan(state: SaveState, topology: Topology) -> SavePlan:
        ranks.append(topology.rank)
        return plan_save(state, topology)

    monkeypatch.setattr(tag_writer, "TOGETHER", together)
    monkeypatch.setattr(tag_writer, "plan_save", plan)
    convert(tag, tmp_path / "result" / "step_3", to="tag", dp=4)

    assert [0, 1, 2, 3] * (plans // 4) == ranks
    for part in ("model", "optim"):
        alone, result = (contents(tmp_path / name / "step_3" / part) for name in ("alone", "result"))
        assert alone == result
    assert () == verify_checkpoint(tmp_path / "result", "step_3").problems


def test_experts_that_only_the_optimizer_shows_are_no_replicas(tmp_path: Path) -> None:
    """Where NxD's tag has master weights in place of weights, ranks' experts are still told from ranks' copies."""
    weights = [replace(w, left_out=w.kind == "parameter") for w in weights_of(torch.bfloat16, experts=True)]
    before, after = layout_of("dp4ep2", weights), layout_of("dp3", weights)
    save_job(tmp_path, weights, before, use_xser=True)
    tag = as_nxd(tmp_path / "step_1")
    for file in tag.glob("model/*.tensors/*.pt"):
        if torch.load(file).dtype == torch.bfloat16 and torch.load(file).numel() != 15:  # all but what is frozen
            file.unlink()
    experts = [weight.name for weight in weights if weight.name.endswith("experts")]
    named = [[name for name in group if (name in experts) is own] for own in (False, True) for group in before.groups]

    with pytest.raises(TopologyMismatch, match=r"block0_experts.*pass partitions= with its expert=True"):
        convert(tag, tmp_path / "lost" / "step_1", to="tag", ep=1, dp=3, saved_param_names=[named], durable=False)
    cut = {name: Partition(expert=True) for name in experts}
    facts: dict[str, Any] = {"saved_param_names": [named], "partitions": cut}
    convert(tag, tmp_path / "ep1" / "step_1", to="tag", ep=1, dp=3, **facts, durable=False)

    for at in after.ranks:
        rank = fresh(weights, after, at)
        load_rank(tmp_path / "ep1", rank, partitions=after.partitions)
        assert None is difference(expected(weights, after, at), rank.held())


@pytest.mark.parametrize(
    ("sizes", "error", "complaint"),
    [
        ({"tp": 5}, TopologyMismatch, "cannot be divided"),
        ({"ep": 5, "dp": 5}, TopologyMismatch, "experts"),
        ({"dp": 3}, InvalidArgument, "ep=2 must divide dp=3"),
        ({"dp": 0}, InvalidArgument, "at least 1"),
        ({"pp": 3}, TopologyMismatch, "stages"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, sizes: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    weights = weights_of(experts=True)
    save_job(tmp_path, weights, layout_of("dp2ep2", weights))
    before = contents(tmp_path / "step_1")

    with pytest.raises(error, match=complaint):
        convert(tmp_path / "step_1", tmp_path / "result" / "step_1", to="tag", **sizes)
    assert not (tmp_path / "result" / "step_1").exists()
    assert before == contents(tmp_path / "step_1")


def _leaders(topology: Topology) -> list[Any]:
    return [type(topology.coordinates)(pp_rank) for pp_rank in range(topology.pp)]
