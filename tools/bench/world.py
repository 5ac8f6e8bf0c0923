"""The processes of one scenario, as each of them sees the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path


class World:
    """This process's rank among ``size``; alone, it needs no process group.

    ``shards`` says that the state is cut over the ranks, and not the same on each.
    """

    def __init__(self, rank: int, size: int, meeting: Path, shards: bool = False) -> None:
        self.rank, self.size, self.shards = rank, size, shards
        if size > 1:
            import torch.distributed as dist

            dist.init_process_group(
                "gloo", f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
            )

    def gather(self, value: float) -> list[float]:
        """Every rank's ``value``; returns on no rank before all have called it."""
        if self.size == 1:
            return [value]
        import torch
        import torch.distributed as dist

        values = [torch.zeros(1, dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
        return [float(each) for each in values]

    def barrier(self) -> None:
        self.gather(0.0)

    def timed(self, act: Callable[[], object]) -> float:
        """Seconds that the slowest rank takes, all starting together."""
        self.barrier()
        started = time.perf_counter()
        act()
        return max(self.gather(time.perf_counter() - started))

    def close(self) -> None:
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()
