"""Writing one safetensors file of an export: verified on the way, in bounded memory, read ahead of the writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from nxd_ckpt.convert.ahead import Ahead
from nxd_ckpt.convert.filling import loses_range, read_run, refuse_overflow
from nxd_ckpt.convert.shards import Shard
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.runtime.arena import Arena
from nxd_ckpt.runtime.progress import Counter
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.tag.reading import LeafReader
from nxd_ckpt.storage.base import Storage

_WINDOW = 32 * 2**20
"""Bytes that are read, and bytes that are written meanwhile. A multiple of a page: local files are written directly."""


class ShardWriter:
    """Writes files of tensors of the tag ``opened`` below ``folder``. ``written`` counts the bytes.

    ``assembly`` says by a tensor's name what it is made of.
    """

    def __init__(
        self,
        opened: OpenTag,
        assembly: Callable[[str], Assembly],
        storage: Storage,
        folder: str,
        written: Counter | None = None,
    ) -> None:
        self._opened, self._assembly = opened, assembly
        self._storage, self._folder = storage, folder
        self._ahead = Ahead(_WINDOW)
        self.written = Counter() if written is None else written

    def write(self, shard: Shard) -> None:
        """Write one file, durably.

        Raises:
            DigestMismatch: what is read is not what was saved; names the tensor.
            DtypeMismatch: a value is too large for the dtype that it is cast to.
        """
        writer = self._storage.create(f"{self._folder}/{shard.file}", shard.layout.nbytes)
        try:
            for start, window in self._windows(shard):
                writer.write_at(start, window)
                writer.settle()  # the memory will be read into again
                self.written.add(len(window))
            writer.close()
        except BaseException:
            writer.abort()
            raise

    def _windows(self, shard: Shard) -> Iterator[tuple[int, memoryview]]:
        """The file piece by piece, and where each begins; while the caller writes one, the next is read."""
        leaves = {form.name: self._assembly(form.name) for form in shard.forms}
        starts = range(0, shard.layout.nbytes, _WINDOW)
        with self._opened.reader() as reader:
            yield from self._ahead.filled(starts, partial(self._fill, reader, shard, leaves))
            reader.finish()

    def _fill(
        self, reader: LeafReader, shard: Shard, leaves: Mapping[str, Assembly], start: int, arena: Arena
    ) -> memoryview:
        """The bytes of the file from ``start`` on."""
        stop = min(start + _WINDOW, shard.layout.nbytes)
        memory = arena.reserve(stop - start)
        head = shard.layout.head[start:stop]
        memory[: len(head)] = head
        casts: list[tuple[str, Assembly, torch.Tensor]] = []
        for form, offset in shard.layout.tensors:
            begin, end = max(start, offset), min(stop, offset + form.nbytes)
            if begin < end:
                mine = memory[begin - start : end - start]
                leaf = replace(leaves[form.name], dtype=form.dtype)
                tensors = list(read_run(reader, leaf, begin - offset, mine, form.name))
                casts += [(form.name, leaf, tensor) for tensor in tensors if loses_range(leaf)]
        reader.wait()
        for cast in casts:
            refuse_overflow(*cast)
        return memory
