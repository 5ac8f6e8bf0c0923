"""Tags: which names are allowed, and the one order that they have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.tags import (
    LATEST,
    TagInfo,
    in_order,
    latest,
    next_order_time,
    order_text,
    same_time,
    undecided,
    validate_tag,
)
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
    """Also when the clock has jumped back, and also than incomplete ones; and hardly later than the clock."""
    newest = max((info.order_time for info in tags), default=0.0)
    order_time = next_order_time(now, newest)
    assert newest < order_time
    assert now - 1e-6 < order_time <= max(now, newest) + 1e-3


@given(now=st.floats(0, 4e9), saves=st.integers(1, 50))
def test_quick_saves_do_not_run_ahead_of_the_clock(now: float, saves: int) -> None:
    """A microsecond each, where no time passes between them."""
    order_time = 0.0
    for _ in range(saves):
        order_time = next_order_time(now, order_time)
    assert order_time - now <= saves * 2e-6


@given(newest=st.floats(0, 2 * LATEST))
def test_order_times_are_told_apart_as_text(newest: float) -> None:
    """As stores keep them; and a marker's time, which a file system rounds, is recognised."""
    order_time = next_order_time(0.0, newest)
    assert order_time == float(order_text(order_time))
    assert same_time(order_time, order_time)
    if order_time < 4e9:
        nanoseconds = int(order_time * 1e9)
        assert same_time(order_time, nanoseconds / 1e9)
        assert not same_time(order_time, order_time + 1e-6)
        assert order_text(newest) != order_text(order_time) or newest < 1e-6


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("step_10", "step_8", "step_9"), ["step_8", "step_9", "step_10"]),
        (("10", "9", "epoch1-step8"), ["epoch1-step8", "9", "10"]),
        (("b", "c", "a"), ["a", "b", "c"]),
        (("step_2", "last", "step_10"), ["last", "step_10", "step_2"]),
    ],
)
def test_steps_in_names_decide_between_tags_of_one_time(names: tuple[str, ...], order: list[str]) -> None:
    """Where all names have one; else the order is total, but means nothing, and that can be asked."""
    tags = [TagInfo(name, 5.0, True, False) for name in names]
    assert order == [info.tag for info in in_order(tags)]
    steps_tell = not set(names) & {"a", "last"}
    assert ([] if steps_tell else [set(names)]) == [{info.tag for info in group} for group in undecided(tags)]


def test_tags_of_one_step_are_undecided() -> None:
    """Nothing tells them apart; a tag of another time is not among them, nor one that is incomplete."""
    tags = [
        TagInfo("a_3", 5.0, True, False), TagInfo("b_3", 5.0, True, False), TagInfo("c", 6.0, True, False),
        TagInfo("d", 6.0, False, False),
    ]  # fmt: skip
    assert [["a_3", "b_3"]] == [[info.tag for info in group] for group in undecided(tags)]
