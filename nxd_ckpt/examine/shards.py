"""Parameters of one or two tags, shard by shard: weight, master weight and optimizer state read side by side, once.

A shard is what one rank saved of the entry that is cut most. The same elements of all its tensors are in memory at the
same time, so that what must hold for each element is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.errors import IncompatibleState, PartLost, PartNotFound
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.reshard.summary import CHUNK, Summary
from nxd_ckpt.reshard.tally import same_bytes
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.tag.side_by_side import Leaf, Matched, SideBySide

WEIGHT, MASTER = "weight", "master_weights"
BEFORE, AFTER = 0, 1

Place = tuple[str, int]
"""What a tensor is of its parameter, WEIGHT or the key of an optimizer's entry, and of which tag."""

_TINY = 1e-30
"""Below, squares and decays are lost to the smallest numbers that a dtype has."""
_LOST = 1e-16
"""First moments whose squares are."""


@dataclass
class Shard:
    """One shard, and what was counted of it.

    ``decays`` are the least ratios, after to before, of entries that have one; ``bound`` that of the first moment to
    the root of the second. ``fallen`` counts elements below the ratio, ``beyond`` those above the bound, ``off`` and
    ``far`` weights that are not the rounded master weight, and not next to it either.
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
    def places(self) -> list[Place]:
        return list(self.leaves)

    def has(self, role: str) -> bool:
        """Whether both tags have it."""
        return (role, BEFORE) in self.leaves and (role, AFTER) in self.leaves

    def alike(self, role: str) -> float:
        """The cosine of what it was and what it is; 1 where either is zero."""
        norms = [self.summaries[role, side].statistics.norm for side in (BEFORE, AFTER)]
        return self.dots.get(role, 0.0) / (norms[0] * norms[1]) if all(norms) else 1.0

    def add(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """The next elements of all ``places``."""
        for chunks in zip(*(torch.split(one, CHUNK) for one in tensors), strict=True):
            self._add(dict(zip(self.leaves, chunks, strict=True)))

    def _add(self, held: Mapping[Place, torch.Tensor]) -> None:
        for place, values in held.items():
            self.summaries.setdefault(place, Summary()).add(values)
        for role in {role for role, _ in held}:
            if self.has(role):
                self._compare(role, held[role, BEFORE], held[role, AFTER])
        first, second = held.get(("exp_avg", AFTER)), held.get(("exp_avg_sq", AFTER))
        if self.bound is not None and first is not None and second is not None:
            bound = second.clamp(min=0).sqrt_().mul_(self.bound).add_(_LOST)
            self.beyond += int(((first.abs() > bound) | (second < 0)).sum())
        for side in (BEFORE, AFTER):
            if (WEIGHT, side) in held and (MASTER, side) in held:
                self._round(side, held[WEIGHT, side], held[MASTER, side])

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
    """Every tensor of ``after``, with what belongs to the same parameter in both tags and has the same shape.

    Tensors that cannot be put together are left out, and ``problems`` say why, by name.

    Raises:
        PartLost: a file of a tag is gone.
    """
    names = [(BEFORE, before), (AFTER, after)]
    roles: dict[str, dict[Place, str]] = {}
    for side, tag in names:
        for name in () if tag is None else tag.tensors:
            assert tag is not None
            parameter, role = _whose(tag, name)
            roles.setdefault(parameter, {})[role, side] = name
    for parameter, found in roles.items():
        held = {}
        for (role, side), name in found.items():
            tag = names[side][1]
            assert tag is not None
            try:
                held[role, side] = _leaves(tag, name)
            except PartLost:
                raise
            except (IncompatibleState, PartNotFound) as error:
                problems[name] = str(error)
        yield from _shards(parameter, held)


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
            done.add(sum(one.nbytes for one in tensors))


def crosswise(before: WholeTag, after: WholeTag, shards: list[Shard], role: str) -> Iterator[tuple[Shard, Shard]]:
    """Pairs of shards of which the first was, in ``before``, what the second is now. Reads each pair anew."""
    pairs = [
        (one, other)
        for one in shards
        for other in shards
        if one is not other and one.leaves[role, BEFORE].shape == other.leaves[role, AFTER].shape
    ]
    dots = [0.0] * len(pairs)
    tensors = [
        Matched(number, one.parameter, ((BEFORE, one.leaves[role, BEFORE]), (AFTER, other.leaves[role, AFTER])))
        for number, (one, other) in enumerate(pairs)
    ]
    for window in SideBySide(before.opened, after.opened).windows(tensors):
        for number, (x, y) in window:
            dots[number] += float(torch.dot(x.float(), y.float()))
    for (one, other), dot in zip(pairs, dots, strict=True):
        norms = one.summaries[role, BEFORE].statistics.norm * other.summaries[role, AFTER].statistics.norm
        if norms and dot / norms > _SAME_CONTENT:
            yield one, other


_SAME_CONTENT = 0.9
"""The cosine from which on a shard is taken for another one, a few steps later."""


def _whose(tag: WholeTag, name: str) -> tuple[str, str]:
    """The parameter, and what the tensor is of it, as names have them. General state is that of "state"."""
    if tag.is_general(name):
        _, parameter, role = name.split("/", 2)
        return parameter, role
    section, parameter, *inner = map(str, tag.path(name))
    return ("/".join((parameter, *inner)), WEIGHT) if section == "model" else (parameter, "/".join(inner))


def _leaves(tag: WholeTag, name: str) -> list[Leaf]:
    """The tensor; where its cut is not known, what each rank held."""
    try:
        return [tag.leaf(name)]
    except PartLost:
        raise
    except (IncompatibleState, PartNotFound):
        return tag.leaves_by_rank(name)


def _shards(parameter: str, held: Mapping[Place, list[Leaf]]) -> Iterator[Shard]:
    """Those that have the shape of the weight, or of the largest entry, cut as the one with most parts; then the rest,
    in the same way."""
    if not held:
        return
    first = held.get((WEIGHT, AFTER)) or held.get((WEIGHT, BEFORE)) or max(held.values(), key=lambda one: one[0].numel)
    shapes = [leaf.shape for leaf in first]
    alike = {place: leaves for place, leaves in held.items() if [leaf.shape for leaf in leaves] == shapes}
    for number, shape in enumerate(shapes):
        leaves = {place: found[number] for place, found in alike.items()}
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
    yield from _shards(parameter, {place: leaves for place, leaves in held.items() if place not in alike})


def _within(leaf: Leaf, box: Box) -> Leaf:
    return leaf if box.size == leaf.shape else Assembly.of(leaf).within(box)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers of two bytes as integers in the same order, neighbours one apart; both zeros are 0."""
    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
