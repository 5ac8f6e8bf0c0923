"""Tags: which names are allowed, and the one order that they have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.tags import TagInfo, in_order, latest, next_order_time, validate_tag
from nxd_ckpt.errors import InvalidTag
from tests.core.tag_infos import TAGS

pytestmark = [pytest.mark.plain, pytest.mark.once]


@pytest.mark.parametrize("tag", ["step_300", "3", "epoch=2,loss=0.1", "ä", "a b", "[1]", "x" * 255])
def test_plain_names_are_tags(tag: str) -> None:
    """Anything that is one visible directory name."""
    assert tag == validate_tag(tag)


def test_numbers_are_tags() -> None:
    """Scripts pass the step itself."""
    assert "300" == validate_tag(300)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("", "non-empty string"),
        (None, "non-empty string"),
        (True, "non-empty string"),
        (1.5, "non-empty string"),
        ("a/b", "not a path"),
        ("/a", "not a path"),
        ("a\\b", "not a path"),
        ("a\0b", "not a path"),
        (".", "hidden"),
        ("..", "hidden"),
        (".nxd_ckpt", "hidden"),
        ("x" * 256, "256 bytes"),
        ("ä" * 128, "256 bytes"),
    ],
)
def test_what_is_no_tag(tag: object, message: str) -> None:
    """Paths, hidden names and what is no name are refused before anything is written."""
    with pytest.raises(InvalidTag, match=message):
        validate_tag(tag)


@given(tags=TAGS, data=st.data())
def test_the_order_is_total(tags: list[TagInfo], data: st.DataObject) -> None:
    """However a listing comes, the order is the same, and time decides before the name."""
    ordered = in_order(data.draw(st.permutations(tags)))
    assert in_order(tags) == ordered
    assert sorted(info.order_time for info in tags) == [info.order_time for info in ordered]


@given(tags=TAGS)
def test_latest_is_the_newest_complete_one(tags: list[TagInfo]) -> None:
    """Incomplete tags are never the latest, whatever their time."""
    complete = [info for info in tags if info.complete]
    assert (in_order(complete)[-1] if complete else None) == latest(tags)


@given(tags=TAGS, now=st.floats(0, 4e9))
def test_a_new_tag_is_later_than_every_other(tags: list[TagInfo], now: float) -> None:
    """Also when the clock has jumped back, and also than incomplete ones."""
    order_time = next_order_time(now, tags)
    assert all(info.order_time < order_time for info in tags)
    assert now < order_time
