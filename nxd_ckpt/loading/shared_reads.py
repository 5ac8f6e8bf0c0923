"""Reading that replicas share: each reads a share of what all load ahead, and sends it to the others, in turns.

Data goes through gloo on the host. By default it is shared where each read goes over a network: in a store.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch

from nxd_ckpt import errors
from nxd_ckpt.coordination.agreement import Agreement, on_all
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, ReplicaLost
from nxd_ckpt.formats.memory import byte_view
from nxd_ckpt.loading.overwriting import Delivery, Fill, Seen
from nxd_ckpt.loading.shares import ReplicaGroup, ReplicaShares
from nxd_ckpt.storage.base import Closing, Storage
from nxd_ckpt.tag.reading import Leaf, LeafReader

WORTH_IT = 256 * 2**20
"""Bytes that replicas must have in common to share the reading by default: joining takes its time."""
_JOINING = 30.0
"""Seconds for joining replicas that were not told to share; after it they read for themselves, as the network may have
no route.
"""
_CHUNK = 256 * 2**20
"""Maximum bytes of one broadcast: a timeout is for lack of progress, not for size."""
_AHEAD = 64 * 2**20
"""Bytes of tensors, for each replica, that wait to be sent or received while their owners read them."""


class Broadcast(Closing):
    """A group of replicas as a gloo group of its own, until it is closed. Construction is collective over them.

    If a member closes it early, or dies, `fill` fails on the others at once.

    Raises:
        CheckpointError: they could not be joined.
    """

    def __init__(self, agreement: Agreement, ranks: Sequence[int], place: int, timeout: float) -> None:
        import torch.distributed as dist

        self._ranks = list(ranks)
        self._place = place
        store = agreement.store(f"replicas/{sha256(repr(self._ranks).encode()).hexdigest()[:32]}")
        try:
            gloo: Any = getattr(dist, "ProcessGroupGloo")  # noqa: B009 (torch does not declare what it exports)
            self._gloo = gloo(store, self._place, len(self._ranks), timedelta(seconds=timeout))
            self._gloo.barrier().wait()  # leaving before another member has connected would make that member fail
        except Exception as error:
            raise CheckpointError(
                f"rank {ranks[place]} could not join the replicas {self._ranks[:8]} to share the reading: "
                f"{_first_line(error)}. Set GLOO_SOCKET_IFNAME to the network interface to use, or pass "
                "share_reads=False"
            ) from error

    def close(self) -> None:
        """Leave the group. Safe to call again."""
        self._gloo = None

    def fill(self, out: torch.Tensor, owner: int, read: Callable[[], None]) -> None:
        """Fill the contiguous CPU tensor ``out`` on all members: the one at place ``owner`` calls ``read``.

        Raises:
            CheckpointError: the error of ``read`` there, on all members.
            ReplicaLost: one of them is gone.
        """
        error: Exception | None = None
        if owner == self._place:
            try:
                read()
            except Exception as problem:
                error = problem
        failure = self._share_message(b"" if error is None else json.dumps(errors.to_wire(error)).encode(), owner)
        if error is not None:
            raise error
        if failure:
            name, message = json.loads(failure)
            raise errors.from_wire(name, message, self._ranks[owner])
        if out.numel():
            # As bytes: gloo lacks some dtypes.
            self._send(torch.frombuffer(byte_view(out), dtype=torch.uint8), owner)

    def _share_message(self, message: bytes, owner: int) -> bytes:
        """Return the owner's ``message`` on all members."""
        length = torch.tensor([len(message)])
        self._send(length, owner)
        if not length.item():
            return b""
        memory = bytearray(message or int(length.item()))
        self._send(torch.frombuffer(memory, dtype=torch.uint8), owner)
        return bytes(memory)

    def _send(self, block: torch.Tensor, owner: int) -> None:
        import torch.distributed as dist

        options: Any = getattr(dist, "BroadcastOptions")()  # noqa: B009
        options.rootRank = owner
        options.rootTensor = 0
        try:
            for start in range(0, len(block), _CHUNK):
                self._gloo.broadcast([block[start : start + _CHUNK]], options).wait()
        except RuntimeError as error:
            # Gloo passes blocks from member to member: a member that waits for this one must not wait forever.
            self.close()
            # Not a PeerTimeout: all living ranks are still in step, and agree on the failure next.
            raise ReplicaLost(
                f"rank {self._ranks[self._place]} lost the replicas {self._ranks[:8]} that it shares the reading with: "
                f"one of them failed or is gone, look at its log ({_first_line(error)})"
            ) from error


class SharedReads(Closing):
    """The reads of this rank's load, in turns that all replicas take in one order (`overwriting.Reads`).

    What this rank owns, or loads alone, is begun at once; in its turn, it is awaited and sent. So all members of a
    group read at the same time, a bounded number of bytes ahead of what is sent. An error waits for this rank's next
    turn as an owner, for all to raise it. Construction is collective: all groups are joined.

    Raises:
        CheckpointError: replicas could not be joined.
    """

    def __init__(self, agreement: Agreement, shares: ReplicaShares, timeout: float) -> None:
        self.requested: int = 0
        self._shares = shares
        self._settled = 0
        self._turns = deque[_Turn]()
        self._ahead = 0
        self._most_ahead = _AHEAD * max((len(group.ranks) for group in shares.groups), default=1)
        self._error: Exception | None = None
        with ExitStack() as groups:
            self._broadcasts = [
                groups.enter_context(Broadcast(agreement, group.ranks, group.place, timeout)) for group in shares.groups
            ]
            self._open = groups.pop_all()

    def close(self) -> None:
        """Leave the groups. Safe to call again."""
        self._open.close()

    def delivery(self, reader: LeafReader, begin: Fill, saw: Seen) -> Delivery:
        """Return what fills live tensors, on all replicas together; ``begin`` starts a read through ``reader``."""
        self._reader = reader
        self._begin = begin
        return Delivery(self, self.fill, saw)

    def fill(self, leaf: Leaf, out: torch.Tensor) -> None:
        """Start to fill ``out`` on all replicas that have the leaf in common."""
        group = self._shares.group(leaf)
        mark = 0
        if self._shares.is_verified_here(leaf) and self._error is None:
            try:
                self._begin(leaf, out)
                mark = self._reader.requested
            except Exception as error:
                self._error = error
        self._turns.append(_Turn(out, group, self._shares.owner(leaf), mark))
        self.requested += 1
        self._ahead += out.nbytes
        while self._ahead > self._most_ahead and len(self._turns) > 1:
            self._take_turn()

    def wait(self, requested: int) -> None:
        """Return when the first ``requested`` tensors are filled. Raises their errors."""
        while self._settled < requested:
            self._take_turn()

    def finish(self) -> None:
        """Return when all tensors are filled, and verified if requested. Raises their errors."""
        self.wait(self.requested)
        self._complete(0)
        self._reader.finish()

    def _take_turn(self) -> None:
        out, group, owner, mark = self._turns.popleft()
        self._settled += 1
        self._ahead -= out.nbytes
        if group is None or owner is None:
            self._complete(mark)
            return
        self._broadcasts[self._shares.groups.index(group)].fill(out, owner, partial(self._complete, mark))
        if owner != group.place:
            self._reader.done.add(out.nbytes)

    def _complete(self, mark: int) -> None:
        """Return when this rank's reads up to ``mark`` are complete."""
        if self._error is not None:  # reads after it were dropped
            raise self._error
        self._reader.wait(mark)


def delivery_of(reader: LeafReader, begin: Fill, reads: SharedReads | None, saw: Seen) -> Delivery:
    """Return what fills live tensors by ``begin``, which starts a read through ``reader``, and shared ``reads``.

    ``saw`` is called as by `Delivery`.
    """
    return Delivery(reader, begin, saw) if reads is None else reads.delivery(reader, begin, saw)


class _Turn(NamedTuple):
    """A tensor being filled: by the member ``owner`` of a group, or by this rank alone. ``mark`` is for its reader."""

    out: torch.Tensor
    group: ReplicaGroup | None
    owner: int | None
    mark: int


def open_shared_reads(
    agreement: Agreement, shares: ReplicaShares, chosen: bool | None, storage: Storage, timeout: float
) -> SharedReads | None:
    """Return the reads that replicas share; None if each reads for itself. Collective.

    ``chosen`` decides; None shares what comes from an object store, if it is much. All ranks get the same result: if
    they pass different values, False goes before True, and True before None.

    Raises:
        CheckpointError: replicas that must share could not be joined; on all ranks.
    """
    pays_off = not storage.renames and shares.nbytes >= WORTH_IT
    requests = agreement.gather([chosen, pays_off, shares.saving])
    decision = agreement.broadcast(None if requests is None else _decision(requests))
    if decision == "read":
        return None
    if decision == "share":
        return on_all(agreement, lambda: SharedReads(agreement, shares, timeout))
    try:
        return on_all(agreement, lambda: SharedReads(agreement, shares, min(timeout / 2, _JOINING)))
    except CheckpointError as error:
        logger.warning("every replica reads everything itself: %s", error)
        return None


def _decision(requests: Sequence[Any]) -> str:
    """Return "share", "read" (each for itself) or "try" (share if that is possible), from the requests of all ranks."""
    chosen, pays_off, savings = zip(*requests, strict=True)
    if not any(savings) or False in chosen:
        return "read"
    if True in chosen:
        return "share"
    return "try" if any(pays_off) else "read"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
