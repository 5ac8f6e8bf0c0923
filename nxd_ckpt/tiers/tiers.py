"""The places that one Checkpointer saves to: the first tier, and those to which its tags are copied."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from nxd_ckpt.commit.tier import Tier, checked_tiers
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, decided_by_rank0
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.core.retention_rules import Rule
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from nxd_ckpt.options.checkpointer_options import CheckpointerOptions
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.hosts.hosts_storage import HostsStorage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.transfer import StoredFile, copy_by_pieces
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.choosing import Place, settled_tags
from nxd_ckpt.tag.identity import of_latest
from nxd_ckpt.tag.union import choose_nearest
from nxd_ckpt.tiers.hosts import join

if TYPE_CHECKING:
    from nxd_ckpt.tiers.drain import Drains

T = TypeVar("T")

_NEWS = 10.0
"""Seconds after which ranks that wait for a tier hear of rank 0 again."""


class Tiers:
    """The tiers of a job's saves. On rank 0, from the first save on, ``drains`` fill all tiers but the first."""

    def __init__(
        self,
        path: StrPath | None,
        tiers: Sequence[Tier] | None,
        first: Storage | None,
        options: CheckpointerOptions,
        rules: tuple[Rule, ...] | None = None,
    ) -> None:
        """Open the tiers; ``first`` is the first one's storage, if not its path's, and ``rules`` its retention.

        Raises InvalidArgument.
        """
        self.tiers: tuple[Tier, ...] = checked_tiers(path, tiers)
        if rules is not None and self.tiers[0].rules is not None:
            raise InvalidArgument("the first tier has keep= or retain=, and so has the Checkpointer: pass one of them")
        self.rules: tuple[Rule, ...] | None = rules or self.tiers[0].rules
        """Rules of retention on the first tier, unless a save has its own."""
        opened = (tier.open(options.durable, options.storage_options) for tier in self.tiers[first is not None :])
        self.storages: list[Storage] = [*([] if first is None else [first]), *opened]
        self.place: Place | None = None
        """The path, if it may name a checkpoint itself: alone, and in no storage of the caller's."""
        if len(self.tiers) == 1 and first is None:
            where = self.first.url if isinstance(self.first, LocalStorage) else self.tiers[0].path
            self.place = where, self.tiers[0].storage_options or options.storage_options
        self.drains: Drains | None = None
        self._timeout = options.timeout

    def __len__(self) -> int:
        return len(self.tiers)

    @property
    def first(self) -> Storage:
        """Storage to which every save is written."""
        return self.storages[0]

    @property
    def _hosts(self) -> HostsStorage | None:
        """The first tier's storage, if that is each host's own."""
        return self.first if isinstance(self.first, HostsStorage) else None

    def join(self, agreement: Agreement | None) -> None:
        """Find the other hosts, if the first tier is each host's own; all ranks call this, before they use it.

        Raises, on every rank, the errors of `nxd_ckpt.tiers.hosts.join`; CheckpointError if no process group joins the
        ranks.
        """
        hosts = self._hosts
        tier = self.tiers[0]
        if hosts is None or hosts.is_joined:
            return
        if agreement is None:
            raise CheckpointError(
                f"tier {tier.name} is each host's own (per_host=True), which needs torch.distributed to be initialised "
                "with all ranks: the ranks find each other through the process group"
            )
        join(hosts, tier, agreement, self._timeout, self._copy_out)

    def _copy_out(
        self, key: str, place: int, folder: str, name: str, expected: FileEntry
    ) -> Generator[int, None, None]:
        """Copy a file of this host to a tier, on rank 0's request, see `HostsStorage.copy_out`."""
        hosts = self._hosts
        if hosts is None or place not in range(1, len(self.storages)):
            raise OSError(f"there is no tier {place}")
        target = self.storages[place]
        if not target.is_dir(folder):
            raise OSError(
                f"{target.url}/{folder}, which rank 0 made, is not there: all ranks must see all tiers, and pass the "
                "same ones"
            )
        return copy_by_pieces(StoredFile(hosts.own, key), StoredFile(target, f"{folder}/{name}"), expected)

    @contextmanager
    def joined(self, agreement: Agreement | None, *, lasting: bool) -> Iterator[None]:
        """Join the other hosts for the block, at whose end no rank reads any more; ``lasting``: for longer."""
        try:
            self.join(agreement)
            yield
        finally:
            if not lasting:
                self._leave()

    def leave(self, meet: Callable[[], Agreement | None] | None) -> None:
        """Stop serving this host's disk, after the last save, once all ranks ``meet``, so that all have left.

        Rank 0 may still clean up there, and others read its verdict. If they do not meet, it is served until the
        process ends.
        """
        with suppress(CheckpointError):
            if self.per_host and (meet is None or meet() is not None):
                self._leave()

    def have_checkpoint(self, agreement: Agreement | None, *, lasting: bool = False) -> bool:
        """Return whether any tier has a complete tag; equal on all ranks that share the ``agreement``.

        Raises PartLost, as a load would, if each of them lost files with a host.
        """

        def look() -> bool:
            has_tag = any(info.complete for storage in self.storages for info in settled_tags(storage))
            if has_tag and self.first.may_lack_files:
                of_latest(True, lambda: choose_nearest(self.storages, None))
            return has_tag

        return self.ask(agreement, look, lasting=lasting)

    def ask(self, agreement: Agreement | None, question: Callable[[], T], *, lasting: bool) -> T:
        """Return rank 0's (JSON) answer to a ``question`` about the tiers, on every rank that shares the ``agreement``.

        ``lasting`` as for `joined`.
        """
        with self.joined(agreement, lasting=lasting):
            return decided_by_rank0(agreement or SingleProcessAgreement(), question)

    @property
    def per_host(self) -> bool:
        """True if the first tier is each host's own."""
        return self._hosts is not None

    def _leave(self) -> None:
        if self._hosts is not None:
            self._hosts.leave()

    def described(self, call: str) -> str:
        """Return the ``call`` that all ranks make, with the tiers that they must have in common."""
        several = f", {len(self)} tiers" if len(self) > 1 else ""
        return call + several + (", per host" if self.per_host else "")

    def claim(self, topology: Topology, agreement: Agreement | None) -> None:
        """Find the other hosts; on rank 0, take the leases of all lower tiers that can be reached. All ranks call it.

        Raises, on every rank that is joined by the ``agreement``:
            DirectoryInUse: another live job writes to one of the tiers.
            InvalidArgument: a tier lies inside a tag.
        """
        self.join(agreement)
        if len(self.tiers) == 1:
            return

        def open_drains() -> None:
            from nxd_ckpt.tiers.drain import Drains  # it imports all tools

            self.drains = Drains(self.tiers, self.storages, self._timeout)

        if agreement is not None:
            decided_by_rank0(agreement, open_drains)
        elif topology.rank == 0:
            open_drains()

    def resume(self) -> None:
        """Let the drains continue where those of the last launch ended."""
        if self.drains is not None:
            with suppress(OSError):  # the first save meets it too
                self.drains.resume()

    def require(self, tier: object) -> None:
        """Raise InvalidArgument unless there is a tier of that number."""
        if not isinstance(tier, int) or tier not in range(len(self.tiers)):
            raise InvalidArgument(f"tier={tier!r}: expected a number from 0, the first tier, to {len(self.tiers) - 1}")

    def wait(self, tier: int, agreement: Agreement | None) -> None:
        """Wait until ``tier``, which is not the first, has all its tags; all ranks call it.

        Raises, on all ranks, the last failure; CheckpointError if no process group tells the other ranks.
        """
        if agreement is None:
            raise CheckpointError(
                f"wait(tier={tier}) needs torch.distributed to be initialised: rank 0 copies to that tier, and tells "
                "the others through the process group"
            )
        self._await(agreement, lambda drains, within: drains.finished(tier, within))

    def finish(self, meet: Callable[[], Agreement | None] | None) -> None:
        """Wait on all ranks, before `close`, until the hosts have copied their own files, however long that takes.

        All ranks ``meet`` for it, if they can; without the ranks that are gone rank 0 does what it can.
        """
        if meet is None or not self.per_host or len(self.tiers) == 1:
            return
        with suppress(CheckpointError):
            agreement = meet()
            if agreement is None:
                return
            if self.drains is not None:
                self.drains.announce()
            self._await(agreement, lambda drains, within: drains.idle(within))

    def _await(self, agreement: Agreement, is_over: Callable[[Drains, float], bool]) -> None:
        """Wait on all ranks. Rank 0, which looks, gives a sign of life from time to time."""
        within = min(self._timeout / 4, _NEWS)
        while not decided_by_rank0(agreement, lambda: self.drains is None or is_over(self.drains, within)):
            pass

    def close(self, grace: float | None) -> None:
        """Release all tiers but the first, once they have all their tags.

        With a ``grace`` copying stops, within so many seconds.
        """
        drains = self.drains
        self.drains = None
        if drains is not None:
            drains.close(grace)
