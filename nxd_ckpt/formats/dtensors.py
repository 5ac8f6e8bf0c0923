"""DTensors in a torch file: the local tensor of one rank, with its place in the global tensor; nothing is called.

A DTensor is pickled with its local tensor and its spec: mesh, placements, global shape and dtype. The mesh has the
coordinate of the rank that wrote it. Classes of the spec become inert records of their fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

from nxd_ckpt.core.limits import RANKS, check_form, check_sizes, shown
from nxd_ckpt.core.mesh import Layout, Mesh, Placement, Shard
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.formats.inert import Call, Inert, Marker
from nxd_ckpt.formats.tensors import TensorStub, itemsize


@dataclass(frozen=True)
class DTensorPart(Inert):
    """One rank's part of a DTensor of ``shape``: the stored tensor ``stub`` holds these ``pieces``."""

    stub: TensorStub
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def layout_of(mesh: Mesh, placements: list[Placement], shape: tuple[int, ...], what: str) -> Layout:
    """Return the layout; raise MalformedFile unless these placements fit the mesh and a tensor of ``shape``."""
    shards = [placement for placement in placements if placement is not None]
    fits = all(0 <= shard.dim < len(shape) and 0 < shard.split <= RANKS for shard in shards)
    if len(placements) != len(mesh.shape) or not fits:
        raise MalformedFile(f"{what}: placements {placements} do not fit {mesh.shape} ranks and shape {shape}")
    return Layout(mesh, tuple(placements))


def local_tensor(stub: Any, shape: tuple[int, ...], layout: Layout, coordinate: Any, what: str) -> DTensorPart:
    """Return the part of the rank at ``coordinate``; raise MalformedFile if ``stub`` has another shape than it."""
    at = check_sizes(coordinate, what)
    if len(at) != len(layout.mesh.shape) or any(a >= n for a, n in zip(at, layout.mesh.shape, strict=True)):
        raise MalformedFile(f"{what}: no rank is at {at} of a mesh of {layout.mesh.shape}")
    expected = layout.local_shape(shape, at)
    if not isinstance(stub, TensorStub) or stub.shape != expected:
        actual = stub.shape if isinstance(stub, TensorStub) else shown(stub)
        raise MalformedFile(f"{what}: the part of a tensor of {shape} at {at} has shape {expected}, found {actual}")
    return DTensorPart(stub, shape, layout.pieces(shape, at))


class _Record(Inert):
    """Stand-in for an object of the class ``kind``: its fields by name, or the values that it was made with."""

    __slots__ = ("fields", "kind", "values")

    def __init__(self, kind: str, *values: Any) -> None:
        self.kind = kind
        self.values = values
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise MalformedFile(f"expected the fields of a {self.kind}, found {shown(state)}")
        self.fields = state


class SubclassRebuilder(Inert):
    """torch's function that makes a DTensor; its state holds all that matters."""

    __slots__ = ()

    def rebuild(self, state: Any) -> DTensorPart:
        """Return the local tensor in a DTensor's state. Raises MalformedFile, UnsupportedState."""
        slots = state[1] if isinstance(state, tuple) else state
        spec = slots["_spec"].fields
        local = slots["_local_tensor"]
        mesh = spec["mesh"].fields
        if not isinstance(local, TensorStub):
            raise UnsupportedState(f"the local tensor of a DTensor is {shown(local)}; only plain ones are read")
        shape = check_form(spec["tensor_meta"].values[0], itemsize(local.dtype), "a DTensor")
        layout = layout_of(_mesh(_mesh_shape(mesh)), [*map(_placement, spec["placements"])], shape, "a DTensor")
        return local_tensor(local, shape, layout, mesh["_coordinate_on_dim"], "a DTensor")


def _mesh_shape(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes of a mesh, which torch before 2.10 keeps as a tensor of ranks."""
    if isinstance(fields.get("mesh"), TensorStub):
        return tuple(fields["mesh"].shape)
    layout = fields["_layout"].fields
    axes = [axis.fields["shape"] for axis in layout["axes"]] if "axes" in layout else layout["shape"]
    return check_sizes([_product(axis) for axis in axes], "a mesh")


def _product(sizes: Any) -> int:
    """Return the ranks along a dimension, which consists of several if the mesh was flattened."""
    return prod(map(_product, sizes)) if isinstance(sizes, tuple) else check_sizes((sizes,), "a mesh")[0]


@lru_cache(maxsize=64)
def _mesh(shape: tuple[int, ...]) -> Mesh:
    if not 0 < prod(shape) <= RANKS:
        raise MalformedFile(f"a mesh of shape {shape}, expected 1 to {RANKS} ranks")
    return Mesh(("",) * len(shape), shape, tuple(range(prod(shape))))


def _placement(record: Any) -> Placement:
    kind = record.kind
    fields = record.fields
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard"):
        raise UnsupportedState(f"a DTensor with the placement {kind}; only sharded and replicated ones are read")
    dim, split = check_sizes((fields["dim"], fields.get("split_factor", 1)), "a placement")
    return Shard(dim, split)


_PLACEMENTS = ("Shard", "_StridedShard", "Replicate", "Partial")
_RECORDS = (
    ("torch.distributed.tensor._dtensor_spec", ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    ("torch.distributed.tensor.placement_types", _PLACEMENTS),
    ("torch.distributed.device_mesh", ("DeviceMesh",)),
    ("torch.distributed._mesh_layout", ("_MeshLayout", "_FlatLayout")),
)

DTENSORS: Mapping[tuple[str, str], Any] = {
    **{(module, kind): Call(partial(_Record, kind)) for module, kinds in _RECORDS for kind in kinds},
    ("torch._utils", "_rebuild_wrapper_subclass"): SubclassRebuilder(),
    ("torch.distributed.tensor", "DTensor"): Marker(),
    ("torch.distributed.tensor._api", "DTensor"): Marker(),
}
"""(module, name) -> the object for the unpickler, beside those of `safe_globals`."""
