"""Forked children: a child has its parent's objects, but neither its threads nor its lease."""

from __future__ import annotations

import os

from nxd_ckpt.errors import CheckpointError


def require_own(pid: int, what: str) -> None:
    """Raise CheckpointError unless this is the process ``pid``, which made ``what``."""
    if os.getpid() != pid:
        raise CheckpointError(
            f"{what}: process {os.getpid()} was forked from process {pid}, which made this Checkpointer and keeps its "
            "threads, lease and staging memory; make a Checkpointer here, for another directory if this one is in use"
        )
