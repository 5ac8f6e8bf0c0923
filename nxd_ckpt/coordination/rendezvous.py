"""The rendezvous of a job's ranks for one call that all make: a first save to a directory, a load, a conversion.

Every rank but rank 0 asks for an answer to each of its calls, by number. Rank 0 waits for the next call of each rank,
and answers all with the number of the meeting, under which they then agree. A rank that waited in vain withdraws its
call, and rank 0 skips withdrawn calls. So ranks that were out of step, because only some of them made a call, are in
step again at the next call that all make.

torchrun keeps the store for the processes that it starts again, and with it what killed ones left there. A call counts
only if it names the launch of rank 0's present process; one that does not is answered with that, and made again.

At their first meeting they agree on a secret that only they know, though anybody on the network may read the store:
torch's TCPStore does not authenticate clients. No secret is ever left there: ranks exchange Diffie-Hellman keys (the
group ffdhe2048 of RFC 7919), and each rank passes the secret, encrypted, to at most 32 others. Reading the store does
not help a stranger. Somebody who can also write to it can take a rank's place, but could stop the job anyway.

Rank 0 does not wait for a rank that went on without the call. Such a rank began a collective operation which rank 0 has
not begun, and stays in it: neither will ever go on. A rank that is only slow has begun fewer, or changes. Where sends
to one rank count too, as with gloo, slow ranks may have begun more: but they do not stand in a collective.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from types import FrameType
from typing import Any

from nxd_ckpt import errors
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, StoreAgreement, Words, answer_of
from nxd_ckpt.coordination.peers import WHEREABOUTS, Address, ConnectionToRank0, Rank0Connections
from nxd_ckpt.coordination.waiting import FairLock
from nxd_ckpt.effects import in_forked_children, logger
from nxd_ckpt.errors import CheckpointError, InvalidArgument, MalformedFile, PeerTimeout, RanksDisagree

_LOOKS = 4
"""Number of equal answers, a second apart, that show a rank standing still."""

_PLACES = ("torch/distributed/", "torch/autograd/graph.py")
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_FRAMES = 4
"""Innermost frames of a thread in which an operation of torch shows."""


class Whereabouts:
    """Rank 0's knowledge of the others."""

    def __init__(self, peers: Rank0Connections) -> None:
        """Listen to the answers that come over ``peers``."""
        self._peers = peers
        self._answers: dict[int, deque[Any]] = defaultdict(lambda: deque(maxlen=_LOOKS))
        peers.listen(WHEREABOUTS, lambda rank, word: self._answers[rank].append(word))

    def has_passed(self, rank: int) -> bool:
        """Return whether that rank stands in an operation that this one has not begun. Asks all ranks once more."""
        self._peers.tell(WHEREABOUTS, None)
        own = operations_begun()
        answers = [*self._answers[rank]]
        if own is None or len(answers) < _LOOKS or not isinstance(answers[0], int):
            return False
        return answers[0] > own and len({*answers}) == 1


def answer(peers: ConnectionToRank0) -> None:
    """Answer rank 0's questions from now on, on a thread of the connection."""
    peers.listen(
        WHEREABOUTS, lambda rank, word: peers.tell(WHEREABOUTS, operations_begun() if stands_in_one() else None)
    )


def stands_in_one() -> bool:
    """Return whether a thread of this process is in a collective operation, or in a backward pass, which waits for one.
    """
    return any(map(_is_collective, sys._current_frames().values()))


def _is_collective(frame: FrameType | None) -> bool:
    for _ in range(_FRAMES):
        if frame is None or frame.f_code.co_name in _POINT_TO_POINT:
            return False
        if any(place in frame.f_code.co_filename for place in _PLACES):
            return True
        frame = frame.f_back
    return False


def operations_begun() -> int | None:
    """Return the number of collective operations begun in the default process group; None if it does not count them."""
    with suppress(RuntimeError, ValueError):
        from torch.distributed.distributed_c10d import _get_default_group

        group: Any = _get_default_group()
        return int(group._get_sequence_number_for_group())
    return None


_FAN_OUT = 32
"""Number of ranks to which one rank passes the secret, at 3 ms each."""

_PRIME = int(
    "ffffffffffffffffadf85458a2bb4a9aafdc5620273d3cf1d8b9c583ce2d3695a9e13641146433fbcc939dce249b3ef97d2fe363"
    "630c75d8f681b202aec4617ad3df1ed5d5fd65612433f51f5f066ed0856365553ded1af3b557135e7f57c935984f0c70e0e68b77"
    "e2a689daf3efe8721df158a136ade73530acca4f483a797abc0ab182b324fb61d108a94bb2c8e3fbb96adab760d7f4681d4f42a3"
    "de394df4ae56ede76372bb190b07a7c8ee0a6d709e02fce1cdf7e2ecc03404cd28342f619172fe9ce98583ff8e4f1232eef28183"
    "c3fe3b1b4c6fad733bb5fcbc2ec22005c58ef1837d1683b2c6f34a26c1b2effa886b423861285c97ffffffffffffffff",
    16,
)
_GENERATOR = 2


class KeyPair:
    """A random private key and its public one, which anybody may read."""

    def __init__(self) -> None:
        self._private = secrets.randbits(256) | 1 << 255
        self.public: str = f"{pow(_GENERATOR, self._private, _PRIME):x}"

    def key_with(self, public: str) -> bytes:
        """Return the 32 bytes that only the owners of the two key pairs can compute.

        Raises MalformedFile for a value that is no public key.
        """
        try:
            value = int(public, 16)
        except (TypeError, ValueError):
            value = 0
        if not 1 < value < _PRIME - 1:
            raise MalformedFile(f"expected a public key of another rank, found {public!r:.40}")
        return sha256(pow(value, self._private, _PRIME).to_bytes(256, "big")).digest()


def job_secret(words: Words, rank: int, world_size: int, secret: bytes) -> bytes:
    """Give every rank the ``secret`` of rank 0; all ranks call this, the others with any value.

    Raises PeerTimeout if a rank does not come.
    """
    pair = KeyPair()
    words.leave(f"public/{rank}", pair.public)
    if rank != 0:
        parent = (rank - 1) // _FAN_OUT
        key = pair.key_with(words.read(f"public/{parent}", parent))
        secret = _xor(bytes.fromhex(words.take(f"encrypted/{rank}", parent)), key)
    first = rank * _FAN_OUT + 1
    for child in range(first, min(first + _FAN_OUT, world_size)):
        key = pair.key_with(words.read(f"public/{child}", child))
        words.leave(f"encrypted/{child}", _xor(secret, key).hex())
    return secret


def _xor(secret: bytes, key: bytes) -> bytes:
    """Encrypt or decrypt with a key that is used once."""
    return bytes(byte ^ key_byte for byte, key_byte in zip(secret, key, strict=True))


def meet(
    rank: int, world_size: int, timeout: float, call: str, members: tuple[int, ...] | None = None
) -> Agreement | None:
    """Return the agreement of a job of this size, for one ``call``; None if no process group joins the ranks.

    ``members`` are the ranks of the whole job that make the call; None for all.

    Only ``torch.distributed`` is read; any backend will do, because only the group's store is used.

    Raises:
        RanksDisagree: another rank made another call, a load instead of a save, or has gone on without it.
        PeerTimeout: a rank did not come within ``timeout`` seconds, or is gone.
    """
    if world_size == 1:
        return SingleProcessAgreement()
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    if members is None and dist.get_world_size() != world_size:
        return None
    if dist.get_rank() != (rank if members is None else members[rank]):
        raise CheckpointError(
            f"this process is rank {dist.get_rank()} of its process group, but rank {rank} of the topology given"
        )
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if any(store is inherited for inherited in _inherited):
        raise CheckpointError(
            f"{call}: this process was forked from rank {rank}, whose connections to the other ranks it must not use; "
            "with topology=Topology() it saves and loads alone"
        )
    return _rendezvous(store, rank, world_size, members).meet(timeout, call)


class Rendezvous:
    """This process's rendezvous with the other ranks, in their process group's ``store``.

    Threads take turns. If threads come in another order on another rank, the names of their calls show it.
    """

    def __init__(self, store: Any, rank: int, world_size: int, members: tuple[int, ...] | None = None) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.group_store = store
        of_members = "" if members is None else f"/{sha256(repr(members).encode()).hexdigest()[:16]}"
        self._store = PrefixStore(f"nxd_ckpt{of_members}", store)
        self._rank = rank
        self._world_size = world_size
        self._members = members
        self._lock = FairLock()
        self._peers: Rank0Connections | ConnectionToRank0 | None = None
        self._whereabouts: Whereabouts | None = None
        self._secret = secrets.token_bytes(32) if rank == 0 else None
        self._launch = secrets.token_hex(8) if rank == 0 else None

    def meet(self, timeout: float, call: str) -> Agreement:
        """Meet the other ranks for ``call`` and return the agreement; see the function `meet`."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        words = Words(self._store, self._rank, timeout, self._is_gone, call, self._has_passed)
        with self._lock.held(call):
            if self._rank == 0:
                number, hub, all_know = _call_in(words, self._world_size, [call, True, self._launch], self._hub())
            else:
                number, hub, all_know = self._answer_to(call, words)
            store = PrefixStore(f"meeting/{number}", self._store)
            if not all_know:
                words = Words(store, self._rank, timeout, self._is_gone)
                self._secret = job_secret(words, self._rank, self._world_size, self._secret or b"")
            self._connect(hub)
        return StoreAgreement(store, self._rank, self._world_size, timeout, self._peers, self._secret)

    def _answer_to(self, call: str, words: Words) -> _Answer:
        launch, self._launch = self._launch, None  # after a call that fails the next one is as the first
        while isinstance(answer := _ask(words, self._rank, [call, self._secret is not None, launch]), str):
            launch = answer
        self._launch = launch
        number, hub, all_know = answer
        return int(number), hub, all_know

    def leave(self) -> None:
        """Close the connections in a forked child: they are its parent's."""
        if self._peers is not None:
            self._peers.leave()

    def _is_gone(self, rank: int) -> bool:
        return self._peers is not None and self._peers.is_gone(rank)

    def _has_passed(self, rank: int) -> bool:
        return self._whereabouts is not None and self._whereabouts.has_passed(rank)

    def _hub(self) -> Address | None:
        try:
            if self._peers is None:
                self._peers = Rank0Connections(self._secret or b"")
                self._whereabouts = None if self._members else Whereabouts(self._peers)
        # A host without listening sockets, or an exiting interpreter: dead ranks are noticed after the timeout.
        except (OSError, RuntimeError) as error:
            logger.debug("the end of other ranks will not be noticed at once: %s", error)
        return self._peers.address() if isinstance(self._peers, Rank0Connections) else None

    def _connect(self, hub: Address | None) -> None:
        if self._peers is None and hub is not None:
            try:
                self._peers = ConnectionToRank0(self._rank, hub, self._secret or b"")
                answer(self._peers)
            except OSError as error:
                logger.debug("the end of rank 0 will not be noticed at once: %s", error)


_Answer = tuple[int, Address | None, bool]
"""Number of the meeting, address for connections, and whether all ranks know the job's secret."""


def _call_in(words: Words, world_size: int, own: list[Any], hub: Address | None) -> _Answer:
    """Wait, on rank 0, for the other ranks' calls, and answer each, or tell why there is no meeting."""
    call_numbers: dict[int, int] = {}
    try:
        calls = {0: own}
        awaited = deque(range(1, world_size))
        while awaited:
            rank = awaited.popleft()
            number, call = _next_call(words, rank)
            if call[-1] == own[-1]:
                call_numbers[rank], calls[rank] = number, call
            else:  # the first of its process, or of one that was killed before this launch
                _answer(words, {rank: number}, {"value": own[-1]})
                awaited.append(rank)
        for rank, (other_call, *_) in calls.items():
            if other_call != own[0]:
                raise RanksDisagree(
                    f"rank 0 calls {own[0]}, rank {rank} {other_call}; all ranks must make the same calls, in the same "
                    "order, and none of them inside 'if rank == 0:'"
                )
        number = words.add("meetings", 1)
    except BaseException as error:
        for rank in range(1, world_size):
            if rank not in call_numbers and (call_number := _came(words, rank)) is not None:
                call_numbers[rank] = call_number
        _answer(words, call_numbers, {"error": errors.to_wire(error)})
        raise
    all_know = all(knows for _, knows, _ in calls.values())
    _answer(words, call_numbers, {"value": [number, hub, all_know]})
    return number, hub, all_know


def _answer(words: Words, call_numbers: dict[int, int], answer: dict[str, Any]) -> None:
    for rank, number in call_numbers.items():
        with suppress(PeerTimeout):  # the store is gone, which the other ranks notice by themselves
            words.leave(f"answer/{rank}/{number}", answer)


def _next_call(words: Words, rank: int) -> tuple[int, list[Any]]:
    """Return the number and the words of the next call of ``rank`` that is not withdrawn.

    They are the call's name, whether the rank knows the secret, and the launch of rank 0 that it knows, or None.
    """
    while True:
        number = _number_of_next(words, rank)
        call = _taken(words, rank)
        if call is not None:
            return number, call


def _came(words: Words, rank: int) -> int | None:
    """Return the number of a rank's last call, if it already waits for its answer; None if there is none."""
    newest = None
    with suppress(PeerTimeout):  # the store is gone
        while words.has(_call_key(rank, number := _number_of_next(words, rank))):
            if _taken(words, rank) is not None:
                newest = number
    return newest


def _taken(words: Words, rank: int) -> list[Any] | None:
    """Take the next call of ``rank``; None if it is withdrawn. The one after it is next from now on."""
    number = _number_of_next(words, rank)
    call: list[Any] = words.take(_call_key(rank, number), rank)
    words.add(f"taken/{rank}", 1)
    return call if words.add(f"claim/{rank}/{number}", 1) == 1 else None


def _number_of_next(words: Words, rank: int) -> int:
    return words.add(f"taken/{rank}", 0) + 1


def _call_key(rank: int, number: int) -> str:
    return f"call/{rank}/{number}"


def _ask(words: Words, rank: int, call: list[Any]) -> Any:
    """Return, on another rank, rank 0's answer to this call; its launch, if that is another than the call names."""
    number = words.add(f"calls/{rank}", 1)
    answer = f"answer/{rank}/{number}"
    try:
        if call[-1] is None:  # the first, or one after a failure, which may have left none under its number
            words.leave(_call_key(rank, number - 1), call)
        words.leave(_call_key(rank, number), call)
        word = words.take(answer, 0)
    except BaseException as error:  # an interrupt too: rank 0 must not answer a rank that has left
        if words.add(f"claim/{rank}/{number}", 1) == 1 or not isinstance(error, PeerTimeout):  # now it is withdrawn
            raise
        word = words.take(answer, 0)  # rank 0 has just come
    return answer_of(word)


_by_members: dict[tuple[int, ...] | None, Rendezvous] = {}
"""Rendezvous in this process's default process group, by the members that meet there; None for all ranks."""


_inherited: list[Any] = []
"""Stores of the parent's process group, in a forked child."""


def _forget_parents() -> None:
    import torch.distributed as dist

    for rendezvous in _by_members.values():
        rendezvous.leave()
    _by_members.clear()
    if dist.is_available() and dist.is_initialized():
        from torch.distributed.distributed_c10d import _get_default_store

        _inherited.append(_get_default_store())


in_forked_children(_forget_parents)


def _rendezvous(store: Any, rank: int, world_size: int, members: tuple[int, ...] | None) -> Rendezvous:
    if any(rendezvous.group_store is not store for rendezvous in _by_members.values()):
        _by_members.clear()
    if members not in _by_members:
        _by_members[members] = Rendezvous(store, rank, world_size, members)
    return _by_members[members]


@contextmanager
def joint_agreement(all_ranks: bool, timeout: float) -> Iterator[Agreement]:
    """Yield an agreement of this process alone, or with ``all_ranks`` of all ranks of the job, which must all call it.

    The ranks are those of the process group. If there is none yet, they are the ranks that torchrun started, and a gloo
    group is made for them and closed again.

    Raises InvalidArgument if the environment describes no job, PeerTimeout if a rank does not join.
    """
    if not all_ranks:
        yield SingleProcessAgreement()
        return
    import torch.distributed as dist

    own = not dist.is_initialized()
    if own:
        _start_group(timeout)
    try:
        agreement = meet(dist.get_rank(), dist.get_world_size(), timeout, "conversion")
        assert agreement is not None  # there is a group of just that size
        yield agreement
    finally:
        if own:
            dist.destroy_process_group()


def _start_group(timeout: float) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except ValueError as error:
        raise InvalidArgument(
            "all_ranks=True needs a job whose ranks all make this call: start it with torchrun, or make a process "
            f"group first; found neither ({str(error).splitlines()[0]})"
        ) from error
    except RuntimeError as error:  # torch's DistError among others
        raise PeerTimeout(
            "all_ranks=True: not all ranks joined; each must make the same call (found "
            f"WORLD_SIZE={os.environ.get('WORLD_SIZE')}; {str(error).splitlines()[0]})"
        ) from error
