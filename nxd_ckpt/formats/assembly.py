"""Reading assemblies: only the bytes that are wanted, straight to where they belong, in bounded memory.

A fragment is read slab by slab. A slab that is one run of bytes on disk and in memory needs no copy; others go through
scratch memory of at most :data:`SLAB` bytes, which also casts. The bytes are verified by the digests of the blocks that
they lie in (:func:`blocks_of`): reading a slice needs no digest of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from math import prod

import torch

from nxd_ckpt.core.box import Box, boxes_of_run
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.reads import contiguous_runs
from nxd_ckpt.formats.tensors import (
    Assembly,
    Fragment,
    TensorStub,
    allocated,
    byte_view,
    contiguous_stride,
    copy_values,
    itemsize,
    torch_dtype,
)
from nxd_ckpt.formats.torch_zip import read_tensor

SLAB = 4 * 2**20
"""Bytes that are read at once, at most."""

_HOLES = 16
"""A hole between two runs is read too if it is not longer than a 16th of what is wanted around it: that saves a
read."""

ReadRanges = Callable[[str, Sequence[tuple[int, memoryview]]], None]
"""(file's key, [(offset, memory), ...]) -> None: fills each memory with the file's bytes from its offset, or raises."""

DirectRun = tuple[int, memoryview]
"""Bytes of a file from an offset on, and the memory that takes them as they are."""


def read_assembly(leaf: Assembly, read: ReadRanges) -> torch.Tensor:
    """The tensor, on the CPU."""
    out = allocated(leaf.shape, leaf.dtype)
    clear_padding(leaf, out)
    for fragment in leaf.fragments:
        if fragment.source.numel:
            stored, target = as_stored(fragment, out)
            for slab in slabs_of(stored):
                read_part(slab, target, read)
    return out


def clear_padding(leaf: Assembly, out: torch.Tensor) -> None:
    """Make ``out`` zero if there are elements that no fragment covers."""
    if sum(fragment.target.numel for fragment in leaf.fragments) < leaf.numel:
        out.zero_()


def as_stored(fragment: Fragment, out: torch.Tensor) -> tuple[Fragment, torch.Tensor]:
    """Both with their dimensions in the order in which the bytes lie in the file, if there is such an order."""
    order = _order(fragment)
    return (fragment, out) if order is None else (fragment.permuted(order), out.permute(order))


def in_stored_order(fragment: Fragment) -> Fragment:
    """As :func:`as_stored`, for whoever does not mind where its elements go."""
    order = _order(fragment)
    return fragment if order is None else fragment.permuted(order)


def _order(fragment: Fragment) -> tuple[int, ...] | None:
    return None if fragment.stub.is_contiguous else fragment.stub.storage_order


def blocks_of(fragment: Fragment) -> Iterator[int]:
    """The digest blocks that the fragment's bytes lie in, numbered within the record of its stub, ascending."""
    stub, size = fragment.stub, itemsize(fragment.stub.dtype)
    if not stub.is_contiguous:
        order = stub.storage_order
        whole = range(-(-stub.storage.nbytes // CRC_BLOCK))
        yield from whole if order is None else blocks_of(fragment.permuted(order))
        return
    begin = stub.offset - stub.storage.offset
    following = 0
    for start, length in contiguous_runs(fragment.source, stub.shape):
        first = (begin + start * size) // CRC_BLOCK
        last = (begin + (start + length) * size - 1) // CRC_BLOCK
        yield from range(max(first, following), last + 1)
        following = max(following, last + 1)


def direct_run(fragment: Fragment, out: torch.Tensor) -> DirectRun | None:
    """Where the fragment's bytes begin in the file, and the memory of ``out`` that takes them as they are.

    None where they are not one run on both sides, or of another dtype.
    """
    stub = fragment.stub
    target = box_of(out, fragment.target)
    if not stub.is_contiguous or not target.is_contiguous() or target.dtype != torch_dtype(stub.dtype):
        return None
    runs = list(islice(contiguous_runs(fragment.source, stub.shape), 2))
    return (stub.offset + runs[0][0] * itemsize(stub.dtype), byte_view(target)) if len(runs) == 1 else None


def slabs_of(fragment: Fragment) -> Iterator[Fragment]:
    """The fragment, :func:`as_stored`, in parts of at most :data:`SLAB` bytes."""
    if not fragment.stub.is_contiguous:
        yield fragment
        return
    for source in cut_box(fragment.source, max(1, SLAB // itemsize(fragment.stub.dtype))):
        yield _narrowed(fragment, source)


def run_of_block(stub: TensorStub, block: int) -> tuple[int, int]:
    """The elements ``start <= index < stop`` of the contiguous stub whose bytes lie in that block of its record."""
    begin, size = stub.offset - stub.storage.offset, itemsize(stub.dtype)
    start, stop = ((at * CRC_BLOCK - begin) // size for at in (block, block + 1))
    return max(start, 0), min(stop, stub.numel)


def fragments_in(fragment: Fragment, start: int, stop: int) -> Iterator[Fragment]:
    """What the fragment has of the elements ``start <= index < stop`` of its contiguous stub."""
    for box in boxes_of_run(start, stop, fragment.stub.shape):
        common = box.intersect(fragment.source)
        if common is not None:
            yield _narrowed(fragment, common)


def cut_out(fragment: Fragment, out: torch.Tensor, block: int, memory: memoryview) -> None:
    """Copy what the fragment has of a block, which is in ``memory``, to where it belongs in ``out``."""
    for piece, values in _cut(fragment, block, memory):
        copy_values(box_of(out, piece.target), values)


def elements_in(fragment: Fragment, block: int, memory: memoryview) -> list[torch.Tensor]:
    """What the fragment has of a block, which is in ``memory``: as tensors of one dimension, in as few as possible."""
    runs = list(islice(contiguous_runs(fragment.source, fragment.stub.shape), 2))
    if len(runs) > 1:
        return [values.reshape(-1) for _, values in _cut(fragment, block, memory)]
    (first, length), (start, stop) = runs[0], run_of_block(fragment.stub, block)
    return [_elements(fragment.stub, block, memory)[max(first - start, 0) : min(first + length, stop) - start]]


def _cut(fragment: Fragment, block: int, memory: memoryview) -> Iterator[tuple[Fragment, torch.Tensor]]:
    """The parts of the fragment that lie in the block, with the elements of each."""
    stub = fragment.stub
    elements, strides = _elements(stub, block, memory), contiguous_stride(stub.shape)
    start, stop = run_of_block(stub, block)
    for piece in fragments_in(fragment, start, stop):
        first = sum(offset * stride for offset, stride in zip(piece.source.offset, strides, strict=True)) - start
        yield piece, elements.as_strided(piece.source.size, strides, first)


def _elements(stub: TensorStub, block: int, memory: memoryview) -> torch.Tensor:
    """Those of the stub that lie in the block, as they are in ``memory``."""
    start, stop = run_of_block(stub, block)
    begin = stub.offset - stub.storage.offset + start * itemsize(stub.dtype) - block * CRC_BLOCK
    return torch.frombuffer(memory, dtype=torch_dtype(stub.dtype), count=stop - start, offset=begin)


def read_part(slab: Fragment, out: torch.Tensor, read: ReadRanges) -> None:
    """Put one of :func:`slabs_of` where it belongs in ``out``."""
    stub, source, target = slab.stub, slab.source, box_of(out, slab.target)
    if not stub.is_contiguous:  # never one of ours: a view that torch.save stored as it was
        whole = read_tensor(lambda offset, memory: read(stub.file, [(offset, memory)]), stub)
        copy_values(target, box_of(whole, source))
        return
    run = direct_run(slab, out)
    if run is not None:
        read(stub.file, [run])
        return
    runs, size = list(contiguous_runs(source, stub.shape)), itemsize(stub.dtype)
    first, end = runs[0][0], runs[-1][0] + runs[-1][1]
    along = end - first <= source.numel + source.numel // _HOLES
    scratch = allocated((end - first if along else source.numel,), stub.dtype)
    memory = byte_view(scratch)
    if along:
        read(stub.file, [(stub.offset + first * size, memory)])
        copy_values(target, scratch.as_strided(source.size, contiguous_stride(stub.shape)))
        return
    ranges, at = [], 0
    for start, length in runs:
        ranges.append((stub.offset + start * size, memory[at : at + length * size]))
        at += length * size
    read(stub.file, ranges)
    copy_values(target, scratch.view(source.size))


def cut_box(box: Box, limit: int) -> Iterator[Box]:
    """``box`` cut along its outer dimensions into boxes of at most ``limit`` elements, in row-major order."""
    if box.numel <= limit:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.size) if size > 1)
    row = prod(box.size[dim + 1 :])
    step = max(1, limit // row)
    parts = (box.narrowed(dim, at, min(step, box.size[dim] - at)) for at in range(0, box.size[dim], step))
    yield from chain.from_iterable(cut_box(part, limit) for part in parts)


def _narrowed(fragment: Fragment, source: Box) -> Fragment:
    """That box of the fragment's source, and where it goes."""
    target = source.shifted(fragment.source.offset).moved(fragment.target.offset)
    return Fragment(fragment.stub, source, target)


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """That part of the tensor, as a view of it."""
    for dim, (offset, size) in enumerate(zip(box.offset, box.size, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
