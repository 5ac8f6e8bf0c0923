"""Reading of ranges of a tag's files by several threads.

Neighbours are read together, and each range is compared with its digest while its bytes are in the processor's cache.
"""

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
"""Maximum number of ranges in a piece, for tiny tensors."""


class Range(NamedTuple):
    """Bytes to read into ``memory``, or to discard.

    ``expected`` is their CRC-32, if they have their own; else they may be the ``segment``-th of those that ``digest``
    covers. ``deliver`` is called with the bytes once they are verified.
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
        """Bytes of scratch memory that it needs, rounded up so that the next range is aligned for any dtype."""
        return -(-self.nbytes // 16) * 16 if self.memory is None else 0


class RangeReader(Closing):
    """Reader of ranges of ``files`` on the storage's preferred number of threads, the caller's included.

    `add` and `call` return before anything is read, and raise the error of an earlier call. ``done`` counts the bytes.
    It
    must be closed.
    """

    def __init__(self, files: TagFiles) -> None:
        self._files, self._open, self._pool = files, OpenFiles(files), ReadPool(files.storage.concurrency)
        self.done = Counter()
        self._file, self._ranges = "", list[Range]()
        self._nbytes, self._scratch_nbytes = 0, 0
        self._longest = max(PIECE, files.storage.read_nbytes)
        self._step = files.storage.read_nbytes

    def add(self, file: str, item: Range) -> None:
        if file != self._file or len(self._ranges) >= _TOGETHER or not self._fits(item):
            self._flush()
        self._file = file
        self._nbytes += item.nbytes
        self._scratch_nbytes += item.scratch_nbytes
        self._ranges.append(item)

    def call(self, name: str, read: partial[None]) -> None:
        """Run ``read`` on one of the threads; errors name the tensor ``name``."""

        def task(scratch: memoryview) -> None:
            with naming(name):
                read()

        self._flush()
        self._pool.submit(task)

    def read_ranges(self, file: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read at once, on this thread, without a digest."""
        self._open.read_ranges(file, ranges)

    @property
    def asked(self) -> int:
        """Argument for `wait` that covers everything requested so far."""
        return self._pool.submitted + bool(self._ranges)

    def wait(self, asked: int) -> None:
        """Return when the first ``asked`` requests are read. Raises their errors."""
        if asked > self._pool.submitted:
            self._flush()
        self._pool.wait_for(asked)

    def close(self) -> None:
        """Stop reading and close the files. Returns when no thread reads any more."""
        self._pool.close()
        self._open.close()

    def _fits(self, item: Range) -> bool:
        """Return whether it is read together with those before it.

        Small ranges are, and adjacent ones up to the storage's preferred length.
        """
        if not self._ranges:
            return True
        if self._scratch_nbytes + item.scratch_nbytes > PIECE:
            return False
        follows = 0 <= item.offset - self._ranges[-1].end <= HOLE
        return self._nbytes + item.nbytes <= (self._longest if follows else PIECE)

    def _flush(self) -> None:
        if self._ranges:
            ranges, self._ranges, self._nbytes, self._scratch_nbytes = self._ranges, [], 0, 0
            self._pool.submit(partial(self._read, self._file, ranges))

    def _read(self, file: str, ranges: Sequence[Range], scratch: memoryview) -> None:
        """Read the ranges, as many at once as the storage prefers, and compare their digests.

        What is read at once shares the scratch memory with what was read before: it stays in the cache.
        """
        begin, nbytes = 0, 0
        for number, item in enumerate(ranges):
            if number > begin and nbytes + item.nbytes > self._step:
                self._read_together(file, ranges[begin:number], scratch)
                begin, nbytes = number, 0
            nbytes += item.nbytes
        self._read_together(file, ranges[begin:], scratch)

    def _read_together(self, file: str, ranges: Sequence[Range], scratch: memoryview) -> None:
        if len(ranges) == 1 and ranges[0].nbytes > self._step:
            self._read_in_steps(file, ranges[0], scratch)
            return
        memories, at = [], 0
        for item in ranges:
            memories.append(scratch[at : at + item.nbytes] if item.memory is None else item.memory)
            at += item.scratch_nbytes
        try:
            self._open.read_ranges(file, [(item.offset, memory) for item, memory in zip(ranges, memories, strict=True)])
        except MalformedFile:  # the file ends before one of them does
            for item, memory in zip(ranges, memories, strict=True):
                with naming(item.name):
                    self._open.read_ranges(file, [(item.offset, memory)])
            raise
        self.done.add(sum(item.nbytes for item in ranges))
        for item, memory in zip(ranges, memories, strict=True):
            if item.expected is not None or item.digest is not None:
                self._compare(file, item, crc32.crc32(memory))
            if item.deliver is not None:
                item.deliver(memory)

    def _read_in_steps(self, file: str, item: Range, scratch: memoryview) -> None:
        """Read a long range; the digest of each step is computed before the next one is read."""
        crc, is_compared = 0, item.expected is not None or item.digest is not None
        is_kept = item.memory is not None or item.deliver is not None
        memory = scratch[: item.nbytes] if item.memory is None else item.memory
        with naming(item.name):
            for at in range(0, item.nbytes, self._step):
                count = min(self._step, item.nbytes - at)
                part = memory[at : at + count] if is_kept else memory[:count]
                self._open.read_ranges(file, [(item.offset + at, part)])
                crc = crc32.crc32(part, crc) if is_compared else crc
        self.done.add(item.nbytes)
        if is_compared:
            self._compare(file, item, crc)
        if item.deliver is not None:
            item.deliver(memory)

    def _compare(self, file: str, item: Range, crc: int) -> None:
        with naming(item.name):
            if item.digest is not None:
                item.digest.take(item.segment, crc, item.nbytes)
            elif crc != item.expected:
                where = f"{self._files.where(file)}, {item.nbytes} bytes from {item.offset} on"
                raise mismatch(where, item.expected or 0, crc)
