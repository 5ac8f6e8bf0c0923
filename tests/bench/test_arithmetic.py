"""The benchmark's arithmetic: medians, ratios of the same rounds, targets that are met, missed or not measured."""

import pytest

from tools.bench.results import SAVE, STALL, WARM, Results, Row, ratios, spread
from tools.bench.scenarios import SCENARIOS
from tools.bench.targets import TARGETS, Target, judge

HERE = "W1 cpu 1p"


def measured(**values: list[float]) -> Results:
    """Saves of contestants, in the scenario ``HERE`` of 10 tensors."""
    return Results([Row(HERE, SAVE, name, seconds) for name, seconds in values.items()], {HERE: (1000, 10)})


def test_no_rounds_have_no_median() -> None:
    """It is an error, not a zero that would win every comparison."""
    with pytest.raises(ValueError, match="no rounds"):
        spread([])


def test_ratios_are_of_the_same_round() -> None:
    """A machine that was slow in one round was slow for both; rounds that only one has are left out."""
    assert [2.0, 2.0] == ratios([2.0, 20.0], [1.0, 10.0, 7.0])


@pytest.mark.parametrize(
    ("target", "ratio", "verdict"),
    [
        (Target(HERE, SAVE, "ours", ("floor",), at_most=1.5), 1.5, "met"),
        (Target(HERE, SAVE, "ours", ("floor",), at_most=1.4), 1.5, "MISSED"),
        (Target(HERE, SAVE, "ours", ("peer",), at_most=1), 0.5, "met"),
        (Target(HERE, SAVE, "ours", ("peer", "absent"), at_most=0.4), 0.5, "MISSED"),
        (Target(HERE, SAVE, "ours", ("peer", "floor"), at_most=1.5), 1.5, "met"),
        (Target(HERE, SAVE, "ours", ("floor",)), 1.5, "reported"),
    ],
)
def test_a_target_is_judged_by_the_median_of_its_rounds(target: Target, ratio: float, verdict: str) -> None:
    """It is ours over the best of theirs; a peer that is not there does not count."""
    results = measured(ours=[3.0, 3.0, 30.0], floor=[2.0, 2.0, 20.0], peer=[6.0, 6.0, 90.0])
    judged = judge(target, results)
    assert judged.ratio is not None
    assert ratio == pytest.approx(judged.ratio.median)
    assert verdict == judged.verdict


@pytest.mark.parametrize("name", ["ours", "peer"])
def test_a_target_without_both_sides_is_not_measured(name: str) -> None:
    judged = judge(Target(HERE, SAVE, "ours", ("peer",), at_most=2), measured(**{name: [1.0]}))
    assert (None, "not measured") == (judged.ratio, judged.verdict)


def test_a_missing_row_is_not_one_of_no_seconds() -> None:
    """A peer that is not installed has no rounds: it is not found, and so not compared with."""
    results = Results([Row(HERE, SAVE, "peer", missing="not installed")], {HERE: (1, 1)})
    assert None is results.find(HERE, SAVE, "peer")


def test_every_target_is_about_something_that_is_run() -> None:
    """Each names a scenario, a measure that is taken there, and contestants that take part."""
    there = {scenario.name for scenario in SCENARIOS}
    assert set() == {target.scenario for target in TARGETS} - there
    assert {SAVE, STALL, WARM} <= {target.measure for target in TARGETS}
    assert len(TARGETS) == len(set(TARGETS))
