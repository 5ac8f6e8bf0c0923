"""Writing the files of a torch DCP directory: verified on the way, in bounded memory.

Every entry is a ``torch.save`` file. A large tensor's is a file of its own, as torch's writer has them with
``single_file_per_rank=False``, which is laid out, filled and written as those of a tag are. Values and small tensors
lie in common ones, one behind the other.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch

from nxd_ckpt.convert.torch_writer import write_torch_files
from nxd_ckpt.core.dcp_chunks import DcpChunk
from nxd_ckpt.formats.tensors import Assembly, allocated, itemsize
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.layout.dcp_metadata import dump_metadata
from nxd_ckpt.runtime.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.views.dcp_state import DcpState
from nxd_ckpt.storage.base import Storage

_SMALL = 2**20
"""Bytes of a tensor below which it shares a file with others."""

_TOGETHER = 32 * 2**20
"""Bytes of such a file, about."""

_Place = tuple[str, int, int]
"""File, offset and length of an entry."""


class DcpWriter:
    """Writes ``state``, which is of the tag ``opened``, below ``folder``. ``written`` counts the bytes of tensors."""

    def __init__(self, opened: OpenTag, state: DcpState, storage: Storage, folder: str) -> None:
        self._opened, self._state, self._storage, self._folder = opened, state, storage, folder
        self._leaves = {name: state.leaf(name) for name in state.tensors}
        self._places: dict[str, _Place] = {}
        self._files = 0
        self.written = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_nbytes(leaf) for leaf in self._leaves.values())

    def write(self) -> bytes:
        """Write all files durably; the metadata, to be written when this is done.

        Raises:
            DigestMismatch: what is read is not what was saved; names the tensor.
        """
        self._write_small()
        self._write_large({name: leaf for name, leaf in self._leaves.items() if _is_large(leaf)})
        self._storage.sync_dir(self._folder)
        return self._metadata()

    def _write_large(self, leaves: dict[str, Any]) -> None:
        files = []
        for name, leaf in leaves.items():
            image = image_of(leaf)
            tensor = NamedTensor(name, 0, leaf.dtype, leaf.shape, None)
            files.append(PlannedFile(self._next_file(), image, (tensor,)))
            self._places[name] = (files[-1].key, 0, image.nbytes)
        if not files:
            return
        before = self.written

        def progress(nbytes: int) -> None:
            self.written = before + nbytes

        write_torch_files(self._opened, files, self._storage, self._folder, progress)

    def _write_small(self) -> None:
        together = io.BytesIO()
        inside: dict[str, tuple[int, int]] = {}
        for name, value in self._small():
            start = together.tell()
            torch.save(value, together)
            inside[name] = (start, together.tell() - start)
            if together.tell() >= _TOGETHER:
                self._put(together, inside)
                together, inside = io.BytesIO(), {}
        if inside:
            self._put(together, inside)

    def _small(self) -> Iterator[tuple[str, Any]]:
        """Values and small tensors by name, read some at a time."""
        yield from ((name, value) for name, (_, value) in self._state.values.items())
        batch: dict[str, Any] = {}
        nbytes = 0
        for name, leaf in self._leaves.items():
            if _is_large(leaf):
                continue
            batch[name] = leaf
            nbytes += _nbytes(leaf)
            if nbytes >= _TOGETHER:
                yield from self._read(batch)
                batch, nbytes = {}, 0
        yield from self._read(batch)

    def _read(self, leaves: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = {}
        with self._opened.reader() as reader:
            for name, leaf in leaves.items():
                tensors[name] = leaf
                if isinstance(leaf, Assembly):
                    tensors[name] = allocated(leaf.shape, leaf.dtype)
                    reader.read_into(leaf, tensors[name], name, compare=True, verified=False)
            reader.finish()
        yield from tensors.items()

    def _put(self, content: io.BytesIO, inside: dict[str, tuple[int, int]]) -> None:
        file = self._next_file()
        self._storage.write(f"{self._folder}/{file}", content.getvalue())
        self._places |= {name: (file, *place) for name, place in inside.items()}
        self.written += sum(_nbytes(self._leaves[name]) for name in inside if name in self._leaves)

    def _next_file(self) -> str:
        self._files += 1
        return f"__0_{self._files - 1}.distcp"

    def _metadata(self) -> bytes:
        values = self._state.values.items()
        chunks = [DcpChunk(path, None, (), (), (), *self._places[name]) for name, (path, _) in values]
        for name, tensor in self._state.tensors.items():
            zeros = (0,) * len(tensor.shape)
            chunks.append(DcpChunk(tensor.path, tensor.dtype, tensor.shape, zeros, tensor.shape, *self._places[name]))
        return dump_metadata(chunks)


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, Assembly) and _nbytes(leaf) >= _SMALL


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.nbytes
    return int(leaf.numel * itemsize(leaf.dtype))
