"""Data-parallel replicas loading together: what all of them want, each proves and reads a share of.

Proving is always shared out where the replicas want the same leaves: a digest need not be compared twice. Reading is
shared, and what was read broadcast through gloo on the host, where storage is slow enough for that to be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import CheckpointError, PeerTimeout
from nxd_ckpt.formats.tensors import byte_view, itemsize
from nxd_ckpt.formats.xser import balance
from nxd_ckpt.runtime.agreement import Agreement
from nxd_ckpt.runtime.reading import Leaf

FAST = 2**30
"""Bytes per second of reading from which on a broadcast is not even tried."""
WORTH_IT = 256 * 2**20
"""Bytes that replicas have in common from which on it pays to measure."""
_PROBE = 8 * 2**20


class Shares:
    """Who of the replicas of ``topology`` proves, and may read, which of the leaves that all of them want.

    ``leaves`` are (global name, leaf), in one order on all replicas.
    """

    def __init__(self, topology: Topology, leaves: Sequence[tuple[str, Leaf]]) -> None:
        self.ranks = topology.replicas(topology.coordinates, expert=topology.ep > 1)
        self.place = self.ranks.index(topology.rank)
        self.nbytes = [_nbytes(leaf) for _, leaf in leaves]
        self._owners = {
            id(leaf): owner
            for (_, leaf), owner in zip(leaves, balance(self.nbytes, len(self.ranks)), strict=True)
        }
        self.digest = sha256(repr(leaves).encode()).hexdigest()

    def owner(self, leaf: Leaf) -> int | None:
        """The place in ``ranks`` of who reads it; None for what this rank alone wants."""
        return self._owners.get(id(leaf))

    def is_proved_here(self, leaf: Leaf) -> bool:
        return self.owner(leaf) in (None, self.place)


def agree_on_shares(agreement: Agreement, shares: Shares) -> bool:
    """Whether the members of every group of replicas want the same leaves, so that none is left out."""
    words = agreement.gather([shares.ranks[0], shares.digest])
    wanted: dict[int, set[str]] = {}
    for leader, digest in words or ():
        wanted.setdefault(leader, set()).add(digest)
    return bool(agreement.broadcast(all(len(digests) == 1 for digests in wanted.values())))


class Broadcast:
    """The replicas as a gloo group of their own. Construction is collective over them; raises PeerTimeout."""

    def __init__(self, agreement: Agreement, ranks: Sequence[int], timeout: float) -> None:
        import torch.distributed as dist

        gloo: Any = getattr(dist, "ProcessGroupGloo")  # noqa: B009 (torch does not declare what it exports)
        self._ranks, self._place = list(ranks), list(ranks).index(agreement.rank)
        store = agreement.store(f"replicas/{ranks[0]}")
        with self._losing():
            self._gloo = gloo(store, self._place, len(self._ranks), timedelta(seconds=timeout))

    def fill(self, out: torch.Tensor, owner: int, read: Callable[[], None]) -> None:
        """Fill the contiguous CPU tensor ``out`` on all members: the one at place ``owner`` by ``read()``.

        Raises:
            CheckpointError: the owner could not read it; there, its own error.
            PeerTimeout: a member is gone.
        """
        error: Exception | None = None
        if owner == self._place:
            try:
                read()
            except Exception as problem:
                error = problem
        failed = torch.tensor([error is not None], dtype=torch.uint8)
        self._send(failed, owner)
        if error is not None:
            raise error
        if failed.item():
            raise CheckpointError(f"rank {self._ranks[owner]} could not read its share; see its error")
        if out.numel():
            # As bytes: gloo lacks some dtypes.
            self._send(torch.frombuffer(byte_view(out), dtype=torch.uint8), owner)

    def rate(self) -> float:
        """Bytes per second of one broadcast, measured."""
        block = torch.zeros(_PROBE, dtype=torch.uint8)
        self._send(block, 0)
        started = time.monotonic()
        self._send(block, 0)
        return _PROBE / max(time.monotonic() - started, 1e-9)

    def _send(self, block: torch.Tensor, owner: int) -> None:
        import torch.distributed as dist

        options: Any = getattr(dist, "BroadcastOptions")()  # noqa: B009
        options.rootRank, options.rootTensor = owner, 0
        with self._losing():
            self._gloo.broadcast([block], options).wait()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerTimeout(
                f"one of the replicas {self._ranks[:8]} is gone, or did not load the same: {str(error).splitlines()[0]}"
            ) from error


def open_broadcast(
    agreement: Agreement, shares: Shares, wanted: bool | None, read_rate: float, timeout: float
) -> Broadcast | None:
    """The group through which replicas give each other what they read; None where each reads for itself.

    ``wanted`` decides; None is for measuring: ``read_rate`` is this rank's (bytes per second, inf if it is not known),
    against a broadcast and the reading of a share. Every rank of the job calls it, and all get the same.
    """
    words = agreement.gather([read_rate, sum(shares.nbytes), len(shares.ranks)])
    slowest, most, size = (min(w[0] for w in words), max(w[1] for w in words), words[0][2]) if words else (0.0, 0, 1)
    tried = wanted if wanted is not None else slowest < FAST and most >= WORTH_IT
    if not agreement.broadcast(bool(tried) and size > 1):
        return None
    group = Broadcast(agreement, shares.ranks, timeout)
    if wanted:
        return group
    rates = agreement.gather(group.rate())
    faster = rates is not None and 1 / min(rates) + 1 / (size * slowest) < 1 / slowest
    return group if agreement.broadcast(faster) else None


def _nbytes(leaf: Leaf) -> int:
    return leaf.numel * itemsize(leaf.dtype)
