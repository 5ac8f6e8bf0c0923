"""Two tags read side by side, in windows: the same elements of both, proved, in memory that does not grow.

Each tag has its reader and that its threads, and while a window is looked at the next one is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import torch

from nxd_ckpt.core.box import boxes_of_run
from nxd_ckpt.formats.tensors import Assembly, TensorStub, itemsize, torch_dtype
from nxd_ckpt.runtime.arena import Arena
from nxd_ckpt.runtime.opening import OpenTag
from nxd_ckpt.runtime.reading import LeafReader

_WINDOW = 16 * 2**20
"""Bytes of a window of each tag; there are two windows of each. Whole blocks, which are proved where they arrive."""
_ALIGNED = 64

Leaf = TensorStub | Assembly
Key = TypeVar("Key")


class Pair(NamedTuple, Generic[Key]):
    """Tensors of equal shape, one of each tag; what the caller calls them, and what errors do."""

    key: Key
    name: str
    a: Leaf
    b: Leaf


class _Run(NamedTuple, Generic[Key]):
    """The elements ``start <= index < stop`` of a pair, row-major, and where in the window they are to lie."""

    pair: Pair[Key]
    start: int
    stop: int
    at: int


class SideBySide:
    """Reads pairs of tensors of the tags ``a`` and ``b``."""

    def __init__(self, a: OpenTag, b: OpenTag) -> None:
        self._tags = a, b
        self._arenas = [(Arena(_WINDOW), Arena(_WINDOW)) for _ in range(2)]

    def windows(self, pairs: Iterable[Pair[Key]]) -> Iterator[list[tuple[Key, torch.Tensor, torch.Tensor]]]:
        """The elements of all pairs, in order, as tensors of one dimension: valid until the next window is asked for.

        Raises:
            CorruptCheckpoint: bytes of a tag are not those that were written.
        """
        a, b = self._tags
        with a.reader() as of_a, b.reader() as of_b, ThreadPoolExecutor(1, "nxd_ckpt-reader") as thread:
            ahead = None
            for number, runs in enumerate(_windows(pairs)):
                following = thread.submit(self._fill, (of_a, of_b), runs, self._arenas[number % 2])
                if ahead is not None:
                    yield ahead.result()
                ahead = following
            if ahead is not None:
                yield ahead.result()

    def _fill(
        self, readers: tuple[LeafReader, LeafReader], runs: list[_Run[Key]], arenas: tuple[Arena, Arena]
    ) -> list[tuple[Key, torch.Tensor, torch.Tensor]]:
        memories = [arena.reserve(_WINDOW) for arena in arenas]
        found = []
        for run in runs:
            leaves = run.pair.a, run.pair.b
            sides = zip(readers, leaves, memories, strict=True)
            a, b = (_read(reader, leaf, run, memory[run.at :]) for reader, leaf, memory in sides)
            found.append((run.pair.key, a, b))
        for reader in readers:
            reader.finish()
        return found


def _read(reader: LeafReader, leaf: Leaf, run: _Run[Key], memory: memoryview) -> torch.Tensor:
    """Have the elements of ``run`` read into the memory; what they will be."""
    whole = torch.frombuffer(memory, dtype=torch_dtype(leaf.dtype), count=run.stop - run.start)
    if len(whole) == leaf.numel:
        reader.read_into(leaf, whole.view(leaf.shape), run.pair.name, compare=True, proved=False)
        return whole
    at = 0
    for box in boxes_of_run(run.start, run.stop, leaf.shape):
        out = whole[at : at + box.numel].view(box.size)
        reader.read_into(Assembly.of(leaf).within(box), out, run.pair.name, compare=True, proved=False)
        at += box.numel
    return whole


def _windows(pairs: Iterable[Pair[Key]]) -> Iterator[list[_Run[Key]]]:
    """The pairs cut into runs, and these collected into windows."""
    runs: list[_Run[Key]] = []
    at = 0
    for pair in pairs:
        size = max(itemsize(pair.a.dtype), itemsize(pair.b.dtype))
        length = _WINDOW // size
        for start in range(0, pair.a.numel, length):
            stop = min(start + length, pair.a.numel)
            if at + (stop - start) * size > _WINDOW:
                yield runs
                runs, at = [], 0
            runs.append(_Run(pair, start, stop, at))
            at += -(-(stop - start) * size // _ALIGNED) * _ALIGNED
    if runs:
        yield runs
