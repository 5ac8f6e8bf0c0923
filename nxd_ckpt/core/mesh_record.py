"""The record of a mesh job's tensors in a tag: each whole tensor, and the ranks that wrote its parts. Pure.

The first rank of each group of ranks with the same tensors writes it into its index. docs/format.md describes the JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from nxd_ckpt.core import document
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.entries import checked, integers
from nxd_ckpt.core.keys import checked_text
from nxd_ckpt.core.limits import RANKS
from nxd_ckpt.core.mesh import Layout, Mesh, Placement, Shard


class WholeTensor(NamedTuple):
    """One whole tensor of a mesh job.

    ``layout`` is the number of one of the record's layouts; of replicas, the ``replica``-th rank wrote the part. If it
    is None, the parts are in the indexes of ``ranks``, cut in any way.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: int | None
    replica: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class MeshRecord:
    """The ``tensors`` of a group of ranks: first the model's, then the optimizer's, each in the order of its state."""

    layouts: tuple[Layout, ...]
    tensors: tuple[WholeTensor, ...]

    def writers(self, tensor: WholeTensor, wanted: Box) -> Iterator[int]:
        """Yield the global ranks that wrote parts of ``wanted``, a box of one of the tensors, and possibly others."""
        if tensor.layout is None:
            yield from tensor.ranks
            return
        layout = self.layouts[tensor.layout]
        for coordinate in layout.holders(tensor.shape, wanted):
            yield layout.rank_of(coordinate, tensor.replica)

    def text(self) -> str:
        """Return the record as JSON."""
        meshes = list(dict.fromkeys(layout.mesh for layout in self.layouts))
        layouts = [[meshes.index(each.mesh), list(map(_placement_fields, each.placements))] for each in self.layouts]
        return document.members(
            {
                "meshes": document.plain([mesh_fields(mesh) for mesh in meshes]),
                "layouts": document.plain(layouts),
                "tensors": document.array(map(_tensor_text, self.tensors)),
            }
        )

    @staticmethod
    def from_json(fields: Any) -> MeshRecord:
        """Parse the record's JSON. Raises KeyError, TypeError or ValueError if it is invalid."""
        meshes = [mesh_of(mesh) for mesh in checked(list, fields["meshes"])]
        layouts = tuple(_layout(layout, meshes) for layout in checked(list, fields["layouts"]))
        return MeshRecord(layouts, tuple(_tensor(tensor, layouts) for tensor in checked(list, fields["tensors"])))


def mesh_fields(mesh: Mesh) -> dict[str, Any]:
    """Return the JSON of a mesh, as plain values."""
    in_order = mesh.ranks == tuple(range(len(mesh.ranks)))
    return {"names": list(mesh.names), "shape": list(mesh.shape), "ranks": None if in_order else list(mesh.ranks)}


def mesh_of(fields: Any) -> Mesh:
    """Parse a mesh's JSON. Raises KeyError, TypeError or ValueError if it is invalid."""
    names, shape = tuple(map(checked_text, fields["names"])), tuple(integers(fields["shape"]))
    size = prod(shape)
    if len(names) != len(shape) or not 0 < size <= RANKS:
        raise ValueError(f"a mesh of shape {shape} with {len(names)} names")
    ranks = tuple(range(size)) if fields["ranks"] is None else tuple(integers(fields["ranks"], size))
    if len(set(ranks)) != size:
        raise ValueError(f"a mesh of {size} ranks lists some of them twice")
    return Mesh(names, shape, ranks)


def _placement_fields(placement: Placement) -> list[int] | None:
    if placement is None:
        return None
    return [placement.dim] if placement.split == 1 else [placement.dim, placement.split]


def _layout(fields: Any, meshes: list[Mesh]) -> Layout:
    number, placements = checked(list, fields)
    mesh = meshes[integers([number])[0]]
    if len(placements) != len(mesh.shape):
        raise ValueError(f"{len(placements)} placements on a mesh of {len(mesh.shape)} dimensions")
    return Layout(mesh, tuple(None if each is None else Shard(*_numbers_of(each)) for each in placements))


def _numbers_of(placement: Any) -> list[int]:
    dim, *split = integers(checked(list, placement))
    if len(split) > 1 or not all(0 < factor <= RANKS for factor in split):
        raise ValueError(f"expected a dimension and at most a split factor, found {placement!r:.80}")
    return [dim, *split]


def _tensor_text(tensor: WholeTensor) -> str:
    where = f"{tensor.layout},{tensor.replica}"
    if tensor.layout is None:
        where = f"null,{document.integers(tensor.ranks)}"
    return f"[{document.quoted(tensor.name)},{document.quoted(tensor.dtype)},{document.integers(tensor.shape)},{where}]"


def _tensor(fields: Any, layouts: tuple[Layout, ...]) -> WholeTensor:
    name, dtype, sizes, layout, where = checked(list, fields)
    name, dtype, shape = checked_text(name), checked(str, dtype), tuple(integers(sizes))
    if layout is None:
        return WholeTensor(name, dtype, shape, None, 0, tuple(integers(checked(list, where))))
    integers([layout, where])
    own = layouts[layout]
    if where >= own.replicas:
        raise ValueError(f"{name}: replica {where} of {own.replicas}")
    if any(placement is not None and placement.dim >= len(shape) for placement in own.placements):
        raise ValueError(f"{name}: of shape {shape}, sharded along a dimension that it does not have")
    return WholeTensor(name, dtype, shape, layout, where)
