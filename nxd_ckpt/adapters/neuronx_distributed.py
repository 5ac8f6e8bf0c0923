"""neuronx-distributed: the topology of a job that has initialised its model-parallel groups."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

from nxd_ckpt.core.topology import Topology, topology_from_groups
from nxd_ckpt.errors import InvalidArgument, UnsupportedState

_PARALLEL_STATE = "neuronx_distributed.parallel_layers.parallel_state"


def live_topology() -> Topology | None:
    """The topology of ``parallel_state``'s replica groups, or None where they are not initialised.

    neuronx-distributed is never imported: a process that uses it has done so. Raises UnsupportedState under context
    parallelism, InvalidArgument where the ranks that NxD names files by do not follow from its groups.
    """
    parallel = sys.modules.get(_PARALLEL_STATE)
    if parallel is None or not parallel.model_parallel_is_initialized():
        return None
    context = _size(parallel, "context_model")
    if context > 1:
        raise UnsupportedState(
            f"context parallelism of size {context} is not supported: its ranks share NxD's file names, and ZeRO-1 "
            "shards over them too; save and load with context_parallel_size=1"
        )
    tp_groups, dp_groups, pp_groups = (_groups(parallel, name) for name in ("tensor_model", "data", "pipeline_model"))
    topology = topology_from_groups(
        _global_rank(parallel, tp_groups, dp_groups, pp_groups),
        tp_groups,
        dp_groups,
        pp_groups,
        ep=_size(parallel, "expert_model"),
    )
    _check(parallel, topology)
    return topology


def _size(parallel: ModuleType, name: str) -> int:
    """The size of a dimension that this version of NxD may not know."""
    get = getattr(parallel, f"get_{name}_parallel_size", None)
    return 1 if get is None else int(get())


def _groups(parallel: ModuleType, name: str) -> list[list[int]]:
    get: Any = getattr(parallel, f"get_{name}_parallel_replica_groups", None)
    if get is None:  # as older versions have it
        get = partial(getattr(parallel, f"get_{name}_parallel_group"), as_list=True)
    return [list(group) for group in get()]


def _global_rank(parallel: ModuleType, tp: list[list[int]], dp: list[list[int]], pp: list[list[int]]) -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    positions = ((tp, "tensor_model"), (dp, "data"), (pp, "pipeline_model"))
    candidates = [
        {group[int(getattr(parallel, f"get_{name}_parallel_rank")())] for group in groups} for groups, name in positions
    ]
    (rank,) = set.intersection(*candidates)
    return rank


def _check(parallel: ModuleType, topology: Topology) -> None:
    ours = {"tensor_model": topology.tp_rank, "data": topology.dp_rank, "pipeline_model": topology.pp_rank}
    if topology.ep > 1:
        ours["expert_model"] = topology.ep_rank
    theirs = {name: int(getattr(parallel, f"get_{name}_parallel_rank")()) for name in ours}
    if theirs != ours:
        raise InvalidArgument(
            f"rank {topology.rank}: neuronx-distributed gives the ranks {theirs}, its replica groups say {ours}; "
            "pass topology= with the map that the files are named by"
        )
