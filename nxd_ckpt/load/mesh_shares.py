"""Ranks of a mesh verifying together what a mesh job saved: each block is read for that by one of those that want it.

The parts that the ranks of a mesh take of a tensor are all of it, and so is what the mesh job saved, without any
padding: there is a rank that wants any one element. Of each block one element is drawn, and who wants that one verifies
the block; of the replicas, which all want it, one is drawn. Nobody needs to know what the others want.
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
    """Which blocks this rank verifies of the leaves that it puts into DTensors: (global name, leaf, place)."""

    def __init__(self, leaves: Sequence[tuple[str, Leaf, Placed]]) -> None:
        self._placed = {id(leaf): placed for _, leaf, placed in leaves}
        self._wanted: dict[int, tuple[Mesh, list[Any]]] = {}
        for name, leaf, placed in leaves:
            mesh, placements = placed.layout.mesh, placed.layout.placements
            _, wanted = self._wanted.setdefault(id(mesh), (mesh, []))
            wanted.append((name, leaf.dtype, placed.shape, placements))

    @property
    def word(self) -> list[Any]:
        """Of each mesh: what tells it from others, how many ranks it has, and a digest of what is wanted on it."""
        return [[_digest(mesh), len(mesh.ranks), _digest(wanted)] for mesh, wanted in self._wanted.values()]

    def takes(self, leaf: Leaf) -> Takes | None:
        """Which blocks of the leaf this rank verifies; None for all of them."""
        placed = self._placed.get(id(leaf))
        if placed is None:
            return None
        replicas, own = placed.layout.replicas, placed.layout.replica_of(placed.coordinate)

        def is_mine(fragment: Fragment, block: int) -> bool:
            drawn = crc32(f"{fragment.stub.file} {fragment.stub.storage.offset} {block}".encode())
            return drawn % replicas == own and _wants(fragment, block, drawn // replicas)

        return is_mine


def agree_on_blocks(agreement: Agreement, shares: MeshShares, terms: Any) -> bool:
    """Whether all ranks of every mesh want the same of the tensors on it, so that no block is left out.

    ``terms`` (JSON) are what else must be the same on all ranks for one to rely on another.
    """
    words = agreement.gather([terms, shares.word])
    return bool(agreement.broadcast(words is None or _is_agreed(words)))


def _is_agreed(words: Sequence[Any]) -> bool:
    found: dict[str, list[Any]] = {}
    for terms, word in words:
        for mesh, size, wanted in word:
            found.setdefault(mesh, []).append([size, wanted, terms])
    return all(told == [told[0]] * told[0][0] for told in found.values())


def _wants(fragment: Fragment, block: int, drawn: int) -> bool:
    """Whether the fragment holds the drawn one of the block's elements."""
    start, stop = run_of_block(fragment.stub, block)
    element = start + drawn % (stop - start)
    for stride, offset, size in zip(
        contiguous_stride(fragment.stub.shape), fragment.source.offset, fragment.source.size, strict=True
    ):
        index, element = divmod(element, stride)
        if not offset <= index < offset + size:
            return False
    return True


def _digest(found: Any) -> str:
    return sha256(repr(found).encode()).hexdigest()[:32]
