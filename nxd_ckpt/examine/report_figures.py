"""Figures of the report as positions in percent of their width and height, without their appearance. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from nxd_ckpt.core import units
from nxd_ckpt.core.units import size

PARTS = (("weights", "one"), ("master weights", "two"), ("moments", "three"))
_TICKS = 4
"""Approximate number of labels on an axis."""
_APART = 24
"""Least distance of two labels of the x axis, in percent of its length."""
_POINTS = 60
"""Up to this many values, each is a dot on its line."""
_TIPS = 150
"""Maximum number of places on the x axis whose values are shown as text."""
_SPARK = 40
"""Maximum number of points of a sparkline, 80 wide and 16 high."""
_STEPS = 6
_LEAST = 6
"""Decades of the colour scale of relative differences: steps from 10**-6 to 1."""
_HOSTS = 40
"""Maximum number of hosts whose ranks are shown."""
_SLOWER = (1.1, 1.25, 1.5, 2.0, 4.0)
"""Steps of the colour scale of a rank's seconds, as multiples of the median."""
SLOW_STEPS = ("as the median", *(f"from {one:g} x" for one in _SLOWER))
MOVED_STEPS = tuple(f"10⁻{exponent}" for exponent in "⁶⁵⁴³²¹")


class Series(NamedTuple):
    """A line of a chart: a value for each place on the x axis, None for none."""

    name: str
    colour: str
    values: Sequence[float | None]


class Mark(NamedTuple):
    """A point of the chart's first line that is named: ``kind`` decides its appearance."""

    place: int
    kind: str
    text: str


def chart(
    series: Sequence[Series],
    at: Sequence[float],
    names: Sequence[str],
    text: Callable[[float], str],
    *,
    axis: Callable[[float], str] | None = None,
    marks: Sequence[Mark] = (),
    from_zero: bool = True,
    binary: bool = False,
) -> dict[str, Any]:
    """Return a line chart: lines, dots, axes with labels, and a text for each place on the x axis.

    ``at`` are the places on the x axis, ascending, ``names`` their names; ``text`` formats a value, ``axis`` a
    label of the y axis. ``binary`` puts the
    labels of the y axis at multiples of powers of two, as sizes need it.
    """
    values = [value for line in series for value in line.values if value is not None]
    low, high = (min(values, default=0.0), max(values, default=1.0))
    ticks = _ticks(0.0 if from_zero else low, high, binary)
    bottom, top = min(ticks[0], low), max(ticks[-1], high)
    first, width = at[0], (at[-1] - at[0]) or 1.0
    xs = [_percent((place - first) / width) if len(at) > 1 else 50.0 for place in at]

    def y(value: float) -> float:
        return _percent(1 - (value - bottom) / ((top - bottom) or 1.0))

    lines = [{"colour": one.colour, "path": _path(xs, one.values, y)} for one in series]
    dots = "".join(
        f"M{x} {y(value)}h0" for one in series[:1] for x, value in zip(xs, one.values, strict=True) if value is not None
    )
    drawn = [(mark, value) for mark in marks if (value := series[0].values[mark.place]) is not None]
    return {
        "legend": [(one.name, one.colour) for one in series],
        "lines": lines,
        "dots": dots if len(at) <= _POINTS else "",
        "y": [{"at": y(tick), "text": (axis or text)(tick)} for tick in ticks],
        "x": _x_labels(xs, names),
        "marks": [{"kind": one.kind, "text": one.text, "x": xs[one.place], "y": y(value)} for one, value in drawn],
        "missing": [x for x, value in zip(xs, series[0].values, strict=True) if value is None],
        "tips": _tips(xs, names, series, text),
    }


def _path(xs: Sequence[float], values: Sequence[float | None], y: Callable[[float], float]) -> str:
    """Return an SVG path with a gap where there is no value."""
    path = ""
    for is_there, group in groupby(zip(xs, values, strict=True), key=lambda pair: pair[1] is not None):
        if is_there:
            path += "M" + "L".join(f"{x} {y(value or 0.0)}" for x, value in group)
    return path


def _x_labels(xs: Sequence[float], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return some of the names, the last one among them, far enough from each other."""
    labels: list[dict[str, Any]] = []
    for at, text in zip(reversed(xs), reversed(names), strict=True):
        if not labels or labels[-1]["at"] - at >= _APART:
            labels.append({"at": at, "text": text})
    return labels


def _tips(
    xs: Sequence[float], names: Sequence[str], series: Sequence[Series], text: Callable[[float], str]
) -> list[dict[str, Any]]:
    """Return a column for each place on the x axis, from half way to the one before to half way to the next.

    Of many places, one of several has a column.
    """
    chosen = [*range(len(xs) - 1, -1, -max(1, -(-len(xs) // _TIPS)))][::-1]
    edges = [0.0, *((xs[a] + xs[b]) / 2 for a, b in pairwise(chosen)), 100.0]
    tips = []
    for number, (left, right) in zip(chosen, pairwise(edges), strict=True):
        values = [(one.name, one.values[number]) for one in series]
        lines = [f"{label}: {'none' if value is None else text(value)}" for label, value in values]
        shown = "\n".join([names[number], *lines])
        tips.append({"left": _round(left), "width": _round(right - left), "text": shown, "at": xs[number]})
    return tips


def _ticks(low: float, high: float, binary: bool) -> list[float]:
    """Return about four round numbers from ``low`` to ``high``, and one on each side."""
    span = (high - low) or abs(high) or 1.0
    step = span / _TICKS
    power = 2.0 ** math.floor(math.log2(step)) if binary else 10.0 ** math.floor(math.log10(step))
    step = next(power * factor for factor in ((1, 2) if binary else (1, 2, 5, 10)) if power * factor >= step * 0.999)
    first = math.floor(low / step + 1e-9)
    return [number * step for number in range(first, max(first + 1, math.ceil(high / step - 1e-9)) + 1)]


def rank_bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return two bars from zero for each rank, staging and writing, which overlap, and the axis in seconds."""
    most = max((max(row["stage_seconds"], row["write_seconds"]) for row in rows), default=0.0)
    ticks = _ticks(0.0, most, False)
    widths = {"stage": "stage_seconds", "write": "write_seconds"}
    bars = [{**row, **{bar: _percent(row[key] / ticks[-1]) for bar, key in widths.items()}} for row in rows]
    hosts = [{"host": host, "rows": list(group)} for host, group in groupby(bars, key=lambda row: row["host"])]
    return {"hosts": hosts, "ticks": [{"at": _percent(tick / ticks[-1]), "text": f"{tick:g} s"} for tick in ticks]}


def rank_heat(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return a row for each slower host, a cell for each of its ranks: coloured by its seconds of writing.

    None if no rank is slower than most; of many slow hosts the slowest are returned, in their order.
    """
    seconds = sorted(row["write_seconds"] for row in rows)
    median = seconds[(len(seconds) - 1) // 2] or 1e-9
    hosts: dict[str, list[tuple[int, float, str]]] = {}
    for row in rows:
        step = sum(row["write_seconds"] >= limit * median for limit in _SLOWER)
        text = f"rank {row['rank']}: {row['write_seconds']:.2f} s, {size(row['nbytes'])}"
        hosts.setdefault(row["host"], []).append((step, row["write_seconds"], text))
    slow = [host for host, cells in hosts.items() if any(step for step, _, _ in cells)]
    shown = set(sorted(slow, key=lambda host: -max(cell[1] for cell in hosts[host]))[:_HOSTS])
    if not shown:
        return None
    columns = max(len(hosts[host]) for host in shown)
    absent = {"class": "absent", "text": "no such rank"}
    lines = []
    for host in (host for host in slow if host in shown):
        cells = [{"class": f"s{step}", "text": text} for step, _, text in hosts[host]]
        lines.append({"name": host, "cells": [*cells, *[absent] * (columns - len(cells))]})
    return {"columns": [str(number) for number in range(columns)], "rows": lines, "others": len(hosts) - len(lines)}


def moved_heat(differences: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row per layer, a cell for each of its modules: coloured by how far it moved."""
    rows = [
        {"name": layer, "cells": [_moved(value) for value in cells]}
        for layer, cells in zip(differences["layers"], differences["cells"], strict=True)
    ]
    return {"columns": differences["modules"], "rows": rows}


def _moved(value: float | str | None) -> dict[str, Any]:
    if value is None:
        return {"class": "absent", "text": "no such tensor"}
    if isinstance(value, str):
        return {"class": "nan", "text": value}
    if not value:
        return {"class": "same", "text": "not changed"}
    step = max(0, min(_STEPS - 1, math.floor(math.log10(value)) + _LEAST))
    return {"class": f"s{step}", "text": f"{100 * value:.3g} %"}


def module_bars(modules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a bar for each module, the largest of which fills the width. Equal layers are one bar."""
    stacks: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in modules:
        stack, _, number = row["module"].rpartition(".")
        parts = tuple(row[part] for part, _ in PARTS)
        stacks.setdefault((stack if number.isdigit() else row["module"], number.isdigit(), *parts), []).append(row)
    groups = sorted(stacks.values(), key=lambda rows: -_total(rows))
    most = max(map(_total, groups), default=0) or 1
    return [_module_bar(rows, most) for rows in groups]


def _module_bar(rows: Sequence[Mapping[str, Any]], most: int) -> dict[str, Any]:
    total, segments = _total(rows), []
    for part, colour in PARTS:
        nbytes = sum(row[part] for row in rows)
        if nbytes:
            segments.append({"colour": colour, "width": _percent(nbytes / most), "text": f"{part} {size(nbytes)}"})
    numbers = sorted(int(row["module"].rpartition(".")[2]) for row in rows) if len(rows) > 1 else []
    name = rows[0]["module"] if not numbers else f"{rows[0]['module'].rpartition('.')[0]}: {_ranges(numbers)}"
    each = f"{units.count(len(rows), 'layer')}, {size(total // len(rows))} each" if numbers else ""
    return {"name": name, "each": each, "total": total, "segments": segments}


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``0-1, 3-7`` for ascending numbers."""
    groups = (list(run) for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]))
    runs = [[number for _, number in run] for run in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _total(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(row[part] for row in rows for part, _ in PARTS)


def sparkline(values: Sequence[float | None]) -> str:
    """Return the points of a line through the values, 80 wide and 16 high; empty for fewer than two."""
    every = max(1, -(-len(values) // _SPARK))
    points = [value for value in values[::-1][::every][::-1] if value is not None]
    if len(points) < 2:
        return ""
    low, span, step = min(points), (max(points) - min(points)) or 1.0, 80 / (len(points) - 1)
    return " ".join(f"{step * at:.0f},{15 - 14 * (value - low) / span:.0f}" for at, value in enumerate(points))


def _percent(share: float) -> float:
    return _round(100 * share)


def _round(value: float) -> float:
    return round(value, 2)
