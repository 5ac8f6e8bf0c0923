"""Reading the tensors of a tag's trees, proved: whole ones by the digest in their file, parts by their blocks' digests.

An index has a digest for every block of a tensor's bytes, so that a part is proved by the blocks that it lies in. A tag
without indexes has one digest a tensor: there the whole tensor is read once to prove any part of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch

from nxd_ckpt.core.manifest import CRC_BLOCK, TensorEntry
from nxd_ckpt.errors import DigestMismatch
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.assembly import blocks_of, fill
from nxd_ckpt.formats.tensors import Assembly, TensorStub
from nxd_ckpt.layout.files import TagFiles
from nxd_ckpt.runtime.proof import naming

Leaf = TensorStub | Assembly


class LeafReader:
    """Reads and proves leaves. ``entries`` are what the tag's indexes say of their tensors, as far as it has any."""

    def __init__(self, files: TagFiles, entries: Mapping[tuple[str, int], TensorEntry]) -> None:
        self._files, self._entries = files, entries
        self._proved: set[tuple[str, int]] = set()
        self._proved_blocks: set[tuple[str, int, int]] = set()
        self._memory = memoryview(b"")

    def prove(self, leaf: Leaf, name: str) -> None:
        """Read what ``leaf`` is made of, of parts the blocks that they lie in, and compare digests; each byte once.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        with naming(name):
            if isinstance(leaf, TensorStub):
                self._prove_whole(leaf)
                return
            for part in leaf.parts:
                entry = self._entry(part.stub)
                if entry is None:
                    self._prove_whole(part.stub)
                else:
                    self._prove_blocks(entry, blocks_of(part))

    def read_into(self, leaf: Leaf, out: torch.Tensor, name: str, *, proved: bool = False) -> None:
        """Fill a contiguous CPU tensor of the leaf's dtype and shape; nothing but its own bytes is read.

        ``proved`` says that :meth:`prove` was called for it. Else whole tensors and whole blocks are compared.

        Raises:
            DigestMismatch: bytes changed; names the tensor ``name``.
        """
        with naming(name):
            if isinstance(leaf, TensorStub) or proved:
                self._files.read_into(leaf, out)
            else:
                fill(leaf, out, self._read_proving)

    def _entry(self, stub: TensorStub) -> TensorEntry | None:
        return self._entries.get((stub.file, stub.storage.offset))

    def _prove_whole(self, stub: TensorStub) -> None:
        place = (stub.file, stub.storage.offset)
        if place not in self._proved:
            self._files.verify(stub)
            self._proved.add(place)

    def _prove_blocks(self, entry: TensorEntry, blocks: Iterable[int]) -> None:
        if (entry.file, entry.offset) in self._proved:
            return
        for block in blocks:
            if (entry.file, entry.offset, block) not in self._proved_blocks:
                self._prove_block(entry, block)
                self._proved_blocks.add((entry.file, entry.offset, block))

    def _read_proving(self, file: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memory from its offset on, and compare the digests of blocks that lie in one of them."""
        self._files.read_ranges(file, ranges)
        starts, entries = self._by_file.get(file, ((), ()))
        for offset, memory in ranges:
            place = bisect_right(starts, offset) - 1
            if place >= 0:
                self._compare_within(entries[place], offset - entries[place].offset, memory)

    def _compare_within(self, entry: TensorEntry, start: int, memory: memoryview) -> None:
        """Compare the blocks that lie whole in ``memory``, the tensor's bytes from ``start`` on."""
        for block in range(-(-start // CRC_BLOCK), len(entry.crc32)):
            begin, end = block * CRC_BLOCK - start, min((block + 1) * CRC_BLOCK, entry.nbytes) - start
            if end > len(memory):
                return
            self._compare(entry, block, memory[begin:end])

    def _prove_block(self, entry: TensorEntry, block: int) -> None:
        begin = block * CRC_BLOCK
        length = min(CRC_BLOCK, entry.nbytes - begin)
        if len(self._memory) < length:
            self._memory = memoryview(bytearray(length))
        self._files.read_ranges(entry.file, [(entry.offset + begin, self._memory[:length])])
        self._compare(entry, block, self._memory[:length])

    def _compare(self, entry: TensorEntry, block: int, data: memoryview) -> None:
        found = crc32.crc32(data)
        if found != entry.crc32[block]:
            begin = entry.offset + block * CRC_BLOCK
            raise DigestMismatch(
                f"{self._files.key(entry.file)}, {len(data)} bytes from {begin} on: expected CRC-32 "
                f"{entry.crc32[block]:08x}, found {found:08x}. The bytes changed since they were written: restore the "
                "file, or load another tag"
            )

    @cached_property
    def _by_file(self) -> Mapping[str, tuple[Sequence[int], Sequence[TensorEntry]]]:
        found: dict[str, list[TensorEntry]] = {}
        for entry in sorted(self._entries.values(), key=lambda entry: entry.offset):
            found.setdefault(entry.file, []).append(entry)
        return {file: ([entry.offset for entry in entries], entries) for file, entries in found.items()}
