"""Reader of assemblies: only the necessary bytes, directly into their memory, in bounded memory.

A fragment is read slab by slab. A slab that is one run of bytes on disk and in memory needs no copy; others go through
scratch memory of at most `SLAB` bytes, which also casts. The bytes are verified by the digests of their blocks
(`blocks_of`), so that reading a slice needs no digest of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, product
from math import prod

import torch

from nxd_ckpt.core.box import Box, boxes_of_run
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.reads import contiguous_runs
from nxd_ckpt.formats.memory import allocated, byte_view, copy_values, torch_dtype
from nxd_ckpt.formats.stored_tensors import read_tensor
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub, contiguous_stride, itemsize

SLAB = 4 * 2**20
"""Largest number of bytes that are read at once."""

_GAP = 16 * 2**10
"""Bytes between two runs of a slab that are read too: that takes less time than to begin another run."""

ReadRanges = Callable[[str, Sequence[tuple[int, memoryview]]], None]
"""(file's key, [(offset, memory), ...]) -> None: fill each memory with the file's bytes from its offset, or raise."""

DirectRun = tuple[int, memoryview]
"""An offset in a file, and the memory that takes the bytes from there unchanged."""


def clear_padding(leaf: Assembly, out: torch.Tensor) -> None:
    """Fill ``out`` with zeros if there are elements that no fragment covers."""
    if sum(fragment.target.numel for fragment in leaf.fragments) < leaf.numel:
        out.zero_()


def as_stored(fragment: Fragment, out: torch.Tensor) -> tuple[Fragment, torch.Tensor]:
    """Return both with their dimensions in the file's order, if the bytes there have such an order."""
    order = _order(fragment)
    return (fragment, out) if order is None else (fragment.permuted(order), out.permute(order))


def in_stored_order(fragment: Fragment) -> Fragment:
    """Return the fragment with its dimensions in the file's order, if the bytes there have such an order."""
    order = _order(fragment)
    return fragment if order is None else fragment.permuted(order)


def _order(fragment: Fragment) -> tuple[int, ...] | None:
    return None if fragment.stub.is_contiguous else fragment.stub.storage_order


def blocks_of(fragment: Fragment) -> Iterator[int]:
    """Yield the digest blocks of the fragment's bytes, numbered within the record of its stub, ascending."""
    stub = fragment.stub
    size = itemsize(fragment.stub.dtype)
    if not stub.is_contiguous:
        order = stub.storage_order
        whole = range(-(-stub.storage.nbytes // CRC_BLOCK))
        yield from whole if order is None else blocks_of(fragment.permuted(order))
        return
    if not fragment.source.numel:
        return
    begin = stub.offset - stub.storage.offset
    following = 0
    # No block lies in a gap that is shorter; rows of many experts would be counted one by one.
    _, starts, length = _groups(fragment, CRC_BLOCK - 1)
    for start in starts:
        first = (begin + start * size) // CRC_BLOCK
        last = (begin + (start + length) * size - 1) // CRC_BLOCK
        yield from range(max(first, following), last + 1)
        following = max(following, last + 1)


def _groups(fragment: Fragment, gap: int) -> tuple[int, Iterator[int], int]:
    """Return the groups of the fragment's elements between which more than ``gap`` bytes of its contiguous stub lie.

    A group has all of the innermost dimensions. Returned are the number of the others, each group's first element,
    ascending, and the distance from there to the end of its last.
    """
    box = fragment.source
    strides = contiguous_stride(fragment.stub.shape)
    most = gap // itemsize(fragment.stub.dtype)
    dim = len(strides)
    length = 1
    while dim and (box.size[dim - 1] == 1 or strides[dim - 1] - length <= most):
        dim -= 1
        length += (box.size[dim] - 1) * strides[dim]
    outer = product(*(range(0, size * stride, stride) for size, stride in zip(box.size[:dim], strides, strict=False)))
    first = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    return dim, (first + sum(steps) for steps in outer), length


def direct_run(fragment: Fragment, out: torch.Tensor) -> DirectRun | None:
    """Return the offset of the fragment's bytes in the file, and the memory of ``out`` that takes them unchanged.

    None unless they are one run on both sides, of the same dtype.
    """
    return _direct_run(fragment, box_of(out, fragment.target))


def _direct_run(fragment: Fragment, target: torch.Tensor) -> DirectRun | None:
    stub = fragment.stub
    if not stub.is_contiguous or not target.is_contiguous() or target.dtype != torch_dtype(stub.dtype):
        return None
    runs = list(islice(contiguous_runs(fragment.source, stub.shape), 2))
    return (stub.offset + runs[0][0] * itemsize(stub.dtype), byte_view(target)) if len(runs) == 1 else None


def slabs_of(fragment: Fragment) -> Iterator[Fragment]:
    """Yield the fragment, from `as_stored`, in parts of at most about `SLAB` bytes, with the gaps that are read."""
    stub = fragment.stub
    source = fragment.source
    if not stub.is_contiguous:
        yield fragment
        return
    dim, _, length = _groups(fragment, _GAP)
    limit = SLAB // itemsize(stub.dtype) * prod(source.size[dim:]) // length
    if source.numel <= limit:
        yield fragment
        return
    for part in cut_box(source, max(1, limit)):
        yield _narrowed(fragment, part)


def run_of_block(stub: TensorStub, block: int) -> tuple[int, int]:
    """Return the range of elements (start, stop) of the contiguous stub whose bytes are in a block of its record."""
    begin = stub.offset - stub.storage.offset
    size = itemsize(stub.dtype)
    start, stop = ((at * CRC_BLOCK - begin) // size for at in (block, block + 1))
    return max(start, 0), min(stop, stub.numel)


def fragments_in(fragment: Fragment, start: int, stop: int) -> Iterator[Fragment]:
    """Yield the parts of the fragment among the elements ``start <= index < stop`` of its contiguous stub."""
    if stop - start == fragment.stub.numel:
        yield fragment
        return
    for box in boxes_of_run(start, stop, fragment.stub.shape):
        common = box.intersect(fragment.source)
        if common is not None:
            yield _narrowed(fragment, common)


def cut_out(fragment: Fragment, out: torch.Tensor, block: int, memory: memoryview) -> None:
    """Copy the fragment's part of a block, which is in ``memory``, to its place in ``out``."""
    for piece, values in _cut(fragment, block, memory):
        copy_values(box_of(out, piece.target), values)


def elements_in(fragment: Fragment, block: int, memory: memoryview) -> list[torch.Tensor]:
    """Return the fragment's part of a block, which is in ``memory``, as few tensors of one dimension."""
    runs = list(islice(contiguous_runs(fragment.source, fragment.stub.shape), 2))
    if len(runs) > 1:
        return [values.reshape(-1) for _, values in _cut(fragment, block, memory)]
    (first, length), (start, stop) = runs[0], run_of_block(fragment.stub, block)
    return [_elements(fragment.stub, block, memory)[max(first - start, 0) : min(first + length, stop) - start]]


def _cut(fragment: Fragment, block: int, memory: memoryview) -> Iterator[tuple[Fragment, torch.Tensor]]:
    """Yield the parts of the fragment in the block, with the elements of each."""
    stub = fragment.stub
    elements = _elements(stub, block, memory)
    strides = contiguous_stride(stub.shape)
    start, stop = run_of_block(stub, block)
    for piece in fragments_in(fragment, start, stop):
        first = sum(offset * stride for offset, stride in zip(piece.source.offset, strides, strict=True)) - start
        yield piece, elements.as_strided(piece.source.size, strides, first)


def _elements(stub: TensorStub, block: int, memory: memoryview) -> torch.Tensor:
    """Return the stub's elements in the block, as a view of ``memory``."""
    start, stop = run_of_block(stub, block)
    begin = stub.offset - stub.storage.offset + start * itemsize(stub.dtype) - block * CRC_BLOCK
    return torch.frombuffer(memory, dtype=torch_dtype(stub.dtype), count=stop - start, offset=begin)


def read_part(slab: Fragment, out: torch.Tensor, read: ReadRanges) -> None:
    """Read one of `slabs_of` into its place in ``out``."""
    stub = slab.stub
    source = slab.source
    target = box_of(out, slab.target)
    if not stub.is_contiguous:  # never in our files: a view that torch.save stored unchanged
        whole = read_tensor(lambda offset, memory: read(stub.file, [(offset, memory)]), stub)
        copy_values(target, box_of(whole, source))
        return
    run = _direct_run(slab, target)
    if run is not None:
        read(stub.file, [run])
        return
    dim, starts, length = _groups(slab, _GAP)
    outer = source.size[:dim]
    size = itemsize(stub.dtype)
    scratch = allocated((*outer, length), stub.dtype)
    memory = byte_view(scratch)
    nbytes = length * size
    ranges = [
        (stub.offset + start * size, memory[number * nbytes : (number + 1) * nbytes])
        for number, start in enumerate(starts)
    ]
    read(stub.file, ranges)
    strides = (*scratch.stride()[:-1], *contiguous_stride(stub.shape)[dim:])
    copy_values(target, scratch.as_strided(source.size, strides))


def cut_box(box: Box, limit: int) -> Iterator[Box]:
    """Yield ``box`` cut along its outer dimensions into boxes of at most ``limit`` elements, in row-major order."""
    if box.numel <= limit:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.size) if size > 1)
    row = prod(box.size[dim + 1 :])
    step = max(1, limit // row)
    parts = (box.narrowed(dim, at, min(step, box.size[dim] - at)) for at in range(0, box.size[dim], step))
    yield from chain.from_iterable(cut_box(part, limit) for part in parts)


def _narrowed(fragment: Fragment, source: Box) -> Fragment:
    """Return the part of the fragment at a box of its source."""
    target = source.shifted(fragment.source.offset).moved(fragment.target.offset)
    return Fragment(fragment.stub, source, target)


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the part of the tensor at ``box``, as a view."""
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(box.offset, box.size, strict=True))]
