"""Reading the tensors of a tag's trees, verified: whole ones by their file's digest, parts by their blocks' digests.

A record is the bytes of one tensor in a file. An index has a digest for every block of it: a part is verified by the
blocks that it lies in. A tag without indexes has one digest per record: its blocks are then read in any order, as parts
of them are requested, and the last decides.

Requests are complete when `LeafReader.finish` returns: they are cut and collected into pieces that several threads
read, whose digests are compared while their bytes are in the processor's cache. A block with several requested parts is
read once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import CRC_BLOCK, TensorEntry
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats import stored_tensors
from nxd_ckpt.formats.assembly import (
    DirectRun,
    as_stored,
    blocks_of,
    clear_padding,
    cut_out,
    direct_run,
    elements_in,
    fragments_in,
    in_stored_order,
    read_part,
    run_of_block,
    slabs_of,
)
from nxd_ckpt.formats.memory import allocated, byte_view, put_bytes, torch_dtype
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub, itemsize
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.storage.base import Closing
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.tag.range_reader import PIECE, Range, RangeReader
from nxd_ckpt.tag.verification import Digest, naming

Record = tuple[str, int]
"""The file's key, and the offset of the record in it."""


class Expected(NamedTuple):
    """Digest of one block: its own CRC-32, or the ``segment``-th of a longer digest."""

    crc32: int | None = None
    digest: Digest | None = None
    segment: int = 0


class _Begun(NamedTuple):
    """A record with one digest for all its blocks, some of which have been read."""

    stub: TensorStub
    name: str
    digest: Digest
    missing: set[int]


class VerifiedRecords:
    """State of a tag's records. ``entries`` are those of its indexes, if it has any. For one thread."""

    def __init__(self, entries: Mapping[Record, TensorEntry]) -> None:
        self._entries = entries
        self._whole: set[Record] = set()
        self._blocks: set[tuple[Record, int]] = set()
        self._begun: dict[Record, _Begun] = {}

    def entry(self, stub: TensorStub) -> TensorEntry | None:
        """Return the index entry of the stub's record."""
        return self._entries.get((stub.file, stub.storage.offset))

    def entries(self) -> Iterable[TensorEntry]:
        return self._entries.values()

    def is_whole(self, stub: TensorStub) -> bool:
        """Return whether all of the record is verified, or will be by earlier requests."""
        return _record(stub) in self._whole

    def claim_whole(self, stub: TensorStub) -> None:
        """Mark that all of the record will be read and compared."""
        if stub.storage.nbytes:  # in safetensors files an empty record begins where another one does
            self._whole.add(_record(stub))

    def claim(self, stub: TensorStub, block: int, count: int, name: str, where: str) -> Expected | None:
        """Return the digest to compare the block with.

        The caller must read all of it. None if there is none, or it was claimed.

        ``count`` is the record's number of blocks. ``name`` and ``where`` describe tensor and bytes in errors.
        """
        record = _record(stub)
        if record in self._whole or (record, block) in self._blocks:
            return None
        entry = self._entries.get(record)
        crc = stub.storage.crc32
        if entry is None and crc is None:
            return None
        self._blocks.add((record, block))
        if entry is not None:
            return Expected(entry.crc32[block])
        if record not in self._begun:
            digest = Digest(where, crc or 0, count)
            self._begun[record] = _Begun(stub, name, digest, set(range(count)))
        begun = self._begun[record]
        begun.missing.discard(block)
        return Expected(None, begun.digest, block)

    def unread(self) -> Iterator[tuple[TensorStub, int, str]]:
        """Yield the unread blocks of records that have been begun: a stub, the block, and the tensor's name."""
        for begun in self._begun.values():
            yield from ((begun.stub, block, begun.name) for block in sorted(begun.missing))


def _record(stub: TensorStub) -> Record:
    return stub.file, stub.storage.offset


class Request(NamedTuple):
    """A part to read; ``run`` is the place of its bytes in memory, if they are copied unchanged."""

    fragment: Fragment
    out: torch.Tensor
    run: DirectRun | None

    def clipped(self, offset: int, nbytes: int) -> DirectRun:
        """Return the part of the run within these bytes of the file."""
        assert self.run is not None
        begin, memory = self.run
        first = max(begin, offset)
        last = min(begin + len(memory), offset + nbytes)
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


Leaf = TensorStub | Assembly

Takes = Callable[[Fragment, int], bool]
"""Returns whether this rank, not another one, verifies a block of the record that a part is read from."""

Look = Callable[[int, list[torch.Tensor]], None]
"""Called with the number of a part of a leaf, and its elements as tensors of one dimension: valid until it returns."""

_PENDING = 64 * 2**20
"""Bytes of blocks that are collected before they are read: the amount that a conversion requests at once."""


class LeafReader(Closing):
    """Reader that verifies leaves. ``entries`` are the tensors in the tag's indexes, if it has any.

    Its methods return before anything is read, and raise the error of an earlier call: `finish` waits for all. It must
    be closed, or used as a context manager. ``done`` counts the bytes read.
    """

    def __init__(self, files: TagFiles, entries: Mapping[tuple[str, int], TensorEntry]) -> None:
        self._files = files
        self._records = VerifiedRecords(entries)
        self._ranges = RangeReader(files)
        self.done: Counter = self._ranges.done
        self._blocks: dict[tuple[str, int, int], PendingBlock] = {}
        self._blocks_nbytes = 0

    def verify(self, leaf: Leaf, name: str, takes: Takes | None = None) -> None:
        """Read the sources of ``leaf``, for parts their blocks, and compare digests; each byte once.

        With ``takes`` only the blocks that it selects.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        with naming(name):
            for stub, blocks in _sources(leaf, takes):
                if not self.is_kept(stub):
                    self._verify(stub, blocks, name)

    def is_kept(self, leaf: Leaf) -> bool:
        """Return whether all of the leaf is in a file that was verified whole and is kept."""
        return isinstance(leaf, TensorStub) and self._files.kept(leaf.file) is not None

    def take_kept(self, leaf: Leaf, out: torch.Tensor) -> bool:
        """Fill ``out``, as `read_into` does, from a file that was verified whole and is kept; return whether it was."""
        if not isinstance(leaf, TensorStub) or not leaf.is_contiguous:
            return False
        kept = self._files.kept(leaf.file)
        if kept is not None:
            put_bytes(out, kept[leaf.offset : leaf.offset + leaf.nbytes])
        return kept is not None

    def read_into(
        self,
        leaf: Leaf,
        out: torch.Tensor,
        name: str,
        *,
        compare: bool,
        verified: bool = True,
        takes: Takes | None = None,
    ) -> None:
        """Fill a contiguous CPU tensor of the leaf's dtype and shape.

        With ``compare`` the digests of everything that is read as a whole, tensor or block, are compared. Unless all of
        it was ``verified`` before, the remaining parts are verified too, by reading the blocks they lie in; with
        ``takes``, only the blocks that it selects. Otherwise only the leaf's own bytes are read.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        with naming(name):
            if isinstance(leaf, TensorStub):
                self._read_stub(leaf, out, name, compare)
                return
            clear_padding(leaf, out)
            for fragment in leaf.fragments:
                if fragment.source.numel:
                    self._read_part(fragment, out, name, compare, None if verified else takes or (lambda *_: True))

    def read(self, leaf: Leaf, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, after all requests; its parts are compared with the indexes too.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        out = allocated(leaf.shape, leaf.dtype)
        self.read_into(leaf, out, name, compare=True, verified=False)
        self.finish()
        return out

    def visit(self, leaf: Leaf, name: str, look: Look) -> None:
        """Call ``look`` with all elements of ``leaf``, verified, in parts and in any order.

        The threads that read them call it, while the bytes are in the processor's cache. A leaf has the same parts
        whenever it is visited.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        leaf, numbers, dtype = Assembly.of(leaf), itertools.count(), torch_dtype(leaf.dtype)

        def show(number: int, values: list[torch.Tensor]) -> None:
            look(number, [value.to(dtype) for value in values])

        with naming(name):
            for fragment in leaf.fragments:
                if fragment.source.numel:
                    self._visit_part(in_stored_order(fragment), name, numbers, show)
            padding = leaf.numel - sum(fragment.target.numel for fragment in leaf.fragments)
            for at in range(0, padding, PIECE):
                look(next(numbers), [torch.zeros(min(PIECE, padding - at), dtype=dtype)])

    def entry(self, stub: TensorStub) -> TensorEntry | None:
        """Return what an index says of the record that ``stub`` is a view of."""
        return self._records.entry(stub)

    def entries(self) -> Iterable[TensorEntry]:
        """Return the tensors in the tag's indexes that were read."""
        return self._records.entries()

    def call(self, name: str, work: partial[None]) -> None:
        """Do ``work`` on one of the threads that read; errors name the tensor ``name``. `finish` waits for it."""
        self._ranges.call(name, work)

    @property
    def requested(self) -> int:
        """Argument for `wait` that covers everything requested so far."""
        self._read_blocks()
        return self._ranges.requested

    def wait(self, requested: int | None = None) -> None:
        """Return when the first ``requested`` requests, or all, are in memory. Raises their errors.

        Tensors with a single digest may still be unverified then: `finish` does the rest.
        """
        self._ranges.wait(self.requested if requested is None else requested)

    def finish(self) -> None:
        """Return when all requests are in memory, and verified if requested. Raises their errors."""
        self._read_blocks()
        for stub, block, name in list(self._records.unread()):
            self._block(stub, block, name)
        self.wait()

    def close(self) -> None:
        """Stop reading, and close the files and release what is kept of them. Returns when no thread reads any more."""
        self._ranges.close()
        self._files.drop_kept()

    def nbytes_to_verify(self, leaves: Iterable[tuple[Leaf, Takes | None]]) -> int:
        """Return the bytes that `verify` reads of all of these together."""
        records: dict[tuple[str, int], int] = {}
        blocks: dict[tuple[str, int, int], int] = {}
        for leaf, takes in leaves:
            for stub, own in _sources(leaf, takes):
                record = stub.file, stub.storage.offset
                if own is None or self._records.entry(stub) is None:
                    records[record] = stub.storage.nbytes
                else:
                    blocks |= {(*record, block): span_of(stub, block)[1] for block in own}
        return sum(records.values()) + sum(nbytes for (*of, _), nbytes in blocks.items() if tuple(of) not in records)

    def _verify(self, stub: TensorStub, blocks: Iterator[int] | None, name: str) -> None:
        """Verify these blocks of the stub's record; all of it without them, or if only the whole has a digest."""
        if blocks is not None and self._records.entry(stub) is not None:
            for block in blocks:
                self._block(stub, block, name)
        elif not self._records.is_whole(stub):
            self._records.claim_whole(stub)
            self._read_record(stub, None, name)

    def _read_stub(self, stub: TensorStub, out: torch.Tensor, name: str, compare: bool) -> None:
        if not stub.is_contiguous:

            def pread_into(offset: int, memory: memoryview) -> None:
                self._ranges.read_ranges(stub.file, [(offset, memory)])

            self._ranges.call(name, partial(stored_tensors.read_into, pread_into, stub, out, compare))
            return
        if self.take_kept(stub, out):
            return
        memory = _memory_for(stub, out)
        whole = stub.nbytes == stub.storage.nbytes
        if compare and (whole or not self._records.is_whole(stub)):
            self._records.claim_whole(stub)
            self._read_record(stub, memory, name)
        else:
            self._read_plain(stub.file, stub.offset, memory, name)

    def _read_record(self, stub: TensorStub, memory: memoryview | None, name: str) -> None:
        """Read the record that the stub is a view of, its own bytes into ``memory`` if any, and compare the digest.

        A record without a digest is read too, because it must exist.
        """
        storage = stub.storage
        # Only in files without an index does 0 mean "not recorded".
        expected = storage.crc32 if self._records.entry(stub) is None else storage.crc32 or 0
        if storage.nbytes <= PIECE and (memory is None or len(memory) == storage.nbytes):
            self._ranges.add(stub.file, Range(storage.offset, storage.nbytes, memory, name, expected))
            return
        segments = list(_segments(storage.offset, storage.offset + storage.nbytes, stub.offset, memory))
        digest = None
        if expected is not None:
            digest = Digest(f"{self._files.where(stub.file)}, record {storage.record!r}", expected, len(segments))
        for number, (offset, nbytes, target) in enumerate(segments):
            self._ranges.add(stub.file, Range(offset, nbytes, target, name, None, digest, number))

    def _read_part(self, fragment: Fragment, out: torch.Tensor, name: str, compare: bool, takes: Takes | None) -> None:
        """Read a part; ``takes`` is None if it was verified before."""
        fragment, out = as_stored(fragment, out)
        run = direct_run(fragment, out)
        if compare and takes is not None:
            if fragment.stub.is_contiguous:
                for block in blocks_of(fragment):
                    pending = self._block(fragment.stub, block, name, takes(fragment, block))
                    pending.requests.append(Request(fragment, out, run))
            else:
                self._verify(fragment.stub, blocks_of(fragment), name)
                self._read_slabs(fragment, out, name)
        elif run is None:
            self._read_slabs(fragment, out, name)
        elif compare and (entry := self._records.entry(fragment.stub)) is not None:
            self._read_run(entry, fragment, run, name)
        else:
            self._read_plain(fragment.stub.file, *run, name)

    def _visit_part(self, fragment: Fragment, name: str, numbers: Iterator[int], show: Look) -> None:
        stub = fragment.stub
        if stub.is_contiguous:
            for block in blocks_of(fragment):
                self._block(stub, block, name).visits.append(Visit(fragment, partial(show, next(numbers))))
        else:
            self._verify(stub, blocks_of(fragment), name)
            self._ranges.call(name, partial(self._show_view, fragment, partial(show, next(numbers))))

    def _show_view(self, fragment: Fragment, show: Callable[[list[torch.Tensor]], None]) -> None:
        """Show a part of a view that ``torch.save`` stored as a view."""
        out = allocated(fragment.source.size, fragment.stub.dtype)
        whole = Fragment(fragment.stub, fragment.source, Box.whole(fragment.source.size))
        read_part(whole, out, self._ranges.read_ranges)
        show([out.reshape(-1)])

    def _read_run(self, entry: TensorEntry, fragment: Fragment, run: DirectRun, name: str) -> None:
        """Read a part that is a run; its whole blocks are compared on arrival."""
        offset, memory = run
        for block in blocks_of(fragment):
            begin, nbytes = span_of(fragment.stub, block)
            first = max(begin, offset)
            last = min(begin + nbytes, offset + len(memory))
            expected = entry.crc32[block] if last - first == nbytes else None
            target = memory[first - offset : last - offset]
            self._ranges.add(entry.file, Range(first, last - first, target, name, expected))

    def _block(self, stub: TensorStub, number: int, name: str, is_verified_here: bool = True) -> PendingBlock:
        """Return the pending block, which is read next."""
        place = stub.file, stub.storage.offset, number
        block = self._blocks.get(place)
        if block is None:
            nbytes = span_of(stub, number)[1]
            if self._blocks_nbytes + nbytes > _PENDING:
                self._read_blocks()
            block = self._blocks[place] = PendingBlock(stub, number, name)
            self._blocks_nbytes += nbytes
        block.is_verified_here |= is_verified_here
        return block

    def _read_blocks(self) -> None:
        """Request the pending blocks, neighbours one after the other."""
        if not self._blocks:
            return
        blocks = self._blocks
        self._blocks = {}
        self._blocks_nbytes = 0
        for _, block in sorted(blocks.items(), key=lambda item: item[0]):
            with naming(block.name):
                self._read_block(block)

    def _read_block(self, block: PendingBlock) -> None:
        """Read all of a block that must be verified or that several parts need; else only the requested bytes."""
        stub, (offset, nbytes) = block.stub, block.span
        where = f"{self._files.where(stub.file)}, record {stub.storage.record!r}"
        count = -(-stub.storage.nbytes // CRC_BLOCK)
        expected = None
        if block.is_verified_here or block.is_read_whole:
            expected = self._records.claim(stub, block.number, count, block.name, where)
        unshared = not block.visits and (len(block.requests) < 2 or block.requested_nbytes < nbytes // 2)
        if expected is None and unshared:
            for request in block.requests:
                self._read_request(request, block)
            return
        target, copies = block.target()
        deliver = partial(block.deliver, copies) if copies or block.visits else None
        self._ranges.add(stub.file, Range(offset, nbytes, target, block.name, *(expected or Expected()), deliver))

    def _read_request(self, request: Request, block: PendingBlock) -> None:
        """Read the requested bytes of a block only."""
        if request.run is not None:
            begin, memory = request.clipped(*block.span)
            self._read_plain(block.stub.file, begin, memory, block.name)
            return
        for piece in fragments_in(request.fragment, *run_of_block(block.stub, block.number)):
            self._read_slabs(piece, request.out, block.name)

    def _read_slabs(self, fragment: Fragment, out: torch.Tensor, name: str) -> None:
        for slab in slabs_of(fragment):
            self._ranges.call(name, partial(read_part, slab, out, self._ranges.read_ranges))

    def _read_plain(self, file: str, offset: int, memory: memoryview, name: str) -> None:
        for at in range(0, len(memory), PIECE):
            target = memory[at : at + PIECE]
            self._ranges.add(file, Range(offset + at, len(target), target, name))


def _memory_for(stub: TensorStub, out: torch.Tensor) -> memoryview:
    memory = byte_view(out)
    if len(memory) != stub.nbytes:
        raise InvalidArgument(f"{out.dtype} {tuple(out.shape)} for a tensor {stub.dtype} {stub.shape}")
    return memory


def _sources(leaf: Leaf, takes: Takes | None) -> Iterator[tuple[TensorStub, Iterator[int] | None]]:
    """Yield the stubs that ``leaf`` is read from, with their blocks to verify; None for a whole tensor."""
    if isinstance(leaf, TensorStub) and takes is None:
        yield leaf, None
        return
    for fragment in Assembly.of(leaf).fragments:
        blocks = blocks_of(fragment)
        yield fragment.stub, blocks if takes is None else filter(partial(takes, fragment), blocks)


def _segments(
    begin: int, end: int, middle: int, memory: memoryview | None
) -> Iterator[tuple[int, int, memoryview | None]]:
    """Yield (offset, length, memory) of pieces that cover [begin, end) of a file.

    From ``middle`` on it is ``memory``, if any.
    """
    if memory is None:
        middle = begin
        memory = memoryview(b"")
    after = middle + len(memory)
    for offset in range(begin, middle, PIECE):
        yield offset, min(PIECE, middle - offset), None
    for at in range(0, len(memory), PIECE):
        target = memory[at : at + PIECE]
        yield middle + at, len(target), target
    for offset in range(after, end, PIECE):
        yield offset, min(PIECE, end - offset), None
