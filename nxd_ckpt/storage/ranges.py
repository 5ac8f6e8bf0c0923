"""Ranges of a file that are read together, where a request costs more than the bytes between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Range = tuple[int, memoryview]
"""An offset in bytes, and the memory to be filled from there on."""

HOLE = 64 * 2**10
"""Bytes between two ranges that take less time than another request of 30 ms."""


class ByteRun(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, and the memories for them, in ascending order without overlaps."""

    begin: int
    end: int
    ranges: list[Range]


def runs(ranges: Sequence[Range]) -> Iterator[ByteRun]:
    """Group neighbouring ranges; empty ones are left out."""
    begin, end, together = 0, 0, list[Range]()
    for offset, buffer in ranges:
        if not len(buffer):
            continue
        if together and not 0 <= offset - end <= HOLE:
            yield ByteRun(begin, end, together)
            together = []
        if not together:
            begin = offset
        together.append((offset, buffer))
        end = offset + len(buffer)
    if together:
        yield ByteRun(begin, end, together)
