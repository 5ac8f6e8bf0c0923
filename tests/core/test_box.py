"""The algebra of boxes, compared with NumPy's slicing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box
from tests.core.cuts import numbered, part_of

pytestmark = [pytest.mark.plain, pytest.mark.once]

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
def test_intersection(one: Box, other: Box) -> None:
    """The common part holds exactly the common elements, and there is none where there are none."""
    common = one.intersect(other)
    assert sorted(set(elements(one)) & set(elements(other))) == ([] if common is None else elements(common))


@given(one=boxes(), other=boxes())
def test_difference(one: Box, other: Box) -> None:
    """What is left of a box holds exactly the elements that the other has not, each once."""
    assert sorted(set(elements(one)) - set(elements(other))) == elements(*one.minus(other))


@given(one=boxes(), other=boxes())
def test_containment(one: Box, other: Box) -> None:
    """A box contains those whose elements it has; an empty one is in every box."""
    assert (set(elements(other)) <= set(elements(one))) == one.contains(other)


@given(box=boxes(), data=st.data())
def test_narrowing_counts_from_the_box(box: Box, data: st.DataObject) -> None:
    """narrowed is a slice of the slice."""
    dim = data.draw(st.integers(0, 2))
    start = data.draw(st.integers(0, box.size[dim]))
    length = data.draw(st.integers(0, box.size[dim] - start))
    narrowed = np.take(part_of(numbered(SHAPE), box), range(start, start + length), axis=dim)
    assert sorted(narrowed.ravel().tolist()) == elements(box.narrowed(dim, start, length))


def test_shifted_is_seen_from_another_origin() -> None:
    """A box relative to a window: offsets are counted from the window's corner."""
    assert Box((1, 0), (2, 2)) == Box((4, 3), (2, 2)).shifted((3, 3))


def test_a_scalar_is_one_element() -> None:
    """The only box of a 0-dimensional tensor has one element, and nothing is left without it."""
    scalar = Box.whole(())
    assert 1 == scalar.numel
    assert scalar == scalar.intersect(scalar)
    assert [] == scalar.minus(scalar)


def test_shown_as_an_index() -> None:
    """Messages show a box as one would index the tensor."""
    assert "[0:4, 2:3]" == str(Box((0, 2), (4, 1)))


def test_boxes_of_other_dimensions_do_not_mix() -> None:
    """Comparing boxes of tensors of different rank is a mistake, not an empty overlap."""
    with pytest.raises(ValueError, match="shorter"):
        Box.whole((2, 3)).intersect(Box.whole((2,)))
