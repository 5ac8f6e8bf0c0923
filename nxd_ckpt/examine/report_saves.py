"""Saves in the report: seconds of each rank, stragglers, and how far the weights moved between two tags."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from nxd_ckpt.checkpoint import Checkpoint
from nxd_ckpt.core.manifest import Manifest
from nxd_ckpt.core.phases import straggler
from nxd_ckpt.core.units import size
from nxd_ckpt.examine.diff import TensorDifference, diff_checkpoints

_ALWAYS = 3
"""Number of consecutive saves a rank must be late in to be called always late."""
_LAYERS, _MODULES = 200, 40
"""Maximum number of rows and columns of the comparison."""
_OTHER = "other"


def timings(manifest: Manifest | None) -> dict[str, float]:
    """Return a save's recorded timings, and what rank 0's commit took without its wait for the slowest rank.

    Rank 0 begins to commit when it has written its own part, so ``commit_seconds`` has that wait in it. It is taken as
    the time by which the slowest rank staged and wrote for longer than rank 0.
    """
    recorded = {} if manifest is None else dict(manifest.timings)
    if manifest is not None and "commit_seconds" in recorded:
        done = [phase.stage_seconds + phase.write_seconds for phase in manifest.phases]
        wait = max(done) - done[0] if done else 0.0
        recorded["commit_alone_seconds"] = round(max(0.0, recorded["commit_seconds"] - wait), 6)
    return recorded


def timeline(tag: Checkpoint) -> list[dict[str, Any]]:
    """Return each rank's part in the save of a tag; empty where that was not recorded."""
    phases = () if tag.manifest is None else tag.manifest.phases
    late = straggler(phases)
    return [
        {
            "rank": rank,
            "host": phase.host,
            "stage_seconds": phase.stage_seconds,
            "write_seconds": phase.write_seconds,
            "nbytes": phase.nbytes,
            "straggler": rank == late,
        }
        for rank, phase in enumerate(phases)
    ]


def stragglers(tags: Sequence[Checkpoint]) -> Iterator[tuple[str, str]]:
    """Yield place and text.

    The rank that the latest save waited for, "always" if it was late in each of the last saves.
    """
    recorded = [tag for tag in tags if tag.manifest is not None and tag.manifest.phases]
    late = [straggler(tag.manifest.phases) for tag in recorded if tag.manifest is not None]
    if not late or late[-1] is None or recorded[-1] is not tags[-1] or recorded[-1].manifest is None:
        return
    rank, phases = late[-1], recorded[-1].manifest.phases
    phase, seconds = phases[rank], sorted(each.write_seconds for each in phases)
    median = seconds[(len(seconds) - 1) // 2]
    always = len(late) >= _ALWAYS and set(late[-_ALWAYS:]) == {rank}
    yield (
        f"the last {_ALWAYS} saves" if always else recorded[-1].tag,
        f"{'always ' if always else ''}waited for rank {rank} on {phase.host}: it wrote {size(phase.nbytes)} in "
        f"{phase.write_seconds:.1f} s, half of the ranks in {median:.1f} s or less",
    )


def differences(before: Checkpoint, after: Checkpoint, progress: bool) -> dict[str, Any]:
    """Return ``||a - b|| / ||a||`` of every weight, by layer and by its name within the layer.

    None if there is no such weight, and a word if that is no number.
    """
    difference = diff_checkpoints(before, after, prefix="model/", progress=progress)
    moved = {tensor.name: _moved(tensor) for tensor in difference.tensors}
    cells: dict[str, dict[str, float | str]] = {}
    for name in after.metadata:
        if name.startswith("model/") and name in before.metadata:
            layer, module = _place(name.removeprefix("model/"))
            cells.setdefault(layer, {})[module] = moved.get(name, 0.0)
    layers = list(cells)[:_LAYERS]
    modules = list(dict.fromkeys(module for layer in layers for module in cells[layer]))[:_MODULES]
    rows = [[cells[layer].get(module) for module in modules] for layer in layers]
    return {"tags": [before.tag, after.tag], "layers": layers, "modules": modules, "cells": rows}


def _moved(tensor: TensorDifference) -> float | str:
    if tensor.relative_norm is None:
        return f"another {tensor.kind}" if tensor.kind == "shape" else tensor.kind
    is_finite = not tensor.nans and math.isfinite(tensor.relative_norm)
    return tensor.relative_norm if is_finite else "not finite"


def _place(name: str) -> tuple[str, str]:
    """Split a name into layer and module: ``model.layers.3`` and ``mlp.up.weight``."""
    layer = re.match(r"(.*?\.?\d+)\.(.*)", name)
    return (layer[1], layer[2]) if layer else (_OTHER, name)
