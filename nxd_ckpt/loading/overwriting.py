"""Overwriting live state: the second phase of a load, when all ranks know that everything fits.

Tensors in host memory are filled in place, others through host memory, one after the other, while the caller continues.
Memory for tensors on their way to a device is bounded: two tensors, or more small ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, UnsupportedState
from nxd_ckpt.formats.memory import allocated, repeats, strided
from nxd_ckpt.formats.strides import stored_stride
from nxd_ckpt.formats.tensors import Assembly, TensorStub, map_tensors
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.tag.reading import Leaf

_ON_THE_WAY = 64 * 2**20
"""Bytes of tensors that may wait to be handed over, in addition to the first two."""

Fill = Callable[[Leaf, torch.Tensor], bool | None]
"""Starts to fill a contiguous CPU tensor with the leaf, and returns True if that is done already; the rest is complete
when the reader has finished.
"""

Seen = Callable[[Leaf, torch.Tensor], None]
"""Is told of a leaf that was read, and its values."""


class Reads(Protocol):
    """Reads that were begun: this rank's own (`LeafReader`), or shared with replicas."""

    @property
    def requested(self) -> int:
        """Argument for `wait` that covers everything requested so far."""

    def wait(self, requested: int) -> None:
        """Return when the first ``requested`` requests are in memory. Raises their errors."""

    def finish(self) -> None:
        """Return when all requests are in memory, and verified if requested. Raises their errors."""


class Delivery:
    """Delivery of leaves to live tensors (`nxd_ckpt.live.optimizer_state.LeafSource`).

    ``fill`` reads through ``reader``. ``saw`` is called with every leaf as it was read, before a live object has it, or
    code that follows in the load.
    """

    def __init__(self, reader: Reads, fill: Fill, saw: Seen) -> None:
        self._reader = reader
        self._fill = fill
        self._saw = saw
        self._in_place: list[tuple[Leaf, torch.Tensor]] = []
        self._waiting: deque[tuple[Leaf, int, torch.Tensor, Callable[[torch.Tensor], None]]] = deque()
        self._waiting_bytes = 0
        self._spans: list[tuple[int, int]] = []  # memory being filled: (begin, end), ascending, disjoint

    def __call__(self, leaf: Leaf) -> torch.Tensor:
        out = allocated(leaf.shape, leaf.dtype)
        self._fill(leaf, out)
        self._reader.finish()
        self._saw(leaf, out)
        return out

    def into(self, leaf: Leaf, memory: torch.Tensor) -> None:
        begin = memory.data_ptr()
        span = begin, begin + memory.nbytes
        at = bisect_right(self._spans, span) if self._spans and span < self._spans[-1] else len(self._spans)
        if self._overlaps(span, at):  # two names of one memory: the later one wins
            self._reader.finish()
            self._spans.clear()
            at = 0
        self._spans.insert(at, span)
        self._fill(leaf, memory)
        self._in_place.append((leaf, memory))

    def then(self, leaf: Leaf, take: Callable[[torch.Tensor], None]) -> None:
        out = allocated(leaf.shape, leaf.dtype)
        while len(self._waiting) > 1 and self._waiting_bytes + out.nbytes > _ON_THE_WAY:
            self._hand_over()
        if self._fill(leaf, out) and not self._waiting:
            self._saw(leaf, out)
            take(out)
            return
        self._waiting.append((leaf, self._reader.requested, out, take))
        self._waiting_bytes += out.nbytes

    def finish(self) -> None:
        """Return when everything is in place."""
        while self._waiting:
            self._hand_over()
        self._reader.finish()
        self._spans.clear()
        for leaf, memory in self._in_place:
            self._saw(leaf, memory)
        self._in_place.clear()

    def _hand_over(self) -> None:
        leaf, requested, out, take = self._waiting.popleft()
        self._waiting_bytes -= out.nbytes
        self._reader.wait(requested)
        self._saw(leaf, out)
        take(out)

    def _overlaps(self, span: tuple[int, int], at: int) -> bool:
        return (at > 0 and self._spans[at - 1][1] > span[0]) or (at < len(self._spans) and self._spans[at][0] < span[1])


PARTLY = "The live state is partly overwritten: load another tag before training on"


@contextmanager
def overwriting(where: str) -> Iterator[None]:
    """Context in which live state changes. Errors add that it is partly overwritten with the state at ``where``."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{error}. {PARTLY}") from error
    except OSError as error:
        logger.error("%s: %s. %s", where, error, PARTLY)
        raise


def fill_model(
    model: ModelAdapter, names: Sequence[str], tree: Mapping[str, Any], delivery: Delivery, strict: bool = True
) -> None:
    """Assign the values of ``tree`` under ``names``. All are in place when the delivery has finished.

    State that modules load themselves comes first: they may refuse it, and then nothing else has changed.
    """
    own = [name for name in names if model.owns(name)]
    if own:
        model.load_own({name: _with_strides(tree[name], delivery) for name in own}, strict)
        names = [name for name in names if not model.owns(name)]
    # All destinations before the first read: while threads read, any tensor operation takes ten times as long.
    destinations = model.destinations(names)
    for name in names:
        leaf = tree[name]
        if not isinstance(leaf, (TensorStub, Assembly)):
            # Extra state: a module may look at its parameters when it is given that, and may replace them.
            delivery.finish()
            model.assign(name, _with_strides(leaf, delivery))
            destinations = model.destinations(names)
        elif name in destinations:
            delivery.into(leaf, destinations[name])
        elif model.is_on_host(name):
            model.assign(name, _with_strides(leaf, delivery))  # at once: it may share memory with what comes next
        else:
            delivery.then(leaf, partial(_assign, model, name, leaf))


def refuse_lost_elements(model: ModelAdapter, names: Sequence[str], tree: Mapping[str, Any], read: Delivery) -> None:
    """Raise UnsupportedState if elements of a saved tensor differ that are the same memory of the live one.

    The live one is expanded. What was saved of such a tensor has the same elements.
    """
    for name, live in model.expanded(names).items():
        if not repeats(read(tree[name]), live):
            raise UnsupportedState(
                f"{model.path}{name} is expanded (elements share memory, its strides are {live.stride()}), and what "
                "was saved differs between them; load into a contiguous() copy"
            )


def _assign(model: ModelAdapter, name: str, leaf: Leaf, value: torch.Tensor) -> None:
    model.assign(name, strided(value, stored_stride(leaf)))


def _with_strides(tree: Any, delivery: Delivery) -> Any:
    """Return ``tree`` with its tensors, read, with their saved strides."""
    return map_tensors(tree, lambda leaf: strided(delivery(leaf), stored_stride(leaf)), (TensorStub, Assembly))
