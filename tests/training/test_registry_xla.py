"""A resumed run is the uninterrupted one with torch-xla's ZeRO-1, for optimizers of the registry."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.testing import check_resume
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal
from tests.support.stateful import Object
from tests.training import imitations
from tests.training.model import zero1
from tests.training.registry import OPTIMIZERS, OWN, Inner

pytestmark = pytest.mark.xla

BASES = {**OPTIMIZERS, **OWN}
SOME, OTHERS = ["AdamW", "8 bits", "SOAP"], ["SGD", "NAdam", "Lion", "Shampoo", "Muon", "schedule-free"]


def _save(directory: str, tag: str, *objects: Any) -> None:
    with Checkpointer(directory, topology=Topology(dp=4, rank=dist.get_rank())) as checkpointer:
        checkpointer.save(tag, *objects, use_xser=True)


def _load(directory: str, tag: str, *objects: Any) -> None:
    with Checkpointer(directory, topology=Topology(dp=4, rank=dist.get_rank())) as checkpointer:
        checkpointer.load(tag, *objects)


def _step(model: Any, optimizer: Any) -> float:
    import torch_xla

    optimizer.zero_grad(set_to_none=True)  # else the first step after a load is another graph
    loss: torch.Tensor = model()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    return loss.item()


def _on_xla(rank: int, names: list[str]) -> list[str]:
    """What differs after a resume, one line for each optimizer."""
    import torch_xla

    topology, problems = Topology(dp=4, rank=rank), []
    for name in names:

        def make(name: str = name) -> Any:
            torch.manual_seed(0)
            model = _OnDevice(torch.nn.Linear(6, 7), torch.nn.Linear(7, 6, bias=False)).to(torch_xla.device())
            settings = {"pin_layout": False, "save_master_weights": True}
            return model, zero1(list(model.parameters()), topology, settings, BASES[name])  # type: ignore[arg-type]

        how: Any = {"save": _save, "load": _load, "steps": 2, "steps_after": 2, "new_process": False}
        told = refusal(partial(check_resume, make, _step, **how))
        problems += [f"{name}: {told}"] if told else []
    return problems


class _OnDevice(Inner):
    """Its batch is made on the host: the same on each rank and in each run."""

    def forward(self) -> torch.Tensor:
        batch = torch.randn(4, 6).to(next(self.parameters()).device)
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss


@pytest.mark.parametrize("names", [SOME, pytest.param(OTHERS, marks=pytest.mark.soak)], ids=["some", "others"])
def test_resumed_shards_are_the_uninterrupted_ones(xla_ranks: RankPool, names: list[str]) -> None:
    """Four ranks, each with a quarter of every parameter and of what the optimizer keeps for it."""
    assert [[]] * 4 == xla_ranks.run(_on_xla, names)


class _Seen(torch.nn.Sequential):
    """Layers with extra state of this rank, another one in the objects that are loaded into."""

    seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def _flat_shards() -> Any:
    """torch-xla's FSDP, whose shards are plain tensors."""
    import torch_xla
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    seen = torch.initial_seed() + dist.get_rank()
    torch.manual_seed(0)
    layers = _Seen(torch.nn.Linear(6, 7), torch.nn.Linear(7, 6)).to(torch_xla.device())
    layers.seen = seen
    model = XlaFullyShardedDataParallel(layers, compute_dtype=torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _drifted(kind: Callable[[Any], Any]) -> Any:
    """Copies that each rank trains on gradients of its own."""
    import torch_xla

    torch.manual_seed(0)
    model = torch.nn.Linear(6, 7).to(torch_xla.device())
    return model, kind(model.parameters())


class _Averages(Object):
    """Averages of weights on the device, in a list that is longer on each rank, with numbers of the rank."""

    def __init__(self, model: Any) -> None:
        super().__init__({"averages": [], "count": 0})
        self.model = model

    def step(self) -> None:
        weights = [one.detach() * (1 + dist.get_rank()) for one in self.model.parameters()]
        self.state["averages"] = [*weights, *weights[: dist.get_rank()]]
        self.state["count"] += 1 + dist.get_rank()


def _averaged() -> Any:
    model, optimizer = _drifted(torch.optim.AdamW)
    return model, optimizer, _Averages(model)


def _adapted() -> Any:
    """Copies of which each rank has an adapter of its own, of another size, and steps on all that it has."""
    import torch_xla

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"common": torch.nn.Linear(6, 7), f"of_{rank}": torch.nn.Linear(7, 2 + rank)})
    model.to(torch_xla.device())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


OF_RANKS: dict[str, Callable[[], Any]] = {
    "adapters": _adapted,
    "flat shards": _flat_shards,
    "drifted copies": partial(_drifted, torch.optim.AdamW),
    "chained": partial(_drifted, imitations.Chained),
    "no optimizer of torch's": partial(_drifted, imitations.NoOptimizer),
    "float32 clones": partial(_drifted, imitations.WithMasters),
    "averages in a list": _averaged,
}


def _own_step(model: Any, optimizer: Any, averages: Any = None) -> float:
    """A step on gradients that no forward pass made: those of XLA's FSDP need collectives that are not emulated."""
    import torch_xla

    def closure() -> float:
        for one in model.parameters():
            one.grad = torch.randn(one.shape).to(one.device) * (1 + dist.get_rank())
        return 0.0

    if isinstance(optimizer, torch.optim.AdamW) and not isinstance(optimizer, imitations.WithMasters):
        closure()
        optimizer.step()
    else:
        optimizer.step(closure)
    if averages is not None:
        averages.step()
    torch_xla.sync()
    return float(sum(one.detach().cpu().sum() for one in model.parameters()))


def _save_plainly(directory: str, tag: str, *objects: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(tag, *objects[:2], state=_state_of(objects), async_save=True)


def _load_plainly(directory: str, tag: str, *objects: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(tag, *objects[:2], state=_state_of(objects))


def _state_of(objects: Sequence[Any]) -> Any:
    return {"averages": objects[2]} if len(objects) > 2 else None


def _of_ranks(rank: int) -> list[str]:
    problems = []
    for name, make in OF_RANKS.items():
        how: Any = {"save": _save_plainly, "load": _load_plainly, "new_process": False}
        told = refusal(partial(check_resume, make, _own_step, steps=2, steps_after=2, **how))
        problems += [f"{name}: {told}"] if told else []
    return problems


def test_what_is_of_one_rank_is_resumed(xla_ranks: RankPool) -> None:
    """Weights and moments on four devices."""
    assert [[]] * 4 == xla_ranks.run(_of_ranks)


def _of_each_rank(rank: int) -> str:
    """Differences after a resume of replicas whose optimizers keep other state on each rank."""
    import torch_xla

    def make() -> Any:
        torch.manual_seed(0)
        model = _OnDevice(torch.nn.Linear(6, 7), torch.nn.Linear(7, 6, bias=False)).to(torch_xla.device())
        return model, imitations.Blocks(model.parameters(), lr=0.01, momentum=0.9)

    how: Any = {"save": _save, "load": _load, "steps": 2, "steps_after": 2, "new_process": False}
    return refusal(partial(check_resume, make, _step, **how))


def test_state_of_each_rank_on_a_device_is_resumed(xla_ranks: RankPool) -> None:
    """In files of xser, which replicas share the writing of otherwise."""
    assert [""] * 4 == xla_ranks.run(_of_each_rank)
