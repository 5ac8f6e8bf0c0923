"""Ranks that are threads of this process."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from nxd_ckpt.coordination.agreement import Agreement, StoreAgreement
from nxd_ckpt.coordination.peers import Peers


def on_ranks(
    world_size: int,
    call: Callable[[Agreement], Any],
    timeout: float = 600.0,
    ends: Sequence[Peers | None] | None = None,
) -> list[Any]:
    """``call`` on each rank, a thread here; its result or the exception that it raised.

    ``ends`` are those of the connections between the ranks.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    outcomes: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            peers = ends[rank] if ends is not None else None
            outcomes[rank] = call(StoreAgreement(store, rank, world_size, timeout, peers))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
