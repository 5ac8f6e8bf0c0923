"""Which elements of a file a box is."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.reads import contiguous_runs
from tests.core.cuts import numbered, part_of


@st.composite
def boxes_in_tensors(draw: st.DrawFn) -> tuple[Box, tuple[int, ...]]:
    """A tensor's shape and a box in it; whole dimensions and single indices are likely."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    offset, size = [], []
    for extent in shape:
        start = draw(st.just(0) | st.integers(0, extent))
        offset.append(start)
        size.append(draw(st.just(extent - start) | st.integers(0, extent - start)))
    return Box(tuple(offset), tuple(size)), shape


def elements(runs: list[tuple[int, int]]) -> list[int]:
    """The numbers of the elements in the runs, in order."""
    return [index for start, length in runs for index in range(start, start + length)]


@given(boxes_in_tensors())
def test_runs_are_the_box_in_row_major_order(case: tuple[Box, tuple[int, ...]]) -> None:
    """The elements of the runs are those of the slice, in its own order."""
    box, shape = case
    assert part_of(numbered(shape), box).ravel().tolist() == elements(list(contiguous_runs(box, shape)))


@given(boxes_in_tensors())
def test_runs_are_as_long_as_possible(case: tuple[Box, tuple[int, ...]]) -> None:
    """No run continues where the one before it ends, and none is empty."""
    runs = list(contiguous_runs(*case))
    assert all(length > 0 for _, length in runs)
    assert all(start + length < after for (start, length), (after, _) in pairwise(runs))
