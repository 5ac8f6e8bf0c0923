"""Two tags read side by side, in windows: the same elements of both, verified, in memory that does not grow.

Each tag has a reader with its own threads. While one window is compared, the next one is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.formats.assembly import cut_box
from nxd_ckpt.formats.tensors import Assembly, TensorStub, itemsize, torch_dtype
from nxd_ckpt.runtime.arena import Arena
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.tag.reading import LeafReader

_WINDOW = 16 * 2**20
"""Bytes of a window of each tag; there are two windows of each. Whole blocks, which are verified where they arrive."""
_ALIGNED = 64

Leaf = TensorStub | Assembly
Key = TypeVar("Key")


@dataclass(frozen=True)
class Pair(Generic[Key]):
    """Two tensors of equal shape, one from each tag, with the caller's key for them and their name in errors."""

    key: Key
    name: str
    a: Leaf
    b: Leaf


@dataclass(frozen=True)
class _Placed(Generic[Key]):
    """A box of a pair, and its place in the window."""

    pair: Pair[Key]
    box: Box
    at: int


class SideBySide:
    """Reads pairs of tensors of the tags ``a`` and ``b``."""

    def __init__(self, a: OpenTag, b: OpenTag) -> None:
        self._tags = a, b
        self._arenas = [(Arena(_WINDOW), Arena(_WINDOW)) for _ in range(2)]

    def windows(self, pairs: Iterable[Pair[Key]]) -> Iterator[list[tuple[Key, torch.Tensor, torch.Tensor]]]:
        """The elements of all pairs, as tensors of one dimension: valid until the next window is asked for.

        Those of a pair come in any order, the same for both: as they lie in the files of one of the tags.

        Raises:
            CorruptCheckpoint: bytes of a tag are not those that were written.
        """
        a, b = self._tags
        with a.reader() as of_a, b.reader() as of_b, ThreadPoolExecutor(1, "nxd_ckpt-reader") as thread:
            ahead = None
            for number, pieces in enumerate(_windows(pairs)):
                following = thread.submit(self._fill, (of_a, of_b), pieces, self._arenas[number % 2])
                if ahead is not None:
                    yield ahead.result()
                ahead = following
            if ahead is not None:
                yield ahead.result()
            for reader in (of_a, of_b):
                reader.finish()

    def _fill(
        self, readers: tuple[LeafReader, LeafReader], pieces: list[_Placed[Key]], arenas: tuple[Arena, Arena]
    ) -> list[tuple[Key, torch.Tensor, torch.Tensor]]:
        memories = [arena.reserve(_WINDOW) for arena in arenas]
        found = []
        for piece in pieces:
            sides = zip(readers, (piece.pair.a, piece.pair.b), memories, strict=True)
            a, b = (_read(reader, leaf, piece, memory[piece.at :]) for reader, leaf, memory in sides)
            found.append((piece.pair.key, a, b))
        for reader in readers:
            reader.wait()
        return found


def _read(reader: LeafReader, leaf: Leaf, piece: _Placed[Key], memory: memoryview) -> torch.Tensor:
    """Start reading the piece into the memory, and return the tensor that it will be."""
    out = torch.frombuffer(memory, dtype=torch_dtype(leaf.dtype), count=piece.box.numel)
    wanted = leaf if piece.box.size == leaf.shape else Assembly.of(leaf).within(piece.box)
    reader.read_into(wanted, out.view(piece.box.size), piece.pair.name, compare=True, verified=False)
    return out


def _windows(pairs: Iterable[Pair[Key]]) -> Iterator[list[_Placed[Key]]]:
    """The pairs cut into pieces, and these collected into windows."""
    pieces: list[_Placed[Key]] = []
    at = 0
    for pair in pairs:
        size = max(itemsize(pair.a.dtype), itemsize(pair.b.dtype))
        for box in _boxes(pair, _WINDOW // size):
            if at + box.numel * size > _WINDOW:
                yield pieces
                pieces, at = [], 0
            pieces.append(_Placed(pair, box, at))
            at += -(-box.numel * size // _ALIGNED) * _ALIGNED
    if pieces:
        yield pieces


def _boxes(pair: Pair[Key], limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements that cover the tensors. The bytes of a box lie together in a file of one
    tag."""
    whole = Box.whole(pair.a.shape)
    if whole.numel <= limit:  # it fits: a whole tensor is read and verified at once
        yield from [whole] * bool(whole.numel)
        return
    targets = min(([part.target for part in Assembly.of(leaf).parts] for leaf in (pair.a, pair.b)), key=len)
    if sum(box.numel for box in targets) < whole.numel:  # the rest is zero
        targets = [whole]
    for box in targets:
        yield from cut_box(box, limit)
