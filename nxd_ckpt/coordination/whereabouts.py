"""How far the ranks of a job are, by the collective operations that each has begun in the process group.

Rank 0 waits for a call that all ranks must make. A rank that began an operation which rank 0 has not begun, and stays
in it, went on without the call: neither will ever go on. A rank that is only slow has begun fewer, or changes. Where
sends to one rank count too, as with gloo, slow ranks may have begun more: but they do not stand in a collective.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from contextlib import suppress
from types import FrameType
from typing import Any

from nxd_ckpt.coordination.peers import WHEREABOUTS, ConnectionToRank0, Rank0Connections

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
        own, answers = operations_begun(), [*self._answers[rank]]
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
