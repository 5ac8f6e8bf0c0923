"""Shared verification among the ranks of a mesh.

Each block that a mesh job saved is verified by one rank that loads it.

The parts that the ranks of a mesh load of a tensor are all of it, and so are the parts that the mesh job saved, without
any padding: some rank loads any given element. One element is drawn per block, and the rank that loads it verifies the
block; of the replicas, which all load it, one is drawn. No rank needs to know what the others load.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any
from zlib import crc32

from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.core.mesh import Mesh
from nxd_ckpt.formats.assembly import run_of_block
from nxd_ckpt.formats.tensors import Fragment, contiguous_stride
from nxd_ckpt.live.dtensor import Placed
from nxd_ckpt.tag.reading import Leaf, Takes


class MeshShares:
    """Blocks that this rank verifies of the leaves that it loads into DTensors: (global name, leaf, place)."""

    def __init__(self, leaves: Sequence[tuple[str, Leaf, Placed]]) -> None:
        self._placed = {id(leaf): placed for _, leaf, placed in leaves}
        self._loaded: dict[int, tuple[Mesh, list[Any]]] = {}
        for name, leaf, placed in leaves:
            mesh, placements = placed.layout.mesh, placed.layout.placements
            _, loaded = self._loaded.setdefault(id(mesh), (mesh, []))
            loaded.append((name, leaf.dtype, placed.shape, placements))

    @property
    def summary(self) -> list[Any]:
        """For each mesh: its digest, its number of ranks, and a digest of the tensors loaded on it."""
        return [[_digest(mesh), len(mesh.ranks), _digest(loaded)] for mesh, loaded in self._loaded.values()]

    def takes(self, leaf: Leaf) -> Takes | None:
        """Return the selection of the leaf's blocks that this rank verifies; None for all of them."""
        placed = self._placed.get(id(leaf))
        if placed is None:
            return None
        replicas, own = placed.layout.replicas, placed.layout.replica_of(placed.coordinate)

        def is_mine(fragment: Fragment, block: int) -> bool:
            drawn = crc32(f"{fragment.stub.file} {fragment.stub.storage.offset} {block}".encode())
            return drawn % replicas == own and _holds_drawn(fragment, block, drawn // replicas)

        return is_mine


def agree_on_blocks(agreement: Agreement, shares: MeshShares, terms: Any) -> bool:
    """Return whether all ranks of every mesh load the same tensors on it, so that no block is left out. Collective.

    ``terms`` (JSON) must also be equal on all ranks for one to rely on another.
    """
    summaries = agreement.gather([terms, shares.summary])
    return bool(agreement.broadcast(summaries is None or _is_agreed(summaries)))


def _is_agreed(summaries: Sequence[Any]) -> bool:
    by_mesh: dict[str, list[Any]] = {}
    for terms, summary in summaries:
        for mesh, size, loaded in summary:
            by_mesh.setdefault(mesh, []).append([size, loaded, terms])
    return all(of_ranks == [of_ranks[0]] * of_ranks[0][0] for of_ranks in by_mesh.values())


def _holds_drawn(fragment: Fragment, block: int, drawn: int) -> bool:
    """Return whether the fragment holds the drawn one of the block's elements."""
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
