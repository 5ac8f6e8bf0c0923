"""Training on real torch-xla ranks goes on on other sizes: the same state to the last bit, the same losses but for
rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reshard import scenarios
from tests.reshard.job import layout_of, weights_of
from tests.reshard.scenarios import Leg, Outcome
from tests.reshard.transformer import topology_of
from tests.reshard.whole import Layout, part, put_back
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference
from tests.training.model import Setup

pytestmark = pytest.mark.xla

XSER = (("use_xser", True),)
LEFT_OUT = (*XSER, ("avoid_saving_lower_precision_weights", True))
SHAPES = {weight.name: weight.shape for weight in weights_of(torch.float32)}


def chain(*sizes: str, soak: bool = False, **fields: Any) -> Any:
    """The setups of jobs that each continue the one before; of several alike all but one are left to ``make soak``."""
    setups = [Setup(tuple(topology_of(size).sizes.items()), **fields) for size in sizes]
    name = "-".join(sizes) + "".join(f"-{key}={value}" for key, value in fields.items())
    return pytest.param(setups, id=name, marks=[pytest.mark.soak] if soak else [])


def whole_of(setup: Setup, outcomes: list[Outcome | None]) -> dict[str, dict[str, Any]]:
    """Every tensor of the job put together from what its ranks held: name -> entry -> whole tensor, or number."""
    wholes: dict[str, dict[str, Any]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            layout = layout_of(setup, rank)
            for name, value in outcome.held["model"].items():
                _put(wholes.setdefault(name, {}), "model", value, name, layout, sharded=False)
            for name, entries in outcome.held["optimizer"].items():
                for kind, value in entries.items():
                    _put(wholes.setdefault(name, {}), kind, value, name, layout, sharded=setup.zero1)
    return wholes


def _put(wholes: dict[str, Any], kind: str, value: Any, name: str, layout: Layout, *, sharded: bool) -> None:
    if kind == "step":
        assert wholes.setdefault(kind, value) == value
        return
    whole = wholes.setdefault(kind, torch.full(SHAPES[name], -1, dtype=value.dtype))
    put_back(whole, value, layout.cuts[name], layout.topology, sharded=sharded)


def held_by(setup: Setup, rank: int, wholes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a rank of another job must hold of them."""
    layout = layout_of(setup, rank)
    names = [weight.name for weight in layout.of_stage(weights_of(torch.float32), layout.topology)]

    def cut(name: str, kind: str) -> Any:
        whole = wholes[name][kind]
        sharded = setup.zero1 and kind != "model"
        return whole if kind == "step" else part(whole, layout.cuts[name], layout.topology, sharded=sharded)

    model = {name: cut(name, "model") for name in sorted(names)}
    entries = {name: [kind for kind in wholes[name] if kind != "model"] for name in sorted(names)}
    trained = {name: kinds for name, kinds in entries.items() if kinds or name.endswith("unused")}
    return {"model": model, "optimizer": {name: {kind: cut(name, kind) for kind in trained[name]} for name in trained}}


@pytest.mark.parametrize(
    "setups",
    [
        chain("dp2tp2", "dp4", soak=True),
        chain("dp4", "dp3", "dp4", options=(*XSER, ("use_zero1_dcp", True))),
        chain("tp4", "tp1", "tp2", soak=True),
        chain("dp2tp2", "pp2tp2", "dp3", options=XSER, soak=True),
        chain("pp2", "tp2", "dp2pp2", soak=True),
        chain("dp4ep2", "dp4", "dp2ep2tp2", options=XSER, soak=True),
        chain("dp2ep2", "dp1", "dp4ep2", soak=True),
        chain("dp2tp2", "dp4", "tp3", dtype="bfloat16", soak=True),
        chain("dp2tp2", "dp3", "pp2tp2", dtype="bfloat16", options=LEFT_OUT),
        chain("dp4", "dp3", master_weights=False, soak=True),
        chain("dp2tp2", "dp4", "pp2", zero1=False, options=XSER, soak=True),
        chain("dp4ep2", "tp2", "dp2ep2", zero1=False, soak=True),
    ],
)
def test_training_goes_on_on_other_sizes(xla_ranks: RankPool, tmp_path: Path, setups: list[Setup]) -> None:
    """Right after each load every rank holds its part of what was held at the save, bit for bit; and each job's losses
    are those of the first job, which is never interrupted."""
    follow(xla_ranks, tmp_path, setups)


@pytest.mark.parametrize(
    "setups",
    [
        chain("dp4ep2", "dp4", "dp2ep2tp2", options=XSER),
        chain("tp4", "dp4", dtype="bfloat16", options=XSER, soak=True),
    ],
)
def test_training_goes_on_where_replicas_share_the_reading(
    xla_ranks: RankPool, tmp_path: Path, setups: list[Setup]
) -> None:
    """The same, where one of the data-parallel replicas reads what all of them want and broadcasts it."""
    follow(xla_ranks, tmp_path, setups, share_reads=True)


def follow(pool: RankPool, directory: Path, setups: list[Setup], share_reads: bool | None = None) -> None:
    """Train one job after the other, each from the checkpoint of the one before, and compare all with the first."""
    start: str | None = None
    wholes: dict[str, dict[str, Any]] = {}
    losses: list[float] = []
    for number, setup in enumerate(setups):
        leg = Leg(setup, start, f"leg{number}", share_reads)
        outcomes: list[Outcome | None] = pool.run(scenarios.run, str(directory), leg, 3)
        held = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
        assert setup.topology(0).world_size == len(held)
        if start is None:
            wholes, losses = whole_of(setup, outcomes), held[0][1].losses
        for rank, outcome in held:
            assert None is difference(held_by(setup, rank, wholes), outcome.held)
            tolerance = 0.02 if setup.dtype == "bfloat16" else 1e-5
            assert losses == pytest.approx(outcome.losses, rel=tolerance)
        start = leg.save
