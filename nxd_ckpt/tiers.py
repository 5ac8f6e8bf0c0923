"""The places that one Checkpointer saves to: the first, and those that its tags are copied to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from nxd_ckpt.core.retention import Rule
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from nxd_ckpt.runtime.checkpointer_options import CheckpointerOptions
from nxd_ckpt.runtime.coordination.agreement import Agreement, decided_by_rank0
from nxd_ckpt.runtime.tier import Tier, checked_tiers
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import StrPath

if TYPE_CHECKING:
    from nxd_ckpt.convert.drain import Drains

_NEWS = 10.0
"""Seconds after which ranks that wait for a tier hear of rank 0 again."""


class Tiers:
    """What a job's saves go to. On rank 0, from the first save on, its ``drains`` fill all tiers but the first."""

    def __init__(
        self, path: StrPath | None, tiers: Sequence[Tier] | None, first: Storage | None, options: CheckpointerOptions
    ) -> None:
        """``first`` is the first tier's storage, where that is not what its path names. Raises InvalidArgument."""
        self.tiers = checked_tiers(path, tiers)
        opened = (tier.open(options.durable, options.storage_options) for tier in self.tiers[first is not None :])
        self.storages = [*([] if first is None else [first]), *opened]
        self.drains: Drains | None = None
        self._timeout = options.timeout

    def __len__(self) -> int:
        return len(self.tiers)

    @property
    def first(self) -> Storage:
        """Where every save is written."""
        return self.storages[0]

    @property
    def rules(self) -> tuple[Rule, ...] | None:
        """Which tags the first keeps, where a save does not say it."""
        return self.tiers[0].rules

    def claim(self, topology: Topology, agreement: Agreement | None) -> None:
        """Rank 0: take the leases of all tiers but the first, as far as they can be reached; all ranks call it.

        Raises, on every rank that is joined by the ``agreement``:
            DirectoryInUse: another live job writes to one of the tiers.
            InvalidArgument: a tier lies inside a tag.
        """
        if len(self.tiers) == 1:
            return

        def open_drains() -> None:
            from nxd_ckpt.convert.drain import Drains  # it brings all tools along

            self.drains = Drains(self.tiers, self.storages, self._timeout)

        if agreement is not None:
            decided_by_rank0(agreement, open_drains)
        elif topology.rank == 0:
            open_drains()

    def resume(self) -> None:
        """Let the drains go on where those of the last launch ended."""
        if self.drains is not None:
            with suppress(OSError):  # the first save meets it too
                self.drains.resume()

    def require(self, tier: object) -> None:
        """Raise InvalidArgument unless there is a tier of that number."""
        if not isinstance(tier, int) or tier not in range(len(self.tiers)):
            raise InvalidArgument(f"tier={tier!r}: expected a number from 0, the first tier, to {len(self.tiers) - 1}")

    def wait(self, tier: int, agreement: Agreement | None) -> None:
        """Until ``tier``, which is not the first, has all that it is to have; all ranks call it.

        Raises, on all ranks, what failed last; CheckpointError where no process group tells the others of it.
        """
        if agreement is None:
            raise CheckpointError(
                f"wait(tier={tier}) needs torch.distributed to be initialised: rank 0 copies to that tier, and tells "
                "the others through the process group"
            )
        # Rank 0 speaks from time to time: it is alive, however long the copy takes.
        within = min(self._timeout / 4, _NEWS)
        while not decided_by_rank0(agreement, lambda: self.drains is None or self.drains.finished(tier, within)):
            pass

    def close(self, grace: float | None) -> None:
        """Give back all tiers but the first, once they have what they are to have; with a ``grace``, without it and
        within so many seconds."""
        drains, self.drains = self.drains, None
        if drains is not None:
            drains.close(grace)
