"""A checkpoint's global tensors, put together by hand from what its ranks saved.

The demo compares a run on other sizes with them, so nothing here asks nxd_ckpt how a tensor is cut: ``torch.load``
reads the files, and the cuts are written down once more, from parallel_layers.py and from what ZeRO-1 does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The parallel layers, with the dimension of their weights that tensor-parallel ranks divide; others are held whole.
PARTITION_DIM = {"embed": 0, "head": 0, "q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "out": 1, "down": 1}
SHAPED_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "master_weights")
TIED = "head.weight"  # the embedding under a second name: one parameter for the optimizer


class ReplicasDiffer(Exception):
    """Ranks that must hold the same tensor hold different ones."""


def global_tensors(tag: Path, dp: int, tp: int) -> dict[str, Tensor]:
    """Every tensor of the directory ``tag``, which ``dp`` x ``tp`` ranks saved, by its name.

    Names are ``model/NAME`` and ``optim/NAME/STATE``, with exp_avg, exp_avg_sq, master_weights and step for STATE.

    Raises:
        ReplicasDiffer: a tensor that several ranks hold is not the same on all.
    """
    models = [_load(tag, "model", 0, tp_rank) for tp_rank in range(tp)]
    optimizers = [[_load(tag, "optim", dp_rank, tp_rank) for dp_rank in range(dp)] for tp_rank in range(tp)]
    found = {f"model/{name}": join_tensor_parallel(name, [model[name] for model in models]) for name in models[0]}
    for index, name in enumerate(optimizer_order(models[0])):
        states = [join_zero1(shards, index) for shards in optimizers]
        for state in SHAPED_LIKE_PARAMETER:
            found[f"optim/{name}/{state}"] = join_tensor_parallel(name, [one[state] for one in states])
        found[f"optim/{name}/step"] = the_same(f"{name}: step", [one["step"] for one in states])
    return found


def join_tensor_parallel(name: str, shards: Sequence[Tensor]) -> Tensor:
    """The parameter ``name``, or what is shaped like it, from each tensor-parallel rank's part."""
    layer = name.split(".")[-2]
    if layer in PARTITION_DIM:
        return torch.cat(list(shards), PARTITION_DIM[layer])
    return the_same(name, shards)


def join_zero1(shards: Sequence[Mapping[str, Any]], index: int) -> dict[str, Tensor]:
    """The state of the parameter ``index`` as one tensor-parallel rank's data-parallel replicas share it.

    Each replica's optimizer file holds an equal number of rows; the last are zeros where they do not divide.
    """
    rows = shards[0]["shape_info"][index][0]
    entries = [
        {**shard["base_state"][index], "master_weights": shard["sharded_master_weights"][index]} for shard in shards
    ]
    state = {name: torch.cat([entry[name] for entry in entries])[:rows] for name in SHAPED_LIKE_PARAMETER}
    return state | {"step": the_same(f"optimizer entry {index}: step", [entry["step"] for entry in entries])}


def optimizer_order(model: Mapping[str, Tensor]) -> list[str]:
    """The parameters' names by their index in the optimizer: matrices, then vectors, as train_llama.py groups them."""
    names = [name for name in model if name != TIED]
    return [name for name in names if model[name].dim() > 1] + [name for name in names if model[name].dim() == 1]


def the_same(name: str, replicas: Sequence[Tensor]) -> Tensor:
    """What all ranks hold alike. Raises ReplicasDiffer."""
    if not all(equal_bits(replicas[0], replica) for replica in replicas):
        raise ReplicasDiffer(f"{name} is not the same on all ranks that hold it whole")
    return replicas[0]


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal: -0.0 is not 0.0, and a NaN equals itself."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    bits, others = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(bits, others)


def _load(tag: Path, part: str, dp_rank: int, tp_rank: int) -> dict[str, Any]:
    file = tag / part / f"dp_rank_{dp_rank:02d}_tp_rank_{tp_rank:02d}_pp_rank_00.pt"
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded
