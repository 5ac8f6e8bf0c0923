"""Equality of two stored tensors, by their digests or, in bounded memory, by their bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.formats.assembly import cut_box
from nxd_ckpt.formats.memory import allocated, byte_view
from nxd_ckpt.formats.tensors import Assembly, TensorStub, digest_of, itemsize
from nxd_ckpt.tag.reading import Leaf, LeafReader

_NBYTES = 4 * 2**20
"""Bytes of each of two tensors that are compared at once."""


def are_equal(a: Leaf, b: Leaf, name: str, reader: Callable[[], AbstractContextManager[LeafReader]]) -> bool:
    """Return whether both have the same dtype, shape and bytes; ``name`` is that of ``b`` in errors of reading.

    Digests are compared if files have them; else the bytes are read, unless both are the same place in a file.
    """
    if a == b:
        return True
    if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype:
        return False
    digests = digest_of(a), digest_of(b)
    if None not in digests and _is_row_major(a) and _is_row_major(b):
        return digests[0] == digests[1]
    wholes = Assembly.of(a), Assembly.of(b)
    if wholes[0].fragments == wholes[1].fragments:
        return True
    with reader() as open_reader:
        return all(
            torch.equal(*(_bytes(open_reader, whole.within(box), name) for whole in wholes))
            for box in cut_box(Box.whole(a.shape), _NBYTES // itemsize(a.dtype))
        )


def _is_row_major(leaf: Leaf) -> bool:
    """Return whether its bytes are those of its storage, in the order of its elements."""
    if not isinstance(leaf, TensorStub):
        return False
    return leaf.is_contiguous and leaf.nbytes == leaf.storage.nbytes


def _bytes(reader: LeafReader, part: Assembly, name: str) -> torch.Tensor:
    out = allocated(part.shape, part.dtype)
    reader.read_into(part, out, f"model/{name}", compare=False)
    reader.finish()
    return torch.frombuffer(byte_view(out), dtype=torch.uint8) if out.numel() else torch.empty(0, dtype=torch.uint8)
