"""neuronx-distributed: the topology of a job that has initialised its model-parallel groups."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

from nxd_ckpt.core.topology import Topology, topology_from_groups
from nxd_ckpt.errors import InvalidArgument, UnsupportedState

_PARALLEL_STATE = "neuronx_distributed.parallel_layers.parallel_state"


def live_topology() -> Topology | None:
    """Return the topology of ``parallel_state``'s replica groups, or None if they are not initialised.

    Context-parallel ranks have the same model, and ZeRO-1 shards over them too: for files they are data-parallel ranks,
    ``dp_rank * cp + cp_rank``. So each writes files that no other has, though NxD gives all their files one name.

    neuronx-distributed is never imported: a process that uses it has done so. Raises UnsupportedState for experts under
    context parallelism, InvalidArgument if the ranks in NxD's file names do not follow from its groups.
    """
    parallel = sys.modules.get(_PARALLEL_STATE)
    if parallel is None or not parallel.model_parallel_is_initialized():
        return None
    context, experts = _size(parallel, "context_model"), _size(parallel, "expert_model")
    if context > 1 and experts > 1:
        raise UnsupportedState(
            f"context parallelism of size {context} with expert parallelism of size {experts}: which ranks share an "
            "expert is not known; save and load with context_parallel_size=1, or without experts"
        )
    dimensions = ["tensor_model", "data", "pipeline_model", *(["context_model"] if context > 1 else [])]
    groups = {name: _groups(parallel, name) for name in dimensions}
    rank = _global_rank(parallel, groups)
    tp_groups, dp_groups, pp_groups, *cp_groups = groups.values()
    if cp_groups:
        dp_groups = _joined(dp_groups, *cp_groups)
    topology = topology_from_groups(rank, tp_groups, dp_groups, pp_groups, ep=experts)
    _check(parallel, topology, context)
    return topology


def _size(parallel: ModuleType, name: str) -> int:
    """Return the size of a dimension that this version of NxD may not know."""
    get = getattr(parallel, f"get_{name}_parallel_size", None)
    return 1 if get is None else int(get())


def _groups(parallel: ModuleType, name: str) -> list[list[int]]:
    get: Any = getattr(parallel, f"get_{name}_parallel_replica_groups", None)
    if get is None:  # as older versions have it
        get = partial(getattr(parallel, f"get_{name}_parallel_group"), as_list=True)
    return [list(group) for group in get()]


def _joined(dp: list[list[int]], cp: list[list[int]]) -> list[list[int]]:
    """Return the data-parallel groups with the context-parallel ranks of each member, in the order of ZeRO-1's shards.
    """
    context = {group[0]: group for group in cp}
    return [[rank for first in group for rank in context[first]] for group in dp if group[0] in context]


def _global_rank(parallel: ModuleType, groups: Mapping[str, list[list[int]]]) -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    candidates = [
        {group[int(getattr(parallel, f"get_{name}_parallel_rank")())] for group in group_lists}
        for name, group_lists in groups.items()
    ]
    (rank,) = set.intersection(*candidates)
    return rank


def _check(parallel: ModuleType, topology: Topology, context: int) -> None:
    dp_rank, cp_rank = divmod(topology.dp_rank, context)
    ours = {"tensor_model": topology.tp_rank, "data": dp_rank, "pipeline_model": topology.pp_rank}
    if context > 1:
        ours["context_model"] = cp_rank
    if topology.ep > 1:
        ours["expert_model"] = topology.ep_rank
    theirs = {name: int(getattr(parallel, f"get_{name}_parallel_rank")()) for name in ours}
    if theirs != ours:
        raise InvalidArgument(
            f"rank {topology.rank}: neuronx-distributed gives the ranks {theirs}, its replica groups say {ours}; "
            "pass topology= with the map that the files are named by"
        )
