"""Writing one safetensors file of an export: proved on the way, in bounded memory, read ahead of the writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from nxd_ckpt.convert.ahead import Ahead
from nxd_ckpt.convert.shards import Shard
from nxd_ckpt.core.box import boxes_of_run
from nxd_ckpt.errors import DtypeMismatch
from nxd_ckpt.formats.tensors import Assembly, torch_dtype
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

    def _fill(
        self, reader: LeafReader, shard: Shard, leaves: Mapping[str, Assembly], start: int, arena: Arena
    ) -> memoryview:
        """The bytes of the file from ``start`` on."""
        stop = min(start + _WINDOW, shard.layout.nbytes)
        memory = arena.reserve(stop - start)
        head = shard.layout.head[start:stop]
        memory[: len(head)] = head
        casts: list[tuple[str, torch.Tensor]] = []
        for form, offset in shard.layout.tensors:
            begin, end = max(start, offset), min(stop, offset + form.nbytes)
            if begin < end:
                mine = memory[begin - start : end - start]
                leaf = leaves[form.name]
                tensors = list(read_run(reader, replace(leaf, dtype=form.dtype), begin - offset, mine, form.name))
                casts += [(form.name, tensor) for tensor in tensors if _is_narrowed(leaf.dtype, form.dtype)]
        reader.finish()
        for name, tensor in casts:
            _refuse_overflow(name, leaves[name], tensor)
        return memory


def read_run(reader: LeafReader, leaf: Assembly, begin: int, memory: memoryview, name: str) -> Iterator[torch.Tensor]:
    """Ask ``reader`` to fill ``memory`` with the row-major tensor's bytes from ``begin`` on, and to prove them.

    Yields the tensors that it is then, each when it was asked for.
    """
    dtype = torch_dtype(leaf.dtype)
    first, last = begin // dtype.itemsize, (begin + len(memory)) // dtype.itemsize
    at = 0
    for box in boxes_of_run(first, last, leaf.shape):
        out = torch.frombuffer(memory, dtype=dtype, count=box.numel, offset=at).view(box.size)
        reader.read_into(leaf.within(box), out, name, compare=True, proved=False)
        at += box.numel * dtype.itemsize
        yield out


def _is_narrowed(saved: str, cast: str) -> bool:
    before, after = torch_dtype(saved), torch_dtype(cast)
    return after.is_floating_point and torch.finfo(after).max < torch.finfo(before).max


def _refuse_overflow(name: str, leaf: Assembly, tensor: torch.Tensor) -> None:
    if bool(tensor.isinf().any()):
        dtypes = f"{leaf.dtype} as {tensor.dtype}"
        raise DtypeMismatch(f"{name}: exported from {dtypes}, values become infinite; choose a dtype of more range")
