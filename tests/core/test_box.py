"""The algebra of boxes, compared with NumPy's slicing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box, is_tiling
from nxd_ckpt.errors import InvalidArgument
from tests.core.cuts import numbered, part_of

SHAPE = (3, 4, 2)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """A box, maybe empty, of a tensor of SHAPE."""
    offset = [draw(st.integers(0, extent)) for extent in SHAPE]
    size = [draw(st.integers(0, extent - start)) for extent, start in zip(SHAPE, offset, strict=True)]
    return Box(tuple(offset), tuple(size))


def elements(*parts: Box) -> list[int]:
    """The numbers of the elements that the boxes cover, with repetitions."""
    return sorted(number for box in parts for number in part_of(numbered(SHAPE), box).ravel().tolist())


@given(one=boxes(), other=boxes())
def test_an_intersection_holds_the_common_elements(one: Box, other: Box) -> None:
    """The common part holds exactly the common elements, and there is none where there are none."""
    common = one.intersect(other)
    assert sorted(set(elements(one)) & set(elements(other))) == ([] if common is None else elements(common))


@given(one=boxes(), other=boxes())
def test_a_difference_holds_what_the_other_has_not(one: Box, other: Box) -> None:
    """What is left of a box holds exactly the elements that the other has not, each once."""
    assert sorted(set(elements(one)) - set(elements(other))) == elements(*one.minus(other))


@given(one=boxes(), other=boxes())
def test_a_box_contains_those_whose_elements_it_has(one: Box, other: Box) -> None:
    """A box contains those whose elements it has; an empty one is in every box."""
    assert (set(elements(other)) <= set(elements(one))) == one.contains(other)


@given(box=boxes(), data=st.data())
def test_narrowing_counts_from_the_box(box: Box, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, 2))
    start = data.draw(st.integers(0, box.size[dim]))
    length = data.draw(st.integers(0, box.size[dim] - start))
    narrowed = np.take(part_of(numbered(SHAPE), box), range(start, start + length), axis=dim)
    assert sorted(narrowed.ravel().tolist()) == elements(box.narrowed(dim, start, length))


def test_boxes_of_other_dimensions_do_not_mix() -> None:
    """Comparing boxes of tensors of different rank is a mistake, not an empty overlap."""
    with pytest.raises(ValueError, match="shorter"):
        Box.whole((2, 3)).intersect(Box.whole((2,)))


def cut_up(box: Box, data: st.DataObject) -> list[Box]:
    """The box in pieces that are not a grid."""
    if not data.draw(st.booleans()):
        return [box]
    dim = data.draw(st.integers(0, len(box.size) - 1))
    at = data.draw(st.integers(0, box.size[dim]))
    halves = (box.narrowed(dim, 0, at), box.narrowed(dim, at, box.size[dim] - at))
    return [piece for half in halves for piece in cut_up(half, data)]


@given(st.data())
def test_pieces_are_all_of_a_box_or_they_are_not(data: st.DataObject) -> None:
    """Any cut is all of it; with a piece lost, twice there or moved it is what counting the elements says."""
    whole = Box.whole(data.draw(st.tuples(*[st.integers(0, 4)] * 3)))
    pieces = cut_up(whole, data)
    assert is_tiling(whole, data.draw(st.permutations(pieces)))
    for number in range(len(pieces)):
        changed = [*pieces]
        other = data.draw(st.sampled_from([[], [pieces[number]] * 2, [pieces[number].moved((0, 1, 0))]]))
        changed[number : number + 1] = other
        counts = np.zeros((9, 9, 9), int)
        for piece in changed:
            counts[tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.size, strict=True))] += 1
        expected = np.zeros((9, 9, 9), int)
        expected[tuple(slice(0, n) for n in whole.size)] = 1
        assert bool((counts == expected).all()) == is_tiling(whole, changed)


def test_many_pieces_are_compared_in_no_time() -> None:
    """20,000 chunks side by side along the last dimension: no comparison of each with each."""
    whole = Box((0, 0), (4, 20_000))
    pieces = [whole.narrowed(1, at, 1) for at in range(20_000)]
    assert is_tiling(whole, pieces)
    assert not is_tiling(whole, [*pieces[1:], pieces[1]])


def test_pieces_of_many_dimensions_are_refused() -> None:
    """What has 2**40 corners is none of a tensor's."""
    with pytest.raises(InvalidArgument, match="cut along 40 dimensions"):
        is_tiling(Box.whole([2] * 40), [Box.whole([1] * 40)])
