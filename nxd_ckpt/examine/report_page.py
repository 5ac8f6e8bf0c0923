"""HTML page of ``nxd-ckpt report``: one file that loads nothing, and runs only its own script; every name is text."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from itertools import groupby, pairwise
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment

from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.examine.report_document import module_and_leaf
from nxd_ckpt.version import __version__

_TICKS = 4
"""Approximate number of labels on an axis."""
_APART = 24
"""Least distance of two labels of the x axis, in percent of its length."""
_POINTS = 60
"""Up to this many values, each is a dot on its line."""
_SPARK = 40
"""Maximum number of points of a sparkline, 80 wide and 16 high."""


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
    marks: Sequence[Mark] = (),
    from_zero: bool = True,
) -> dict[str, Any]:
    """Return a line chart: lines, dots, and axes with labels.

    ``at`` are the places on the x axis, ascending, ``names`` their names; ``text`` formats a label of the y axis.
    """
    values = [value for line in series for value in line.values if value is not None]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    ticks = _ticks(0.0 if from_zero else low, high)
    bottom = min(ticks[0], low)
    top = max(ticks[-1], high)
    first = at[0]
    width = (at[-1] - at[0]) or 1.0
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
        "y": [{"at": y(tick), "text": text(tick)} for tick in ticks],
        "x": _x_labels(xs, names),
        "marks": [{"kind": one.kind, "text": one.text, "x": xs[one.place], "y": y(value)} for one, value in drawn],
        "missing": [x for x, value in zip(xs, series[0].values, strict=True) if value is None],
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


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers from ``low`` to ``high``, and one on each side."""
    span = (high - low) or abs(high) or 1.0
    least = span / _TICKS * 0.999
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    first = math.floor(low / step + 1e-9)
    return [number * step for number in range(first, max(first + 1, math.ceil(high / step - 1e-9)) + 1)]


def rank_bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return two bars from zero for each rank, staging and writing, which overlap, and the axis in seconds."""
    most = max((max(row["stage_seconds"], row["write_seconds"]) for row in rows), default=0.0)
    ticks = _ticks(0.0, most)
    widths = {"stage": "stage_seconds", "write": "write_seconds"}
    bars = [{**row, **{bar: _percent(row[key] / ticks[-1]) for bar, key in widths.items()}} for row in rows]
    hosts = [{"host": host, "rows": list(group)} for host, group in groupby(bars, key=lambda row: row["host"])]
    return {"hosts": hosts, "ticks": [{"at": _percent(tick / ticks[-1]), "text": f"{tick:g} s"} for tick in ticks]}


def sparkline(values: Sequence[float | None]) -> str:
    """Return the points of a line through the values, 80 wide and 16 high; empty for fewer than two."""
    every = max(1, -(-len(values) // _SPARK))
    points = [value for value in values[::-1][::every][::-1] if value is not None]
    if len(points) < 2:
        return ""
    low = min(points)
    span = (max(points) - min(points)) or 1.0
    step = 80 / (len(points) - 1)
    return " ".join(f"{step * at:.0f},{15 - 14 * (value - low) / span:.0f}" for at, value in enumerate(points))


def _percent(share: float) -> float:
    return _round(100 * share)


def _round(value: float) -> float:
    return round(value, 2)


_TAGS, _METRICS, _TENSORS, _PROBLEMS = 300, 12, 1500, 100
"""Maximum number of each that is shown; the page tells how many are not."""
_NEWEST = 12
"""Number of tags that the table shows before it is opened."""
_RANKS, _WORST = 16, 10
"""Up to this many ranks are shown one by one; of more, the slowest ones."""
_NAME = 200
"""Longest name that is shown whole."""
_STAGES = (
    ("staging: training waits", "three", "stage_seconds"),
    ("writing: the slowest rank", "one", "write_seconds"),
    ("committing, without waiting for that rank", "two", "commit_alone_seconds"),
)

Document = Mapping[str, Any]


def page_of(document: Document) -> str:
    """Render the page. Names in ``document`` may hold anything: all of it is shown as text."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "size": size,
        "time": lambda iso: "?" if iso is None else units.time_of_day(iso),
        "seconds": lambda value: _seconds(value) if isinstance(value, (int, float)) else "",
        "number": lambda value: "" if value is None else _number(value),
        "percent": lambda value: "" if value is None else f"{100 * value:.3g} %",
        "duration": lambda value: "" if value is None else units.duration(value),
        "short": _short,
    }
    texts = {kind: (files("nxd_ckpt.examine") / f"report_page.{kind}").read_text() for kind in ("html", "css", "js")}
    digest = b64encode(sha256(texts["js"].encode()).digest()).decode()
    tags = document["tags"][-_TAGS:]
    names = list(dict.fromkeys(name for tag in tags for name in tag["metrics"]))
    metrics = [_metric(name, [tag for tag in tags if name in tag["metrics"]]) for name in names[:_METRICS]]
    shown = {
        **document,
        "style": texts["css"],
        "script": texts["js"],
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'",
        "version": __version__,
        "tags": [_row(tag, number) for number, tag in enumerate(tags, 1 - len(tags))],
        "tags_left_out": len(document["tags"]) - len(tags),
        "newest": _NEWEST,
        "most": _PROBLEMS,
        "metrics": metrics,
        "metrics_left_out": max(0, len(names) - _METRICS),
        "metric_names": names,
        "marks": {mark["kind"] for one in metrics if one["chart"] for mark in one["chart"]["marks"]},
        "stages": _stages(tags),
        "ranks": _ranks(document),
        "tree": _tree(document["health"]["tensors"][:_TENSORS]),
        "tensors_left_out": max(0, len(document["health"]["tensors"]) - _TENSORS),
    }
    return _printable(environment.from_string(texts["html"]).render(shown))


def _printable(page: str) -> str:
    """Escape unprintable characters and those that turn the text direction: names come from disk."""
    hidden = (char for char in set(page) if not char.isprintable() and char != "\n")
    return page.translate({ord(char): ascii(char)[1:-1] for char in hidden})


def _short(name: str, most: int = _NAME) -> str:
    """Return a name without its middle if it is longer than ``most``."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


def _number(value: float) -> str:
    """Return four digits, or all those of a large whole number."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def _row(tag: Document, number: int) -> dict[str, Any]:
    """Return a tag's row: the marks say its state in words, the worst first."""
    bad = "damaged" if tag["problems"] else "" if tag["complete"] else "incomplete"
    marks = [("bad", bad)] if bad else []
    marks += [("bad", "not finite")] if tag["not_finite"] else []
    marks += [("good", "latest")] if tag["latest"] else []
    marks += [("", "pinned")] if tag["pinned"] else []
    return {**tag, "marks": marks, "older": number <= -_NEWEST}


def _places(tags: Sequence[Document]) -> list[float]:
    """Return places on the x axis: the steps if they ascend, otherwise one for each tag."""
    steps = [tag["step"] for tag in tags]
    ascend = None not in steps and all(a < b for a, b in pairwise(steps))
    return [float(step) for step in steps] if ascend else [float(place) for place in range(len(tags))]


def _chart(tags: Sequence[Document], series: Sequence[Series], text: Any, **options: Any) -> dict[str, Any]:
    return chart(series, _places(tags), [_short(tag["tag"], 24) for tag in tags], text, **options)


def _metric(name: str, tags: Sequence[Document]) -> dict[str, Any]:
    """Return a metric's chart, with a title that says how it went."""
    values = [tag["metrics"][name] for tag in tags]
    finite = [place for place, value in enumerate(values) if value is not None]
    missing = len(values) - len(finite)
    title: dict[str, Any] = {"name": name, "missing": missing, "text": "never finite", "chart": None}
    if not finite:
        return title
    first = values[finite[0]]
    last = values[finite[-1]]
    low, high = (pick(finite, key=lambda place: values[place]) for pick in (min, max))
    went = "fell" if last < first else "rose" if last > first else "stayed"
    title["text"] = f"{went} from {_number(first)} to {_number(last)}" if went != "stayed" else f"is {_number(last)}"
    if len(finite) < 2 or values[low] == values[high]:
        return title
    best, kind = (high, "highest") if last > first else (low, "lowest")
    title["text"] += f", {kind} at {_short(tags[best]['tag'], 40)}"
    marks = [Mark(place, "pinned", "pinned") for place, tag in enumerate(tags) if tag["pinned"]]
    marks += [Mark(low, "low", "lowest"), Mark(high, "high", "highest")]
    marks += [Mark(len(tags) - 1, "latest", "latest")] if tags[-1]["latest"] else []
    line = Series(name, "one", values)
    return {**title, "chart": _chart(tags, [line], _number, marks=marks, from_zero=False)}


def _stages(tags: Sequence[Document]) -> dict[str, Any] | None:
    """Return the seconds of each save's stages as lines beside each other: they overlap, and are never added up."""
    timed = [tag for tag in tags if "write_seconds" in tag["timings"]]
    if not timed:
        return None
    series = [Series(name, colour, [tag["timings"].get(key) for tag in timed]) for name, colour, key in _STAGES]
    waits = [value for value in series[0].values if value is not None]
    title = f"The slowest rank writes for {_seconds(median(one for one in series[1].values if one is not None))}"
    if waits:
        longest = max(timed, key=lambda tag: tag["timings"].get("stage_seconds", 0.0))
        title = f"Training waits {_seconds(median(waits))} for a save" + (
            f", at most {_seconds(max(waits))} ({_short(longest['tag'], 40)})" if len(timed) > 1 else ""
        )
    if len(timed) < 2:
        return {"title": title, "chart": None}
    return {"title": title, "chart": _chart(timed, series, lambda seconds: f"{seconds:g} s")}


def _ranks(document: Document) -> dict[str, Any] | None:
    """Return the ranks of the latest save: all of them, or of many the slowest."""
    rows = [{**row, "place": _place(row["place"])} for row in document["ranks"]]
    if len(rows) < 2:
        return None
    low, high = (size(pick(row["nbytes"] for row in rows)) for pick in (min, max))
    wrote = f"each wrote {low}" if low == high else f"they wrote {low} to {high} each"
    view: dict[str, Any] = {"wrote": f"{len(rows)} ranks; {wrote}", "worst": 0}
    late = next((row for row in rows if row["straggler"]), None)
    fast, slow = (_seconds(pick(row["write_seconds"] for row in rows)) for pick in (min, max))
    view["title"] = f"no straggler: all ranks wrote for {fast}" if fast == slow else f"no straggler: {fast} to {slow}"
    if late is not None:
        host = f" on {_short(late['host'], 60)}" if late["host"] else ""
        view["title"] = f"rank {late['rank']}{host} is the straggler: {_seconds(late['write_seconds'])}"
    if len(rows) <= _RANKS:
        hosts = list(dict.fromkeys(row["host"] for row in rows))
        return {**view, "bars": rank_bars(sorted(rows, key=lambda row: hosts.index(row["host"])))}
    worst = sorted(rows, key=lambda row: -row["write_seconds"])[:_WORST]
    return {**view, "bars": rank_bars(worst), "worst": len(worst)}


def _place(coordinates: Mapping[str, int]) -> str:
    return " ".join(f"{name} {at}" for name, at in coordinates.items())


def _tree(tensors: Iterable[Document]) -> list[dict[str, Any]]:
    """Return stacks of layers, and single modules, each with its tensors; those that are not finite come first."""
    modules: dict[str, list[dict[str, Any]]] = {}
    for row in tensors:
        kind, _, rest = row["name"].partition("/")
        name, _, part = (rest, "", "") if kind == "model" else rest.rpartition("/")
        module, leaf = module_and_leaf(name)
        line = "" if row["frozen"] else sparkline(row["norms"])
        shown = {**row, "module": module, "leaf": leaf, "part": part, "line": line}
        modules.setdefault(module, []).append(shown)
    stacks: dict[str, list[dict[str, Any]]] = {}
    for module, rows in modules.items():
        stack, _, number = module.rpartition(".")
        stacks.setdefault(stack if number.isdigit() else module, []).append(_group(module, rows))
    tree = []
    for stack, groups in stacks.items():
        whole = _group(stack, [row for one in groups for row in one["rows"]])
        tree.append(groups[0] if len(groups) == 1 else {**whole, "groups": groups})
    for node in tree:
        node["groups"] = sorted(node["groups"], key=lambda group: not group["bad"])
    return sorted(tree, key=lambda node: not node["bad"])


def _group(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    weights = [row for row in rows if not row["part"]]
    return {
        "name": name or "(top level)",
        "rows": rows,
        "groups": [],
        "numbers": sum(row["numbers"] for row in weights),
        "norm": math.hypot(*(row["norm"] for row in weights)),
        "bad": sum(row["nans"] + row["infs"] > 0 for row in rows),
        "frozen": bool(weights) and all(row["frozen"] for row in weights),
    }
