"""Tensors put together from parts of saved ones: the right elements, and no other bytes than theirs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box, boxes_of_run
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.formats import assembly
from nxd_ckpt.formats.assembly import blocks_of
from nxd_ckpt.formats.memory import copy_values
from nxd_ckpt.formats.tensors import (
    Assembly,
    Fragment,
    StorageSpan,
    TensorStub,
)
from tests.formats.assemblies import BEFORE, Files, cases, index, read_leaf


@given(cases(), st.sampled_from([4, 16, 64, 2**20]), st.sampled_from([0, 8, 2**14]))
def test_every_element_comes_from_its_part(
    case: tuple[Files, Assembly, torch.Tensor, int], slab: int, gap: int
) -> None:
    """Padding is zero, other dtypes are cast, in slabs of any size; only short gaps are read besides what is needed."""
    files, leaf, expected, needed = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "SLAB", slab)
        patch.setattr(assembly, "_GAP", gap)
        found = read_leaf(leaf, files.read)
    assert torch.equal(expected, found)
    assert files.most <= slab
    assert needed <= files.nbytes <= needed * (1 + gap // 4)  # at most one gap for each element, of 4 bytes


@pytest.mark.parametrize(("slab", "gap", "most"), [(16, 4, 12), (16, 0, 16), (80, 4, 72), (100, 28, 100)])
def test_scratch_memory_is_bounded_where_only_some_gaps_are_short(slab: int, gap: int, most: int) -> None:
    """Between columns there is one element, between planes there are many: short gaps alone count as elements read."""
    files, numbers = Files(), torch.arange(2.0 * 8 * 2).reshape(2, 8, 2)
    box = Box((0, 1, 1), (2, 5, 1))
    part = Fragment(files.put("file", numbers), box, Box.whole(box.size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "SLAB", slab)
        patch.setattr(assembly, "_GAP", gap)
        found = read_leaf(Assembly("float32", box.size, (part,)), files.read)
    assert torch.equal(numbers[index(box)], found)
    assert files.most == most


@given(st.lists(st.integers(1, 3), min_size=12, max_size=20), st.data())
def test_a_window_of_many_parts_has_those_inside(heights: list[int], data: st.DataObject) -> None:
    """Parts of different heights, in any order, with rows between them that are in none."""
    rows = sum(heights) + len(heights)
    numbers = torch.arange(1.0, rows * 4 + 1).reshape(rows, 4)
    files, parts, first, expected = Files(), [], 0, torch.zeros_like(numbers)
    stub = files.put("file", numbers)
    for number, height in enumerate(heights):
        box = Box((first, number % 3), (height, 4 - number % 3))
        parts.append(Fragment(stub, box, box))
        expected[index(box)] = numbers[index(box)]
        first += height + number % 2
    whole = Assembly("float32", (rows, 4), tuple(data.draw(st.permutations(parts))))
    start = data.draw(st.integers(0, rows - 1))
    window = Box((start, data.draw(st.integers(0, 2))), (data.draw(st.integers(1, rows - start)), 2))
    assert torch.equal(expected[index(window)], read_leaf(whole.within(window), files.read))


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_boxes_of_a_run_are_that_run(shape: list[int], data: st.DataObject) -> None:
    """In their order, row by row, they are the run's elements; they are few."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    boxes = list(boxes_of_run(start, stop, shape))
    assert list(range(start, stop)) == [n for box in boxes for n in numbers[index(box)].flatten().tolist()]
    assert len(boxes) <= 2 * len(shape) + 1


def test_blocks_of_a_part_are_those_that_its_bytes_lie_in() -> None:
    """Those that its bytes lie in: of rows a few side by side, of columns all; each once."""
    rows, columns = 4096, CRC_BLOCK // 1024 // 4  # a row is 1,024th of a block
    span = StorageSpan("data/0", BEFORE, rows * columns * 4, None)
    stub = TensorStub("file", BEFORE, "float32", (rows, columns), (columns, 1), span)
    some_rows = Box((1023, 0), (3, columns))
    some_columns = Box((0, 5), (rows, 2))
    assert [0, 1] == list(blocks_of(Fragment(stub, some_rows, some_rows.shifted((1023, 0)))))
    assert [0, 1, 2, 3] == list(blocks_of(Fragment(stub, some_columns, some_columns.shifted((0, 5)))))
    assert [0, 1] == list(blocks_of(Fragment(stub, some_rows, some_rows.shifted((1023, 0))).permuted((1, 0))))


@pytest.mark.parametrize(
    ("shape", "saved", "wanted"),
    [
        ((512, 1280), torch.bfloat16, torch.bfloat16),
        ((300, 1280), torch.float32, torch.bfloat16),
        ((1, 3, 257, 1, 512), torch.int16, torch.int16),
        ((512, 300), torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("is_target", [True, False])
def test_a_transposed_copy_has_torchs_values(
    shape: tuple[int, ...], saved: torch.dtype, wanted: torch.dtype, is_target: bool
) -> None:
    """Either side is transposed, and the other a part of more columns; what is beside the target stays."""
    values = torch.arange(torch.Size(shape).numel()).remainder(251).view(shape)
    wide = torch.zeros(*shape[:-1], shape[-1] + 256, dtype=saved)
    wide[..., : shape[-1]] = values
    source = wide[..., : shape[-1]]
    around = torch.full((*shape[:-2], shape[-1], shape[-2] + 256), -1, dtype=wanted)
    target = around[..., : shape[-2]]
    if is_target:
        copy_values(target.mT, source)
    else:
        copy_values(target, source.mT)
    assert torch.equal(values.mT.to(wanted), target)
    assert (around[..., shape[-2] :] == -1).all()
