"""Parameters of one or two tags, shard by shard: weight, master weight and optimizer state, read side by side, once.

A shard is one rank's part of the entry with the finest partition. The same elements of all its tensors are in memory
at the same time, so that rules for single elements can be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.optimizer_bounds import FIRST, SECOND, least_update
from nxd_ckpt.formats.tensors import Assembly, torch_dtype
from nxd_ckpt.reshard.summary import CHUNK, Summary, TensorStatistics
from nxd_ckpt.reshard.tally import same_bytes
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.tag.reading import Leaf
from nxd_ckpt.tag.side_by_side import Matched, SideBySide

WEIGHT, MASTER = "weight", "master_weights"
BEFORE, AFTER = 0, 1

Place = tuple[str, int]
"""Role of a tensor (WEIGHT or the key of an optimizer's entry) and its tag."""

_TINY = 1e-30
"""Smaller values lose squares and decays to the smallest numbers of a dtype."""
_LOST = 1e-16
"""Smaller first moments lose their squares."""


@dataclass
class Shard:
    """One shard, and the counts of its elements.

    ``decays`` are the least ratios, after to before, of entries that have one; ``bound`` limits the ratio of the first
    moment to the root of the second. ``fallen`` counts elements below the ratio, ``beyond`` elements above the bound,
    ``off`` weights that are not the rounded master weight, and ``far`` those of them that are no neighbour of it
    either.
    """

    parameter: str
    box: Box
    file: str
    leaves: Mapping[Place, Leaf]
    decays: dict[str, float] = field(default_factory=dict)
    bound: float | None = None
    summaries: dict[Place, Summary] = field(default_factory=dict)
    moved: dict[str, bool] = field(default_factory=dict)
    dots: dict[str, float] = field(default_factory=dict)
    fallen: dict[str, int] = field(default_factory=dict)
    beyond: int = 0
    off: dict[int, int] = field(default_factory=dict)
    far: dict[int, int] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return self.box.numel

    @property
    def place(self) -> str:
        """Its place in its tensor, in words."""
        return f"offset {list(self.box.offset)}"

    def at(self, role: str = WEIGHT) -> str:
        """Return place and file of its tensor of that role in brackets, for the end of a phrase."""
        leaf = self.leaves.get((role, AFTER))
        file = self.file if role == WEIGHT or leaf is None else getattr(leaf, "file", "")
        return f" (at {', '.join(filter(None, (self.place, file)))})" if any(self.box.offset) or file else ""

    def name(self, role: str) -> str:
        """Return the global name of its tensor of that role."""
        return f"model/{self.parameter}" if role == WEIGHT else f"optim/{self.parameter}/{role}"

    def statistics(self, role: str, side: int) -> TensorStatistics:
        return self.summaries[role, side].statistics

    def has(self, role: str) -> bool:
        """Return whether both tags have it."""
        return (role, BEFORE) in self.leaves and (role, AFTER) in self.leaves

    def similarity(self, role: str) -> float:
        """Return the cosine between before and after; 1 where either is zero."""
        norms = [self.statistics(role, side).norm for side in (BEFORE, AFTER)]
        return self.dots.get(role, 0.0) / (norms[0] * norms[1]) if all(norms) else 1.0

    def add(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Count the next elements of all ``leaves``."""
        for chunks in zip(*(torch.split(tensor, CHUNK) for tensor in tensors), strict=True):
            self._add(dict(zip(self.leaves, chunks, strict=True)))

    def _add(self, values_by_place: Mapping[Place, torch.Tensor]) -> None:
        for place, values in values_by_place.items():
            self.summaries.setdefault(place, Summary()).add(values)
        for role in {role for role, _ in values_by_place}:
            if self.has(role):
                self._compare(role, values_by_place[role, BEFORE], values_by_place[role, AFTER])
        first, second = values_by_place.get(("exp_avg", AFTER)), values_by_place.get(("exp_avg_sq", AFTER))
        if self.bound is not None and first is not None and second is not None:
            bound = second.clamp(min=0).sqrt_().mul_(self.bound).add_(_LOST)
            self.beyond += int(((first.abs() > bound) | (second < 0)).sum())
        for side in (BEFORE, AFTER):
            if (WEIGHT, side) in values_by_place and (MASTER, side) in values_by_place:
                self._round(side, values_by_place[WEIGHT, side], values_by_place[MASTER, side])

    def _compare(self, role: str, before: torch.Tensor, after: torch.Tensor) -> None:
        if before.dtype == after.dtype and before.dtype.itemsize <= 8:
            self.moved[role] = self.moved.get(role, False) or not same_bytes(before, after)
        else:
            self.moved[role] = True
        if not (before.dtype.is_floating_point and after.dtype.is_floating_point):
            return
        x, y = before.float(), after.float()
        if role in (WEIGHT, MASTER):
            dot = float(torch.dot(x, y))
            self.dots[role] = self.dots.get(role, 0.0) + dot
        if role in self.decays:
            fallen = (y < x * self.decays[role]) & (x > _TINY)
            self.fallen[role] = self.fallen.get(role, 0) + int(fallen.sum())

    def _round(self, side: int, weight: torch.Tensor, master: torch.Tensor) -> None:
        if weight.dtype == master.dtype or weight.dtype.itemsize != 2 or not weight.dtype.is_floating_point:
            return
        apart = (_ordered(weight) - _ordered(master.to(weight.dtype))).abs()
        self.off[side] = self.off.get(side, 0) + int(torch.count_nonzero(apart))
        self.far[side] = self.far.get(side, 0) + int((apart > 1).sum())


def shards_of(before: WholeTag | None, after: WholeTag, problems: dict[str, str]) -> Iterator[Shard]:
    """Yield every tensor of ``after`` with the tensors of the same parameter and shape in both tags.

    Tensors that cannot be assembled are left out, and ``problems`` says why, by name.

    Raises:
        PartLost: a file of a tag is gone.
    """
    tags = {AFTER: after} if before is None else {BEFORE: before, AFTER: after}
    names: dict[str, dict[Place, str]] = {}
    for side, tag in tags.items():
        for name in tag.tensors:
            parameter, role = _parameter_and_role(tag, name)
            names.setdefault(parameter, {})[role, side] = name
    for parameter, names_by_place in names.items():
        leaves = {}
        for (role, side), name in names_by_place.items():
            parts = tags[side].parts_or_problem(name, problems)
            if parts is not None:
                leaves[role, side] = parts
        yield from _shards(parameter, leaves)


def read_shards(before: WholeTag | None, after: WholeTag, shards: Iterable[Shard], done: Counter) -> None:
    """Count all shards. ``done`` counts bytes.

    Raises:
        CorruptCheckpoint: bytes of a tag are not those that were written.
    """
    tags = [(before or after).opened, after.opened]

    def matched() -> Iterator[Matched[Shard]]:
        for shard in shards:
            leaves = tuple((side, leaf) for (_, side), leaf in shard.leaves.items())
            yield Matched(shard, f"the shard of {shard.parameter}", leaves)

    for window in SideBySide(*tags).windows(matched()):
        for shard, tensors in window:
            shard.add(tensors)
            done.add(sum(tensor.nbytes for tensor in tensors))


def crosswise(before: WholeTag, after: WholeTag, shards: list[Shard], role: str) -> Iterator[tuple[Shard, Shard]]:
    """Yield pairs of shards of which the first was, in ``before``, what the second is now. Reads each pair again."""
    pairs = [
        (origin, target)
        for origin in shards
        for target in shards
        if origin is not target and origin.leaves[role, BEFORE].shape == target.leaves[role, AFTER].shape
    ]
    dots = [0.0] * len(pairs)
    tensors = [
        Matched(number, origin.parameter, ((BEFORE, origin.leaves[role, BEFORE]), (AFTER, target.leaves[role, AFTER])))
        for number, (origin, target) in enumerate(pairs)
    ]
    for window in SideBySide(before.opened, after.opened).windows(tensors):
        for number, (x, y) in window:
            dots[number] += float(torch.dot(x.float(), y.float()))
    for (origin, target), dot in zip(pairs, dots, strict=True):
        norms = origin.statistics(role, BEFORE).norm * target.statistics(role, AFTER).norm
        if norms and dot / norms > _SAME_CONTENT:
            yield origin, target


_SAME_CONTENT = 0.9
"""Cosine from which on a shard counts as another one, a few steps later."""


def _parameter_and_role(tag: WholeTag, name: str) -> tuple[str, str]:
    """Split a tensor's name into parameter and role. General state belongs to the parameter "state"."""
    if tag.is_general(name):
        _, parameter, role = name.split("/", 2)
        return parameter, role
    section, parameter, *inner = map(str, tag.path(name))
    return ("/".join((parameter, *inner)), WEIGHT) if section == "model" else (parameter, "/".join(inner))


def _shards(parameter: str, leaves_by_place: Mapping[Place, list[Leaf]]) -> Iterator[Shard]:
    """Yield shards of one shape after another: first that of the weight or the largest entry.

    Entries of one shape are divided like the one with the most parts.
    """
    if not leaves_by_place:
        return
    first = (
        leaves_by_place.get((WEIGHT, AFTER))
        or leaves_by_place.get((WEIGHT, BEFORE))
        or max(leaves_by_place.values(), key=lambda entry: entry[0].numel)
    )
    shapes = [leaf.shape for leaf in first]
    same_shape = {
        place: leaves for place, leaves in leaves_by_place.items() if [leaf.shape for leaf in leaves] == shapes
    }
    for number, shape in enumerate(shapes):
        leaves = {place: entry[number] for place, entry in same_shape.items()}
        whole = Box.whole(shape)
        if not whole.numel:
            continue
        fragments = max((Assembly.of(leaf).fragments for leaf in leaves.values()), key=len)
        if sum(fragment.target.numel for fragment in fragments) < whole.numel:
            yield Shard(parameter, whole, "", leaves)
            continue
        for fragment in fragments:
            inside = {place: _within(leaf, fragment.target) for place, leaf in leaves.items()}
            yield Shard(parameter, fragment.target, fragment.stub.file, inside)
    yield from _shards(
        parameter, {place: leaves for place, leaves in leaves_by_place.items() if place not in same_shape}
    )


def _within(leaf: Leaf, box: Box) -> Leaf:
    return leaf if box.size == leaf.shape else Assembly.of(leaf).within(box)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Return 2-byte floats as integers in the same order, neighbours one apart; both zeros are 0."""
    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


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
                shard.name(role),
                f"{statistics.nans} NaN and {statistics.infs} infinite of {statistics.numel} elements{shard.at(role)}",
            )
    if shard.beyond:
        yield problem(
            "moments",
            shard.name("exp_avg"),
            f"{shard.beyond} elements are larger than any gradients with these second moments can make them"
            f"{shard.at('exp_avg')}: the two moments are not of the same parameter, or shard",
        )


def check_moves(shard: Shard, context: OptimizerContext) -> Iterator[Finding]:
    """Report weights and moments that moved without a step, or stood still through one."""
    grown = context.grown.get(shard.parameter)
    weight = MASTER if shard.has(MASTER) else WEIGHT
    moments = [role for role in (*FIRST, *SECOND) if shard.has(role) and _could_move(shard, role)]
    moved = shard.moved.get(weight)
    if grown == 0 and moved:
        yield problem("steps", shard.parameter, f"the weight changed, but its optimizer made no step{shard.at()}")
    if grown or (grown is None and moved and not context.counts):
        for role in moments:
            if not shard.moved[role]:
                yield problem(
                    "moments",
                    shard.name(role),
                    f"no element changed since the tag before, though the parameter made {_steps(grown)}"
                    f"{shard.at(role)}: it is of the tag before",
                )
    if moved is False:
        yield from _standing_still(shard, context, weight, grown, any(shard.moved[role] for role in moments))
    for role, count in shard.fallen.items():
        if count:
            yield problem(
                "moments",
                shard.name(role),
                f"{count} elements fell by more than {_steps(grown)} can do{shard.at(role)}: it is of another "
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
    share = sum(shard.numel for shard in off) / max(1, sum(shard.numel for shard in rounded))
    for shard in off:
        message = (
            f"{shard.off[AFTER]} of {shard.numel} elements are not the master weights rounded to "
            f"{shard.leaves[WEIGHT, AFTER].dtype}{shard.at()}"
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
            if shard.has(role) and shard.numel >= _FEW and role in shard.dots and shard.similarity(role) < _UNLIKE
        ]
        for role in (WEIGHT, MASTER)
    }


def exchanged(role: str, origin: Shard, target: Shard) -> Finding:
    """Return the finding that ``origin``, in the tag before, is ``target`` now."""
    return problem(
        "shards",
        target.name(role),
        f"what is at {target.place} now was at {origin.place} of {origin.name(role)} in the tag before",
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
    first = next((role for role in FIRST if shard.has(role)), None)
    second = next((role for role in SECOND if shard.has(role)), None)
    if first is None or shard.parameter not in context.after:
        return
    if not (grown or (grown is None and others_moved)):
        return
    smallest = min(shard.statistics(first, side).absmax for side in (BEFORE, AFTER))
    largest = None if second is None else max(shard.statistics(second, side).absmax for side in (BEFORE, AFTER))
    updates = [
        least_update(options, smallest, largest)
        for options in (context.before.get(shard.parameter, {}), context.after[shard.parameter])
    ]
    precision = torch.finfo(torch_dtype(shard.leaves[weight, AFTER].dtype)).eps
    visible = _VISIBLE * precision * shard.statistics(weight, AFTER).absmax
    if all(update is not None and update > visible for update in updates):
        yield problem(
            "weights",
            shard.name(weight),
            f"no element changed since the tag before, though the optimizer made {_steps(grown)}{shard.at(weight)}: it "
            "is of the tag before",
        )


def _could_move(shard: Shard, role: str) -> bool:
    """Return whether its elements must move: not by chance all still, nor limited by precision."""
    dtype = torch_dtype(shard.leaves[role, AFTER].dtype)
    coarse = role in SECOND and (not dtype.is_floating_point or torch.finfo(dtype).eps > _FINE)
    return shard.numel >= _FEW and not coarse and shard.statistics(role, BEFORE).absmax > _NOTHING


def _steps(grown: int | None) -> str:
    return "steps" if grown is None else "1 step" if grown == 1 else f"{grown} steps"
