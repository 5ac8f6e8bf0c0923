"""Shared loading of data-parallel replicas: each verifies and reads a share of the leaves that all load.

Verifying is always shared if the replicas load the same leaves: a digest need not be compared twice. Reading is
shared, and the data broadcast through gloo on the host, if storage is slow enough for that to be faster.
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
"""Reading speed (bytes per second) from which on no broadcast is tried."""
WORTH_IT = 256 * 2**20
"""Bytes that replicas must have in common for a measurement to pay off."""
_PROBE = 8 * 2**20
_PROBE_SECONDS = 30.0
"""Time limit for joining replicas for a measurement; after it they read for themselves, as the network may have no
route.
"""
_CHUNK = 256 * 2**20
"""Maximum bytes of one broadcast: a timeout is for lack of progress, not for size."""


class ReplicaShares:
    """Assignment of the leaves that all replicas of ``topology`` load to the replica that verifies, and may read, each.

    ``leaves`` are (global name, leaf), in one order on all replicas. ``nbytes`` is the total to verify.
    """

    def __init__(self, topology: Topology, leaves: Sequence[tuple[str, Leaf]]) -> None:
        self.ranks = topology.replicas(topology.coordinates, expert=topology.ep > 1)
        self.place = self.ranks.index(topology.rank)
        sizes = dict(_record(leaf) for _, leaf in leaves)
        owners = dict(zip(sizes, _balanced(list(sizes.values()), len(self.ranks)), strict=True))
        # By identity: a leaf that only this rank loads, a ZeRO-1 shard, may equal a leaf that all load.
        self._owners = {id(leaf): owners[_record(leaf)[0]] for _, leaf in leaves}
        self.nbytes = sum(sizes.values())
        self.digest = sha256(repr((self.ranks, leaves)).encode()).hexdigest()

    def owner(self, leaf: Leaf) -> int | None:
        """Return the place in ``ranks`` of the replica that reads it; None for leaves that only this rank loads."""
        return self._owners.get(id(leaf))

    def is_verified_here(self, leaf: Leaf) -> bool:
        return self.owner(leaf) in (None, self.place)


def agree_on_shares(agreement: Agreement, shares: ReplicaShares | None, terms: Any = None) -> bool:
    """Return whether the members of every group of replicas load the same leaves, so that none is left out. Collective.

    ``terms`` (JSON) must also be equal on all members for one to rely on another. None as ``shares`` means that this
    rank
    loads other leaves than its replicas: then nobody shares.
    """
    own = None if shares is None else [shares.ranks[0], [len(shares.ranks), shares.digest, terms]]
    gathered = agreement.gather(own) or []
    if None in gathered:
        return bool(agreement.broadcast(False))
    groups: dict[int, list[Any]] = {}
    for leader, summary in gathered:
        groups.setdefault(leader, []).append(summary)
    return bool(agreement.broadcast(all(group == [group[0]] * group[0][0] for group in groups.values())))


class Broadcast(Closing):
    """The replicas as a gloo group of their own, until it is closed. Construction is collective over them.

    If a member closes it early, or dies, `fill` fails on the others at once.

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
            self._gloo.barrier().wait()  # leaving before another member has connected would make that member fail
        except Exception as error:
            raise CheckpointError(
                f"rank {agreement.rank} could not join the replicas {self._ranks[:8]} to share the reading: "
                f"{_first_line(error)}. Set GLOO_SOCKET_IFNAME to the network interface to use, or pass "
                "share_reads=False"
            ) from error

    def close(self) -> None:
        """Leave the group. Safe to call again."""
        self._gloo = None

    def fill(self, out: torch.Tensor, owner: int, read: Callable[[], None]) -> None:
        """Fill the contiguous CPU tensor ``out`` on all members: the one at place ``owner`` calls ``read``.

        Raises:
            CheckpointError: the error of ``read`` there, on all members; or one of them is gone.
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

    def rate(self) -> float:
        """Measure bytes per second of one broadcast."""
        block = torch.zeros(_PROBE, dtype=torch.uint8)
        self._send(block, 0)
        started = effects.monotonic()
        self._send(block, 0)
        return _PROBE / max(effects.monotonic() - started, 1e-9)

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
        options.rootRank, options.rootTensor = owner, 0
        try:
            for start in range(0, len(block), _CHUNK):
                self._gloo.broadcast([block[start : start + _CHUNK]], options).wait()
        except RuntimeError as error:
            # Gloo passes blocks from member to member: a member that waits for this one must not wait forever.
            self.close()
            # Not a PeerTimeout: all living ranks are still in step, and agree on the failure next.
            raise CheckpointError(
                f"rank {self._ranks[self._place]} lost the replicas {self._ranks[:8]} that it shares the reading with: "
                f"one of them failed or is gone, look at its log ({_first_line(error)})"
            ) from error


def open_broadcast(
    agreement: Agreement, shares: ReplicaShares, wanted: bool | None, read_rate: float, timeout: float
) -> Broadcast | None:
    """Return the group through which replicas share their reads; None if each reads for itself. Collective.

    ``wanted`` decides; None measures: ``read_rate`` is this rank's (bytes per second, inf if unknown), compared with a
    broadcast and the reading of a share. All ranks get the same result: if they pass different values, False goes
    before
    True, and True before None.

    Raises:
        CheckpointError: replicas that must share could not be joined; on all ranks.
    """
    requests = agreement.gather([wanted, read_rate, shares.nbytes, len(shares.ranks)])
    decision = agreement.broadcast(None if requests is None else _decision(requests))
    if decision == "measure":
        rates = agreement.gather(_broadcast_rate(agreement, shares, timeout))
        decision = agreement.broadcast(None if requests is None or rates is None else _measured(requests, min(rates)))
    if decision == "read":
        return None
    return on_all(agreement, lambda: Broadcast(agreement, shares.ranks, timeout))


def _decision(requests: Sequence[Any]) -> str:
    """Return "share", "read" (each for itself) or "measure", from the requests of all ranks."""
    wanted, rates, nbytes, sizes = zip(*requests, strict=True)
    if sizes[0] == 1 or False in wanted:
        return "read"
    if True in wanted:
        return "share"
    return "measure" if min(rates) < FAST and max(nbytes) >= WORTH_IT else "read"


def _measured(requests: Sequence[Any], broadcast_rate: float) -> str:
    """Return "share" or "read": compare the slowest rank reading all with reading its share and a broadcast of all."""
    read_rate, size = min(request[1] for request in requests), requests[0][3]
    saved = (1 - 1 / size) / read_rate
    return "share" if broadcast_rate and 1 / broadcast_rate < saved else "read"


def _broadcast_rate(agreement: Agreement, shares: ReplicaShares, timeout: float) -> float:
    """Measure bytes per second of a broadcast; 0 if it fails."""
    try:
        # Half the time that rank 0 waits for this rank.
        with Broadcast(agreement, shares.ranks, min(timeout / 2, _PROBE_SECONDS)) as group:
            return group.rate()
    except CheckpointError as error:
        logger.warning("every replica reads everything itself: %s", error)
        return 0.0


def _record(leaf: Leaf) -> tuple[Any, int]:
    """Return the unit of verification and its bytes.

    For a whole tensor the record that it, perhaps with others, views.
    """
    if isinstance(leaf, Assembly):
        return leaf, leaf.numel * itemsize(leaf.dtype)
    return (leaf.file, leaf.storage.offset), leaf.storage.nbytes


def _balanced(nbytes: Sequence[int], n: int) -> list[int]:
    """Return the member, of ``n``, that gets each item: the largest first, each to the member with the least so far.

    So one that is larger than the others' shares (an embedding) is a share by itself.
    """
    owners = [0] * len(nbytes)
    members = [(0, member) for member in range(n)]
    for index in sorted(range(len(nbytes)), key=lambda index: -nbytes[index]):
        load, owners[index] = members[0]
        heapq.heapreplace(members, (load + nbytes[index], owners[index]))
    return owners


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
