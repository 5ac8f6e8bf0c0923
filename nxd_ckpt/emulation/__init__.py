"""Run a torch-xla training script across processes, on a machine without accelerators.

Each process has one XLA:CPU device; data between processes goes through gloo. torch-xla's own collectives
do not work there: in separate processes an all-reduce silently returns the local value. Here every collective
is either routed, or raises `NotEmulated` with its name::

    python -m nxd_ckpt.emulation --nproc 4 train.py --steps 10

Differences from a cluster, beyond speed: a collective runs at the call, so it ends the pending XLA graph;
reductions are summed in the group's order, in the tensor's own dtype; ranks that do not make the same call
get `CollectiveMismatch` instead of a hang. The script is run after torch-xla was imported.
"""

from __future__ import annotations

from nxd_ckpt.emulation.install import install
from nxd_ckpt.emulation.launcher import launch
from nxd_ckpt.emulation.world import CollectiveMismatch, NotEmulated, PeerLost

__all__ = ["CollectiveMismatch", "NotEmulated", "PeerLost", "install", "launch"]
