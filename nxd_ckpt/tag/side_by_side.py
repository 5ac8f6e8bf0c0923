"""Tensors of one or several tags side by side: read in windows, or compared by their digests.

A window has the same elements of all tensors, verified; memory does not grow. Each tag has a reader with its own
threads. While one window is processed, the next one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.formats.assembly import cut_box
from nxd_ckpt.formats.memory import allocated, byte_view, torch_dtype
from nxd_ckpt.formats.tensors import Assembly, TensorStub, digest_of, itemsize
from nxd_ckpt.storage.arena import Arena
from nxd_ckpt.storage.transfer import prefetched
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import Leaf, LeafReader

_MEMORY = 32 * 2**20
"""Bytes of a window, shared by its tensors; there are two windows. Two tensors have whole blocks each, verified on
arrival.
"""
_ALIGNED = 64

Key = TypeVar("Key")

Window = list[tuple[Key, tuple[torch.Tensor, ...]]]


@dataclass(frozen=True)
class Matched(Generic[Key]):
    """Tensors of equal shape, each with the number of its tag, the caller's key for them, and their name in errors."""

    key: Key
    name: str
    leaves: tuple[tuple[int, Leaf], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaves[0][1].shape

    @property
    def itemsize(self) -> int:
        """Item size of the largest dtype."""
        return max(itemsize(leaf.dtype) for _, leaf in self.leaves)


@dataclass(frozen=True)
class _Placed(Generic[Key]):
    """A box of the tensors, and the place of each in the window."""

    matched: Matched[Key]
    box: Box
    places: tuple[int, ...]


def windows(tags: Sequence[OpenTag], tensors: Iterable[Matched[Key]]) -> Iterator[Window[Key]]:
    """Yield the elements of all tensors, as tensors of one dimension: valid until the next window is requested.

    Elements come in any order, the same for all tensors: the order in the files of one of the ``tags``.

    Raises:
        CorruptCheckpoint: bytes of a tag are not those that were written.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(tag.reader()) for tag in tags]
        yield from prefetched([*_windows(tensors)], partial(_filled, readers), _MEMORY)
        for reader in readers:
            reader.finish()


def _filled(readers: list[LeafReader], pieces: list[_Placed[Key]], arena: Arena) -> Window[Key]:
    memory = arena.reserve(_MEMORY)
    window = []
    for piece in pieces:
        sides = zip(piece.matched.leaves, piece.places, strict=True)
        read = tuple(_read(readers[tag], leaf, piece, memory[at:]) for (tag, leaf), at in sides)
        window.append((piece.matched.key, read))
    for reader in readers:
        reader.wait()
    return window


def _read(reader: LeafReader, leaf: Leaf, piece: _Placed[Key], memory: memoryview) -> torch.Tensor:
    """Start reading the piece into the memory, and return its future tensor."""
    out = torch.frombuffer(memory, dtype=torch_dtype(leaf.dtype), count=piece.box.numel)
    part = leaf if piece.box.size == leaf.shape else Assembly.of(leaf).within(piece.box)
    reader.read_into(part, out.view(piece.box.size), piece.matched.name, compare=True, verified=False)
    return out


def _windows(tensors: Iterable[Matched[Key]]) -> Iterator[list[_Placed[Key]]]:
    """Cut the tensors into pieces, and collect these into windows."""
    pieces: list[_Placed[Key]] = []
    at = 0
    for matched in tensors:
        count = len(matched.leaves)
        size = matched.itemsize
        for box in _boxes(matched, _MEMORY // count // _ALIGNED * _ALIGNED // size):
            each = -(-box.numel * size // _ALIGNED) * _ALIGNED
            if at + count * each > _MEMORY:
                yield pieces
                pieces = []
                at = 0
            pieces.append(_Placed(matched, box, tuple(range(at, at + count * each, each))))
            at += count * each
    if pieces:
        yield pieces


def _boxes(matched: Matched[Key], limit: int) -> Iterator[Box]:
    """Yield boxes of at most ``limit`` elements that cover the tensors.

    A box's bytes are contiguous in a file of one tag.
    """
    whole = Box.whole(matched.shape)
    if whole.numel <= limit:  # it fits: a whole tensor is read and verified at once
        yield from [whole] * bool(whole.numel)
        return
    leaves = [Assembly.of(leaf) for _, leaf in matched.leaves]
    targets = min(([fragment.target for fragment in leaf.fragments] for leaf in leaves), key=len)
    if sum(box.numel for box in targets) < whole.numel:  # the rest is zero
        targets = [whole]
    for box in targets:
        yield from cut_box(box, limit)


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
    return isinstance(leaf, TensorStub) and leaf.is_record


def _bytes(reader: LeafReader, part: Assembly, name: str) -> torch.Tensor:
    out = allocated(part.shape, part.dtype)
    reader.read_into(part, out, f"model/{name}", compare=False)
    reader.finish()
    return torch.frombuffer(byte_view(out), dtype=torch.uint8) if out.numel() else torch.empty(0, dtype=torch.uint8)
