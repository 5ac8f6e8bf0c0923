"""Reading the tensors of a tag's trees, verified: whole ones by their file's digest, parts by their blocks' digests.

An index has a digest for every block of a tensor's bytes: a part is verified by the blocks that it lies in. A tag
without indexes has one digest a tensor: there the whole tensor is read once to verify any part of it.

What is asked for is done by the time of :meth:`LeafReader.finish`: cut and collected into pieces that several threads
read, whose digests are compared while their bytes are still in the processor's cache. A block that several parts lie in
is read once for all that ask for it in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.closing import Closing
from nxd_ckpt.core.manifest import CRC_BLOCK, TensorEntry
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats import torch_zip
from nxd_ckpt.formats.assembly import (
    DirectRun,
    as_stored,
    blocks_of,
    clear_padding,
    direct_run,
    fragments_in,
    in_stored_order,
    read_part,
    run_of_block,
    slabs_of,
)
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub, allocated, byte_view, torch_dtype
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.range_reader import Range, RangeReader
from nxd_ckpt.tag.read_pool import PIECE
from nxd_ckpt.tag.verification import Digest, naming
from nxd_ckpt.tag.verified_records import Expected, VerifiedRecords
from nxd_ckpt.tag.wanted_blocks import Visit, Want, WantedBlock, span_of

Leaf = TensorStub | Assembly

Takes = Callable[[Fragment, int], bool]
"""Whether a block of the record that a part is read from is to be verified here, and not by another rank."""

Look = Callable[[int, list[torch.Tensor]], None]
"""Called with the number of a part of a leaf, and its elements as tensors of one dimension: valid until it returns."""

_PENDING = 64 * 2**20
"""Bytes of blocks that are collected before they are read: what a conversion asks for at once, and no more."""


class LeafReader(Closing):
    """Reads and verifies leaves. ``entries`` are what the tag's indexes say of their tensors, as far as it has any.

    Its methods return before anything was read, and raise what an earlier call met: :meth:`finish` waits for all. To be
    closed, or used as a context manager. ``done`` counts what was read.
    """

    def __init__(self, files: TagFiles, entries: Mapping[tuple[str, int], TensorEntry]) -> None:
        self._files, self._records = files, VerifiedRecords(entries)
        self._ranges = RangeReader(files)
        self.done = self._ranges.done
        self._blocks, self._blocks_nbytes = dict[tuple[str, int, int], WantedBlock](), 0

    def verify(self, leaf: Leaf, name: str, takes: Takes | None = None) -> None:
        """Read what ``leaf`` is made of, of parts the blocks that they lie in, and compare digests; each byte once.

        Only those blocks that ``takes`` says, if it is given.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        with naming(name):
            for stub, blocks in _sources(leaf, takes):
                self._verify(stub, blocks, name)

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

        With ``compare`` the digests of what is read as a whole, tensor or block, are compared. Unless all of it was
        ``verified``, the rest is then as well, but for blocks that ``takes``, if it is given, does not say, and for
        that the blocks are read that parts lie in; else nothing but the leaf's own bytes.

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
                    self._read_part(fragment, out, name, compare, None if verified else takes or _takes_all)

    def visit(self, leaf: Leaf, name: str, look: Look) -> None:
        """Show all elements of ``leaf`` to ``look``, verified, in parts: by the threads that read them, while they are
        in the processor's cache, in any order. The same leaf has the same parts whenever it is visited.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        leaf, numbers, dtype = Assembly.of(leaf), itertools.count(), torch_dtype(leaf.dtype)

        def show(number: int, values: list[torch.Tensor]) -> None:
            look(number, [one.to(dtype) for one in values])

        with naming(name):
            for fragment in leaf.fragments:
                if fragment.source.numel:
                    self._visit_part(in_stored_order(fragment), name, numbers, show)
            padding = leaf.numel - sum(fragment.target.numel for fragment in leaf.fragments)
            for at in range(0, padding, PIECE):
                look(next(numbers), [torch.zeros(min(PIECE, padding - at), dtype=dtype)])

    @property
    def asked(self) -> int:
        """What :meth:`wait` takes to wait for all that was asked for until now."""
        self._read_blocks()
        return self._ranges.asked

    def wait(self, asked: int | None = None) -> None:
        """Return when what was asked for is in memory, all or the earlier of it. Raises what reading it met.

        What is compared by one digest for all of a tensor may still be unverified then: :meth:`finish` does the rest.
        """
        self._ranges.wait(self.asked if asked is None else asked)

    def finish(self) -> None:
        """Return when all that was asked for is in memory, and verified where that was asked for. Raises as above."""
        self._read_blocks()
        for stub, block, name in list(self._records.unread()):
            self._block(stub, block, name)
        self.wait()

    def close(self) -> None:
        """Stop reading and close the files. Returns when no thread reads any more."""
        self._ranges.close()

    def nbytes_to_verify(self, leaves: Iterable[tuple[Leaf, Takes | None]]) -> int:
        """Bytes that :meth:`verify` reads of all of these together."""
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
        """Verify these blocks of the stub's record; all of it without them, or where only the whole has a digest."""
        if blocks is not None and self._records.entry(stub) is not None:
            for block in blocks:
                self._block(stub, block, name)
        elif not self._records.is_whole(stub):
            self._records.claim_whole(stub)
            self._read_record(stub, None, name)

    def _read_stub(self, stub: TensorStub, out: torch.Tensor, name: str, compare: bool) -> None:
        if not stub.is_contiguous:
            self._ranges.call(name, partial(torch_zip.read_into, self._pread_into(stub.file), stub, out, compare))
            return
        memory = byte_view(out)
        if len(memory) != stub.nbytes:
            raise InvalidArgument(f"{out.dtype} {tuple(out.shape)} for a tensor {stub.dtype} {stub.shape}")
        whole = stub.nbytes == stub.storage.nbytes
        if compare and (whole or not self._records.is_whole(stub)):
            self._records.claim_whole(stub)
            self._read_record(stub, memory, name)
        else:
            self._read_plain(stub.file, stub.offset, memory, name)

    def _read_record(self, stub: TensorStub, memory: memoryview | None, name: str) -> None:
        """Read the record that the stub is a view of, its own bytes into ``memory`` if any, and compare the digest.

        One without a digest verifies nothing, but must be there.
        """
        storage = stub.storage
        # That 0 means "not recorded" is said of files that no index vouches for.
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

    def _read_part(
        self, fragment: Fragment, out: torch.Tensor, name: str, compare: bool, takes: Takes | None
    ) -> None:
        """Read a part; None as ``takes`` if it was verified before."""
        fragment, out = as_stored(fragment, out)
        run = direct_run(fragment, out)
        if compare and takes is not None:
            if fragment.stub.is_contiguous:
                for block in blocks_of(fragment):
                    one = self._block(fragment.stub, block, name, takes(fragment, block))
                    one.wants.append(Want(fragment, out, run))
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
        """Of what ``torch.save`` stored as the view that it was."""
        out = allocated(fragment.source.size, fragment.stub.dtype)
        whole = Fragment(fragment.stub, fragment.source, Box.whole(fragment.source.size))
        read_part(whole, out, self._ranges.read_ranges)
        show([out.reshape(-1)])

    def _read_run(self, entry: TensorEntry, fragment: Fragment, run: DirectRun, name: str) -> None:
        """Read a part that is a run; whole blocks of it are compared where they arrive."""
        offset, memory = run
        for block in blocks_of(fragment):
            begin, nbytes = span_of(fragment.stub, block)
            first, last = max(begin, offset), min(begin + nbytes, offset + len(memory))
            expected = entry.crc32[block] if last - first == nbytes else None
            target = memory[first - offset : last - offset]
            self._ranges.add(entry.file, Range(first, last - first, target, name, expected))

    def _block(self, stub: TensorStub, number: int, name: str, is_verified_here: bool = True) -> WantedBlock:
        """The block among those that are to be read next, now at the latest."""
        place = stub.file, stub.storage.offset, number
        block = self._blocks.get(place)
        if block is None:
            nbytes = span_of(stub, number)[1]
            if self._blocks_nbytes + nbytes > _PENDING:
                self._read_blocks()
            block = self._blocks[place] = WantedBlock(stub, number, name)
            self._blocks_nbytes += nbytes
        block.is_verified_here |= is_verified_here
        return block

    def _read_blocks(self) -> None:
        """Ask for the blocks that are wanted, neighbours one after the other."""
        blocks, self._blocks, self._blocks_nbytes = self._blocks, {}, 0
        for _, one in sorted(blocks.items(), key=lambda item: item[0]):
            with naming(one.name):
                self._read_block(one)

    def _read_block(self, one: WantedBlock) -> None:
        """Read all of a block where it is to be compared, or where several want it; else what is wanted of it."""
        stub, (offset, nbytes) = one.stub, one.span
        where = f"{self._files.where(stub.file)}, record {stub.storage.record!r}"
        count = -(-stub.storage.nbytes // CRC_BLOCK)
        expected = None
        if one.is_verified_here or one.is_wanted_whole:
            expected = self._records.claim(stub, one.number, count, one.name, where)
        unshared = not one.visits and (len(one.wants) < 2 or one.wanted_nbytes < nbytes // 2)
        if expected is None and unshared:
            for want in one.wants:
                self._read_want(want, one)
            return
        target, others = one.shared_out()
        deliver = partial(one.deliver, others) if others or one.visits else None
        self._ranges.add(stub.file, Range(offset, nbytes, target, one.name, *(expected or Expected()), deliver))

    def _read_want(self, want: Want, one: WantedBlock) -> None:
        """Read what is wanted of a block, and nothing else."""
        if want.run is not None:
            begin, memory = want.clipped(*one.span)
            self._read_plain(one.stub.file, begin, memory, one.name)
            return
        for piece in fragments_in(want.fragment, *run_of_block(one.stub, one.number)):
            self._read_slabs(piece, want.out, one.name)

    def _read_slabs(self, fragment: Fragment, out: torch.Tensor, name: str) -> None:
        for slab in slabs_of(fragment):
            self._ranges.call(name, partial(read_part, slab, out, self._ranges.read_ranges))

    def _read_plain(self, file: str, offset: int, memory: memoryview, name: str) -> None:
        for at in range(0, len(memory), PIECE):
            target = memory[at : at + PIECE]
            self._ranges.add(file, Range(offset + at, len(target), target, name))

    def _pread_into(self, file: str) -> torch_zip.PreadInto:
        return lambda offset, memory: self._ranges.read_ranges(file, [(offset, memory)])


def _takes_all(fragment: Fragment, block: int) -> bool:
    return True


def _sources(leaf: Leaf, takes: Takes | None) -> Iterator[tuple[TensorStub, Iterator[int] | None]]:
    """What ``leaf`` is read from, with the blocks of it that are to be verified; None for a whole tensor."""
    if isinstance(leaf, TensorStub) and takes is None:
        yield leaf, None
        return
    for fragment in Assembly.of(leaf).fragments:
        blocks = blocks_of(fragment)
        yield fragment.stub, blocks if takes is None else filter(partial(takes, fragment), blocks)


def _segments(
    begin: int, end: int, middle: int, memory: memoryview | None
) -> Iterator[tuple[int, int, memoryview | None]]:
    """(offset, length, memory) of pieces that cover [begin, end) of a file: from ``middle`` on ``memory``, if any."""
    if memory is None:
        middle, memory = begin, memoryview(b"")
    after = middle + len(memory)
    for offset in range(begin, middle, PIECE):
        yield offset, min(PIECE, middle - offset), None
    for at in range(0, len(memory), PIECE):
        target = memory[at : at + PIECE]
        yield middle + at, len(target), target
    for offset in range(after, end, PIECE):
        yield offset, min(PIECE, end - offset), None
