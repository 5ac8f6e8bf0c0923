"""From neuronx-distributed's jobs to meshes and back: model and optimizer, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.mesh import whole_job
from tests.reshard.ranks import fresh, load_rank, save_job
from tests.reshard.transformer import layout_of, weights_of
from tests.reshard.whole import expected
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference


@pytest.mark.parametrize(("on", "zero1"), [("dp2tp2", True), ("tp2pp2", False), ("dp2ep2tp2", True)])
@pytest.mark.one_in(2)
def test_a_mesh_goes_on_from_a_job_of_nxd(gloo_ranks: RankPool, tmp_path: Path, on: str, zero1: bool) -> None:
    """Fused and strided layers, ZeRO-1 shards, stages and experts become DTensors, cut along both dimensions."""
    weights = weights_of(experts="ep" in on)
    save_job(tmp_path, weights, layout_of(on, weights, zero1=zero1, master_weights=False))
    for found in gloo_ranks.run(whole_job.load, tmp_path, weights):
        assert None is difference(whole_job.loaded(weights), found)


def test_float32_parameters_take_the_master_weights(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """NxD trains bfloat16 weights beside float32 masters; FSDP2 has one parameter, which goes on from the exact one."""
    weights = [weight for weight in weights_of(torch.bfloat16) if weight.kind == "parameter"]
    save_job(tmp_path, weights, layout_of("dp2tp2", weights))
    found = gloo_ranks.run(whole_job.load, tmp_path, weights, torch.float32)[0]
    assert None is difference(whole_job.loaded(weights, masters=True), found)


def test_master_weights_take_float32_parameters(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """The way back: NxD's master weights take FSDP2's one parameter bit for bit, its bfloat16 weights the rounding."""
    weights = [replace(weight, left_out=True) for weight in weights_of(torch.bfloat16, experts=True)]
    weights = [weight for weight in weights if weight.kind == "parameter"]
    gloo_ranks.run(whole_job.save, tmp_path, [replace(weight, dtype=torch.float32) for weight in weights])
    live = layout_of("dp2ep2tp2", weights)
    for at in live.ranks:
        rank = fresh(weights, live, at, stepped=at.rank % 2 == 1)
        assert {"saved": 1} == load_rank(tmp_path, rank, partitions=live.partitions)
        assert None is difference(expected(weights, live, at), rank.held())


@pytest.mark.parametrize(("to", "zero1"), [("dp2tp2", True), ("dp2ep2pp2", False)])
def test_a_job_of_nxd_goes_on_from_a_mesh(gloo_ranks: RankPool, tmp_path: Path, to: str, zero1: bool) -> None:
    """Each rank of any sizes gets its part of the DTensors."""
    weights = weights_of(experts="ep" in to)
    gloo_ranks.run(whole_job.save, tmp_path, weights)
    live = layout_of(to, weights, zero1=zero1, master_weights=False)
    for at in live.ranks:
        rank = fresh(weights, live, at, stepped=at.rank % 2 == 1)
        assert {"saved": 1} == load_rank(tmp_path, rank, partitions=live.partitions)
        assert None is difference(expected(weights, live, at), rank.held())
