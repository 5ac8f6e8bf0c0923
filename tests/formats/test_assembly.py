"""Tensors put together from parts of saved ones: the right elements, and no other bytes than theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box, boxes_of_run
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.formats import assembly
from nxd_ckpt.formats.assembly import blocks_of, read_assembly
from nxd_ckpt.formats.tensors import (
    Assembly,
    Part,
    StorageSpan,
    TensorStub,
    contiguous_stride,
    itemsize,
    torch_dtype,
)

pytestmark = pytest.mark.plain

BEFORE = 24
"""Bytes in each file before its tensor."""


@dataclass
class Files:
    """Tensors in files of their own, and how many bytes of them were read."""

    contents: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0

    def put(self, name: str, tensor: torch.Tensor) -> TensorStub:
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()
        self.contents[name] = bytes(BEFORE) + raw
        shape = tuple(tensor.shape)
        span = StorageSpan("data/0", BEFORE, len(raw), None)
        return TensorStub(name, BEFORE, "float32", shape, contiguous_stride(shape), span)

    def read(self, file: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for offset, memory in ranges:
            memory[:] = self.contents[file][offset : offset + len(memory)]
            self.nbytes += len(memory)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Files, Assembly, torch.Tensor, int]:
    """An assembly of boxes of two tensors, what it should be by indexing, and the bytes that it needs."""
    dims = draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(["float32", "float64", "bfloat16"]))
    files, parts, needed = Files(), [], 0
    shape = [draw(st.integers(1, 5)) for _ in range(dims)]
    rows: list[int] = []
    for number in range(2 if dims else 1):  # side by side along dimension 0
        saved = tuple(size + draw(st.integers(0, 3)) for size in shape)
        tensor = torch.arange(1.0, 1.0 + torch.Size(saved).numel()).reshape(saved) * (number + 1)
        size = (draw(st.integers(1, shape[0])), *shape[1:]) if dims else ()
        source = Box(tuple(draw(st.integers(0, a - b)) for a, b in zip(saved, size, strict=True)), size)
        target = Box((sum(rows), *(0 for _ in shape[1:])) if dims else (), size)
        parts.append((files.put(f"file{number}", tensor), source, target, tensor))
        rows.append(size[0] if dims else 0)
        needed += source.numel * itemsize("float32")
    whole = (sum(rows) + draw(st.integers(0, 2)), *shape[1:]) if dims else ()
    expected = torch.zeros(whole, dtype=torch_dtype(dtype))
    for _, source, target, tensor in parts:
        expected[index(target)] = tensor[index(source)].to(expected.dtype)
    leaf = Assembly(dtype, tuple(whole), tuple(Part(stub, source, target) for stub, source, target, _ in parts))
    return files, leaf, expected, needed


@given(cases(), st.sampled_from([4, 16, 64, 2**20]))
def test_every_element_comes_from_its_part(case: tuple[Files, Assembly, torch.Tensor, int], slab: int) -> None:
    """Padding is zero, other dtypes are cast, in slabs of any size; hardly more is read than what is needed."""
    files, leaf, expected, needed = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "SLAB", slab)
        found = read_assembly(leaf, files.read)
    assert torch.equal(expected, found)
    assert needed <= files.nbytes <= needed * 17 / 16


@given(cases(), st.data(), st.sampled_from([4, 16, 2**20]))
def test_tensors_are_transposed_on_the_way(
    case: tuple[Files, Assembly, torch.Tensor, int], data: st.DataObject, slab: int
) -> None:
    """Parts of stubs whose dimensions are in another order than in the file: as much is read as without that."""
    files, leaf, expected, needed = case
    order = tuple(data.draw(st.permutations(range(expected.dim()))))
    parts = tuple(part.permuted(order) for part in leaf.parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "SLAB", slab)
        found = read_assembly(Assembly(leaf.dtype, tuple(expected.permute(order).shape), parts), files.read)
    assert torch.equal(expected.permute(order), found)
    assert needed <= files.nbytes <= needed * 17 / 16


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_boxes_of_a_run_are_that_run(shape: list[int], data: st.DataObject) -> None:
    """In their order, row by row, they are the run's elements; they are few."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    boxes = list(boxes_of_run(start, stop, shape))
    assert list(range(start, stop)) == [n for box in boxes for n in numbers[index(box)].flatten().tolist()]
    assert len(boxes) <= 2 * len(shape) + 1


def test_blocks_of_a_part() -> None:
    """Those that its bytes lie in: of rows a few side by side, of columns all; each once."""
    rows, columns = 4096, CRC_BLOCK // 1024 // 4  # a row is 1,024th of a block
    span = StorageSpan("data/0", BEFORE, rows * columns * 4, None)
    stub = TensorStub("file", BEFORE, "float32", (rows, columns), (columns, 1), span)
    some_rows = Box((1023, 0), (3, columns))
    some_columns = Box((0, 5), (rows, 2))
    assert [0, 1] == list(blocks_of(Part(stub, some_rows, some_rows.shifted((1023, 0)))))
    assert [0, 1, 2, 3] == list(blocks_of(Part(stub, some_columns, some_columns.shifted((0, 5)))))
    assert [0, 1] == list(blocks_of(Part(stub, some_rows, some_rows.shifted((1023, 0))).permuted((1, 0))))
