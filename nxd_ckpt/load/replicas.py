"""Data-parallel replicas loading together: what all of them want, each verifies and reads a share of.

Verifying is always shared out where the replicas want the same leaves: a digest need not be compared twice. Reading is
shared, and what was read broadcast through gloo on the host, where storage is slow enough for that to be faster.
"""

from __future__ import annotations

import heapq
import json
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch

from nxd_ckpt import effects, errors
from nxd_ckpt.coordination.agreement import Agreement, on_all
from nxd_ckpt.core.closing import Closing
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.formats.tensors import Assembly, byte_view, itemsize
from nxd_ckpt.tag.reading import Leaf

logger = logging.getLogger("nxd_ckpt")

FAST = 2**30
"""Bytes per second of reading from which on a broadcast is not even tried."""
WORTH_IT = 256 * 2**20
"""Bytes that replicas have in common from which on it pays to measure."""
_PROBE = 8 * 2**20
_PROBE_SECONDS = 30.0
"""Replicas that cannot be joined for a measurement by then read for themselves: a network may have no way."""
_CHUNK = 256 * 2**20
"""Bytes that are broadcast at once, at most: a timeout is for what makes no progress, not for what is large."""


class ReplicaShares:
    """Who of the replicas of ``topology`` verifies, and may read, which of the leaves that all of them want.

    ``leaves`` are (global name, leaf), in one order on all replicas. ``nbytes`` is what they have to verify together.
    """

    def __init__(self, topology: Topology, leaves: Sequence[tuple[str, Leaf]]) -> None:
        self.ranks = topology.replicas(topology.coordinates, expert=topology.ep > 1)
        self.place = self.ranks.index(topology.rank)
        sizes = dict(_record(leaf) for _, leaf in leaves)
        owners = dict(zip(sizes, _balanced(list(sizes.values()), len(self.ranks)), strict=True))
        # By identity: what this rank alone wants, a ZeRO-1 shard, may be equal to a leaf that all want.
        self._owners = {id(leaf): owners[_record(leaf)[0]] for _, leaf in leaves}
        self.nbytes = sum(sizes.values())
        self.digest = sha256(repr((self.ranks, leaves)).encode()).hexdigest()

    def owner(self, leaf: Leaf) -> int | None:
        """The place in ``ranks`` of who reads it; None for what this rank alone wants."""
        return self._owners.get(id(leaf))

    def is_verified_here(self, leaf: Leaf) -> bool:
        return self.owner(leaf) in (None, self.place)


def agree_on_shares(agreement: Agreement, shares: ReplicaShares | None, terms: Any = None) -> bool:
    """Whether the members of every group of replicas want the same leaves, so that none is left out.

    ``terms`` (JSON) are what else must be the same on all members for one to rely on another. Nobody shares where a
    rank is known to want others than its replicas: ``shares`` None.
    """
    own = None if shares is None else [shares.ranks[0], [len(shares.ranks), shares.digest, terms]]
    words = agreement.gather(own) or []
    if None in words:
        return bool(agreement.broadcast(False))
    groups: dict[int, list[Any]] = {}
    for leader, word in words:
        groups.setdefault(leader, []).append(word)
    return bool(agreement.broadcast(all(found == [found[0]] * found[0][0] for found in groups.values())))


class Broadcast(Closing):
    """The replicas as a gloo group of their own, until it is closed. Construction is collective over them.

    A member that closes it early, or dies, makes :meth:`fill` fail on the others at once.

    Raises:
        CheckpointError: they could not be joined.
    """

    def __init__(self, agreement: Agreement, ranks: Sequence[int], timeout: float) -> None:
        import torch.distributed as dist

        self._ranks, self._place = list(ranks), list(ranks).index(agreement.rank)
        store = agreement.store(f"replicas/{ranks[0]}")
        try:
            gloo: Any = getattr(dist, "ProcessGroupGloo")  # noqa: B009 (torch does not declare what it exports)
            self._gloo = gloo(store, self._place, len(self._ranks), timedelta(seconds=timeout))
            self._gloo.barrier().wait()  # who leaves before another has connected to it would make that one fail
        except Exception as error:
            raise CheckpointError(
                f"rank {agreement.rank} could not join the replicas {self._ranks[:8]} to share the reading: "
                f"{_first_line(error)}. GLOO_SOCKET_IFNAME names the network interface to use; share_reads=False does "
                "without"
            ) from error

    def close(self) -> None:
        """Leave the group. Safe to call again."""
        self._gloo = None

    def fill(self, out: torch.Tensor, owner: int, read: Callable[[], None]) -> None:
        """Fill the contiguous CPU tensor ``out`` on all members: the one at place ``owner`` by ``read()``.

        Raises:
            CheckpointError: what ``read`` raised there, on all members; or one of them is gone.
        """
        error: Exception | None = None
        if owner == self._place:
            try:
                read()
            except Exception as problem:
                error = problem
        told = self._tell(b"" if error is None else json.dumps(errors.to_wire(error)).encode(), owner)
        if error is not None:
            raise error
        if told:
            name, message = json.loads(told)
            raise errors.from_wire(name, message, self._ranks[owner])
        if out.numel():
            # As bytes: gloo lacks some dtypes.
            self._send(torch.frombuffer(byte_view(out), dtype=torch.uint8), owner)

    def rate(self) -> float:
        """Bytes per second of one broadcast, measured."""
        block = torch.zeros(_PROBE, dtype=torch.uint8)
        self._send(block, 0)
        started = effects.monotonic()
        self._send(block, 0)
        return _PROBE / max(effects.monotonic() - started, 1e-9)

    def _tell(self, word: bytes, owner: int) -> bytes:
        """The owner's ``word``, on all members."""
        length = torch.tensor([len(word)])
        self._send(length, owner)
        if not length.item():
            return b""
        memory = bytearray(word or int(length.item()))
        self._send(torch.frombuffer(memory, dtype=torch.uint8), owner)
        return bytes(memory)

    def _send(self, block: torch.Tensor, owner: int) -> None:
        import torch.distributed as dist

        options: Any = getattr(dist, "BroadcastOptions")()  # noqa: B009
        options.rootRank, options.rootTensor = owner, 0
        try:
            for start in range(0, len(block), _CHUNK):
                self._gloo.broadcast([block[start : start + _CHUNK]], options).wait()
        except RuntimeError as error:
            # Gloo passes blocks on from member to member: one that waits for this one must not wait in vain.
            self.close()
            # Not a PeerTimeout: all ranks that live are still in step, and say so to each other next.
            raise CheckpointError(
                f"rank {self._ranks[self._place]} lost the replicas {self._ranks[:8]} that it shares the reading with: "
                f"one of them failed or is gone, look at its log ({_first_line(error)})"
            ) from error


def open_broadcast(
    agreement: Agreement, shares: ReplicaShares, wanted: bool | None, read_rate: float, timeout: float
) -> Broadcast | None:
    """The group through which replicas give each other what they read; None where each reads for itself.

    ``wanted`` decides; None is for measuring: ``read_rate`` is this rank's (bytes per second, inf if it is not known),
    against a broadcast and the reading of a share. Every rank of the job calls it, and all get the same: where they
    want different things, False goes before True, and True before None.

    Raises:
        CheckpointError: replicas that are wanted to share could not be joined; on all ranks.
    """
    words = agreement.gather([wanted, read_rate, shares.nbytes, len(shares.ranks)])
    decision = agreement.broadcast(None if words is None else _decision(words))
    if decision == "measure":
        rates = agreement.gather(_broadcast_rate(agreement, shares, timeout))
        decision = agreement.broadcast(None if words is None or rates is None else _measured(words, min(rates)))
    if decision == "read":
        return None
    return on_all(agreement, lambda: Broadcast(agreement, shares.ranks, timeout))


def _decision(words: Sequence[Any]) -> str:
    """"share", "read" (each for itself) or "measure", given what every rank wants and knows."""
    wanted, rates, nbytes, sizes = zip(*words, strict=True)
    if sizes[0] == 1 or False in wanted:
        return "read"
    if True in wanted:
        return "share"
    return "measure" if min(rates) < FAST and max(nbytes) >= WORTH_IT else "read"


def _measured(words: Sequence[Any], broadcast_rate: float) -> str:
    """"share" or "read": the slowest rank's reading of all, against that of its share and a broadcast of all."""
    read_rate, size = min(word[1] for word in words), words[0][3]
    saved = (1 - 1 / size) / read_rate
    return "share" if broadcast_rate and 1 / broadcast_rate < saved else "read"


def _broadcast_rate(agreement: Agreement, shares: ReplicaShares, timeout: float) -> float:
    """Bytes per second of a broadcast; 0 where there can be none."""
    try:
        # Half of what rank 0 waits for this rank's word.
        with Broadcast(agreement, shares.ranks, min(timeout / 2, _PROBE_SECONDS)) as group:
            return group.rate()
    except CheckpointError as error:
        logger.warning("every replica reads everything itself: %s", error)
        return 0.0


def _record(leaf: Leaf) -> tuple[Any, int]:
    """What is verified as one, and its bytes: for a whole tensor the record that it, perhaps with others, views."""
    if isinstance(leaf, Assembly):
        return leaf, leaf.numel * itemsize(leaf.dtype)
    return (leaf.file, leaf.storage.offset), leaf.storage.nbytes


def _balanced(nbytes: Sequence[int], n: int) -> list[int]:
    """Which of ``n`` members gets each item: the largest first, each to who has the least so far.

    So one that is larger than the others' shares (an embedding) is a share by itself.
    """
    owners = [0] * len(nbytes)
    members = [(0, member) for member in range(n)]
    for index in sorted(range(len(nbytes)), key=lambda index: -nbytes[index]):
        held, owners[index] = members[0]
        heapq.heapreplace(members, (held + nbytes[index], owners[index]))
    return owners


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
