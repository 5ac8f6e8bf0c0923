"""Figures of the report: axes with round labels, gaps, bars of ranks."""

import re
from importlib.resources import files
from typing import Any

import pytest

from nxd_ckpt.examine.report_page import Mark, Series, chart, rank_bars


def test_a_line_has_axes_and_a_gap_where_nothing_is_known() -> None:
    """Places are percent of width and height; the last name is always on the axis."""
    names = [f"step_{n}" for n in range(8)]
    loss = Series("loss", "one", [8, 6, None, 4, 3, 2, 1, 0.5])
    drawn = chart([loss], list(range(8)), names, str, marks=[Mark(7, "low", "lowest"), Mark(2, "pinned", "")])
    assert ["0.0", "2.0", "4.0", "6.0", "8.0"] == [label["text"] for label in drawn["y"]]
    assert [100.0, 75.0, 50.0, 25.0, 0.0] == [label["at"] for label in drawn["y"]]
    assert drawn["lines"][0]["path"].startswith("M0.0 0.0L14.29 25.0M42.86 50.0L57.14 62.5L")
    assert [("step_7", 100.0), ("step_5", 71.43)] == [(label["text"], label["at"]) for label in drawn["x"]][:2]
    assert [28.57] == drawn["missing"]
    assert [("low", 100.0, 93.75)] == [(mark["kind"], mark["x"], mark["y"]) for mark in drawn["marks"]]


@pytest.mark.parametrize(
    ("values", "options", "labels"),
    [
        ([0.0], {}, ["0.0", "0.5"]),
        ([5.0, 5.0], {"from_zero": False}, ["4.0", "6.0"]),
        ([2.93, 3.07], {"from_zero": False}, ["2.9", "2.95", "3.0", "3.05", "3.1"]),
        ([3000.0], {}, ["0.0", "1000.0", "2000.0", "3000.0"]),
    ],
)
def test_labels_of_an_axis_are_round(values: list[float], options: dict[str, Any], labels: list[str]) -> None:
    at, names = list(range(len(values))), ["t"] * len(values)
    drawn = chart([Series("", "one", values)], at, names, lambda value: str(round(value, 9)), **options)
    assert labels == [label["text"] for label in drawn["y"]]
    assert all(0 <= label["at"] <= 100 for label in drawn["y"])


def test_bars_of_ranks_have_one_scale() -> None:
    """Ranks of one host stand together; each bar is a share of the axis."""
    seconds = {rank: 9.0 if rank == 6 else 2.0 for rank in range(4, 9)}
    row = {"stage_seconds": 1.0, "nbytes": 1, "straggler": False}
    rows = [{**row, "rank": rank, "host": f"h{rank // 4}", "write_seconds": seconds[rank]} for rank in seconds]
    bars = rank_bars(rows)
    assert [("h1", 4), ("h2", 1)] == [(host["host"], len(host["rows"])) for host in bars["hosts"]]
    assert (10.0, 90.0) == (bars["hosts"][0]["rows"][2]["stage"], bars["hosts"][0]["rows"][2]["write"])


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_has_the_contrast_of_wcag(scheme: int) -> None:
    """Level AA on the page and on cards, light and dark; lines and bars have 3 to 1."""
    style = (files("nxd_ckpt.examine") / "report_page.css").read_text()
    themes = re.findall(r":root \{ (?:color-scheme: light dark; )?(--ink[^}]*)\}", style)
    colours = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]+)", themes[scheme]))
    for text in ("ink", "soft", "good", "warning", "bad", "one"):
        assert min(_contrast(colours[text], colours[page]) for page in ("page", "card")) >= 4.5, text
    for line in ("one", "two", "three"):
        assert _contrast(colours[line], colours["page"]) >= 3, line


def _contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.2 (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio)."""
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
