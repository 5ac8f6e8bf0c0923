"""Tags: which names are allowed, and the one order that they have."""

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
    step_of,
    undecided,
    validate_tag,
)
from nxd_ckpt.errors import InvalidTag
from tests.core.tag_infos import TAGS


@pytest.mark.parametrize("tag", ["step_300", 3, "epoch=2,loss=0.1", "ä", "a b", "[1]", "x" * 255])
def test_plain_names_are_tags(tag: str | int) -> None:
    """Anything that is one visible directory name, and the step itself."""
    assert str(tag) == validate_tag(tag)


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
    """However a listing comes, the order is the same, and time decides before the name, but within a whole second."""
    ordered = in_order(data.draw(st.permutations(tags)))
    assert in_order(tags) == ordered
    assert sorted(int(info.order_time) for info in tags) == [int(info.order_time) for info in ordered]
    exact = [info.order_time for info in ordered if not info.is_coarse]
    assert sorted(exact) == exact


@given(tags=TAGS)
def test_latest_is_the_newest_complete_one(tags: list[TagInfo]) -> None:
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
    order_time = 0.0
    for _ in range(saves):
        order_time = next_order_time(now, order_time)
    assert order_time - now <= saves * 2e-6


@given(newest=st.floats(0, 2 * LATEST))
def test_order_times_are_told_apart_as_text(newest: float) -> None:
    """As ``done`` keeps them."""
    order_time = next_order_time(0.0, newest)
    assert order_time == float(order_text(order_time))
    if order_time < 4e9:
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


@pytest.mark.parametrize(
    ("names", "order", "told"),
    [
        (("ep3-step_100", "ep12-step_400", "ep3-step_90"), ["ep3-step_90", "ep3-step_100", "ep12-step_400"], True),
        (("step_1000-ep3", "step_200-ep3"), ["step_200-ep3", "step_1000-ep3"], True),
        (("step_100-v2", "step_200-v1"), ["step_100-v2", "step_200-v1"], True),
        (("step=300-loss=0.2", "step=200-loss=0.9"), ["step=200-loss=0.9", "step=300-loss=0.2"], True),
        (("epoch=2-loss=0.9", "epoch=10-loss=0.1"), ["epoch=2-loss=0.9", "epoch=10-loss=0.1"], True),
        (("ep1-ba300", "ep2-ba1000"), ["ep1-ba300", "ep2-ba1000"], True),
        (("ep1-step_200", "ep2-step_100"), ["ep2-step_100", "ep1-step_200"], False),  # or steps count from each epoch
        (("ep1-step_100", "ep2-step_100"), ["ep1-step_100", "ep2-step_100"], False),
        (("epoch_3", "step_100"), ["epoch_3", "step_100"], False),
    ],
)
def test_of_several_numbers_in_a_name_the_step_decides(names: tuple[str, ...], order: list[str], told: bool) -> None:
    """By the word before it; epochs only where no name has a step, and where they contradict, nothing is told."""
    tags = [TagInfo(name, 5.0, True, False) for name in names]
    assert (order, told) == ([info.tag for info in in_order(tags)], not undecided(tags))


@pytest.mark.parametrize(
    ("tag", "step"),
    [
        ("300", 300),
        ("step_300", 300),
        ("epoch1-step300", 300),
        ("step300-epoch1", 300),
        ("global_step_300_mp_rank_00", 300),
        ("epoch_7", 7),
        ("300-loss=0.25", 300),
        ("iter_0000300", 300),
        ("ckpt.300", 300),
        (f"step_{10**18 + 5}", 10**18 + 5),
        (f"step_{10**200}", 10**200),
        ("v2_last", 2),
        ("last", None),
        ("٣", None),
    ],
)
def test_the_step_of_a_name(tag: str, step: int | None) -> None:
    assert step == step_of(tag)


def test_times_that_are_known_exactly_outweigh_steps() -> None:
    """Ours are never reordered by a tag of another program of the same second; that is then of unknown place."""
    ours = [TagInfo("step_9", 5.25, True, True), TagInfo("step_2", 5.5, True, True)]
    other = TagInfo("step_10", 5.0, True, False)
    assert ["step_9", "step_2"] == [info.tag for info in in_order([*ours, other]) if info.ours]
    assert [[*ours, other]] == undecided([*ours, other])
    assert [] == undecided(ours)


@given(clock=st.floats(0, 3))
def test_a_save_beside_a_whole_second_that_lies_ahead_is_the_later_one(clock: float) -> None:
    """It is dated right after it, because the clock is not waited for; steps do not put it back."""
    other = TagInfo("step_10", 5.0, True, False)
    first = TagInfo("step_2", next_order_time(clock, 5.0), True, True)
    assert [other, first] == in_order([first, other])
    assert [] == undecided([first, other])
    later = TagInfo("step_11", 5.5, True, True)
    assert [other, first, later] == in_order([later, first, other])
    assert 1 == len(undecided([later, first, other]))
