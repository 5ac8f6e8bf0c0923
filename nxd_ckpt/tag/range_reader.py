"""Ranges of a tag's files, read by several threads: neighbours together, each compared with its digest while its bytes
are still in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from nxd_ckpt.core.closing import Closing
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats import crc32
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.storage.ranges import HOLE
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.open_files import OpenFiles
from nxd_ckpt.tag.read_pool import PIECE, ReadPool
from nxd_ckpt.tag.verification import Digest, mismatch, naming

_TOGETHER = 500
"""Ranges of a piece, at most: those of tiny tensors."""


class Range(NamedTuple):
    """Bytes to be read into ``memory``, or nowhere.

    ``expected`` is their CRC-32, if they have one of their own; else they may be the ``segment``-th that ``digest`` is
    of. ``deliver`` is called with the bytes once these are right.
    """

    offset: int
    nbytes: int
    memory: memoryview | None
    name: str
    expected: int | None = None
    digest: Digest | None = None
    segment: int = 0
    deliver: Callable[[memoryview], None] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def scratch_nbytes(self) -> int:
        """What it takes of the memory that is used again, so that the next may begin as any dtype wants it."""
        return -(-self.nbytes // 16) * 16 if self.memory is None else 0


class RangeReader(Closing):
    """Reads ranges of ``files`` on as many threads as the storage likes, the caller's included. Close it. ``done``
    counts what was read.

    :meth:`add` and :meth:`call` return before anything was read, and raise what an earlier call met.
    """

    def __init__(self, files: TagFiles) -> None:
        self._files, self._open, self._pool = files, OpenFiles(files), ReadPool(files.storage.concurrency)
        self.done = Counter()
        self._file, self._ranges = "", list[Range]()
        self._nbytes, self._scratch_nbytes = 0, 0
        self._longest = max(PIECE, files.storage.read_nbytes)

    def add(self, file: str, one: Range) -> None:
        if file != self._file or len(self._ranges) >= _TOGETHER or not self._goes_along(one):
            self._flush()
        self._file = file
        self._nbytes += one.nbytes
        self._scratch_nbytes += one.scratch_nbytes
        self._ranges.append(one)

    def call(self, name: str, read: partial[None]) -> None:
        """Let one of the threads do this; errors name the tensor ``name``."""

        def task(scratch: memoryview) -> None:
            with naming(name):
                read()

        self._flush()
        self._pool.submit(task)

    def read_ranges(self, file: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read them at once, on this thread, with no digest."""
        self._open.read_ranges(file, ranges)

    @property
    def asked(self) -> int:
        """What :meth:`wait` takes to wait for all that was asked for until now."""
        return self._pool.submitted + bool(self._ranges)

    def wait(self, asked: int) -> None:
        """Return when the earlier of what was asked for, or all of it, is read. Raises what reading it met."""
        if asked > self._pool.submitted:
            self._flush()
        self._pool.wait_for(asked)

    def close(self) -> None:
        """Stop reading and close the files. Returns when no thread reads any more."""
        self._pool.close()
        self._open.close()

    def _goes_along(self, one: Range) -> bool:
        """Whether it is read together with those before it: small ones are, and what follows on them as long as the
        storage likes long reads."""
        if not self._ranges:
            return True
        if self._scratch_nbytes + one.scratch_nbytes > PIECE:
            return False
        follows = 0 <= one.offset - self._ranges[-1].end <= HOLE
        return self._nbytes + one.nbytes <= (self._longest if follows else PIECE)

    def _flush(self) -> None:
        if self._ranges:
            ranges, self._ranges, self._nbytes, self._scratch_nbytes = self._ranges, [], 0, 0
            self._pool.submit(partial(self._read, self._file, ranges))

    def _read(self, file: str, ranges: Sequence[Range], scratch: memoryview) -> None:
        """Read the ranges at once, and compare their digests."""
        memories, at = [], 0
        for one in ranges:
            memories.append(scratch[at : at + one.nbytes] if one.memory is None else one.memory)
            at += one.scratch_nbytes
        try:
            self._open.read_ranges(file, [(one.offset, memory) for one, memory in zip(ranges, memories, strict=True)])
        except MalformedFile:  # the file ends before one of them does
            for one, memory in zip(ranges, memories, strict=True):
                with naming(one.name):
                    self._open.read_ranges(file, [(one.offset, memory)])
            raise
        self.done.add(sum(one.nbytes for one in ranges))
        for one, memory in zip(ranges, memories, strict=True):
            if one.expected is not None or one.digest is not None:
                self._compare(file, one, memory)
            if one.deliver is not None:
                one.deliver(memory)

    def _compare(self, file: str, one: Range, memory: memoryview) -> None:
        found = crc32.crc32(memory)
        with naming(one.name):
            if one.digest is not None:
                one.digest.take(one.segment, found, one.nbytes)
            elif found != one.expected:
                where = f"{self._files.where(file)}, {one.nbytes} bytes from {one.offset} on"
                raise mismatch(where, one.expected or 0, found)
