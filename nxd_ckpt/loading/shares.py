"""Shares of ranks that load together: who verifies, and may read for all, what several ranks have in common.

Ranks have a leaf in common if they are replicas: data-parallel ones, or ranks of a mesh with equal parts of a DTensor.
Each of their leaves has an owner among them. A digest need not be compared twice.

The ranks of a mesh that load parts of tensors from a mesh job's tag also share the blocks that several parts lie in.
All parts together are all of the tensor, and so are the parts that the mesh job saved, without any padding: some rank
loads any given element. One element is drawn per block, and the owner of the part that it lies in verifies the block.
No rank needs to know what the others load.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from zlib import crc32

from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.core.mesh import Mesh, Placed
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.assembly import run_of_block
from nxd_ckpt.formats.tensors import Assembly, Fragment, contiguous_stride
from nxd_ckpt.tag.reading import Leaf, Takes

Ranks = tuple[int, ...]
Named = tuple[str, Leaf]


@dataclass(frozen=True)
class ReplicaGroup:
    """Ranks that load equal leaves, seen by the one at ``place`` among them.

    ``owners`` are the places of those that read each leaf, by the leaf's id: a leaf that only this rank loads, a ZeRO-1
    shard, may equal one that all load. ``nbytes`` is the total to verify.
    """

    ranks: Ranks
    place: int
    owners: Mapping[int, int]
    nbytes: int


class ReplicaShares:
    """Assignment of leaves to the replica that verifies, and may read, each.

    ``leaves`` are (global name, leaf), in one order on all replicas; ``placed`` are the places of those that are parts
    of DTensors, by id. The others belong to the data-parallel replicas of ``topology``. With ``by_block`` the ranks of
    a mesh share the blocks of the placed ones.
    """

    def __init__(
        self, topology: Topology, leaves: Iterable[Named], placed: Mapping[int, Placed] = {}, by_block: bool = False
    ) -> None:
        self._placed = placed if by_block else {}
        members: dict[tuple[Ranks, int], list[Leaf]] = {}
        replicas = _Replicas(topology)
        for _, leaf in leaves:
            ranks, place = replicas.of(placed.get(id(leaf)))
            if len(ranks) > 1 and leaf.numel:
                members.setdefault((ranks, place), []).append(leaf)
        # In an order that all ranks have: they join groups one after the other.
        self.groups: list[ReplicaGroup] = [_group(*of, members[of]) for of in sorted(members)]
        self._group_of = {leaf: group for group in self.groups for leaf in group.owners}

    def group(self, leaf: Leaf) -> ReplicaGroup | None:
        """Return the ranks that have it in common; None for leaves that only this rank loads."""
        return self._group_of.get(id(leaf))

    def owner(self, leaf: Leaf) -> int | None:
        """Return the place in its group of the replica that reads it; None for leaves that only this rank loads."""
        group = self.group(leaf)
        return None if group is None else group.owners[id(leaf)]

    def is_verified_here(self, leaf: Leaf) -> bool:
        group = self.group(leaf)
        return group is None or group.owners[id(leaf)] == group.place

    def verified_here(self, leaves: Iterable[Named]) -> Iterator[tuple[str, Leaf, Takes | None]]:
        """Yield those of ``leaves`` that this rank verifies, with the selection of their blocks; see `takes`."""
        if not self.groups and not self._placed:
            return ((name, leaf, None) for name, leaf in leaves)
        return ((name, leaf, self.takes(leaf)) for name, leaf in leaves if self.is_verified_here(leaf))

    def takes(self, leaf: Leaf) -> Takes | None:
        """Return the selection of the leaf's blocks that this rank verifies; None for all of them."""
        if id(leaf) not in self._placed:
            return None
        is_mine = self.is_verified_here(leaf)
        return lambda fragment, block: is_mine and _holds_drawn(fragment, block)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has in common with others."""
        return sum(group.nbytes for group in self.groups)

    @property
    def saving(self) -> float:
        """The part of these bytes that other ranks read, if all read equal shares."""
        saved = sum(group.nbytes * (1 - 1 / len(group.ranks)) for group in self.groups)
        return saved / max(self.nbytes, 1)


def agree_on_shares(
    agreement: Agreement,
    topology: Topology,
    leaves: Iterable[Named],
    placed: Sequence[tuple[str, Leaf, Placed]] = (),
    terms: Any = None,
    by_block: bool = False,
) -> ReplicaShares:
    """Return the shares of leaves that replicas load alike, so that none is left out. Collective.

    ``leaves`` are in the order of reading, and so are the ``placed`` among them. Leaves of data-parallel replicas are
    shared if all members of every group load the same ones, and placed leaves if all ranks of every mesh load the same
    tensors on it, each in one order, without which replicas would wait for each other for ever. ``terms`` (JSON) must
    also be equal for one rank to rely on another.
    """
    if agreement.world_size == 1:
        return ReplicaShares(topology, ())  # it may act as one rank of several
    leaves = list(leaves)
    place_of = {id(leaf): place for _, leaf, place in placed}
    plain = [named for named in leaves if id(named[1]) not in place_of]
    ranks, _ = _Replicas(topology).of(None)
    order = _digest([name for name, _ in leaves])
    own_plain = [ranks[0], [len(ranks), _digest((ranks, plain)), order, terms]]
    own_placed = [[*mesh, _digest([name for name, *_ in placed]), terms] for mesh in _meshes(placed)]
    words = agreement.gather([own_plain, own_placed])
    decision = None if words is None else [_is_plain_agreed(words), _is_placed_agreed(words)]
    shares_plain, shares_placed = agreement.broadcast(decision)
    chosen = [named for named in leaves if (shares_placed if id(named[1]) in place_of else shares_plain)]
    return ReplicaShares(topology, chosen, place_of, by_block and shares_placed)


class _Replicas:
    """The ranks that load the same as this one, and its place among them: of a placed leaf, or of any other."""

    def __init__(self, topology: Topology) -> None:
        ranks = tuple(topology.replicas(topology.coordinates, expert=topology.ep > 1))
        self._plain = ranks, ranks.index(topology.rank)
        self._of_layout: dict[Any, tuple[Ranks, int]] = {}

    def of(self, placed: Placed | None) -> tuple[Ranks, int]:
        if placed is None:
            return self._plain
        layout = placed.layout
        key = id(layout.mesh), layout.placements, placed.coordinate
        if key not in self._of_layout:
            ranks = tuple(layout.rank_of(placed.coordinate, replica) for replica in range(layout.replicas))
            self._of_layout[key] = ranks, layout.replica_of(placed.coordinate)
        return self._of_layout[key]


def _meshes(placed: Sequence[tuple[str, Leaf, Placed]]) -> list[list[Any]]:
    """Return for each mesh its digest, its number of ranks, and a digest of the tensors loaded on it."""
    loaded: dict[int, tuple[Mesh, list[Any]]] = {}
    for name, leaf, place in placed:
        mesh = place.layout.mesh
        placements = place.layout.placements
        loaded.setdefault(id(mesh), (mesh, []))[1].append((name, leaf.dtype, place.shape, placements))
    return [[_digest(mesh), len(mesh.ranks), _digest(on_mesh)] for mesh, on_mesh in loaded.values()]


def _is_plain_agreed(words: Sequence[Any]) -> bool:
    groups: dict[int, list[Any]] = {}
    for (leader, summary), _ in words:
        groups.setdefault(leader, []).append(summary)
    return all(group == [group[0]] * group[0][0] for group in groups.values())


def _is_placed_agreed(words: Sequence[Any]) -> bool:
    by_mesh: dict[str, list[Any]] = {}
    for _, meshes in words:
        for mesh, *summary in meshes:
            by_mesh.setdefault(mesh, []).append(summary)
    return all(of_ranks == [of_ranks[0]] * of_ranks[0][0] for of_ranks in by_mesh.values())


def _group(ranks: Ranks, place: int, leaves: Sequence[Leaf]) -> ReplicaGroup:
    sizes = dict(map(_record, leaves))
    owners = dict(zip(sizes, _balanced(list(sizes.values()), len(ranks)), strict=True))
    return ReplicaGroup(ranks, place, {id(leaf): owners[_record(leaf)[0]] for leaf in leaves}, sum(sizes.values()))


def _record(leaf: Leaf) -> tuple[Any, int]:
    """Return the unit of verification and its bytes.

    For a whole tensor the record that it, perhaps with others, views.
    """
    if isinstance(leaf, Assembly):
        return leaf, leaf.nbytes
    return (leaf.file, leaf.storage.offset), leaf.storage.nbytes


def _balanced(nbytes: Sequence[int], n: int) -> list[int]:
    """Return the member, of ``n``, that gets each item: the largest first, each to the member with the least so far.

    So one that is larger than the others' shares (an embedding) is a share by itself.
    """
    owners = [0] * len(nbytes)
    members = [(0, member) for member in range(n)]
    for index in sorted(range(len(nbytes)), key=lambda index: -nbytes[index]):
        load, owners[index] = members[0]
        heapq.heapreplace(members, (load + nbytes[index], owners[index]))
    return owners


def _holds_drawn(fragment: Fragment, block: int) -> bool:
    """Return whether the fragment holds the drawn one of the block's elements."""
    drawn = crc32(f"{fragment.stub.file} {fragment.stub.storage.offset} {block}".encode())
    start, stop = run_of_block(fragment.stub, block)
    element = start + drawn % (stop - start)
    for stride, offset, size in zip(
        contiguous_stride(fragment.stub.shape), fragment.source.offset, fragment.source.size, strict=True
    ):
        index, element = divmod(element, stride)
        if not offset <= index < offset + size:
            return False
    return True


def _digest(value: Any) -> str:
    return sha256(repr(value).encode()).hexdigest()[:32]
