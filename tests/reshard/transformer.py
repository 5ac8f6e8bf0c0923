"""A small transformer as a list of weights, cut as NxD's layers cut theirs, for any sizes that divide 24."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from nxd_ckpt import Partition, Section, Topology
from tests.reshard.whole import Layout, Weight

VOCAB, HIDDEN, FFN, EXPERTS = 24, 6, 24, 12


def weights_of(dtype: torch.dtype = torch.float32, *, experts: bool = False) -> list[Weight]:
    """Two blocks between an embedding and a head; rows that no dp divides, a frozen weight, a buffer."""
    found = [Weight("embed", (VOCAB, HIDDEN), dtype), Weight("temperature", (1,), dtype, options=1)]
    for block in ("block0", "block1"):
        found += [
            Weight(f"{block}_norm", (HIDDEN + 1,), dtype, options=1, step=None if block == "block1" else 3.0),
            Weight(f"{block}_qkv", (FFN + 24, HIDDEN), dtype),
            Weight(f"{block}_gate_up", (2 * FFN, HIDDEN), dtype),
            Weight(f"{block}_gate_up_bias", (2 * FFN,), dtype, options=1),
            Weight(f"{block}_down", (HIDDEN - 1, FFN), dtype),
            Weight(f"{block}_scale", (3, 5), dtype, "frozen"),
            Weight(f"{block}_seen", (), torch.int64, "buffer"),
        ]
        found += [Weight(f"{block}_experts", (EXPERTS, HIDDEN, FFN), dtype)] if experts else []
    return [*found, Weight("head", (VOCAB, HIDDEN), dtype)]


def topology_of(sizes: str) -> Topology:
    """``dp2tp4`` as a topology, seen from its first rank."""
    found: dict[str, Any] = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", sizes)}
    return Topology(**found)


def layout_of(
    sizes: str, weights: Sequence[Weight], *, zero1: bool = True, master_weights: bool = True, reverse: bool = False
) -> Layout:
    """How a job of ``sizes`` ("dp2tp4") cuts it. ``reverse``: parameters and groups in another order than the model's.

    k and v in the fused q, k, v are two partitions each where tp is even: fewer than there are ranks.
    """
    topology = topology_of(sizes)
    tp, few = topology.tp, 2 if topology.tp % 2 == 0 else 1
    known = {
        "embed": Partition(0, num_partitions=tp),
        "head": Partition(0, num_partitions=tp),
        "qkv": Partition(0, fused=(Section(FFN, tp), Section(12, few), Section(12, few))),
        "gate_up": Partition(0, 2, tp),
        "gate_up_bias": Partition(0, 2, tp),
        "down": Partition(1, num_partitions=tp),
        "experts": Partition(2, num_partitions=tp, expert=topology.ep > 1),
    }
    names = [weight.name for weight in weights]
    cuts = {name: known.get(name.partition("_")[2] or name, Partition()) for name in names}
    last = topology.pp - 1
    ends = {"embed": 0, "block0": 0, "block1": last, "head": last}
    everywhere = frozenset(range(topology.pp))
    stages = {
        name: frozenset({ends[first]}) if (first := name.partition("_")[0]) in ends else everywhere for name in names
    }
    ordered = weights[::-1] if reverse else weights
    groups = [
        tuple(weight.name for weight in ordered if weight.kind == "parameter" and weight.options == options)
        for options in ((1, 0) if reverse else (0, 1))
    ]
    return Layout(topology, cuts, tuple(groups), stages, zero1, master_weights)
