"""Random models, and random pairs of jobs that cut them."""

from dataclasses import dataclass, replace
from itertools import product
from math import lcm
from typing import Any

import torch
from hypothesis import strategies as st

from nxd_ckpt import Partition, Section, Topology
from nxd_ckpt.core.topology import Coordinates
from tests.reshard.whole import Layout, Weight

_SIZES: list[dict[str, Any]] = [
    {"dp": ep * expert_dp, "tp": tp, "pp": pp, "ep": ep}
    for expert_dp, tp, pp, ep in product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2), (1, 2))
    if ep * expert_dp * tp * pp <= 8
]


@dataclass(frozen=True)
class Case:
    """One model, saved by one job and loaded by another."""

    weights: tuple[Weight, ...]
    saved: Layout
    live: Layout
    use_xser: bool
    left_out: bool

    @property
    def save_options(self) -> dict[str, Any]:
        return {"use_xser": self.use_xser, "avoid_saving_lower_precision_weights": self.left_out}


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sizes = draw(st.sampled_from(_SIZES))
    if draw(st.integers(0, 3)):
        return Topology(**sizes)
    places = [Coordinates(*at) for at in product(range(sizes["pp"]), range(sizes["dp"]), range(sizes["tp"]))]
    return Topology(**sizes, rank_map=draw(st.permutations(places)))  # as on Trn1, where tp groups are strided


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """ZeRO-1 or not, xser or not, master weights or not; every weight cut as it likes on either side."""
    on, to = draw(topologies()), draw(topologies())
    zero1, use_xser = draw(st.booleans()), draw(st.booleans())
    master_weights = zero1 and draw(st.booleans())
    left_out = master_weights and use_xser and draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    python_steps = draw(st.booleans())
    weights, cuts = [], []
    for number in range(draw(st.integers(2, 5))):
        # The first two are what every pipeline stage has: something to train that is not an expert's.
        kind = "parameter" if number < 2 else draw(st.sampled_from(["parameter", "parameter", "frozen", "buffer"]))
        scalars, experts = kind != "parameter" or not zero1, number >= 2
        shape, *pair = draw(_uncut() if kind == "buffer" else _cut_twice(on, to, scalars, experts))
        step = draw(st.sampled_from([None, 2, 5]))
        weights.append(
            Weight(
                f"w{number}",
                shape,
                torch.int64 if kind == "buffer" else dtype,
                kind,
                step if step is None or python_steps else float(step),
                options=draw(st.integers(0, 1)),
                left_out=left_out and kind == "parameter",
            )
        )
        cuts.append(pair)
    stages = [draw(_stages(weights, topology.pp)) for topology in (on, to)]
    groups = [draw(_groups(weights)) for _ in range(2)]
    if on.pp == to.pp:
        stages[1] = stages[0]
    if (on.tp, on.pp, on.ep) == (to.tp, to.pp, to.ep):
        groups[1] = groups[0]  # where nothing but dp changes, param groups are what they were
    first, second = (
        Layout(
            topology,
            {weight.name: pair[side] for weight, pair in zip(weights, cuts, strict=True)},
            groups[side],
            stages[side],
            zero1,
            master_weights,
        )
        for side, topology in enumerate((on, to))
    )
    return Case(tuple(weights), first, second, use_xser, left_out)


@st.composite
def _cut_twice(draw: st.DrawFn, on: Topology, to: Topology, scalars: bool, experts: bool) -> Any:
    """A shape, and how each of two jobs cuts it; 0-dimensional or an expert's only if asked for."""
    dims = draw(st.integers(0 if scalars else 1, 3))
    if dims and draw(st.integers(0, 5)) == 0:
        return draw(_fused_twice(on, to, dims))
    expert = experts and dims > 0 and on.ep * to.ep > 1 and draw(st.booleans())
    # One expert-parallel rank marks experts or not: NxD does where expert parallelism is switched on.
    pair = [draw(_partition(dims, at.tp, expert and (at.ep > 1 or draw(st.booleans())))) for at in (on, to)]
    if on.tp == to.tp and pair[0].replicated_over_tp != pair[1].replicated_over_tp:
        pair[1] = replace(pair[0], expert=pair[1].expert)  # on the same tp, a cut on one side only is a lost attribute
    multiples = [lcm(*(_multiple(cut, at, dim) for cut, at in zip(pair, (on, to), strict=True))) for dim in range(dims)]
    shape = tuple(draw(st.integers(1, 2 if multiple > 1 else 6)) * multiple for multiple in multiples)
    return shape, *pair


@st.composite
def _fused_twice(draw: st.DrawFn, on: Topology, to: Topology, dims: int) -> Any:
    """A parameter that holds up to three tensors, each cut by itself; the other dimensions are not cut."""
    dim = draw(st.integers(0, dims - 1))
    sections: list[list[Section]] = [[], []]
    for _ in range(draw(st.integers(1, 3))):
        counts = [draw(_divisors(at.tp)) for at in (on, to)]
        size = lcm(*counts) * draw(st.integers(1, 2))
        for side, at in enumerate((on, to)):
            sections[side].append(Section(size, counts[side], draw(_orderings(at.tp))))
    along = sum(section.size for section in sections[0])
    shape = tuple(along if d == dim else draw(st.integers(1, 4)) for d in range(dims))
    first, second = (Partition(dim, fused=tuple(sections[side])) for side in range(2))
    return shape, first, first if on.tp == to.tp else second


@st.composite
def _uncut(draw: st.DrawFn) -> Any:
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    return shape, Partition(), Partition()


@st.composite
def _partition(draw: st.DrawFn, dims: int, tp: int, expert: bool) -> Partition:
    dim = draw(st.none() | st.integers(0, dims - 1)) if dims else None
    if dim is None:
        return Partition(expert=expert)
    return Partition(dim, draw(st.integers(1, 3)), draw(_divisors(tp)), draw(_orderings(tp)), expert)


def _multiple(partition: Partition, at: Topology, dim: int) -> int:
    """What the size of the dimension must be a multiple of."""
    experts = at.ep if partition.expert and dim == 0 else 1
    blocks = partition.num_partitions * partition.partition_stride if partition.partition_dim == dim else 1
    return experts * blocks


@st.composite
def _groups(draw: st.DrawFn, weights: list[Weight]) -> tuple[tuple[str, ...], ...]:
    """Param groups in any order, each of one kind of options; those of a kind may be one group or two."""
    trained = draw(st.permutations([weight for weight in weights if weight.kind == "parameter"]))
    keys = {weight.name: (weight.options, draw(st.integers(0, 1))) for weight in trained}
    order = draw(st.permutations(sorted(set(keys.values()))))
    return tuple(tuple(weight.name for weight in trained if keys[weight.name] == key) for key in order)


@st.composite
def _stages(draw: st.DrawFn, weights: list[Weight], pp: int) -> dict[str, frozenset[int]]:
    """The first weight is on the first stage, the second on the last, any on both (as tied embeddings are)."""
    sets = st.sets(st.integers(0, pp - 1), min_size=1).map(frozenset)
    fixed = {0: frozenset({0}), 1: frozenset({pp - 1})}
    return {weight.name: draw(sets) | fixed.get(number, frozenset()) for number, weight in enumerate(weights)}


def _orderings(tp: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    return st.none() | st.permutations(range(tp)).map(tuple)


def _divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([value for value in range(1, number + 1) if number % value == 0])
