"""Reading assemblies: only the bytes that are wanted, straight to where they belong, in bounded memory.

A part is read slab by slab. A slab that is one run of bytes on disk and in memory needs no copy; others go through
scratch memory of at most :data:`SLAB` bytes, which also casts. What proves the bytes are the digests of the blocks that
they lie in (:func:`blocks_of`): reading a slice needs no digest of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from math import prod

import torch

from nxd_ckpt.core.box import Box, boxes_of_run
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.plan import contiguous_runs
from nxd_ckpt.formats.tensors import Assembly, Part, byte_view, contiguous_stride, itemsize, torch_dtype
from nxd_ckpt.formats.torch_zip import read_tensor

SLAB = 4 * 2**20
"""Bytes that are read at once, at most."""

_HOLES = 16
"""A hole between two runs is read along if it is not longer than a 16th of what is wanted around it: one read less."""

ReadRanges = Callable[[str, Sequence[tuple[int, memoryview]]], None]
"""(file's key, [(offset, memory), ...]) -> None: fills each memory with the file's bytes from its offset, or raises."""


def read_assembly(leaf: Assembly, read: ReadRanges) -> torch.Tensor:
    """The tensor, on the CPU."""
    out = torch.empty(leaf.shape, dtype=torch_dtype(leaf.dtype))
    fill(leaf, out, read)
    return out


def fill(leaf: Assembly, out: torch.Tensor, read: ReadRanges) -> None:
    """Put the tensor together in ``out``, a contiguous CPU tensor of its dtype and shape."""
    clear_padding(leaf, out)
    for part in leaf.parts:
        if part.source.numel:
            for slab in slabs_of(part):
                read_part(slab, out, read)


def clear_padding(leaf: Assembly, out: torch.Tensor) -> None:
    """Make ``out`` zero if there are elements that no part covers."""
    if sum(part.target.numel for part in leaf.parts) < leaf.numel:
        out.zero_()


def fill_run(leaf: Assembly, start: int, stop: int, out: memoryview, read: ReadRanges) -> None:
    """Fill ``out`` with the elements ``start <= index < stop`` of the row-major tensor."""
    dtype = torch_dtype(leaf.dtype)
    at = 0
    for box in boxes_of_run(start, stop, leaf.shape):
        length = box.numel * dtype.itemsize
        fill(leaf.within(box), torch.frombuffer(out, dtype=dtype, count=box.numel, offset=at).view(box.size), read)
        at += length


def blocks_of(part: Part) -> Iterator[int]:
    """The digest blocks that the part's bytes lie in, numbered within the record of its stub, ascending."""
    stub, size = part.stub, itemsize(part.stub.dtype)
    if not stub.is_contiguous:
        order = stub.storage_order
        whole = range(-(-stub.storage.nbytes // CRC_BLOCK))
        yield from whole if order is None else blocks_of(part.permuted(order))
        return
    begin = stub.offset - stub.storage.offset
    following = 0
    for start, length in contiguous_runs(part.source, stub.shape):
        first = (begin + start * size) // CRC_BLOCK
        last = (begin + (start + length) * size - 1) // CRC_BLOCK
        yield from range(max(first, following), last + 1)
        following = max(following, last + 1)


def direct_run(part: Part, out: torch.Tensor) -> tuple[int, memoryview] | None:
    """Where the part's bytes begin in the file, and the memory of ``out`` that takes them as they are.

    None where they are not one run on both sides, or of another dtype.
    """
    stub = part.stub
    target = _view(out, part.target)
    if not stub.is_contiguous or not target.is_contiguous() or target.dtype != torch_dtype(stub.dtype):
        return None
    runs = list(islice(contiguous_runs(part.source, stub.shape), 2))
    return (stub.offset + runs[0][0] * itemsize(stub.dtype), byte_view(target)) if len(runs) == 1 else None


def slabs_of(part: Part) -> Iterator[Part]:
    """The part in parts of at most :data:`SLAB` bytes."""
    if not part.stub.is_contiguous:
        order = part.stub.storage_order
        if order is None:
            yield part
        else:
            back = tuple(order.index(dim) for dim in range(len(order)))
            yield from (slab.permuted(back) for slab in slabs_of(part.permuted(order)))
        return
    for source in cut_box(part.source, max(1, SLAB // itemsize(part.stub.dtype))):
        moved = source.shifted(part.source.offset)
        offset = tuple(a + b for a, b in zip(moved.offset, part.target.offset, strict=True))
        yield Part(part.stub, source, Box(offset, source.size))


def read_part(slab: Part, out: torch.Tensor, read: ReadRanges) -> None:
    """Put one of :func:`slabs_of` where it belongs in ``out``."""
    order = None if slab.stub.is_contiguous else slab.stub.storage_order
    if order is not None:  # transposed on the way: read as it lies in the file
        read_part(slab.permuted(order), out.permute(order), read)
        return
    stub, source, target = slab.stub, slab.source, _view(out, slab.target)
    if not stub.is_contiguous:  # never one of ours: a view that torch.save stored as it was
        whole = read_tensor(lambda offset, memory: read(stub.file, [(offset, memory)]), stub)
        target.copy_(_view(whole, source))
        return
    run = direct_run(slab, out)
    if run is not None:
        read(stub.file, [run])
        return
    runs, size = list(contiguous_runs(source, stub.shape)), itemsize(stub.dtype)
    first, end = runs[0][0], runs[-1][0] + runs[-1][1]
    along = end - first <= source.numel + source.numel // _HOLES
    scratch = torch.empty(end - first if along else source.numel, dtype=torch_dtype(stub.dtype))
    memory = byte_view(scratch)
    if along:
        read(stub.file, [(stub.offset + first * size, memory)])
        target.copy_(scratch.as_strided(source.size, contiguous_stride(stub.shape)))
        return
    ranges, at = [], 0
    for start, length in runs:
        ranges.append((stub.offset + start * size, memory[at : at + length * size]))
        at += length * size
    read(stub.file, ranges)
    target.copy_(scratch.view(source.size))


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


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offset, box.size, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
