"""This process's place among those of the launcher, and its connections to the others."""

# For mypy: torch.distributed does not declare what it exports.
# mypy: disable-error-code="attr-defined"
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from nxd_ckpt.emulation.exchange import GroupMembers
from nxd_ckpt.errors import InvalidArgument

TIMEOUT_VARIABLE = "NXD_CKPT_EMULATION_TIMEOUT"
PORT_VARIABLE = "NXD_CKPT_EMULATION_PORT"
_DEFAULT_TIMEOUT_SECONDS = 600.0


@dataclass
class World:
    """This process among its peers. ``groups`` in torch-xla's sense are lists of global ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    store: Store
    timeout: timedelta
    _peers: dict[tuple[int, ...], GroupMembers] = field(default_factory=dict, repr=False)

    def peers(self, groups: Sequence[Sequence[int]] | None = None) -> GroupMembers:
        """Return this rank's group among ``groups``; all ranks if there are none.

        Joined at the first use, then kept.

        Raises:
            InvalidArgument: this rank is in none of the groups.
        """
        for group in groups or [range(self.size)]:
            if self.rank in group:
                ranks = tuple(int(rank) for rank in group)
                if ranks not in self._peers:
                    store = PrefixStore("nxd_ckpt.emulation/" + ",".join(map(str, ranks)), self.store)
                    self._peers[ranks] = GroupMembers(store, ranks, self.rank, self.timeout)
                return self._peers[ranks]
        raise InvalidArgument(f"collective on rank {self.rank}: it is in none of the groups {groups}")


def world_from_environment() -> World:
    """Return the launcher's world; a world of one without a launcher.

    Raises:
        InvalidArgument: there are several processes, but the launcher did not start them.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size > 1 and PORT_VARIABLE not in os.environ:
        raise InvalidArgument(
            f"CPU-XLA emulation of {size} ranks: {PORT_VARIABLE} is not set; start the script with "
            f"python -m nxd_ckpt.emulation --nproc {size}"
        )
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT_SECONDS)))
    return World(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        # Not at MASTER_PORT, which is the script's: a store that outlived its process groups would hand the
        # addresses of the old group to the next one.
        store=TCPStore(
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            int(os.environ.get(PORT_VARIABLE, 0)),
            size,
            is_master=rank == 0,
            timeout=timeout,
        ),
        timeout=timeout,
    )
