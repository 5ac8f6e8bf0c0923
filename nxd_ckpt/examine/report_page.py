"""HTML page of ``nxd-ckpt report``: no script, no external resources, every name escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment

from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.examine.report_figures import PARTS, heatmap, timeline, treemap

_WIDTH, _HEIGHT = 900, 90
_LINE = 40
"""Maximum number of points of a line."""
_MODULES = 200
"""Maximum number of modules shown."""
_PHASES = (
    ("staged", "two", "stage_seconds"),
    ("written", "three", "write_seconds"),
    ("committed", "one", "commit_seconds"),
)


def page_of(document: Mapping[str, Any]) -> str:
    """Render the page. Names in ``document`` may hold anything: all of it is shown as text."""
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters |= {
        "size": size,
        "topology": units.short_topology,
        "time": lambda iso: "?" if iso is None else units.time_of_day(iso),
        "seconds": lambda value: f"{value:.2f} s" if isinstance(value, (int, float)) else "",
        "number": lambda value: "" if value is None else f"{value:.4g}",
        "percent": lambda value: "" if value is None else f"{100 * value:.3g} %",
    }
    template = environment.from_string((files("nxd_ckpt.examine") / "report_page.html").read_text())
    tags, modules = document["tags"], document["modules"]
    health = document["health"]
    shown = {
        **document,
        "plots": _plots(tags),
        "places": {tag["tag"]: _places(document["tiers"], tag["tag"]) for tag in tags},
        "parts": PARTS,
        "treemap": treemap(modules) if modules else None,
        "timeline": timeline(document["timeline"]) if document["timeline"] else None,
        "heatmap": None if document["differences"] is None else heatmap(document["differences"]),
        "modules": [_module(row, modules[0]) for row in modules[:_MODULES]],
        "modules_left_out": max(0, len(modules) - _MODULES),
        "health": {**health, "tensors": [{**row, "line": _line(row["norms"])} for row in health["tensors"]]},
    }
    return _printable(template.render(shown))


def _printable(page: str) -> str:
    """Escape unprintable characters and those that turn the text direction: names come from disk."""
    hidden = (char for char in set(page) if not char.isprintable() and char != "\n")
    return page.translate({ord(char): ascii(char)[1:-1] for char in hidden})


def _plots(tags: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return bar charts of the tags' sizes and of the seconds of each save."""
    sizes = [[("size", "one", tag["nbytes"], size(tag["nbytes"]))] for tag in tags]
    times = [
        [
            (name, colour, tag["timings"].get(key, 0.0), f"{name} {tag['timings'].get(key, 0.0):.2f} s")
            for name, colour, key in _PHASES
        ]
        for tag in tags
    ]
    plots = [{"title": "Size of each tag, oldest first", "legend": (), **_bars(tags, sizes)}]
    if any(bar[2] for bars in times for bar in bars):
        legend = (("staging", "two"), ("writing", "three"), ("committing", "one"))
        plots.append({"title": "Seconds of each save:", "legend": legend, **_bars(tags, times)})
    return plots


def _places(tiers: Sequence[Mapping[str, Any]], tag: str) -> str:
    """Return the numbers of the tiers that have the tag; the directory itself is number 0."""
    return ", ".join(str(number) for number, tier in enumerate(tiers, 1) if tag in tier["tags"])


def _bars(tags: Sequence[Mapping[str, Any]], stacks: Sequence[Sequence[tuple[str, str, float, str]]]) -> dict[str, Any]:
    most = max((sum(bar[2] for bar in stack) for stack in stacks), default=0) or 1
    step = min(_WIDTH / max(1, len(stacks)), 60.0)
    bars = []
    for number, (tag, stack) in enumerate(zip(tags, stacks, strict=True)):
        top = float(_HEIGHT)
        for _, colour, value, title in stack:
            height = value / most * (_HEIGHT - 5)
            top -= height
            bars.append(
                {
                    "x": round(number * step, 2),
                    "y": round(top, 2),
                    "width": round(max(step * 0.8, 0.5), 2),
                    "height": round(height, 2),
                    "colour": colour,
                    "title": f"{tag['tag']}: {title}",
                }
            )
    return {"width": _WIDTH, "height": _HEIGHT, "bars": bars}


def _module(row: Mapping[str, Any], largest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table with its bars; the bars of the largest module fill the width."""
    most, at, bars = sum(largest[part] for part, _ in PARTS) or 1, 0.0, []
    for part, colour in PARTS:
        width = 300 * row[part] / most
        title = f"{part} {size(row[part])}"
        bars.append({"x": round(at, 2), "width": round(width, 2), "colour": colour, "title": title})
        at += width
    return {"module": row["module"], "total": sum(row[part] for part, _ in PARTS), "bars": bars}


def _line(values: Sequence[float | None]) -> str:
    """Return the points of a line through the values, 80 wide and 16 high; empty for fewer than two."""
    every = max(1, -(-len(values) // _LINE))
    points = [value for value in values[::-1][::every][::-1] if value is not None]
    if len(points) < 2:
        return ""
    low, high = min(points), max(points)
    scale = (high - low) or 1.0
    step = 80 / (len(points) - 1)
    return " ".join(f"{step * number:.4g},{15 - 14 * (value - low) / scale:.4g}" for number, value in enumerate(points))
