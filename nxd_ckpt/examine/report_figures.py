"""Figures of the report as rectangles, without their appearance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nxd_ckpt.core.units import size

PARTS = (("weights", "one"), ("master weights", "two"), ("moments", "three"))
_WIDTH = 900
_ROW = 16
_RANKS = 128
"""Maximum number of rows in a timeline: the slowest ranks."""
_LABELLED = 60
"""Minimum width of a rectangle of the treemap that shows a name."""
_SHADES = 6
_LEAST = 1e-6
"""Relative differences up to this share the lightest shade."""

Rectangle = dict[str, Any]


def treemap(modules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a rectangle per module, its area proportional to its bytes, divided into its parts."""
    height, rectangles = 300, list[Rectangle]()
    rows = [(row, total) for row in modules if (total := sum(row[part] for part, _ in PARTS))]
    for row, x, y, width, high in _areas(rows, 0, 0, _WIDTH, height):
        name, parts = row["module"], [((part, colour), row[part]) for part, colour in PARTS if row[part]]
        for (part, colour), *area in _areas(parts, x, y, width, high):
            rectangles.append(_rectangle(colour, f"{name}: {part} {size(row[part])}", *area))
        if width > _LABELLED and high > _ROW:
            rectangles[-1]["label"] = {"x": round(x + 4, 1), "y": round(y + 12, 1), "text": _short(name, width)}
    return {"width": _WIDTH, "height": height, "rectangles": rectangles}


def timeline(saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a bar per rank of one save: staging, then writing. The slowest come first; the straggler is marked."""
    rows = sorted(saved, key=lambda row: -row["stage_seconds"] - row["write_seconds"])[:_RANKS]
    most = max((row["stage_seconds"] + row["write_seconds"] for row in rows), default=0) or 1.0
    rectangles: list[Rectangle] = []
    for number, row in enumerate(rows):
        at = 0.0
        where = f"rank {row['rank']}{' on ' + row['host'] if row['host'] else ''}"
        for phase, colour, key in (("staging", "two", "stage_seconds"), ("writing", "three", "write_seconds")):
            width = _WIDTH * row[key] / most
            title = f"{where}: {phase} {row[key]:.2f} s, {size(row['nbytes'])}"
            is_late = row["straggler"] and phase == "writing"
            rectangles.append(_rectangle("late" if is_late else colour, title, at, number * _ROW, width, _ROW - 3))
            at += width
        rectangles[-1]["label"] = {"x": 4, "y": number * _ROW + 10, "text": where}
    height = max(1, len(rows)) * _ROW
    return {"width": _WIDTH, "height": height, "rectangles": rectangles, "left_out": len(saved) - len(rows)}


def heatmap(differences: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row per layer, shaded by how far each of its modules moved."""
    columns, rows = differences["modules"], []
    for layer, cells in zip(differences["layers"], differences["cells"], strict=True):
        shades = [
            None if value is None else {"shade": _shade(value), "title": f"{layer} {module}: {100 * value:.3g} %"}
            for module, value in zip(columns, cells, strict=True)
        ]
        rows.append({"layer": layer, "cells": shades})
    return {"columns": columns, "rows": rows}


def _shade(value: float) -> int:
    """Return a shade from 0 (unchanged) to the darkest (a different tensor)."""
    if not value:
        return 0
    return max(1, min(_SHADES, round(_SHADES * (1 - math.log10(max(value, _LEAST)) / math.log10(_LEAST)))))


def _areas(
    items: Sequence[tuple[Any, int]], x: float, y: float, width: float, height: float
) -> Iterator[tuple[Any, float, float, float, float]]:
    """Divide a rectangle recursively along its longer side, in proportion to the weights of ``items``."""
    if len(items) < 2:
        yield from ((item, x, y, width, height) for item, _ in items)
        return
    total, first, cut = sum(weight for _, weight in items), items[0][1], 1
    while cut < len(items) - 1 and 2 * (first + items[cut][1]) <= total:
        first, cut = first + items[cut][1], cut + 1
    share = first / total
    if width >= height:
        yield from _areas(items[:cut], x, y, width * share, height)
        yield from _areas(items[cut:], x + width * share, y, width * (1 - share), height)
    else:
        yield from _areas(items[:cut], x, y, width, height * share)
        yield from _areas(items[cut:], x, y + height * share, width, height * (1 - share))


def _rectangle(colour: str, title: str, x: float, y: float, width: float, height: float) -> Rectangle:
    sides = {"x": x, "y": y, "width": width, "height": height}
    return {"colour": colour, "title": title, **{name: round(side, 2) for name, side in sides.items()}}


def _short(name: str, width: float) -> str:
    """Return the end of the name that fits: layers differ there."""
    room = int(width / 7)
    return name if len(name) <= room else f"…{name[-(room - 1):]}"
