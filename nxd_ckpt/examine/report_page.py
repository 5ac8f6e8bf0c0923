"""HTML page of ``nxd-ckpt report``: one file that loads nothing, and runs only its own script; every name is text."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from itertools import pairwise
from statistics import median
from typing import Any

from jinja2 import Environment

from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.examine.report_figures import (
    MOVED_STEPS,
    PARTS,
    SLOW_STEPS,
    Mark,
    Series,
    chart,
    module_bars,
    moved_heat,
    rank_bars,
    rank_heat,
    sparkline,
)
from nxd_ckpt.version import __version__

_TAGS, _METRICS, _MODULES, _TENSORS, _PROBLEMS = 300, 12, 100, 1500, 100
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
    tags, modules = document["tags"][-_TAGS:], document["modules"]
    names = list(dict.fromkeys(name for tag in tags for name in tag["metrics"]))
    metrics = [_metric(name, [tag for tag in tags if name in tag["metrics"]]) for name in names[:_METRICS]]
    shown = {
        **document,
        "style": texts["css"],
        "script": texts["js"],
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'",
        "version": __version__,
        "tags": [_row(tag, document, number) for number, tag in enumerate(tags, 1 - len(tags))],
        "tags_left_out": len(document["tags"]) - len(tags),
        "newest": _NEWEST,
        "most": _PROBLEMS,
        "metrics": metrics,
        "metrics_left_out": max(0, len(names) - _METRICS),
        "metric_names": names,
        "marks": {mark["kind"] for one in metrics if one["chart"] for mark in one["chart"]["marks"]},
        "stages": _stages(tags),
        "sizes": _sizes(tags),
        "ranks": _ranks(document),
        "moved": None if document["differences"] is None else moved_heat(document["differences"]),
        "moved_steps": MOVED_STEPS,
        "slow_steps": SLOW_STEPS,
        "parts": [(part, colour) for part, colour in PARTS if any(row[part] for row in modules)],
        "modules": (bars := module_bars(modules))[:_MODULES],
        "modules_left_out": max(0, len(bars) - _MODULES),
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


def _axis(seconds: float) -> str:
    return f"{seconds:g} s"


def _row(tag: Document, document: Document, number: int) -> dict[str, Any]:
    """Return a tag's row: the marks say its state in words, the worst first."""
    name = tag["tag"]
    bad = "damaged" if tag["problems"] else "" if tag["complete"] else "incomplete"
    marks = [("bad", bad)] if bad else []
    marks += [("bad", "not finite")] if tag["not_finite"] else []
    marks += [("good", "latest")] if tag["latest"] else []
    marks += [("", "pinned")] if tag["pinned"] else []
    tiers = [str(place) for place, tier in enumerate(document["tiers"], 1) if name in tier["tags"]]
    return {**tag, "marks": marks, "places": ", ".join(tiers), "older": number <= -_NEWEST}


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
    first, last = values[finite[0]], values[finite[-1]]
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
    usual = [median(known) for one in series if (known := [value for value in one.values if value is not None])]
    waits = [value for value in series[0].values if value is not None]
    title = f"The slowest rank writes for {_seconds(median(one for one in series[1].values if one is not None))}"
    if waits:
        longest = max(timed, key=lambda tag: tag["timings"].get("stage_seconds", 0.0))
        title = f"Training waits {_seconds(median(waits))} for a save" + (
            f", at most {_seconds(max(waits))} ({_short(longest['tag'], 40)})" if len(timed) > 1 else ""
        )
    return {"title": title, "chart": _chart(timed, series, _seconds, axis=_axis) if len(timed) > 1 and usual else None}


def _sizes(tags: Sequence[Document]) -> dict[str, Any] | None:
    if not tags:
        return None
    shown = {size(tag["nbytes"]) for tag in tags}
    if len(shown) == 1:
        return {"title": f"{'All tags have' if len(tags) > 1 else 'The tag has'} {shown.pop()}", "chart": None}
    small, large = (pick(tags, key=lambda tag: tag["nbytes"]) for pick in (min, max))
    title = f"Sizes go from {size(small['nbytes'])} to {size(large['nbytes'])} ({_short(large['tag'], 40)})"
    series = [Series("size", "one", [float(tag["nbytes"]) for tag in tags])]
    return {"title": title, "chart": _chart(tags, series, lambda value: size(int(value)), binary=True)}


def _ranks(document: Document) -> dict[str, Any] | None:
    """Return the ranks of the latest save: all of them, or for many their hosts, and the slowest."""
    places = {row["rank"]: " ".join(f"{name} {at}" for name, at in row["place"].items()) for row in document["ranks"]}
    rows = [{**row, "place": places.get(row["rank"], "")} for row in document["timeline"]]
    nbytes = [row["nbytes"] for row in document["ranks"] or rows]
    if len(nbytes) < 2:
        return None
    low, high = size(min(nbytes)), size(max(nbytes))
    wrote = f"each wrote {low}" if low == high else f"they wrote {low} to {high} each"
    view: dict[str, Any] = {"wrote": f"{len(nbytes)} ranks; {wrote}", "title": "no rank's seconds are recorded"}
    view |= {"bars": None, "heat": None, "few": [], "worst": 0}
    if not rows:
        few = document["ranks"][: _RANKS if low != high else 0]
        return {**view, "few": [{**row, "place": places[row["rank"]]} for row in few]}
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
    return {**view, "bars": rank_bars(worst), "heat": rank_heat(rows), "worst": len(worst)}


def _tree(tensors: Iterable[Document]) -> list[dict[str, Any]]:
    """Return stacks of layers, and single modules, each with its tensors; those that are not finite come first."""
    modules: dict[str, list[dict[str, Any]]] = {}
    for row in tensors:
        kind, _, rest = row["name"].partition("/")
        name, _, part = (rest, "", "") if kind == "model" else rest.rpartition("/")
        match = re.match(r"(.*?\.\d+)\.(.*)", name) or re.match(r"(.*)\.(.*)", name)
        module, leaf = (match[1], match[2]) if match else ("", name)
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
