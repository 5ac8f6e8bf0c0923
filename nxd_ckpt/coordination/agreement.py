"""Agreement of all ranks on the caller's thread, through the process group's key-value store.

It never uses XLA (its rendezvous gathers device tensors), nor object collectives (they fail on the "xla" backend). Each
round costs O(ranks) messages: every rank sends its word to rank 0, which answers all.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from nxd_ckpt import effects, errors
from nxd_ckpt.coordination.peers import Peers
from nxd_ckpt.coordination.waiting import pause_after
from nxd_ckpt.core.limits import shown
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, PeerTimeout, RanksDisagree, ReplicaLost, TagReplaced

T = TypeVar("T")

_own_secret = secrets.token_bytes(32)
"""Secret of a process that is alone."""

_SLICE = 1.0
"""Seconds of a wait for another rank's word, after which to check whether the word can still come."""

_LONG = 30.0
"""Seconds that rank 0 waits for another rank's call before it says so."""


class Agreement(Protocol):
    """Exchange of JSON values between the ranks: from all to rank 0, and from rank 0 to all."""

    rank: int
    world_size: int
    peers: Peers | None
    """This rank's end of the connections between the ranks' processes; None if there is none."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value, by rank, on rank 0; None elsewhere."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""

    def is_gone(self, rank: int) -> bool:
        """Return whether that rank's process is known to have ended. False does not mean that it lives."""

    def sign(self) -> None:
        """Show ranks that wait for this one that it is at work."""

    def secret_for(self, purpose: str) -> bytes:
        """Return 32 bytes that only the ranks of this job know, different for each purpose."""

    def store(self, name: str) -> Any:
        """Return a c10d store of that name for some of the ranks; never called by a process alone."""


class SingleProcessAgreement:
    """An agreement of one process with itself: a single-process job, or a tool that acts as one rank."""

    rank = 0
    world_size = 1
    peers: Peers | None = None

    def gather(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def is_gone(self, rank: int) -> bool:
        return False

    def sign(self) -> None:
        """Do nothing: nobody waits."""

    def secret_for(self, purpose: str) -> bytes:
        return hmac.digest(_own_secret, purpose.encode(), "sha256")

    def store(self, name: str) -> Any:
        raise CheckpointError(f"a single process has no other ranks to share the store {name!r} with")


class Words:
    """Words (JSON) that ranks leave for each other in a c10d store: TCPStore, FileStore, HashStore, PrefixStore.

    A wait ends when the word is there, after ``timeout`` seconds without a sign of the rank that should leave it, or as
    soon as that rank, or the store itself, is known to be ``gone``. While rank 0 waits for anything, it gives signs of
    life, so that ranks which wait for its word do not give up before it does. Any rank may give signs while it works.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        timeout: float,
        gone: Callable[[int], bool] = lambda rank: False,
        call: str | None = None,
        passed: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        """Take part in the ``call`` of that name, for errors; a long wait of rank 0 for others to make it is logged.

        ``passed`` returns whether a rank is known to have gone on without the call.
        """
        self.store: Any = store
        self._rank = rank
        self._timeout = timeout
        self._gone = gone
        self._call = call
        self._passed = passed
        self._signed = -math.inf
        self._is_logged = rank != 0 or call is None

    def leave(self, key: str, word: Any) -> None:
        """Leave a word under ``key``."""
        self._ask(self.store.set, key, json.dumps(word, default=shown))  # an error here would leave the others waiting

    def take(self, key: str, rank: int) -> Any:
        """Return and delete the word that ``rank`` leaves under ``key`` for this rank alone. Raises PeerTimeout."""
        word = self.read(key, rank)
        # A long job must not fill the store. Stores that cannot delete (FileStore) keep a few bytes a word.
        with suppress(RuntimeError):
            self.store.delete_key(key)
        return word

    def read(self, key: str, rank: int) -> Any:
        """Return the word that ``rank`` leaves under ``key``. Raises PeerTimeout, or RanksDisagree if it has passed."""
        began = since = effects.monotonic()
        sign = self._sign_of(rank)
        while not self._comes(key, began):
            if self._gone(rank) and not self.has(key):  # it may have ended after leaving the word
                raise PeerTimeout(f"rank {self._rank} waited for rank {rank}: its process ended; look at its log")
            if self._passed(rank) and not self.has(key):
                raise RanksDisagree(
                    f"rank 0 calls {self._call}, and rank {rank} has gone on without it: it is in a collective "
                    "operation of the process group that rank 0 has not reached. All ranks must make the same calls, "
                    "in the same order, and none of them inside 'if rank == 0:' or 'if accelerator.is_main_process:'"
                )
            if sign != (sign := self._sign_of(rank)):
                since = effects.monotonic()
            elif effects.monotonic() - since >= self._timeout:
                made = "make the same nxd_ckpt call" if self._call is None else f"call {self._call}, as all ranks must"
                raise PeerTimeout(
                    f"rank {self._rank} waited {self._timeout:.0f} s for rank {rank}: it is gone, slow, or did not "
                    f"{made}; look at its log"
                )
            elif not self._is_logged and effects.monotonic() - began >= _LONG:
                self._is_logged = True
                logger.warning(
                    "nxd_ckpt: rank 0 has called %s, and waits for rank %d: all ranks must make that call. It fails "
                    "after %.0f s (timeout)",
                    self._call,
                    rank,
                    self._timeout,
                )
        return json.loads(self._ask(self.store.get, key))

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``, which begins at 0, and return it; no two ranks get the same."""
        return int(self._ask(self.store.add, key, amount))

    def sign(self) -> None:
        """Show that this rank is alive and at work."""
        now = effects.monotonic()
        if now - self._signed >= _SLICE / 2:
            self._signed = now
            self.leave(_sign_key(self._rank), now)

    def _comes(self, key: str, began: float) -> bool:
        """Return whether the word comes within a slice of time; pauses grow with the time since ``began``."""
        started = effects.monotonic()
        within = min(_SLICE, self._timeout)
        if self._rank == 0:
            self.sign()
        # Not store.wait: where it times out, torch prints two warnings.
        while not self.has(key):
            now = effects.monotonic()
            if now - started >= within:
                return False
            effects.sleep(min(pause_after(now - began), within))
        return True

    def has(self, key: str) -> bool:
        """Return whether there is a word under ``key`` now."""
        return bool(self._ask(self.store.check, [key]))

    def _sign_of(self, rank: int) -> bytes | None:
        key = _sign_key(rank)
        return bytes(self._ask(self.store.get, key)) if self.has(key) else None

    def _ask(self, request: Callable[..., Any], *words: Any) -> Any:
        try:
            return request(*words)
        except RuntimeError as error:
            raise PeerTimeout(
                f"rank {self._rank} cannot reach the process group's store, which usually lives in rank 0's process: "
                f"it is gone; look at rank 0's log ({str(error).splitlines()[0]})"
            ) from error


def _sign_key(rank: int) -> str:
    return f"sign/{rank}"


class StoreAgreement:
    """Agreement through a c10d store that belongs to one call, which all ranks make.

    All ranks must call the same methods in the same order: a `broadcast` follows a `gather`. Raises PeerTimeout on all
    ranks, naming the missing rank, after ``timeout`` seconds without its word, or as soon as it is known to be gone.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout: float,
        peers: Peers | None = None,
        secret: bytes | None = None,
    ) -> None:
        self.rank: int = rank
        self.world_size: int = world_size
        self.peers: Peers | None = peers
        self._secret = secret
        self._words = Words(store, rank, timeout, self.is_gone)
        self._round = 0

    def gather(self, value: Any) -> list[Any] | None:
        self._round += 1
        if self.rank != 0:
            self._words.leave(self._key(self.rank), value)
            return None
        try:
            return [value, *(self._words.take(self._key(rank), rank) for rank in range(1, self.world_size))]
        except PeerTimeout as error:
            with suppress(PeerTimeout):  # the ranks that came wait for rank 0's word now
                self._round += 1
                self._words.leave(self._key(0), {"error": errors.to_wire(error)})
            raise

    def broadcast(self, value: Any) -> Any:
        self._round += 1
        if self.rank == 0:
            self._words.leave(self._key(0), {"value": value})
            return value
        return answer_of(self._words.read(self._key(0), 0))

    def is_gone(self, rank: int) -> bool:
        return self.peers is not None and self.peers.is_gone(rank)

    def sign(self) -> None:
        self._words.sign()

    def secret_for(self, purpose: str) -> bytes:
        if self._secret is None:
            raise CheckpointError("the ranks of this job did not agree on a secret when they met")
        return hmac.digest(self._secret, purpose.encode(), "sha256")

    def store(self, name: str) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(f"{self._round}/{name}", self._words.store)

    def _key(self, rank: int) -> str:
        return f"{self._round}/{rank}"


def answer_of(word: dict[str, Any]) -> Any:
    """Return rank 0's ``value`` from its answer, or raise its ``error``."""
    if "error" in word:
        name, message = word["error"]
        raise errors.from_wire(name, message, 0)
    return word["value"]


def on_all(agreement: Agreement, step: Callable[[], T]) -> T:
    """Run ``step`` on every rank; if it raised on any, raise on all.

    A rank raises its own error if it has one, otherwise that of the first failed rank, as the same class. If any rank
    raised TagReplaced, all do. ReplicaLost gives way to any other error: that is why a replica was lost.
    """
    own: Exception | None = None
    try:
        result = step()
    except Exception as error:
        own = error
    words = agreement.gather(None if own is None else errors.to_wire(own))
    failures = [[rank, *word] for rank, word in enumerate(words or ()) if word]
    failed = agreement.broadcast(min(failures, key=lambda failure: _explains(failure[1]), default=None))
    if own is not None and _explains(errors.to_wire(own)[0]) == _explains(failed[1]):
        raise own
    if failed is not None:
        rank, name, message = failed
        raise errors.from_wire(name, message, rank) from own
    return result


def in_turns(agreement: Agreement, steps: Sequence[Callable[[], T]]) -> list[T]:
    """Run this rank's steps one after the other, and return their results; rank 0 has as many as any rank.

    A failure or interrupt of any rank ends the turn of all, so that none waits longer than one step takes.
    """
    results: list[T] = []
    for turn in range(decided_by_rank0(agreement, lambda: len(steps))):
        try:
            results += on_all(agreement, partial(_results, steps[turn : turn + 1]))
        except CheckpointError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
            raise
    return results


def _results(steps: Sequence[Callable[[], T]]) -> list[T]:
    try:
        return [step() for step in steps]
    except KeyboardInterrupt as interrupt:
        raise CheckpointError("interrupted") from interrupt  # for the others


def _explains(name: str) -> int:
    """Return the place of an error's class in the order in which errors explain those that other ranks met."""
    return {TagReplaced.__name__: 0, ReplicaLost.__name__: 2}.get(name, 1)


def decided_by_rank0(agreement: Agreement, decide: Callable[[], T]) -> T:
    """Run ``decide`` on rank 0 alone and return its (JSON) result, or raise its error, on every rank."""
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
    value: T = answer_of(word)
    return value
