"""The environment of this process: its place in the job, and the versions that write its checkpoints.

In a job that has initialised neuronx-distributed's model-parallel groups, these tell the place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch

from nxd_ckpt.core.topology import Topology, topology_from_groups
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.live import torch_xla
from nxd_ckpt.version import __version__


def topology_of(topology: Topology | None, process_group: Any = None) -> Topology:
    """Return this rank's place among the ranks that save and load together: ``topology``, or `default_topology`.

    Raises:
        InvalidArgument: this process is not in the ``process_group``, or has another place in it than ``topology``
            says.
    """
    if process_group is None:
        return topology or default_topology()
    import torch.distributed as dist

    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(f"this process is not in process_group=: it is rank {dist.get_rank()} of the job")
    if not isinstance(process_group, dist.ProcessGroup):
        raise InvalidArgument(
            "process_group: expected a group of torch.distributed, of which this process is one, such as "
            f"dist.new_group([0, 1]); found {process_group!r}"
        )
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise InvalidArgument(f"this process is not in process_group=, rank {dist.get_rank()} of the job")
    members = dist.get_process_group_ranks(process_group)
    if topology is None:
        return Topology(dp=len(members), rank=rank, members=members)
    if (topology.world_size, topology.rank) != (len(members), rank):
        raise InvalidArgument(
            f"topology= is rank {topology.rank} of {topology.world_size}, but this process is rank {rank} of the "
            f"{len(members)} in process_group="
        )
    return Topology(**topology.sizes, rank=rank, rank_map=topology.rank_map, members=members)


def default_topology() -> Topology:
    """Return neuronx_distributed's live topology; without it, all ranks of the process group as data-parallel ones."""
    live = live_topology()
    if live is not None:
        return live
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return Topology(dp=dist.get_world_size(), rank=dist.get_rank())
    return Topology()


_LAUNCHERS = {
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
    "PJRT_LOCAL_PROCESS_COUNT": "torch_xla.launch",
}
"""The variables in which launchers tell a process how many there are."""


def require_all_ranks(topology: Topology, *given: Any) -> None:
    """Raise InvalidArgument if a process that would save alone, by none of the options ``given``, is one of several.

    Each would save what it has as the whole job's state, in the place of the others'.
    """
    if any(option is not None for option in given):
        return
    threads = torch_xla.rank_threads()
    if threads:
        raise InvalidArgument(
            f"{threads} ranks are threads of this process (xmp.spawn on its devices), and each would save its own "
            "state in the place of the others': run a process for each device, with torchrun or, on CPUs, "
            "python -m nxd_ckpt.emulation"
        )
    if topology.world_size > 1:
        return
    joined = default_topology().world_size
    if joined > 1:
        raise InvalidArgument(
            f"this Checkpointer was made before the process group of {joined} ranks, and would save each rank as a job "
            "of its own: make it after torch.distributed.init_process_group()"
        )
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return
    for variable, launcher in _LAUNCHERS.items():
        count = os.environ.get(variable, "")
        if count.isdigit() and int(count) > 1:
            raise InvalidArgument(
                f"{variable}={count}: this process is one of {count} ({launcher} or the like), but there is no process "
                "group, and each would save its own state as that of the whole job: call "
                "torch.distributed.init_process_group() before, or pass topology=, which Topology() makes a job of one"
            )


def require_same_group(topology: Topology, *given: Any) -> None:
    """Raise InvalidArgument if this process has another place in its process group than in ``topology``.

    So it has if a new group was made since, of other ranks. None of the options ``given`` told the place.
    """
    import torch.distributed as dist

    if topology.world_size == 1 or any(option is not None for option in given):
        return
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if (rank, size) != (topology.rank, topology.world_size):
            raise InvalidArgument(
                f"this Checkpointer was made as rank {topology.rank} of {topology.world_size}, and this process is "
                f"rank {rank} of {size} by now: close it, and make another, on all ranks"
            )


def versions() -> dict[str, str]:
    """Return the versions of the libraries that write a checkpoint, for its manifest."""
    from importlib import metadata

    version_by_name = {"python": sys.version.split()[0], "torch": torch.__version__, "nxd_ckpt": __version__}
    for name in ("torch_xla", "torch_neuronx", "neuronx_distributed"):
        try:
            version_by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return version_by_name


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
    context = _size(parallel, "context_model")
    experts = _size(parallel, "expert_model")
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
