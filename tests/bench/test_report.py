"""The benchmark's tables and its picture say what was measured, what was not, and why."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tools.bench.picture import svg
from tools.bench.report import sections
from tools.bench.results import SAVE, SLOWDOWN, STALL, WARM, Results, Row
from tools.bench.targets import Target, judge

pytestmark = [pytest.mark.plain, pytest.mark.once]

HERE = "W3 cpu 1p"
RESULTS = Results(
    [
        Row(HERE, SAVE, "floor: O_DIRECT write", [1.0, 1.0], peak=0),
        Row(HERE, SAVE, "nxd_ckpt", [2.0, 4.0], peak=3 * 2**20),
        Row(HERE, SAVE, "torch DCP", [4.0, 4.0], note="synced by itself"),
        Row(HERE, STALL, "nxd_ckpt", [0.5, 0.25]),
        Row(HERE, WARM, 'nxd_ckpt, verify="reading"', [1.0]),
        Row(HERE, WARM, "torch.save", [2.0]),
        Row(HERE, SLOWDOWN, "nxd_ckpt", [1.25]),
        Row(HERE, "", "OLMo-core", missing="not installed: No module named 'olmo_core'"),
    ],
    {HERE: (2**31, 7)},
    {"cores": 2, "versions": {"torch": "2.9.1"}},
)
TARGET = Target(HERE, SAVE, "nxd_ckpt", ("floor: O_DIRECT write",), at_most=1.3)


def cells(text: str, measure: str, contestant: str) -> list[str]:
    """The cells of one row of a Markdown table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return next(row for row in rows if row[:2] == [measure, contestant])


def shown(markdown: bool) -> str:
    return "\n".join(sections(RESULTS, [judge(TARGET, RESULTS)], markdown=markdown))


def test_a_row_has_seconds_rate_and_ratios() -> None:
    """The median, the extremes, GiB a second, against the floor and against nxd_ckpt, and peak memory."""
    assert ["3.000 s", "2.000 - 4.000", "0.67", "3.00", "1.00", "3 MiB", ""] == cells(shown(True), SAVE, "nxd_ckpt")[2:]
    assert "1.50" == cells(shown(True), SAVE, "torch DCP")[6]


def test_loads_compare_with_the_one_that_reads_once() -> None:
    """Which of the three ways to load stands for nxd_ckpt is the same in table and targets."""
    assert "2.00" == cells(shown(True), WARM, "torch.save")[6]


def test_a_slowdown_is_no_time() -> None:
    """It has neither seconds nor a rate."""
    assert ["1.25 x", "1.25 - 1.25", ""] == cells(shown(True), SLOWDOWN, "nxd_ckpt")[2:5]


def test_what_the_numbers_depend_on_comes_first() -> None:
    """The machine, and the versions of what was compared."""
    assert "cores 2, torch 2.9.1." == shown(True).splitlines()[0]


@pytest.mark.parametrize("markdown", [False, True])
def test_misses_and_what_is_missing_are_shown(markdown: bool) -> None:
    """A target that was missed is in the table like any other, and so is a peer that is not there."""
    text = shown(markdown)
    assert 1 == text.count("MISSED")
    assert "not installed: No module named 'olmo_core'" in text
    assert "synced by itself" in text


def test_the_picture_is_an_svg_with_a_bar_for_each() -> None:
    """Well-formed, each panel's longest bar as long as the others', and nothing drawn for what was not measured."""
    bars = ElementTree.fromstring(svg(RESULTS)).iter("{http://www.w3.org/2000/svg}rect")
    drawn = [(bar.get("class"), int(bar.get("width", ""))) for bar in bars]
    whole = max(width for _, width in drawn)
    stall, save = [("ours", 4)], [("floor", 1), ("ours", 3), ("peer", 4)]
    load = [("ours", 2), ("peer", 4)]
    assert [*stall, *save, *load] == [(kind, round(4 * width / whole)) for kind, width in drawn]


def test_a_picture_of_nothing_is_still_one() -> None:
    """A run of other scenarios leaves no bar, and no error."""
    assert [] == list(ElementTree.fromstring(svg(Results())).iter("{http://www.w3.org/2000/svg}rect"))
