"""Data as a fixed number of streams, which are divided again when the number of data-parallel ranks changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nxd_ckpt.errors import IncompatibleState, InvalidArgument


class DataStreams:
    """The share of one of ``dp`` data-parallel ranks in ``count`` streams, read in turns.

    Use it so:

        def stream(number):  # the number-th of 24 parts of the data
            return StatefulDataLoader(MyShard(number, 24), batch_size=8)

        batches = DataStreams(stream, 24, dp=4, dp_rank=1)

    A stream is anything that is iterable and has ``state_dict()`` and ``load_state_dict()``. Its state moves as a
    whole to the rank that reads it next, so no sample is lost or repeated, whatever the state holds. A stream that
    ends is left out from then on.
    """

    def __init__(self, stream: Callable[[int], Any], count: int, *, dp: int = 1, dp_rank: int = 0) -> None:
        """Make this rank's streams.

        Args:
            stream: makes the stream with a number from 0 on.
            count: number of streams, constant for the whole run: at least the largest dp it will ever have, ideally a
                multiple of each.
            dp, dp_rank: number of data-parallel ranks, and this rank's number.

        Raises:
            InvalidArgument: a rank would have no stream, or there is no such rank.
        """
        if not 0 <= dp_rank < dp:
            raise InvalidArgument(f"dp_rank must be one of the {dp} ranks that dp= says, found {dp_rank}")
        if count < dp:
            raise InvalidArgument(f"{count} streams are too few for dp={dp}: each rank reads at least one")
        self.count, self.dp, self.dp_rank = count, dp, dp_rank
        self._streams = {number: stream(number) for number in range(dp_rank, count, dp)}
        self._turns = dict.fromkeys(self._streams, 0)
        self._ended: set[int] = set()
        self._iterators: dict[int, Iterator[Any]] = {}

    def __iter__(self) -> Iterator[Any]:
        while len(self._ended) < len(self._streams):
            # The least read one, so that streams that come from other ranks catch up.
            number = min(self._streams.keys() - self._ended, key=lambda number: (self._turns[number], number))
            if number not in self._iterators:
                self._iterators[number] = iter(self._streams[number])
            try:
                item = next(self._iterators[number])
            except StopIteration:
                self._ended.add(number)
                continue
            self._turns[number] += 1
            yield item

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's streams, by number."""
        states = {
            number: {"turns": self._turns[number], "ended": number in self._ended, "state": stream.state_dict()}
            for number, stream in self._streams.items()
        }
        return {"kind": "streams", "count": self.count, "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which may have more streams than this rank reads: those of all ranks.

        Raises IncompatibleState if it lacks one that this rank reads.
        """
        states = state.get("states", {})
        missing = [number for number in self._streams if number not in states]
        if state.get("count") != self.count or missing:
            problem = f"stream {missing[0]} is missing" if missing else f"it has {state.get('count')}"
            first = min(self._streams)
            raise IncompatibleState(
                f"the data position does not hold the streams {first}, {first + self.dp}, ... of {self.count} that "
                f"rank {self.dp_rank} of dp={self.dp} reads: {problem}"
            )
        self._iterators.clear()
        for number, stream in self._streams.items():
            stream.load_state_dict(states[number]["state"])
        self._turns = {number: states[number]["turns"] for number in self._streams}
        self._ended = {number for number in self._streams if states[number]["ended"]}
