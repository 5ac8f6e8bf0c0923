"""Chunks of a torch DCP directory, as ranks report them to the writer of ``.metadata``. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from nxd_ckpt.core.entries import integers
from nxd_ckpt.core.keys import checked_name


class DcpChunk(NamedTuple):
    """A chunk of a tensor, or a plain value: ``nbytes`` from byte ``start`` of ``file``, relative to the directory.

    ``path`` is the keys that lead to it in the state dict. ``dtype`` is torch's name, None for a value. The chunk has
    ``size`` and begins at ``offset`` in the tensor of ``shape``, all in elements.
    """

    path: tuple[str | int, ...]
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    file: str = ""
    start: int = 0
    nbytes: int = 0

    @property
    def name(self) -> str:
        """DCP's fully qualified name."""
        return ".".join(map(str, self.path))

    @staticmethod
    def from_json(fields: list[Any]) -> DcpChunk:
        """Parse a chunk's JSON, its fields in order. Raises TypeError or ValueError if they are invalid."""
        path, dtype, shape, offset, size, file, *place = fields
        shape, offset, size = (tuple(integers(numbers)) for numbers in (shape, offset, size))
        return DcpChunk(tuple(path), dtype, shape, offset, size, checked_name(file), *integers(place, 2))
