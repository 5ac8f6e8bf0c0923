"""Data positions and random state of a process, as plain data; loaders whose data are divided again on another dp."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from nxd_ckpt.core.data_position import Position, check_position, is_data_position, position
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.errors import IncompatibleState, InvalidArgument
from nxd_ckpt.live import torch_xla


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

    @takes()
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
        self.count = count
        self.dp = dp
        self.dp_rank = dp_rank
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


class ElasticSampler(Sampler[int]):
    """Indices of a map-style dataset for one of ``dp`` data-parallel ranks, without end.

    Use it so:

        sampler = ElasticSampler(len(dataset), dp=4, dp_rank=1, seed=7)
        loader = StatefulDataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)

    All ranks deal out one order, that of epoch after epoch, each a permutation of its own: rank r takes every dp-th
    index from the r-th on. Nothing is padded or dropped at the end of an epoch, as with torch's DistributedSampler: the
    last samples of one and the first of the next may be in one batch. So every sample is read once in each epoch, also
    if dp changes in the middle of it.

    It is iterated once. To continue elsewhere, take ``state_dict()`` of the loader, not of the sampler: the sampler is
    ahead of the samples that workers have delivered.
    """

    @takes()
    def __init__(self, length: int, *, dp: int = 1, dp_rank: int = 0, shuffle: bool = True, seed: int = 0) -> None:
        """Make the sampler at the start of the data.

        Args:
            length: samples in the dataset.
            dp, dp_rank: number of data-parallel ranks, and this rank's number.
            shuffle: use a new order in each epoch, drawn only from ``seed`` and the epoch; else the dataset's order.

        Raises:
            InvalidArgument: no samples, or no such rank.
        """
        if length < 1:
            raise InvalidArgument(f"length must be at least 1, found {length}")
        if not 0 <= dp_rank < dp:
            raise InvalidArgument(f"dp_rank must be one of the {dp} ranks that dp= says, found {dp_rank}")
        self.length = length
        self.dp = dp
        self.dp_rank = dp_rank
        self.shuffle = shuffle
        self.seed = seed
        self._consumed = 0
        self._reader: object | None = None

    @property
    def consumed(self) -> int:
        """Samples that all ranks together have taken, over all epochs, if all took as many as this one."""
        return self._consumed

    @property
    def epoch(self) -> int:
        """Number of complete passes over the samples."""
        return self._consumed // self.length

    def __iter__(self) -> Iterator[int]:
        mine = object()
        order = torch.empty(0)
        of_epoch = -1
        while True:
            if self._reader not in (None, mine):
                raise InvalidArgument(
                    "an ElasticSampler has no end and is iterated once: workers of the first iterator have taken "
                    "samples that were never delivered. Keep that iterator (batches = iter(loader)), or continue from "
                    "a state dict"
                )
            self._reader = mine
            epoch, at = divmod(self._consumed + self.dp_rank, self.length)
            if epoch != of_epoch:
                order = self._order(epoch)
                of_epoch = epoch
            self._consumed += self.dp
            yield int(order[at])

    def state_dict(self) -> dict[str, Any]:
        """Return plain data from which a sampler of any dp can continue."""
        return {
            "kind": "samples",
            "consumed": self._consumed,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state`` with a new iterator. Raises IncompatibleState for another order of samples."""
        expected = self.state_dict() | {"consumed": state.get("consumed")}
        if state != expected or not isinstance(state.get("consumed"), int):
            raise IncompatibleState(
                f"the data position is of another order of samples: expected {expected}, found {state}; make the "
                "sampler as it was at the save"
            )
        self._consumed = state["consumed"]
        self._reader = None

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))


_STEPS_SINCE = "_steps_since_snapshot"
_DATASET_STATE = "dataset_state"
"""torchdata's keys: batches delivered since the state was taken, and the dataset's own state."""


def capture_data_position(loader: Any) -> Position:
    """Return the position of ``loader`` as plain data, for ``rank_content=``.

    A load on another dp re-splits the position of `DataStreams`, and of torchdata's StatefulDataLoader over an
    `ElasticSampler`. The state of any other object with ``state_dict()`` is one rank's own: a load on other sizes
    refuses it.

    Raises:
        InvalidArgument: an object without ``state_dict`` and ``load_state_dict``.
    """
    if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
        raise InvalidArgument(
            f"{type(loader).__name__} has no state_dict() and load_state_dict(): expected a loader that has, such as "
            "torchdata.stateful_dataloader.StatefulDataLoader"
        )
    state = loader.state_dict()
    if isinstance(loader, DataStreams):
        return position(loader.dp, loader.dp_rank, None, state)
    sampler = _sampler_of(loader)
    if sampler is None:
        return position(None, None, state, None, "as nothing tells how its loader shares the data out among ranks")
    shared = _place(loader, sampler, state)
    alone = ""
    if shared is None:
        alone = "as its loader does not tell which samples it has delivered"
    elif any(value is not None for value in _all(state, _DATASET_STATE)):
        shared = None
        alone = "as its dataset has state of its own"
    return position(sampler.dp, sampler.dp_rank, state, shared, alone)


def restore_data_position(loader: Any, saved: Position) -> None:
    """Move ``loader`` to a position that `capture_data_position` returned, re-split over other ranks if needed.

    Raises:
        InvalidArgument: not a data position, or the loader is being iterated.
        MalformedFile: a position that capture_data_position() cannot have returned.
        IncompatibleState: the position is of another kind of loader, of other data, or of another rank and cannot be
            re-split.
    """
    if not is_data_position(saved):
        raise InvalidArgument(
            f"expected the result of capture_data_position(), found {type(saved).__name__}; a load fills "
            "rank_content= with it"
        )
    check_position(saved, "data position")
    running = getattr(loader, "_iterator", None)  # torchdata's
    if running is not None and not getattr(running, "_finished", False):
        raise InvalidArgument(
            f"{type(loader).__name__} is being iterated, and its iterator would continue from the old place: restore "
            "the data position before iter(), or into a new loader"
        )
    shared = saved["shared"]
    sampler = _sampler_of(loader)
    kind = None if shared is None else shared["kind"]
    if isinstance(loader, DataStreams) and kind == "streams":
        loader.load_state_dict(shared)
    elif sampler is not None and kind == "samples" and _place_of(saved) != (sampler.dp, sampler.dp_rank):
        sampler.load_state_dict(shared)
        if loader is not sampler:
            loader.load_state_dict({})  # a new iterator, which asks the sampler
    elif not isinstance(loader, DataStreams) and kind != "streams" and _is_own(saved, sampler):
        loader.load_state_dict(saved["state"])
    else:
        origin = f"one rank's own, {saved['alone']}" if kind is None else f"of {kind}"
        raise IncompatibleState(
            f"a {type(loader).__name__} cannot continue from this data position, which is {origin}; make the loader as "
            "it was at the save, for the same rank and number of ranks"
        )


def _is_own(saved: Position, sampler: ElasticSampler | None) -> bool:
    """Return whether the position is that of a loader with the same share, as far as both tell.

    Positions that were merged are no rank's own.
    """
    if saved["dp"] is None and saved["shared"] is not None:
        return False
    return _place_of(saved) == (None if sampler is None else (sampler.dp, sampler.dp_rank))


def _place_of(saved: Position) -> tuple[int, int] | None:
    return None if saved["dp"] is None else (saved["dp"], saved["dp_rank"])


def _sampler_of(loader: Any) -> ElasticSampler | None:
    """Return the ElasticSampler that chooses the samples of ``loader``; None if there is none."""
    if isinstance(loader, ElasticSampler):
        return loader
    if not isinstance(loader, DataLoader):
        return None
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, ElasticSampler):
            return sampler
    return None


def _place(loader: Any, sampler: ElasticSampler, state: Any) -> dict[str, Any] | None:
    """Return the sampler's state after the last batch that ``loader`` delivered; None if that is unknown."""
    sampler_state = next(_samplers(state), None)
    later = sum(_all(state, _STEPS_SINCE))
    if sampler_state is None or not later:
        return sampler_state
    size = 1 if loader.batch_sampler is None else getattr(loader.batch_sampler, "batch_size", None)
    return None if size is None else sampler_state | {"consumed": sampler_state["consumed"] + later * size * sampler.dp}


def is_of_share(loader: Any, state: Any) -> bool:
    """Return whether the ``state`` of a loader counts for its rank's share of the data alone, as far as is known.

    Those of torch and torchdata do, except over an `ElasticSampler` with no batches on the way.
    """
    of_torchdata = any(base.__module__.partition(".")[0] == "torchdata" for base in type(loader).__mro__)
    if not of_torchdata and not isinstance(loader, (DataLoader, IterableDataset)):
        return False
    return _sampler_of(loader) is None or any(_all(state, _STEPS_SINCE))


def _samplers(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of ElasticSamplers anywhere in a loader's state."""
    if isinstance(state, dict):
        if state.get("kind") == "samples" and "consumed" in state:
            yield dict(state)
        else:
            for value in state.values():
                yield from _samplers(value)


def _all(state: Any, name: str) -> Iterator[Any]:
    """Yield every value of that name in nested dicts."""
    if isinstance(state, dict):
        for key, value in state.items():
            if key == name:
                yield value
            else:
                yield from _all(value, name)


def capture_random_state() -> dict[str, Any]:
    """Return the state of every generator that this process uses, as tensors, lists and numbers only."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch_xla.is_running():
        state["xla"] = list(torch_xla.random_state())
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `capture_random_state`; generators that this process does not use are skipped."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "torch_xla" in sys.modules and "xla" in state:
        torch_xla.set_random_state(*state["xla"])


def is_random_state(value: Any) -> bool:
    """Return whether ``value`` is a result of `capture_random_state`."""
    return isinstance(value, dict) and value.keys() - {"numpy", "xla"} == {"python", "torch"}
