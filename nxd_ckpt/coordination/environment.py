"""The environment of this process: its place in the job, and the versions that write its checkpoints."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.live.neuronx_distributed import live_topology
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
    if topology.world_size > 1 or any(option is not None for option in given):
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
