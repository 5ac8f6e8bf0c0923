"""Retention: what rules keep together stays, and the newest complete tag always does."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.retention_rules import (
    Best,
    Every,
    Last,
    Metrics,
    Rule,
    Within,
    decide,
    rules_of,
    unknown_metrics,
)
from nxd_ckpt.core.tags import TagInfo, in_order
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.checkpointer_options import RetentionOptions
from nxd_ckpt.saving.options import SaveOptions
from tests.core.tag_infos import TAGS

RULES: st.SearchStrategy[Rule] = st.one_of(
    st.builds(Last, st.integers(1, 4)),
    st.builds(Every, st.integers(1, 4)),
    st.builds(Best, st.sampled_from(["loss", "accuracy"]), st.integers(1, 3), st.sampled_from(["min", "max"])),
    st.builds(Within, st.floats(0.1, 1e6)),
)
VALUES: st.SearchStrategy[float | None] = st.sampled_from([None, math.nan, math.inf, -1.0, 0.0, 0.5])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[TagInfo], list[Rule], Mapping[str, Metrics], set[str]]:
    """Tags with times that are often equal, some of them with metrics, some pinned; and rules."""
    tags = draw(TAGS)
    known = {info.tag: draw(st.dictionaries(st.sampled_from(["loss", "accuracy"]), VALUES)) for info in tags}
    pins = draw(st.sets(st.sampled_from([*known, "gone"])))
    return tags, draw(st.lists(RULES, min_size=1, max_size=3)), known, pins


def listing(*names: str) -> list[TagInfo]:
    """Complete tags, an hour apart, oldest first."""
    return [TagInfo(name, 3600.0 * number, True, True) for number, name in enumerate(names, 1)]


def kept(tags: list[TagInfo], *rules: Rule, metrics: Mapping[str, Metrics] | None = None) -> list[str]:
    return list(decide(tags, rules, metrics or {}).kept)


@given(case=cases())
def test_the_union_stays(case: tuple[list[TagInfo], list[Rule], Mapping[str, Metrics], set[str]]) -> None:
    """What any rule alone keeps stays, as do pinned tags and the newest; nothing else does."""
    tags, rules, metrics, pins = case
    found = decide(tags, rules, metrics, pins)
    complete = {info.tag for info in tags if info.complete}
    newest = max(((info.order_time, info.tag) for info in tags if info.complete), default=(0.0, ""))[1]
    alone = {tag for rule in rules for tag in decide(tags, [rule], metrics).kept}
    assert (alone | pins | {newest}) & complete == found.kept.keys()


@given(case=cases())
def test_each_complete_tag_is_judged_once(
    case: tuple[list[TagInfo], list[Rule], Mapping[str, Metrics], set[str]],
) -> None:
    """It stays for a reason, or goes; incomplete ones do neither. At least one stays, and the oldest go first."""
    tags, rules, metrics, pins = case
    found = decide(tags, rules, metrics, pins)
    complete = [info.tag for info in in_order(info for info in tags if info.complete)]
    assert complete == sorted([*found.kept, *found.surplus], key=complete.index)
    assert all(found.kept.values())
    assert bool(complete) == bool(found.kept)
    assert list(found.surplus) == [tag for tag in complete if tag in found.surplus]


@given(tags=TAGS, count=st.integers(1, 4))
def test_enough_is_kept(tags: list[TagInfo], count: int) -> None:
    """Of the newest, min(count, existing) stay, each newer than any that goes; incomplete ones are not touched.

    Their times differ: for ties see below."""
    tags = [replace(info, order_time=float(number)) for number, info in enumerate(tags)]
    found = decide(tags, [Last(count)], {})
    times = {info.tag: (info.order_time, info.tag) for info in tags if info.complete}
    assert min(count, len(times)) == len(found.kept)
    assert all(times[going] < times[staying] for going in found.surplus for staying in found.kept)


def test_every_so_many_steps_one_is_kept() -> None:
    """Step 0 too; a name without a step is not, and the newest is in any case."""
    tags = listing("step_0", "step_15", "step_20", "end", "step_25")
    assert ["step_0", "step_20", "step_25"] == kept(tags, Every(10))


def test_the_best_are_kept() -> None:
    """The lowest, or the highest. How good a tag without the metric, or with NaN, is, is not known: it stays until so
    many have it, and one that is older than these for good."""
    tags = listing("a", "b", "c", "d", "e", "f")
    metrics: dict[str, Metrics] = {
        "a": {"loss": 3.0}, "b": {"loss": None}, "c": {"loss": 1.0}, "d": {"other": 0.0}, "e": {"loss": 2.0}
    }  # fmt: skip
    assert ["c", "e", "f"] == kept(tags, Best("loss", 2), metrics=metrics)
    assert ["a", "f"] == kept(tags, Best("loss", mode="max"), metrics=metrics)
    assert ["a", "b", "c", "d", "e", "f"] == kept(tags, Best("loss", 4), metrics=metrics)
    assert ["1", "3", "5"] == kept(listing(*"12345"), Best("x"), metrics={"2": {"x": 2.0}, "3": {"x": 1.0}})
    assert ["a", "b", "c", "d", "e", "f"] == kept(tags, Best("los"), metrics=metrics)
    assert [] == unknown_metrics([Best("loss"), Last(1)], metrics)
    [sentence] = unknown_metrics([Best("los"), Best("other")], metrics)
    assert "did you mean 'loss'?" in sentence
    assert "loss, other" in sentence


def test_tags_of_one_time_that_names_do_not_order_stay() -> None:
    """Of a copied run of NxD's the newest might go; where steps tell, rules apply."""
    named = [TagInfo(name, 1.0, True, False) for name in ("a", "b", "c")]
    assert () == decide([*named, TagInfo("d", 2.0, True, True)], [Last(1)], {}).surplus
    stepped = [TagInfo(f"step_{step}", 1.0, True, False) for step in (8, 9, 10)]
    assert ("step_8", "step_9") == decide(stepped, [Last(1)], {}).surplus


def test_one_tag_is_counted_with_the_newest() -> None:
    tags = listing("a", "b", "c", "d")
    assert ["a", "d"] == kept(tags, Last(2, including="a")) == kept(tags, Last(1, including="a"))
    assert ["c", "d"] == kept(tags, Last(2, including="c")) == kept(tags, Last(2, including="gone"))
    assert ("last 2 with a",) == decide(tags, [Last(2, including="a")], {}).kept["a"]


def test_tags_that_rules_count_are_told_from_others() -> None:
    """And the newest in any case."""
    found = decide(listing(*"12345"), [Every(2), Best("x")], {"1": {"x": 1.0}, "3": {"x": 2.0}})
    assert {"1", "5"} == found.counted


def test_of_equal_ones_the_newer_is_better() -> None:
    metrics = {tag: {"loss": 1.0} for tag in "abc"}
    for mode in ("min", "max"):
        rule = Best("loss", 1, mode)
        assert ["c", "d"] == kept(listing("a", "b", "c", "d"), rule, metrics=metrics)


def test_time_counts_back_from_the_newest() -> None:
    """Not from now: a job that was away for a week finds its tags."""
    tags = listing("a", "b", "c", "d")
    assert ["b", "c", "d"] == kept(tags, Within(hours=2))
    assert ["c", "d"] == kept(tags, Within(minutes=119))
    assert ["a", "b", "c", "d"] == kept(tags, Within(days=1))
    assert 24 * 3600 + 2 * 3600 + 3 * 60 == Within(days=1, hours=2, minutes=3).seconds


def test_every_reason_is_told() -> None:
    """By rule; pinned tags are, and the newest where nothing else keeps it."""
    metrics = {"1": {"x": 2.0}, "2": {"x": 1.0}, "3": {"x": 3.0}}
    found = decide(listing("1", "2", "3"), [Every(2), Best("x")], metrics, {"1", "2", "other"})
    assert {"1": ("pinned",), "2": ("every 2", "best 1 by x (min)", "pinned"), "3": ("the newest",)} == found.kept


@pytest.mark.parametrize(
    "made",
    [
        lambda: Last(0),
        lambda: rules_of(0),
        lambda: Last(True),
        lambda: Last(1.5),  # type: ignore[arg-type]
        lambda: Every(0),
        lambda: Best("", 1),
        lambda: Best("loss", 0),
        lambda: Best("loss", 1, "lowest"),  # type: ignore[arg-type]
        lambda: Within(),
        lambda: Within(hours=-1),
        lambda: Within(hours=math.nan),
        lambda: Within(days=math.inf),
        lambda: Within("2h"),  # type: ignore[arg-type]
    ],
)
def test_a_rule_that_could_keep_nothing_is_refused(made: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument, match=r"(Last|Every|Best|Within)\(\)"):
        made()


@pytest.mark.parametrize(("number", "expected"), [(None, None), (-1, None), (1, (Last(1),)), (7, (Last(7),))])
def test_none_and_minus_one_keep_all(number: int | None, expected: Any) -> None:
    assert expected == rules_of(RetentionOptions(num_kept_ckpts=number).num_kept_ckpts)
    assert (Every(5), Last(2)) == rules_of(2, [Every(5)])
    assert (Every(5),) == rules_of(-1, RetentionOptions(retain=(Every(5),)).retain)


@pytest.mark.parametrize("number", [0, -2, True, 2.5, "three"])
def test_numbers_that_do_not(number: Any) -> None:
    """0 would delete what was just saved, as upstream does; the rest is a mistake."""
    with pytest.raises(InvalidArgument, match="num_kept_ckpts must be None or -1"):
        RetentionOptions(num_kept_ckpts=number)


@pytest.mark.parametrize("retain", [[], (), Last(3), [3], ["last"], {Last(3): 1}, "Last(3)"])
def test_a_policy_without_rules_is_refused(retain: Any) -> None:
    """It would keep nothing, or is none."""
    with pytest.raises(InvalidArgument, match=r"or a list of rules such as \[Last\(3\)"):
        RetentionOptions(retain=retain)


def test_metrics_are_numbers_by_name() -> None:
    """Whole ones become floats, and what is not finite None."""
    found = _recorded({"loss": 2, "nan": math.nan, "inf": -math.inf, "f": 0.5, "huge": 10**400})
    assert {"loss": 2.0, "nan": None, "inf": None, "f": 0.5, "huge": None} == found
    assert ({}, {}) == (_recorded(None), _recorded({}))


@pytest.mark.parametrize(
    "metrics", [{"loss": "low"}, {"loss": True}, {3: 1.0}, {"": 1.0}, {"\ud800": 1.0}, [2.0], {"loss": [1.0]}]
)
def test_other_metrics_are_refused(metrics: Any) -> None:
    with pytest.raises(InvalidArgument, match="metrics"):
        _recorded(metrics)


def _recorded(metrics: Any) -> dict[str, float | None]:
    return SaveOptions(metrics=metrics).recorded_metrics
