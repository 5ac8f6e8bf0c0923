"""The environment of this process: its place in the job, and the versions that write its checkpoints."""

from __future__ import annotations

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
