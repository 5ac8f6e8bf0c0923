"""Blocks that are about to be read, with the requests for their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.formats.assembly import DirectRun, cut_out, elements_in, fragments_in, run_of_block
from nxd_ckpt.formats.tensors import Fragment, TensorStub, itemsize


class Request(NamedTuple):
    """A part to read; ``run`` is the place of its bytes in memory, if they are copied unchanged."""

    fragment: Fragment
    out: torch.Tensor
    run: DirectRun | None

    def clipped(self, offset: int, nbytes: int) -> DirectRun:
        """Return the part of the run within these bytes of the file."""
        assert self.run is not None
        begin, memory = self.run
        first, last = max(begin, offset), min(begin + len(memory), offset + nbytes)
        return first, memory[first - begin : last - begin]

    def covers(self, offset: int, nbytes: int) -> bool:
        """Return whether the run has all of them."""
        return self.run is not None and self.run[0] <= offset and offset + nbytes <= self.run[0] + len(self.run[1])


class Visit(NamedTuple):
    """A part to show to ``look``, and not to keep."""

    fragment: Fragment
    look: Callable[[list[torch.Tensor]], None]


@dataclass
class PendingBlock:
    """A block (by number) of the stub's record, with the requests for its bytes; without any, it is only verified.

    ``is_verified_here`` is False if another rank verifies it.
    """

    stub: TensorStub
    number: int
    name: str
    requests: list[Request] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    is_verified_here: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """Its offset in the file, and its bytes."""
        return span_of(self.stub, self.number)

    @property
    def is_read_whole(self) -> bool:
        """True if a request covers all of it unchanged."""
        return any(request.covers(*self.span) for request in self.requests)

    @property
    def requested_nbytes(self) -> int:
        run = run_of_block(self.stub, self.number)
        numel = sum(piece.source.numel for request in self.requests for piece in fragments_in(request.fragment, *run))
        return numel * itemsize(self.stub.dtype)

    def target(self) -> tuple[memoryview | None, list[Request]]:
        """Return the memory to read the whole block into, if a request covers it, and the requests that need a copy."""
        for number, request in enumerate(self.requests):
            if request.covers(*self.span):
                return request.clipped(*self.span)[1], self.requests[:number] + self.requests[number + 1 :]
        return None, self.requests

    def deliver(self, requests: Sequence[Request], memory: memoryview) -> None:
        """Copy the block's bytes to the requests, and show them to the visits."""
        for request in requests:
            cut_out(request.fragment, request.out, self.number, memory)
        for fragment, look in self.visits:
            look(elements_in(fragment, self.number, memory))


def span_of(stub: TensorStub, block: int) -> tuple[int, int]:
    """Return offset in the file and length of a block of the stub's record."""
    begin = block * CRC_BLOCK
    return stub.storage.offset + begin, min(CRC_BLOCK, stub.storage.nbytes - begin)
