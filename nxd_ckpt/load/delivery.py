"""Filling live tensors: those in host memory in place, others through host memory, one after the other.

The caller continues while the bytes are read. Memory for tensors on their way to a device is bounded: two tensors, or
more small ones.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from nxd_ckpt.formats.tensors import allocated
from nxd_ckpt.tag.reading import Leaf

_ON_THE_WAY = 64 * 2**20
"""Bytes of tensors that may wait to be handed over, in addition to the first two."""

Fill = Callable[[Leaf, torch.Tensor], None]
"""Starts to fill a contiguous CPU tensor with the leaf; complete when the reader has finished."""


class Reads(Protocol):
    """Reads that were begun: this rank's own (`LeafReader`), or shared with replicas."""

    @property
    def asked(self) -> int:
        """Argument for `wait` that covers everything requested so far."""

    def wait(self, asked: int) -> None:
        """Return when the first ``asked`` requests are in memory. Raises their errors."""

    def finish(self) -> None:
        """Return when all requests are in memory, and verified if requested. Raises their errors."""


class Delivery:
    """Delivery of leaves to live tensors (`nxd_ckpt.live.optimizer_state.Read`). ``fill`` reads through ``reader``."""

    def __init__(self, reader: Reads, fill: Fill) -> None:
        self._reader, self._fill = reader, fill
        self._waiting: deque[tuple[int, torch.Tensor, Callable[[torch.Tensor], None]]] = deque()
        self._waiting_bytes = 0
        self._spans: list[tuple[int, int]] = []  # memory being filled: (begin, end), ascending, disjoint

    def __call__(self, leaf: Leaf) -> torch.Tensor:
        out = allocated(leaf.shape, leaf.dtype)
        self._fill(leaf, out)
        self._reader.finish()
        return out

    def into(self, leaf: Leaf, memory: torch.Tensor) -> None:
        begin = memory.data_ptr()
        span = begin, begin + memory.nbytes
        if self._overlaps(span):  # two names of one memory: the later one wins
            self._reader.finish()
            self._spans.clear()
        insort(self._spans, span)
        self._fill(leaf, memory)

    def then(self, leaf: Leaf, take: Callable[[torch.Tensor], None]) -> None:
        out = allocated(leaf.shape, leaf.dtype)
        while len(self._waiting) > 1 and self._waiting_bytes + out.nbytes > _ON_THE_WAY:
            self._hand_over()
        self._fill(leaf, out)
        self._waiting.append((self._reader.asked, out, take))
        self._waiting_bytes += out.nbytes

    def finish(self) -> None:
        """Return when everything is in place."""
        while self._waiting:
            self._hand_over()
        self._reader.finish()
        self._spans.clear()

    def _hand_over(self) -> None:
        asked, out, take = self._waiting.popleft()
        self._waiting_bytes -= out.nbytes
        self._reader.wait(asked)
        take(out)

    def _overlaps(self, span: tuple[int, int]) -> bool:
        at = bisect_right(self._spans, span)
        return (at > 0 and self._spans[at - 1][1] > span[0]) or (at < len(self._spans) and self._spans[at][0] < span[1])
