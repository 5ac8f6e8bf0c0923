"""Which boxes of a global tensor a rank of a mesh holds: as torch's DTensor cuts it."""

import json
from itertools import product
from math import prod
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, _StridedShard

from nxd_ckpt.core.box import Box, is_tiling
from nxd_ckpt.core.mesh import Layout, Mesh, MeshRecord, Placement, Shard, WholeTensor

Case = tuple[tuple[int, ...], Layout]


@st.composite
def layouts(draw: st.DrawFn) -> Case:
    """A shape, and how a tensor of it lies on a mesh of one to four dimensions."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    dims = st.integers(0, len(shape) - 1) if shape else st.nothing()
    placement = st.none() | st.builds(Shard, dims, st.sampled_from([1, 1, 2, 3]))
    placements = tuple(draw(placement) for _ in sizes)
    ranks = tuple(draw(st.permutations(range(prod(sizes)))))
    return shape, Layout(Mesh(("",) * len(sizes), sizes, ranks), placements)


def held_by_torch(shape: tuple[int, ...], layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The local tensor of the numbers 0, 1, ... as torch's placements cut it."""
    held = torch.arange(prod(shape)).reshape(shape)
    for size, placement, index in zip(layout.mesh.shape, layout.placements, coordinate, strict=True):
        if placement is not None:
            held = in_torch(placement)._split_tensor(held, size, with_padding=False)[0][index]
    return held


def in_torch(placement: Placement) -> Any:
    if placement is None:
        return Replicate()
    dim, split = placement.dim, placement.split
    return TorchShard(dim) if split == 1 else _StridedShard(dim, split_factor=split)


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))]


@given(layouts())
def test_pieces_are_what_torch_gives_each_rank(case: Case) -> None:
    """Put together of its pieces, each rank's tensor is the one that torch's placements cut for it."""
    shape, layout = case
    whole = torch.arange(prod(shape)).reshape(shape)
    for coordinate in product(*map(range, layout.mesh.shape)):
        expected = held_by_torch(shape, layout, coordinate)
        found = torch.full(layout.local_shape(shape, coordinate), -1)
        for piece in layout.pieces(shape, coordinate):
            cut(found, piece.local).copy_(cut(whole, piece.box))
        assert torch.equal(expected, found)


@given(layouts())
def test_shapes_and_offsets_are_those_of_torch(case: Case) -> None:
    """torch's own arithmetic for checkpoints says the same local shape, and where the first element is."""
    shape, layout = case
    placements = [in_torch(placement) for placement in layout.placements]
    for coordinate in product(*map(range, layout.mesh.shape)):
        size, offset = _compute_local_shape_and_global_offset(shape, layout.mesh.shape, list(coordinate), placements)
        assert tuple(size) == layout.local_shape(shape, coordinate)
        pieces = layout.pieces(shape, coordinate)
        if pieces:
            assert tuple(offset) == pieces[0].box.offset


@given(layouts(), st.data())
def test_holders_together_hold_a_box_once(case: Case, data: st.DataObject) -> None:
    """Of any box, the holders have each element once, and each of them has a part of it."""
    shape, layout = case
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    size = tuple(data.draw(st.integers(0, whole - at)) for whole, at in zip(shape, start, strict=True))
    wanted = Box(start, size)
    parts = []
    for coordinate in layout.holders(shape, wanted):
        own = [piece.box.intersect(wanted) for piece in layout.pieces(shape, coordinate)]
        assert any(own)
        parts += [part.shifted(wanted.offset) for part in own if part is not None]
    assert is_tiling(Box.whole(size), parts)


@given(layouts())
def test_replicas_hold_the_same(case: Case) -> None:
    """Each replica is another rank, its number leads back to it, and it holds what the others hold."""
    shape, layout = case
    for coordinate in product(*map(range, layout.mesh.shape)):
        ranks = [layout.rank_of(coordinate, replica) for replica in range(layout.replicas)]
        assert len(set(ranks)) == layout.replicas
        assert ranks[layout.replica_of(coordinate)] == layout.mesh.rank_at(coordinate)
        for replica, rank in enumerate(ranks):
            other = layout.mesh.coordinate_of(rank)
            assert other is not None
            assert layout.replica_of(other) == replica
            assert layout.pieces(shape, other) == layout.pieces(shape, coordinate)


@given(layouts(), layouts())
@settings(max_examples=20, deadline=None)
def test_a_record_comes_back_as_it_was(one: Case, two: Case) -> None:
    """Meshes, placements and tensors are in the JSON."""
    tensors = (
        WholeTensor("model/a", "float32", one[0], 0, one[1].replicas - 1),
        WholeTensor('model/"b', "bfloat16", two[0], 1),
        WholeTensor("optim/a/step", "float32", (), None, 0, (3, 5)),
    )
    record = MeshRecord((one[1], two[1]), tensors)
    assert record == MeshRecord.from_json(json.loads(json.dumps(record.to_json())))
