"""A whole model with its optimizer's state, and what each rank of a job holds of it.

The reference is slow and obviously right: cut the whole tensor, or the numbers of its elements, as upstream cuts
tensors (:mod:`tests.core.cuts`). Nothing here knows of boxes, pieces or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch

from nxd_ckpt import Partition, Topology
from nxd_ckpt.core.reads import Cut, CutIndex
from tests.core import cuts

OPTIONS: tuple[dict[str, Any], ...] = (
    {"lr": 0.25, "weight_decay": 0.125, "betas": (0.5, 0.75)},
    {"lr": 0.5, "weight_decay": 0.0, "betas": (0.5, 0.875)},
)
"""What param groups may have. A parameter keeps its own, whichever group it is in."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Weight:
    """One tensor of the whole model, with its optimizer's state.

    ``kind`` is "parameter", "frozen" or "buffer". ``step`` is None for a parameter that never had a gradient, an int
    where the optimizer counts in Python. ``left_out`` weights are the casts of their master weights. ``alias`` is the
    name that the values are drawn for: tied weights share it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "parameter"
    step: int | float | None = 3.0
    options: int = 0
    left_out: bool = False
    alias: str | None = None

    @property
    def value(self) -> torch.Tensor:
        if not self.dtype.is_floating_point:
            return (self._drawn("value") * 100).to(self.dtype)
        return (self.master if self.left_out else self._drawn("value")).to(self.dtype)

    @property
    def master(self) -> torch.Tensor:
        return self._drawn("master")

    def state(self) -> dict[str, torch.Tensor]:
        """The moments, float32."""
        return {} if self.step is None else {"exp_avg": self._drawn("first"), "exp_avg_sq": self._drawn("second")}

    def _drawn(self, what: str) -> torch.Tensor:
        return _drawn(f"{self.alias or self.name}/{what}", self.shape).clone()


@lru_cache(maxsize=64)
def _drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) - 0.5


@dataclass(frozen=True)
class Layout:
    """How one job cuts a model: ``cuts`` by name, the pipeline stages that hold a name (by default all), param groups.

    ``groups`` lists names in the order of their groups; a stage leaves out what it does not hold. ``topology`` may be
    seen from any rank.
    """

    topology: Topology
    cuts: Mapping[str, Partition]
    groups: tuple[tuple[str, ...], ...]
    stages: Mapping[str, frozenset[int]] = field(default_factory=dict)
    zero1: bool = True
    master_weights: bool = True

    @property
    def ranks(self) -> list[Topology]:
        """The topology as every global rank sees it."""
        return [self.topology.at(rank) for rank in range(self.topology.world_size)]

    @property
    def partitions(self) -> dict[str, Partition]:
        """What attributes cannot say, for ``partitions=``."""
        return {name: partition for name, partition in self.cuts.items() if partition.fused}

    def of_stage(self, weights: Sequence[Weight], at: Topology) -> list[Weight]:
        return [w for w in weights if at.pp_rank in self.stages.get(w.name, frozenset(range(at.pp)))]


def part(whole: torch.Tensor, partition: Partition, at: Topology, *, sharded: bool = False) -> torch.Tensor:
    """What the rank ``at`` holds of a whole tensor; its ZeRO-1 shard, padded with zeros, with ``sharded``."""
    bits = whole.view(_BITS[whole.element_size()]).numpy()  # NumPy has no bfloat16
    held = _held(bits, partition, at, sharded, padding=0)
    return torch.from_numpy(held.copy()).view(whole.dtype)


def put_back(whole: torch.Tensor, value: torch.Tensor, partition: Partition, at: Topology, *, sharded: bool) -> None:
    """The reverse of :func:`part`: copy what the rank ``at`` holds to where it belongs; padding must be zeros."""
    numbers = _numbers(tuple(whole.shape), partition, at, sharded)
    real = numbers != cuts.PADDING
    assert not value[~real].any()
    whole.view(-1)[numbers[real]] = value[real]


def _numbers(shape: tuple[int, ...], partition: Partition, at: Topology, sharded: bool) -> torch.Tensor:
    """Which elements of the whole tensor the rank ``at`` holds."""
    return torch.from_numpy(_held(cuts.numbered(shape), partition, at, sharded))


def _held(whole: Any, partition: Partition, at: Topology, sharded: bool, padding: int = cuts.PADDING) -> Any:
    shards, shard = (at.expert_dp, at.expert_dp_rank) if partition.expert else (at.dp, at.dp_rank)
    cut = Cut(at.tp, at.ep, shards if sharded else 1)
    place = CutIndex(at.tp_rank, at.ep_rank, shard if sharded else 0)
    return cuts.Job(partition, cut).hold(whole, place, padding)


def expected(weights: Sequence[Weight], layout: Layout, at: Topology) -> dict[str, Any]:
    """What the rank ``at`` must hold after a load: ``model`` and ``optimizer`` by name, as ``ranks.Live.held`` has it.

    ``shard`` is what ZeRO-1 steps on: the master weights, or without them the model's weights in float32.
    """
    mine = sorted(layout.of_stage(weights, at), key=lambda weight: weight.name)
    levels = (3 if at.ep > 1 else 2) if layout.zero1 else 1
    optimizer = {}
    names = {weight.name for weight in mine}
    for weight in (weight for weight in mine if weight.kind == "parameter" and weight.alias not in names):
        cut = layout.cuts[weight.name]
        step = torch.tensor(weight.step) if isinstance(weight.step, float) else weight.step
        entry: dict[str, Any] = {} if step is None else {"step": step}
        entry |= {key: part(whole, cut, at, sharded=layout.zero1) for key, whole in weight.state().items()}
        if layout.zero1:
            stepped_on = weight.master if layout.master_weights else weight.value.float()
            entry["shard"] = part(stepped_on, cut, at, sharded=True)
        optimizer[weight.name] = {**entry, "options": [OPTIONS[weight.options]] * levels}
    model = {weight.name: part(weight.value, layout.cuts[weight.name], at) for weight in mine}
    return {"model": model, "optimizer": optimizer}
