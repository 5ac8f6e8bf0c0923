"""Writing one safetensors file of an export: proved on the way, in bounded memory, read ahead of the writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from nxd_ckpt.convert.shards import Shard
from nxd_ckpt.core.box import boxes_of_run
from nxd_ckpt.errors import DtypeMismatch
from nxd_ckpt.formats.safetensors import TensorForm
from nxd_ckpt.formats.tensors import Assembly, torch_dtype
from nxd_ckpt.runtime.arena import Arena
from nxd_ckpt.runtime.mapped_tag import MappedTag
from nxd_ckpt.runtime.mapped_tensors import HfTensor
from nxd_ckpt.runtime.opening import OpenTag
from nxd_ckpt.runtime.progress import Counter
from nxd_ckpt.runtime.reading import LeafReader
from nxd_ckpt.storage.base import Storage

_WINDOW = 32 * 2**20
"""Bytes that are read, and bytes that are written meanwhile. A multiple of a page: local files are written directly."""


class ShardWriter:
    """Writes files of ``tensors`` of the tag ``opened`` below ``folder``. ``written`` counts the bytes."""

    def __init__(
        self, opened: OpenTag, mapped: MappedTag, tensors: Mapping[str, HfTensor], storage: Storage, folder: str
    ) -> None:
        self._opened, self._mapped, self._tensors = opened, mapped, tensors
        self._storage, self._folder = storage, folder
        self._arenas = (Arena(_WINDOW), Arena(_WINDOW))
        self.written = Counter()

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
        leaves = {form.name: self._leaf(form) for form in shard.forms}
        starts = range(0, shard.layout.nbytes, _WINDOW)
        with self._opened.reader() as reader, ThreadPoolExecutor(1, "nxd_ckpt-reader") as thread:
            ahead = thread.submit(self._fill, reader, shard, leaves, 0)
            for start in starts:
                window = ahead.result()
                if start + _WINDOW < shard.layout.nbytes:
                    ahead = thread.submit(self._fill, reader, shard, leaves, start + _WINDOW)
                yield start, window

    def _leaf(self, form: TensorForm) -> Assembly:
        return replace(self._mapped.assembly(self._tensors[form.name]), dtype=form.dtype)

    def _fill(self, reader: LeafReader, shard: Shard, leaves: Mapping[str, Assembly], start: int) -> memoryview:
        """The bytes of the file from ``start`` on."""
        stop = min(start + _WINDOW, shard.layout.nbytes)
        memory = self._arenas[start // _WINDOW % 2].reserve(stop - start)
        head = shard.layout.head[start:stop]
        memory[: len(head)] = head
        casts: list[tuple[str, torch.Tensor]] = []
        for form, offset in shard.layout.tensors:
            begin, end = max(start, offset), min(stop, offset + form.nbytes)
            if begin < end:
                mine = memory[begin - start : end - start]
                tensors = list(self._read(reader, form, leaves[form.name], begin - offset, mine))
                casts += [(form.name, tensor) for tensor in tensors if self._is_narrowed(form)]
        reader.finish()
        for name, tensor in casts:
            self._refuse_overflow(name, tensor)
        return memory

    def _read(
        self, reader: LeafReader, form: TensorForm, leaf: Assembly, begin: int, memory: memoryview
    ) -> Iterator[torch.Tensor]:
        """Have ``memory`` filled with the tensor's bytes from ``begin`` on; the tensors that it is then."""
        dtype = torch_dtype(form.dtype)
        first, last = begin // dtype.itemsize, (begin + len(memory)) // dtype.itemsize
        at = 0
        for box in boxes_of_run(first, last, leaf.shape):
            out = torch.frombuffer(memory, dtype=dtype, count=box.numel, offset=at).view(box.size)
            reader.read_into(leaf.within(box), out, form.name, compare=True, proved=False)
            at += box.numel * dtype.itemsize
            yield out

    def _is_narrowed(self, form: TensorForm) -> bool:
        saved, cast = torch_dtype(self._tensors[form.name].dtype), torch_dtype(form.dtype)
        return cast.is_floating_point and torch.finfo(cast).max < torch.finfo(saved).max

    def _refuse_overflow(self, name: str, tensor: torch.Tensor) -> None:
        if bool(tensor.isinf().any()):
            dtypes = f"{self._tensors[name].dtype} as {tensor.dtype}"
            raise DtypeMismatch(f"{name}: exported from {dtypes}, values become infinite; choose a dtype of more range")
