"""Reading the tensors of a tag's trees, proved: whole ones by the digest in their file, parts by their blocks' digests.

An index has a digest for every block of a tensor's bytes, so that a part is proved by the blocks that it lies in. A tag
without indexes has one digest a tensor: there the whole tensor is read once to prove any part of it.

What is asked for is done by the time of :meth:`LeafReader.finish`: cut and collected into pieces that several threads
read, whose digests are compared while their bytes are still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple

import torch

from nxd_ckpt.core.manifest import CRC_BLOCK, TensorEntry
from nxd_ckpt.errors import InvalidArgument, MalformedFile
from nxd_ckpt.formats import crc32, torch_zip
from nxd_ckpt.formats.assembly import blocks_of, clear_padding, direct_run, read_part, slabs_of
from nxd_ckpt.formats.tensors import Assembly, Part, TensorStub, byte_view
from nxd_ckpt.layout.files import TagFiles
from nxd_ckpt.layout.open_files import OpenFiles
from nxd_ckpt.runtime.proof import Digest, naming
from nxd_ckpt.runtime.read_pool import PIECE, ReadPool

Leaf = TensorStub | Assembly

_TOGETHER = 500
"""Ranges of a piece, at most: those of tiny tensors."""


class LeafReader:
    """Reads and proves leaves. ``entries`` are what the tag's indexes say of their tensors, as far as it has any.

    Its methods return before anything was read, and raise what an earlier call met: :meth:`finish` waits for all. To be
    closed, or used as a context manager.
    """

    def __init__(self, files: TagFiles, entries: Mapping[tuple[str, int], TensorEntry]) -> None:
        self._files, self._entries = files, entries
        self._open, self._pool = OpenFiles(files), ReadPool()
        self._proved: set[tuple[str, int]] = set()
        self._proved_blocks: set[tuple[str, int, int]] = set()
        self._file, self._ranges, self._nbytes = "", list[_Range](), 0

    def prove(self, leaf: Leaf, name: str) -> None:
        """Read what ``leaf`` is made of, of parts the blocks that they lie in, and compare digests; each byte once.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        with naming(name):
            for stub, blocks in _sources(leaf):
                self._prove(stub, blocks, name)

    def read_into(self, leaf: Leaf, out: torch.Tensor, name: str, *, compare: bool, proved: bool = True) -> None:
        """Fill a contiguous CPU tensor of the leaf's dtype and shape.

        With ``compare`` the digests of what is read as a whole, tensor or block, are compared. Unless all of it was
        ``proved``, the rest is then as well, and for that the blocks are read that parts lie in; else nothing but the
        leaf's own bytes.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        with naming(name):
            if isinstance(leaf, TensorStub):
                self._read_stub(leaf, out, name, compare)
                return
            clear_padding(leaf, out)
            for part in leaf.parts:
                if compare and not proved and self._entry(part.stub) is None:
                    self._prove(part.stub, None, name)
                if part.source.numel:
                    self._read_part(part, out, name, compare, proved)

    @property
    def asked(self) -> int:
        """What :meth:`finish` takes to wait for all that was asked for until now."""
        return self._pool.submitted + bool(self._ranges)

    def finish(self, asked: int | None = None) -> None:
        """Return when what was asked for has been read, all or the earlier of it. Raises what reading it met."""
        if asked is None or asked > self._pool.submitted:
            self._flush()
        self._pool.wait_for(self._pool.submitted if asked is None else asked)

    def close(self) -> None:
        """Stop reading and close the files. Returns when no thread reads any more."""
        self._pool.close()
        self._open.close()

    def __enter__(self) -> LeafReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entry(self, stub: TensorStub) -> TensorEntry | None:
        return self._entries.get((stub.file, stub.storage.offset))

    def _prove(self, stub: TensorStub, blocks: Iterator[int] | None, name: str) -> None:
        """Prove these blocks of the stub's record; all of it without them, or where only the whole has a digest."""
        place, entry = (stub.file, stub.storage.offset), self._entry(stub)
        if place in self._proved:
            return
        if blocks is None or entry is None:
            self._proved.add(place)
            self._read_record(stub, memoryview(b""), name)
            return
        for block in blocks:
            if (*place, block) not in self._proved_blocks:
                self._proved_blocks.add((*place, block))
                offset, nbytes = _span(entry, block)
                self._add(stub.file, offset, nbytes, None, name, self._digest_of(entry, block))

    def _read_stub(self, stub: TensorStub, out: torch.Tensor, name: str, compare: bool) -> None:
        if not stub.is_contiguous:
            self._call(name, partial(torch_zip.read_into, self._pread_into(stub.file), stub, out, compare))
            return
        memory = byte_view(out)
        if len(memory) != stub.nbytes:
            raise InvalidArgument(f"{out.dtype} {tuple(out.shape)} for a tensor {stub.dtype} {stub.shape}")
        whole = stub.nbytes == stub.storage.nbytes
        if compare and (whole or (stub.file, stub.storage.offset) not in self._proved):
            self._proved.add((stub.file, stub.storage.offset))
            self._read_record(stub, memory, name)
        else:
            self._read_plain(stub.file, stub.offset, memory, name)

    def _read_record(self, stub: TensorStub, memory: memoryview, name: str) -> None:
        """Read the record that the stub is a view of, its own bytes into ``memory``, and compare the record's digest.

        One without a digest proves nothing, but must be there.
        """
        storage = stub.storage
        middle = stub.offset if len(memory) else storage.offset
        segments = list(_segments(storage.offset, middle, memory, storage.offset + storage.nbytes))
        # That 0 means "not recorded" is said of files that no index vouches for.
        expected = storage.crc32 if self._entry(stub) is None else storage.crc32 or 0
        digest = None
        if expected is not None:
            where = f"{self._files.storage.url}/{self._files.key(stub.file)}, record {storage.record!r}"
            digest = Digest(where, expected, len(segments))
            if not segments:
                digest.compare(0)
        for number, (offset, nbytes, target) in enumerate(segments):
            self._add(stub.file, offset, nbytes, target, name, digest, number)

    def _read_part(self, part: Part, out: torch.Tensor, name: str, compare: bool, proved: bool) -> None:
        entry, run = self._entry(part.stub), direct_run(part, out)
        if run is None:
            if compare and not proved:
                self._prove(part.stub, blocks_of(part), name)
            for slab in slabs_of(part):
                self._call(name, partial(read_part, slab, out, self._open.read_ranges))
        elif entry is None or not compare:
            self._read_plain(part.stub.file, *run, name)
        else:
            self._read_blocks(entry, part, *run, name, proved)

    def _read_blocks(
        self, entry: TensorEntry, part: Part, offset: int, memory: memoryview, name: str, proved: bool
    ) -> None:
        """Read the bytes from ``offset`` on; those of a whole block are compared where they arrive."""
        end = offset + len(memory)
        for block in blocks_of(part):
            begin, nbytes = _span(entry, block)
            first, last = max(begin, offset), min(begin + nbytes, end)
            whole = last - first == nbytes
            if not whole and not proved:
                self._prove(part.stub, iter([block]), name)
            digest = self._digest_of(entry, block) if whole else None
            self._add(entry.file, first, last - first, memory[first - offset : last - offset], name, digest)

    def _read_plain(self, file: str, offset: int, memory: memoryview, name: str) -> None:
        for at in range(0, len(memory), PIECE):
            target = memory[at : at + PIECE]
            self._add(file, offset + at, len(target), target, name)

    def _digest_of(self, entry: TensorEntry, block: int) -> Digest:
        offset, nbytes = _span(entry, block)
        key = f"{self._files.storage.url}/{self._files.key(entry.file)}"
        return Digest(f"{key}, {nbytes} bytes from {offset} on", entry.crc32[block])

    def _pread_into(self, file: str) -> torch_zip.PreadInto:
        return lambda offset, memory: self._open.read_ranges(file, [(offset, memory)])

    def _add(
        self,
        file: str,
        offset: int,
        nbytes: int,
        memory: memoryview | None,
        name: str,
        digest: Digest | None = None,
        segment: int = 0,
    ) -> None:
        if file != self._file or self._nbytes + nbytes > PIECE or len(self._ranges) >= _TOGETHER:
            self._flush()
        self._file = file
        self._nbytes += nbytes
        self._ranges.append(_Range(offset, nbytes, memory, name, digest, segment))

    def _call(self, name: str, read: partial[None]) -> None:
        def task(scratch: memoryview) -> None:
            with naming(name):
                read()

        self._flush()
        self._pool.submit(task)

    def _flush(self) -> None:
        if self._ranges:
            ranges, self._ranges, self._nbytes = self._ranges, [], 0
            self._pool.submit(partial(_read, self._open, self._file, ranges))


class _Range(NamedTuple):
    """Bytes to be read into ``memory``, or nowhere; they are the ``segment``-th of those that ``digest`` is for."""

    offset: int
    nbytes: int
    memory: memoryview | None
    name: str
    digest: Digest | None
    segment: int


def _read(files: OpenFiles, file: str, ranges: Sequence[_Range], scratch: memoryview) -> None:
    """Read the ranges at once, and compare their digests."""
    memories, at = [], 0
    for _, nbytes, memory, *_ in ranges:
        memories.append(scratch[at : at + nbytes] if memory is None else memory)
        at += nbytes
    try:
        files.read_ranges(file, [(one.offset, memory) for one, memory in zip(ranges, memories, strict=True)])
    except MalformedFile:  # the file ends before one of them does
        for one, memory in zip(ranges, memories, strict=True):
            with naming(one.name):
                files.read_ranges(file, [(one.offset, memory)])
        raise
    for (_, nbytes, _, name, digest, segment), memory in zip(ranges, memories, strict=True):
        if digest is not None:
            found = crc32.crc32(memory)
            with naming(name):
                digest.take(segment, found, nbytes)


def _sources(leaf: Leaf) -> Iterator[tuple[TensorStub, Iterator[int] | None]]:
    """What ``leaf`` is read from, with the blocks of it that it lies in; None for a whole tensor."""
    if isinstance(leaf, TensorStub):
        yield leaf, None
    else:
        yield from ((part.stub, blocks_of(part)) for part in leaf.parts)


def _span(entry: TensorEntry, block: int) -> tuple[int, int]:
    """Where the block begins in its file, and its bytes."""
    begin = block * CRC_BLOCK
    return entry.offset + begin, min(CRC_BLOCK, entry.nbytes - begin)


def _segments(begin: int, middle: int, memory: memoryview, end: int) -> Iterator[tuple[int, int, memoryview | None]]:
    """(offset, length, memory) of pieces covering [begin, end) of a file: ``memory`` from ``middle`` on, else none."""
    after = middle + len(memory)
    for offset in range(begin, middle, PIECE):
        yield offset, min(PIECE, middle - offset), None
    for at in range(0, len(memory), PIECE):
        target = memory[at : at + PIECE]
        yield middle + at, len(target), target
    for offset in range(after, end, PIECE):
        yield offset, min(PIECE, end - offset), None
