"""Ranges of a file that are read together, where a request costs more than the bytes that lie between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Range = tuple[int, memoryview]
"""An offset in bytes, and the memory to be filled from there on."""

HOLE = 64 * 2**10
"""Bytes between two ranges that take less time than a request of their own, at 30 ms a request."""


class ByteRun(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, and the memories that want them, in ascending order and apart."""

    begin: int
    end: int
    wanted: list[Range]


def runs(ranges: Sequence[Range]) -> Iterator[ByteRun]:
    """Neighbouring ranges together; empty ones are left out."""
    begin, end, wanted = 0, 0, list[Range]()
    for offset, buffer in ranges:
        if not len(buffer):
            continue
        if wanted and not 0 <= offset - end <= HOLE:
            yield ByteRun(begin, end, wanted)
            wanted = []
        if not wanted:
            begin = offset
        wanted.append((offset, buffer))
        end = offset + len(buffer)
    if wanted:
        yield ByteRun(begin, end, wanted)
