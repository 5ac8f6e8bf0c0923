"""Saving as every rank of a job, one after the other, in one process."""

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nxd_ckpt import Topology, close_checkpointers, finalize_checkpoint, save_checkpoint

What = Callable[[int], dict[str, Any]]
"""The arguments of ``save_checkpoint`` (model, optimizer, ...) of a global rank."""


def save_as_every_rank(directory: Path, tag: str, topologies: Sequence[Topology], what: What, **options: Any) -> None:
    """One checkpoint of all ranks: their saves are in flight together, and become visible as one."""
    run = uuid.uuid4().hex
    for rank, topology in enumerate(topologies):
        save_checkpoint(
            directory, tag, **what(rank), topology=topology, run_id=run, async_save=True, timeout=600.0, **options
        )
    finalize_checkpoint()
    close_checkpointers()
