"""Parameters of one or two tags, shard by shard: weight, master weight and optimizer state, read side by side, once.

A shard is one rank's part of the entry with the finest partition. The same elements of all its tensors are in memory
at the same time, so that rules for single elements can be counted.
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
    def places(self) -> list[Place]:
        return list(self.leaves)

    def has(self, role: str) -> bool:
        """Return whether both tags have it."""
        return (role, BEFORE) in self.leaves and (role, AFTER) in self.leaves

    def similarity(self, role: str) -> float:
        """Return the cosine between before and after; 1 where either is zero."""
        norms = [self.summaries[role, side].statistics.norm for side in (BEFORE, AFTER)]
        return self.dots.get(role, 0.0) / (norms[0] * norms[1]) if all(norms) else 1.0

    def add(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Count the next elements of all ``places``."""
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
    names = [(BEFORE, before), (AFTER, after)]
    roles: dict[str, dict[Place, str]] = {}
    for side, tag in names:
        for name in () if tag is None else tag.tensors:
            assert tag is not None
            parameter, role = _parameter_and_role(tag, name)
            roles.setdefault(parameter, {})[role, side] = name
    for parameter, names_by_place in roles.items():
        leaves = {}
        for (role, side), name in names_by_place.items():
            tag = names[side][1]
            assert tag is not None
            try:
                leaves[role, side] = _leaves(tag, name)
            except PartLost:
                raise
            except (IncompatibleState, PartNotFound) as error:
                problems[name] = str(error)
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
        norms = origin.summaries[role, BEFORE].statistics.norm * target.summaries[role, AFTER].statistics.norm
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


def _leaves(tag: WholeTag, name: str) -> list[Leaf]:
    """Return the tensor, or the part of each rank if its partition is unknown."""
    try:
        return [tag.leaf(name)]
    except PartLost:
        raise
    except (IncompatibleState, PartNotFound):
        return tag.leaves_by_rank(name)


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
