"""Which elements of a file a box is: runs, and the spans in which they are read."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.plan import contiguous_runs, spans
from nxd_ckpt.errors import InvalidArgument
from tests.core.cuts import numbered, part_of

pytestmark = pytest.mark.plain


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


@pytest.mark.parametrize(
    ("box", "shape", "expected"),
    [
        (Box.whole((4, 5)), (4, 5), [(0, 20)]),
        (Box((1, 0), (2, 5)), (4, 5), [(5, 10)]),
        (Box((1, 2), (2, 2)), (4, 5), [(7, 2), (12, 2)]),
        (Box((0, 1, 0), (2, 1, 3)), (2, 2, 3), [(3, 3), (9, 3)]),
        (Box.whole(()), (), [(0, 1)]),
        (Box((2, 0), (0, 5)), (4, 5), []),
    ],
)
def test_runs_by_example(box: Box, shape: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    """Whole tensors and whole rows are one run; columns are one a row."""
    assert expected == list(contiguous_runs(box, shape))


ASCENDING = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=8)


@given(steps=ASCENDING, limit=st.integers(1, 12), gap=st.integers(0, 4))
def test_spans_hold_the_runs_within_the_limit(steps: list[tuple[int, int]], limit: int, gap: int) -> None:
    """Nothing is lost, doubled or reordered; no span is too long or has too large a hole; none ends too early."""
    runs, end = [], 0
    for hole, length in steps:
        runs.append((end + hole, length))
        end += hole + length
    found = list(spans(runs, limit, gap))
    assert elements(runs) == elements([run for span in found for run in span])
    for span in found:
        assert sum(span[-1]) - span[0][0] <= limit
        assert all(after - start - length <= gap for (start, length), (after, _) in pairwise(span))
    for span, later in pairwise(found):
        assert later[0][0] - sum(span[-1]) > gap or later[0][0] - span[0][0] >= limit


def test_spans_by_example() -> None:
    """Runs of two, five apart: read as one over a gap of three, up to eight long; a long run is cut."""
    assert [[(0, 2), (5, 2)], [(10, 2)]] == list(spans([(0, 2), (5, 2), (10, 2)], limit=8, gap=3))
    assert [[(0, 2)], [(5, 2)]] == list(spans([(0, 2), (5, 2)], limit=8, gap=2))
    assert [[(3, 4)], [(7, 4)], [(11, 2)]] == list(spans([(3, 10)], limit=4))


@pytest.mark.parametrize(("limit", "gap"), [(0, 0), (4, -1)])
def test_spans_of_nothing_are_refused(limit: int, gap: int) -> None:
    """A limit of zero would read nothing for ever."""
    with pytest.raises(InvalidArgument, match="limit must be at least 1 and gap at least 0"):
        list(spans([(0, 1)], limit, gap))
