"""Provenance of what is loaded: the saved tensors that a live one was put together from are its own, and all of it.

What a save of the live tensor would write in the index, its name and its boxes of the global tensor, is compared with
what the index says of the tensors that were read. Neither names nor places of the plan of the load are used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import TensorEntry
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS
from nxd_ckpt.formats.state import StateTensor
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub, contiguous_stride, itemsize
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import Leaf, LeafReader

_WEIGHT = "the weight"


class Provenance:
    """Provenance of tensors of a tag, whose indexes ``reader`` knows, on a rank of ``topology``.

    ``aliases`` returns all names of a live parameter.
    """

    def __init__(
        self, opened: OpenTag, topology: Topology, reader: LeafReader, aliases: Callable[[str], Collection[str]]
    ) -> None:
        self._opened = opened
        self._topology = topology
        self._reader = reader
        self._aliases = aliases
        self._in_place: dict[tuple[Any, ...], tuple[bool, StateTensor]] = {}
        self._parameters = {} if opened.manifest is None else opened.manifest.parameters

    def fault(self, about: StateTensor, leaf: Leaf) -> str | None:
        """Return why ``leaf`` is not what belongs into the live tensor; None if it is, or nothing is known."""
        if self._opened.manifest is None:
            return None
        if isinstance(leaf, TensorStub):
            stored = self._reader.entry(leaf)
            if stored is not None and self._is_own(about.name, stored.name) and self._is_in_place(about, stored, leaf):
                return None  # as nearly all: a whole tensor of the tag, by its own name, in its own place
        if not leaf.numel:
            return None
        if self._is_rounded(about, leaf):
            return "it was put together from rounded values, and the tag has the exact ones"
        fragments = [fragment for fragment in Assembly.of(leaf).fragments if fragment.source.numel]
        entries = [self._entry(fragment.stub) for fragment in fragments]
        for entry in entries:
            if entry is not None and self._is_anothers(about.name, entry.name):
                return f"it was read from {entry.name}"
        pieces = about.pieces(self._topology, leaf.shape)
        if pieces is None or not self._is_of_one_whole(about):
            return None
        covered = 0
        for fragment, entry in zip(fragments, entries, strict=True):
            if entry is None or entry.pieces is None:
                return None
            own = sum(box.numel for box in _rightly_placed(fragment, entry.pieces, pieces))
            if own != fragment.source.numel:
                return f"elements of {entry.name} in {entry.file} are in the wrong place of it"
            covered += own
        whole = sum(piece.local.numel for piece in pieces)
        return None if covered == whole else f"{whole - covered} of its {whole} elements were not read"

    def unread(self, parameters: Collection[str], read: Collection[str]) -> list[str]:
        """Return the global names of the optimizer's state of live ``parameters`` that the tag has, and was not read.

        ``read`` are global names. Master weights are apart: an optimizer may have none.
        """
        known = () if self._opened.is_renamed else read
        left = [entry.name for entry in self._reader.entries() if entry.name not in known]
        rest = [self._live(name) for name in left if not name.startswith("model/")]
        names = {alias: name for name in parameters for alias in self._aliases(name)} if rest else {}
        named = {(names[name], role): f"optim/{names[name]}/{role}" for name, role in rest if name in names}
        return [at for (_, role), at in named.items() if role != _WEIGHT and at not in read]

    def _is_own(self, live: str, saved: str) -> bool:
        return self._live(saved) == _parts_of(live) if self._opened.is_renamed else saved == live

    def _is_in_place(self, about: StateTensor, stored: TensorEntry, leaf: TensorStub) -> bool:
        """Return whether the leaf is all of ``stored``, and that is where the live tensor is."""
        _, spec, shards, shard, _, _, placed = about
        form = stored.dtype, stored.shape, leaf.dtype, leaf.shape, leaf.stride
        key = id(placed), id(spec), shards, shard, id(stored.pieces), form  # of many tensors, few
        verdict = self._in_place.get(key)
        if verdict is None:  # ``about`` is kept, so that nothing else gets the ids of what it has
            is_there = about.pieces(self._topology, stored.shape) == stored.pieces
            verdict = self._in_place[key] = is_there and _is_all(leaf, stored), about
        return verdict[0]

    def _is_rounded(self, about: StateTensor, leaf: Leaf) -> bool:
        """Return whether a weight is made of one with fewer bits, though the tag has its master weights."""
        stubs = [fragment.stub for fragment in Assembly.of(leaf).fragments]
        own, role = _parts_of(about.name)
        if role != _WEIGHT or all(itemsize(stub.dtype) >= itemsize(leaf.dtype) for stub in stubs):
            return False
        masters = {f"optim/{name}/{MASTER_WEIGHTS}" for name in self._aliases(own)}
        return any(entry.dtype == leaf.dtype and entry.name in masters for entry in self._reader.entries())

    def _entry(self, stub: TensorStub) -> TensorEntry | None:
        """Return what the index says of the stub, if the stub is all of it."""
        entry = self._reader.entry(stub)
        return entry if entry is not None and _is_all(stub, entry) else None

    def _is_anothers(self, live: str, saved: str) -> bool:
        """Return whether a tensor has a ``saved`` name that is not the ``live`` one's, which is there too."""
        own, own_role = _parts_of(live)
        other, role = self._live(saved)
        if own.startswith("#") or other.startswith("#") or not (own and other):
            return False
        names = {*self._aliases(own)}
        if role == own_role and (other in names or self._tied(other) & names):
            return False
        # Several tensors in one memory are stored once, under any of their names.
        return any(name in names and each == own_role for name, each in self._stored)

    def _tied(self, name: str) -> set[str]:
        """Return all names that the parameter with this name had when it was saved."""
        tie = self._parameters[name].tie if name in self._parameters else None
        return set() if tie is None else {other for other, spec in self._parameters.items() if spec.tie == tie}

    def _live(self, saved: str) -> tuple[str, str]:
        parameter, role = _parts_of(saved)
        return parameter and self._opened.live_name(parameter), role

    @cached_property
    def _stored(self) -> set[tuple[str, str]]:
        return {self._live(entry.name) for entry in self._reader.entries()}

    def _is_of_one_whole(self, about: StateTensor) -> bool:
        """Return whether both sides know the cut, and cut a tensor of one shape."""
        manifest, live = self._opened.manifest, about.spec
        if about.placed is not None or manifest is None:
            return True
        names = self._aliases(_parts_of(about.name)[0])
        saved = next((self._parameters[name] for name in names if name in self._parameters), None)
        if saved is None or live is None or not (saved.partition.known and live.partition.known):
            return False
        if any((spec.partition.partition_dim or 0) >= max(len(spec.shape), 1) for spec in (saved, live)):
            return False
        wholes = [
            spec.partition.global_shape(spec.shape, at.ep)
            for spec, at in ((saved, manifest.topology), (live, self._topology))
        ]
        return wholes[0] == wholes[1]


def _is_all(stub: TensorStub, entry: TensorEntry) -> bool:
    is_alike = (entry.dtype, entry.shape) == (stub.dtype, stub.shape)
    return is_alike and stub.stride == contiguous_stride(stub.shape)


def _rightly_placed(fragment: Fragment, saved: Sequence[Piece], live: Sequence[Piece]) -> Iterator[Box]:
    """Yield the boxes of the fragment's source whose elements are the same elements of the global tensor as live."""
    source, target = fragment.source, fragment.target
    for piece in saved:
        inside = piece.local.intersect(source)
        if inside is None:
            continue
        there = inside.shifted(source.offset).moved(target.offset)
        for own in live:
            common = there.intersect(own.local)
            if common is None:
                continue
            back = common.shifted(target.offset).moved(source.offset)
            if _moved(back, piece) == _moved(common, own):
                yield back


def _moved(part: Box, piece: Piece) -> Box:
    """Return the place in the global tensor of ``part``, a box of the local one inside ``piece``."""
    return part.shifted(piece.local.offset).moved(piece.box.offset)


def _parts_of(name: str) -> tuple[str, str]:
    """Return the parameter of a global name, "" if there is none, and what of it the tensor is."""
    part, _, rest = name.partition("/")
    if part == "model":
        return rest, _WEIGHT
    if part != "optim":  # a rank's own value, apart from the state of all
        return "", rest
    parameter, _, entry = rest.rpartition("/")
    return parameter, _WEIGHT if entry == MASTER_WEIGHTS else entry
