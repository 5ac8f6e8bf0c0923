"""Parts of whole tensors that a rank of a mesh job loads into its DTensors: it reads no more of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nxd_ckpt.core.partition import Piece
from nxd_ckpt.formats.strides import dense, stride_of, with_stride
from nxd_ckpt.formats.tensors import Assembly, Fragment, Path, TensorStub, iter_tensors, map_tensors
from nxd_ckpt.live.dtensor import Placed
from nxd_ckpt.tag.reading import Leaf


def local_part(leaf: Leaf, placed: Placed) -> Leaf:
    """Return this rank's part of the tensor ``leaf``; dense, in the recorded order of dimensions."""
    part, stride = part_of(leaf, placed.pieces, placed.local_shape), stride_of(leaf)
    return part if stride is None else with_stride(part, stride._replace(steps=dense(stride.steps, part.shape)))


def part_of(leaf: Leaf, pieces: Sequence[Piece], shape: tuple[int, ...]) -> Leaf:
    """Return the tensor of ``shape`` that consists of ``pieces`` of ``leaf``; zero elsewhere."""
    fragments: list[Fragment] = []
    for piece in pieces:
        if isinstance(leaf, TensorStub) and piece.local.size == leaf.shape:
            return leaf
        inside = Assembly.of(leaf).within(piece.box).fragments
        fragments += (fragment.moved(piece.local.offset) for fragment in inside)
    if len(fragments) == 1 and fragments[0].is_whole(leaf.dtype, shape):
        return fragments[0].stub  # on the mesh of the save each part is a whole saved tensor
    return Assembly(leaf.dtype, shape, tuple(fragments))


def local_tree(tree: dict[Any, Any], placed: Mapping[Path, Placed]) -> dict[Any, Any]:
    """Return ``tree`` with this rank's part of each leaf that is ``placed``, by its path."""
    if not placed:
        return tree
    by_leaf = {id(leaf): placed[path] for path, leaf in iter_tensors(tree) if path in placed}
    cut: dict[Any, Any] = map_tensors(tree, lambda leaf: _cut(leaf, by_leaf.get(id(leaf))))
    return cut


def _cut(leaf: Leaf, placed: Placed | None) -> Leaf:
    return leaf if placed is None else local_part(leaf, placed)
