"""Findings on the shards of a tag, by itself and against the tag before it, from counts of their elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.optimizer_bounds import FIRST, SECOND, least_update
from nxd_ckpt.examine.shards import AFTER, BEFORE, MASTER, WEIGHT, Shard
from nxd_ckpt.formats.tensors import torch_dtype
from nxd_ckpt.reshard.summary import TensorStatistics

_FEW = 16
"""Tensors with fewer elements may stand still by chance."""
_NOTHING = 1e-30
"""Smaller values may fade to zero."""
_FINE = 1e-5
"""Coarsest precision in which a second moment falls at every step."""
_VISIBLE = 2.0
"""Units in the last place of the largest weight that an update needs to be visible for certain."""
_UNLIKE = 0.5
"""Cosine of a weight before and after below which it may be another weight."""


@dataclass(frozen=True)
class OptimizerContext:
    """Options and steps of the parameters, by name.

    Attributes:
        before, after: the options of their param groups in both tags.
        grown: the number of steps the optimizer made between the tags.
        counts: true if the optimizer counts steps at all.
    """

    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    after: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grown: Mapping[str, int] = field(default_factory=dict)
    counts: bool = False


def check_values(shard: Shard) -> Iterator[Finding]:
    """Report NaN and infinities, and first moments beyond the bound set by second ones."""
    for (role, side), summary in shard.summaries.items():
        statistics = summary.statistics
        if side == AFTER and statistics.nans + statistics.infs:
            yield problem(
                "values",
                _name(shard, role),
                f"{statistics.nans} NaN and {statistics.infs} infinite of {statistics.numel} elements{_where(shard)}",
            )
    if shard.beyond:
        yield problem(
            "moments",
            _name(shard, "exp_avg"),
            f"{shard.beyond} elements are larger than any gradients with these second moments can make them"
            f"{_where(shard)}: the two moments are not of the same parameter, or shard",
        )


def check_moves(shard: Shard, context: OptimizerContext) -> Iterator[Finding]:
    """Report weights and moments that moved without a step, or stood still through one."""
    grown = context.grown.get(shard.parameter)
    weight = MASTER if shard.has(MASTER) else WEIGHT
    moments = [role for role in (*FIRST, *SECOND) if shard.has(role) and _could_move(shard, role)]
    moved = shard.moved.get(weight)
    if grown == 0 and moved:
        yield problem("steps", shard.parameter, f"the weight changed, but its optimizer made no step{_where(shard)}")
    if grown or (grown is None and moved and not context.counts):
        for role in moments:
            if not shard.moved[role]:
                yield problem(
                    "moments",
                    _name(shard, role),
                    f"no element changed since the tag before, though the parameter made {_steps(grown)}"
                    f"{_where(shard)}: it is of the tag before",
                )
    if moved is False:
        yield from _standing_still(shard, context, weight, grown, any(shard.moved[role] for role in moments))
    for role, count in shard.fallen.items():
        if count:
            yield problem(
                "moments",
                _name(shard, role),
                f"{count} elements fell by more than {_steps(grown)} can do{_where(shard)}: it is of another "
                "parameter or shard, or the optimizer started fresh",
            )


def check_any_moved(shards: Sequence[Shard], context: OptimizerContext) -> Iterator[Finding]:
    """Report an optimizer of whose weights not one changed."""
    moved = [shard.moved.get(WEIGHT) for shard in shards if shard.parameter in context.after and shard.has(WEIGHT)]
    if moved and not any(moved):
        yield problem("weights", "model", "not one weight changed since the tag before, though the run continued")


def check_rounding(shards: Sequence[Shard]) -> Iterator[Finding]:
    """Report weights that are not their master weights rounded to nearest.

    Rounding to a neighbour is only a doubt if it happens everywhere: hardware may round so.
    """
    rounded = [shard for shard in shards if AFTER in shard.off]
    off = [shard for shard in rounded if shard.off[AFTER]]
    was_exact = any(BEFORE in shard.off for shard in rounded) and not any(shard.off.get(BEFORE) for shard in rounded)
    share = sum(map(_numel, off)) / max(1, sum(map(_numel, rounded)))
    for shard in off:
        message = (
            f"{shard.off[AFTER]} of {_numel(shard)} elements are not the master weights rounded to "
            f"{shard.leaves[WEIGHT, AFTER].dtype}{_where(shard)}"
        )
        if shard.far[AFTER] or was_exact or share < 0.5:
            yield problem("rounding", f"model/{shard.parameter}", message)
        elif not any(BEFORE in shard.off for shard in rounded):
            yield doubt("rounding", f"model/{shard.parameter}", f"{message}; stochastic rounding explains this")


def suspects(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    """Return shards of weights, and of master weights, that are unlike those before."""
    return {
        role: [
            shard
            for shard in shards
            if shard.has(role) and _numel(shard) >= _FEW and role in shard.dots and shard.similarity(role) < _UNLIKE
        ]
        for role in (WEIGHT, MASTER)
    }


def exchanged(role: str, origin: Shard, target: Shard) -> Finding:
    """Return the finding that ``origin``, in the tag before, is ``target`` now."""
    return problem(
        "shards",
        _name(target, role),
        f"what is at {_place(target)} now was at {_place(origin)} of {_name(origin, role)} in the tag before",
    )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings of one kind on several shards of one tensor; problems come first."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind, finding.what), []).append(finding)
    result = []
    for (severity, kind, what), group in groups.items():
        more = f" (and {len(group) - 1} more of it)" if len(group) > 1 else ""
        result.append((problem if severity == "problem" else doubt)(kind, what, group[0].message + more))
    return sorted(result, key=lambda finding: finding.severity != "problem")


def _standing_still(
    shard: Shard, context: OptimizerContext, weight: str, grown: int | None, others_moved: bool
) -> Iterator[Finding]:
    """Report a weight that did not move though its optimizer's state shows that it should have."""
    name = _name(shard, weight)
    if shard.parameter not in context.after:
        return
    if not any(shard.has(role) for role in FIRST):
        return
    if not (grown or (grown is None and others_moved)):
        return
    first = next(role for role in FIRST if shard.has(role))
    second = next((role for role in SECOND if shard.has(role)), None)
    smallest = min(_of(shard, first, side).absmax for side in (BEFORE, AFTER))
    largest = None if second is None else max(_of(shard, second, side).absmax for side in (BEFORE, AFTER))
    updates = [
        least_update(options, smallest, largest)
        for options in (context.before.get(shard.parameter, {}), context.after[shard.parameter])
    ]
    precision = torch.finfo(torch_dtype(shard.leaves[weight, AFTER].dtype)).eps
    visible = _VISIBLE * precision * _of(shard, weight, AFTER).absmax
    if all(update is not None and update > visible for update in updates):
        yield problem(
            "weights",
            name,
            f"no element changed since the tag before, though the optimizer made {_steps(grown)}{_where(shard)}: it is "
            "of the tag before",
        )


def _could_move(shard: Shard, role: str) -> bool:
    """Return whether its elements must move: not by chance all still, nor limited by precision."""
    dtype = torch_dtype(shard.leaves[role, AFTER].dtype)
    coarse = role in SECOND and (not dtype.is_floating_point or torch.finfo(dtype).eps > _FINE)
    return _numel(shard) >= _FEW and not coarse and _of(shard, role, BEFORE).absmax > _NOTHING


def _of(shard: Shard, role: str, side: int) -> TensorStatistics:
    return shard.summaries[role, side].statistics


def _numel(shard: Shard) -> int:
    return shard.box.numel


def _name(shard: Shard, role: str) -> str:
    return f"model/{shard.parameter}" if role == WEIGHT else f"optim/{shard.parameter}/{role}"


def _steps(grown: int | None) -> str:
    return "steps" if grown is None else "1 step" if grown == 1 else f"{grown} steps"


def _place(shard: Shard) -> str:
    return f"offset {list(shard.box.offset)}"


def _where(shard: Shard) -> str:
    """Return the shard's place in its tensor; empty for whole tensors."""
    return f" (at {_place(shard)}, {shard.file})" if any(shard.box.offset) or shard.file else ""
