"""Agreement of all ranks on the caller's thread, through the process group's key-value store.

Never through XLA (its rendezvous gathers device tensors) and never through object collectives (they fail on the
"xla" backend). Each round costs O(ranks) messages: every rank hands its word to rank 0, rank 0 answers all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from nxd_ckpt import errors
from nxd_ckpt.errors import CheckpointError, PeerTimeout

T = TypeVar("T")


class Agreement(Protocol):
    """What the ranks need to agree: JSON values from all to rank 0, and from rank 0 to all."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, by rank, on rank 0; None elsewhere."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""

    def store(self, name: str) -> Any:
        """A c10d store of that name, for some of the ranks to meet in; never called by a process alone."""


class Alone:
    """One process that agrees with itself: a single-process job, or a tool that acts as one rank."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def store(self, name: str) -> Any:
        raise CheckpointError(f"a process alone meets nobody in {name!r}")


class StoreAgreement:
    """Agreement through a c10d store (TCPStore, FileStore, HashStore or a PrefixStore of one).

    All ranks must call the same methods in the same order. Raises PeerTimeout, naming the rank that was waited for,
    after ``timeout`` seconds without its word, or as soon as the store itself is gone.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._store = store
        self._round = 0

    def gather(self, value: Any) -> list[Any] | None:
        self._round += 1
        if self.rank != 0:
            self._put(value)
            return None
        return [value, *(self._take(rank) for rank in range(1, self.world_size))]

    def broadcast(self, value: Any) -> Any:
        self._round += 1
        if self.rank != 0:
            return json.loads(self._wait(self._key(0), 0))
        self._put(value)
        return value

    def store(self, name: str) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(f"{self._round}/{name}", self._store)

    def _put(self, value: Any) -> None:
        with _reaching_the_store(self.rank):
            self._store.set(self._key(self.rank), json.dumps(value))

    def _take(self, rank: int) -> Any:
        key = self._key(rank)
        value = json.loads(self._wait(key, rank))
        # A long job must not fill the store. Stores that cannot delete (FileStore) keep a few bytes a round.
        with suppress(RuntimeError):
            self._store.delete_key(key)
        return value

    def _wait(self, key: str, rank: int) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise PeerTimeout(
                f"rank {self.rank} waited {self.timeout:.0f} s for rank {rank}: it is gone, slow, or did not make "
                f"the same nxd_ckpt call; look at its log ({str(error).splitlines()[0]})"
            ) from error
        with _reaching_the_store(self.rank):
            value: bytes = self._store.get(key)
        return value

    def _key(self, rank: int) -> str:
        return f"{self._round}/{rank}"


def on_all(agreement: Agreement, step: Callable[[], T]) -> T:
    """Run ``step`` on every rank; if it raised on any, raise on all.

    A rank raises its own error where it has one, else that of the first rank that failed, as the same class.
    """
    own: Exception | None = None
    try:
        result = step()
    except Exception as error:
        own = error
    words = agreement.gather(None if own is None else errors.to_wire(own))
    failed = None if words is None else next(([r, *word] for r, word in enumerate(words) if word), None)
    failed = agreement.broadcast(failed)
    if own is not None:
        raise own
    if failed is not None:
        rank, name, message = failed
        raise errors.from_wire(name, message, rank)
    return result


def decided_by_rank0(agreement: Agreement, decide: Callable[[], T]) -> T:
    """Run ``decide`` on rank 0 alone and give its (JSON) result, or its error, to every rank."""
    word: Any = None
    own: Exception | None = None
    if agreement.rank == 0:
        try:
            word = {"value": decide()}
        except Exception as error:
            own = error
            word = {"error": errors.to_wire(error)}
    word = agreement.broadcast(word)
    if own is not None:
        raise own
    if "error" in word:
        name, message = word["error"]
        raise errors.from_wire(name, message, 0)
    value: T = word["value"]
    return value


@contextmanager
def _reaching_the_store(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerTimeout(
            f"rank {rank} cannot reach the process group's store, which usually lives in rank 0's process: that is "
            f"gone; look at its log ({str(error).splitlines()[0]})"
        ) from error


def agreement_for(rank: int, world_size: int, timeout: float) -> Agreement | None:
    """The agreement of a job of this size, or None where no process group joins the ranks.

    Reads ``torch.distributed`` only; the group may use any backend, its store is what counts.
    """
    if world_size == 1:
        return Alone()
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size):
        return None
    if dist.get_rank() != rank:
        raise CheckpointError(
            f"this process is rank {dist.get_rank()} of its process group, but rank {rank} of the topology given"
        )
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = PrefixStore("nxd_ckpt", _get_default_store())
    # A store outlives an agreement, and so do the words of an earlier one. How often this rank joined tells them apart,
    # without asking the others: all ranks make the same calls. The directory's name does not: where ranks mean
    # different ones, they must meet to find out.
    with _reaching_the_store(rank):
        generation = store.add(f"joined/{rank}", 1)
    return StoreAgreement(PrefixStore(str(generation), store), rank, world_size, timeout)
