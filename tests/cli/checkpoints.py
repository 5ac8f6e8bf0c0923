"""Checkpoints to look at: small, and cut in every way."""

from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Partition, Section, Topology
from tests.bad_input.live import jobs, topologies
from tests.interop.saving import save_as_every_rank

CONTENT = {"steps": 7, "seen": torch.arange(3), "args": {"lr": 0.1, "deep": {"er": {"est": 1}}}, 5: "x" * 500}

PLACES = [Topology(dp=2, tp=4, ep=2, rank=rank) for rank in range(8)]
"""Of the ranks that saved the tag ``cut``."""

CUTS = {
    "norm": (Partition(), "whole"),
    "column": (Partition(0, num_partitions=4), "dim 0 in 4"),
    "row": (Partition(1, num_partitions=4), "dim 1 in 4"),
    "strided": (Partition(0, 2, 4), "dim 0 in 4, 2 blocks each"),
    "kv": (Partition(0, num_partitions=2), "dim 0 in 2, each on 2 ranks"),
    "ordered": (Partition(0, num_partitions=4, rank_ordering=(0, 2, 1, 3)), "dim 0 in 4, by rank 0 2 1 3"),
    "qkv": (Partition(0, fused=(Section(8, 4), Section(4, 2), Section(4, 2))), "dim 0 of 8 in 4 + 4 in 2 + 4 in 2"),
    "expert": (Partition(1, num_partitions=4, expert=True), "dim 0 over 2 ep ranks, dim 1 in 4"),
    "lost": (Partition(known=False), "unknown"),
}
"""How each parameter of the tag ``cut`` is cut, and the same in words."""
GLOBAL = {
    "norm": (3,), "column": (8, 3), "row": (3, 8), "strided": (16, 2), "kv": (4, 2), "ordered": (8,), "qkv": (16, 2),
    "expert": (4, 8), "lost": (2,),
}


def whole(name: str) -> torch.Tensor:
    """The global tensor, each element of which is its own number."""
    tensor = torch.empty(GLOBAL[name])
    return torch.arange(float(tensor.numel())).reshape(tensor.shape)


def held(name: str, at: Topology) -> torch.Tensor:
    """What the rank ``at`` holds of the global tensor, cut by hand."""
    tensor, tp_rank = whole(name), at.tp_rank
    if name == "column":
        return tensor.chunk(4)[tp_rank]
    if name == "row":
        return tensor.chunk(4, dim=1)[tp_rank].contiguous()
    if name == "strided":
        return torch.cat(tensor.chunk(8)[tp_rank::4])
    if name == "kv":
        return tensor.chunk(2)[tp_rank % 2]
    if name == "ordered":
        return tensor.chunk(4)[(0, 2, 1, 3)[tp_rank]]
    if name == "qkv":
        q, k, v = tensor.split((8, 4, 4))
        return torch.cat([q.chunk(4)[tp_rank], k.chunk(2)[tp_rank % 2], v.chunk(2)[tp_rank % 2]])
    if name == "expert":
        return tensor.chunk(2)[at.ep_rank].chunk(4, dim=1)[tp_rank].contiguous()
    return tensor


def save_examples(directory: Path) -> None:
    """Three tags, oldest first: ``z_plain`` of one rank, ``zero1`` of two with ZeRO-1, ``cut`` of eight ranks.

    The latter two are xser, and ``cut`` is without an optimizer.
    """
    [one] = jobs()
    save_as_every_rank(directory, "z_plain", [Topology()], lambda _: {**one.parts, "user_content": CONTENT})
    two = jobs(2, zero1=True)
    save_as_every_rank(
        directory,
        "zero1",
        topologies(two),
        lambda rank: {**two[rank].parts, "rank_content": two[rank].rank_content},
        use_xser=True,
    )

    def cut(rank: int) -> dict[str, Any]:
        return {
            "model": {name: held(name, PLACES[rank]) for name in CUTS},
            "partitions": {name: partition for name, (partition, _) in CUTS.items()},
        }

    save_as_every_rank(directory, "cut", PLACES, cut, use_xser=True)
