"""What this process runs in: its place in the job, and what wrote its checkpoints."""

from __future__ import annotations

import sys

import torch

from nxd_ckpt.adapters.neuronx_distributed import live_topology
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.version import __version__


def default_topology() -> Topology:
    """neuronx_distributed's live topology; without it, all ranks of the process group as data-parallel ones."""
    live = live_topology()
    if live is not None:
        return live
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return Topology(dp=dist.get_world_size(), rank=dist.get_rank())
    return Topology()


def versions() -> dict[str, str]:
    """What wrote a checkpoint, for its manifest."""
    from importlib import metadata

    found = {"python": sys.version.split()[0], "torch": torch.__version__, "nxd_ckpt": __version__}
    for name in ("torch_xla", "torch_neuronx", "neuronx_distributed"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
