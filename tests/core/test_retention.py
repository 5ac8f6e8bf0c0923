"""Retention: the newest complete tags stay, whatever else happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.retention import tags_to_remove, validate_num_kept
from nxd_ckpt.core.tags import TagInfo
from nxd_ckpt.errors import InvalidArgument
from tests.core.tag_infos import TAGS

pytestmark = [pytest.mark.plain, pytest.mark.once]


@pytest.mark.parametrize(("given_number", "expected"), [(None, None), (-1, None), (1, 1), (7, 7)])
def test_none_and_minus_one_keep_all(given_number: int | None, expected: int | None) -> None:
    """None and -1 keep all, as NxD has it."""
    assert expected == validate_num_kept(given_number)


@pytest.mark.parametrize("number", [0, -2, True, 2.0, "3"])
def test_numbers_that_do_not(number: int) -> None:
    """0 would delete what was just saved, as upstream does; the rest is a mistake."""
    with pytest.raises(InvalidArgument, match="num_kept_ckpts must be None or -1"):
        validate_num_kept(number)


@given(tags=TAGS, kept=st.none() | st.integers(1, 4))
def test_enough_is_kept(tags: list[TagInfo], kept: int | None) -> None:
    """min(kept, existing) complete tags stay, each newer than any that goes; incomplete ones are not touched."""
    gone = tags_to_remove(tags, kept)
    complete = [info for info in tags if info.complete]
    staying = [info for info in complete if info.tag not in gone]
    assert (len(complete) if kept is None else min(kept, len(complete))) == len(staying)
    going = [info for info in complete if info.tag in gone]
    assert len(gone) == len(going)
    assert all((a.order_time, a.tag) < (b.order_time, b.tag) for a in going for b in staying)


def test_the_oldest_go_first() -> None:
    """The order in which they go: an interruption leaves the newest."""
    tags = [TagInfo(name, time, True, True) for name, time in (("c", 3.0), ("a", 1.0), ("b", 2.0))]
    assert ["a", "b"] == tags_to_remove(tags, 1)
