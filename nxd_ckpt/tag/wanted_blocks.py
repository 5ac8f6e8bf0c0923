"""Blocks that are about to be read, and who wants what of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.formats.assembly import DirectRun, cut_out, elements_in, fragments_in, run_of_block
from nxd_ckpt.formats.tensors import Fragment, TensorStub, itemsize


class Want(NamedTuple):
    """A part that is to be read; ``run`` is where its bytes go as they are, if they do."""

    fragment: Fragment
    out: torch.Tensor
    run: DirectRun | None

    def clipped(self, offset: int, nbytes: int) -> DirectRun:
        """What the run has of these bytes of the file."""
        assert self.run is not None
        begin, memory = self.run
        first, last = max(begin, offset), min(begin + len(memory), offset + nbytes)
        return first, memory[first - begin : last - begin]

    def covers(self, offset: int, nbytes: int) -> bool:
        """Whether the run has all of them."""
        return self.run is not None and self.run[0] <= offset and offset + nbytes <= self.run[0] + len(self.run[1])


class Visit(NamedTuple):
    """A part that is to be shown to ``look``, and not kept."""

    fragment: Fragment
    look: Callable[[list[torch.Tensor]], None]


@dataclass
class WantedBlock:
    """The block with this number of the stub's record, for those who want something of it: nobody, if it is only to be
    verified. ``is_verified_here`` says whether it is, or if another rank does that."""

    stub: TensorStub
    number: int
    name: str
    wants: list[Want] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    is_verified_here: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """Where it begins in the file, and its bytes."""
        return span_of(self.stub, self.number)

    @property
    def is_wanted_whole(self) -> bool:
        """Whether somebody wants all of it, as it is."""
        return any(want.covers(*self.span) for want in self.wants)

    @property
    def wanted_nbytes(self) -> int:
        run = run_of_block(self.stub, self.number)
        wanted = sum(piece.source.numel for want in self.wants for piece in fragments_in(want.fragment, *run))
        return wanted * itemsize(self.stub.dtype)

    def shared_out(self) -> tuple[memoryview | None, list[Want]]:
        """The memory that the whole block is read into, one's own if it wants all of it, and those who want a copy."""
        for number, want in enumerate(self.wants):
            if want.covers(*self.span):
                return want.clipped(*self.span)[1], self.wants[:number] + self.wants[number + 1 :]
        return None, self.wants

    def deliver(self, wants: Sequence[Want], memory: memoryview) -> None:
        """Give each what it wants of the block's bytes, and show them to those who look."""
        for want in wants:
            cut_out(want.fragment, want.out, self.number, memory)
        for fragment, look in self.visits:
            look(elements_in(fragment, self.number, memory))


def span_of(stub: TensorStub, block: int) -> tuple[int, int]:
    """Where the block of the stub's record begins in its file, and its bytes."""
    begin = block * CRC_BLOCK
    return stub.storage.offset + begin, min(CRC_BLOCK, stub.storage.nbytes - begin)
