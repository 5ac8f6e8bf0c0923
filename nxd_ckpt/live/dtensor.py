"""torch's DTensors: this rank's part of a tensor, without any communication.

Nothing here imports torch.distributed.tensor: a tensor can only be a DTensor in a process that has done so already.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch

from nxd_ckpt.core.mesh import Coordinate, Layout, Mesh, Placed, Placement, Shard
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import UnsupportedState

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(value: Any) -> bool:
    if type(value) in PLAIN:  # as nearly all are
        return False
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(value, library.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory; any other tensor unchanged."""
    if type(tensor) in PLAIN or not is_dtensor(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]  # as to_local(), which takes 50 times as long
    local = local.wait() if hasattr(local, "wait") else local
    detached: torch.Tensor = local.detach() if local.requires_grad else local
    return detached


def tell_autograd(*tensors: torch.Tensor) -> None:
    """Tell autograd that tensors are overwritten, as torch's operations in place do.

    A backward pass that needs the old values then fails, where it would use the new ones.
    """
    parts = map(local_of, filter(is_dtensor, tensors))
    torch.autograd.graph.increment_version([each for each in (*tensors, *parts) if not each.is_inference()])


def like(local: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as this rank's part of a DTensor with the placement and shape of ``model``."""
    about: Any = model
    return as_part(local, about.device_mesh, about.placements, model)


def as_part(local: torch.Tensor, mesh: Any, placements: Sequence[Any], whole: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as this rank's part of a DTensor with the shape and strides of ``whole``."""
    library: Any = sys.modules["torch.distributed.tensor"]
    placed: torch.Tensor = library.DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return placed


def model_of(parameter: torch.Tensor, shape: tuple[int, ...], cut: Collection[int]) -> torch.Tensor:
    """Return a DTensor of ``shape``, without memory, for an optimizer's state with another shape than its parameter.

    It lies on the parameter's mesh. Along a mesh dimension that cuts the parameter it is cut along the first of its
    dimensions ``cut`` that is as long as the parameter's; else each rank there has all of it.
    """
    library: Any = sys.modules["torch.distributed.tensor"]
    about: Any = parameter
    placements: list[Any] = []
    for placement in about.placements:
        dims = [dim for dim in cut if placement.is_shard() and shape[dim] == parameter.shape[placement.dim]]
        plain = type(placement) is library.Shard and dims
        placements.append(library.Shard(dims[0]) if plain else library.Replicate())
    local = meta = torch.empty(shape, device="meta")
    coordinate = about.device_mesh.get_coordinate()
    for size, at, placement in zip(about.device_mesh.shape, coordinate or (), placements, strict=False):
        if placement.is_shard():
            parts = local.chunk(size, placement.dim)
            local = parts[at] if at < len(parts) else local.narrow(placement.dim, 0, 0)
    return as_part(local, about.device_mesh, placements, meta)


def placed_of(name: str, tensor: torch.Tensor, local: torch.Tensor | None = None) -> Placed:
    """Return the position of a DTensor on its mesh; ``local`` is this rank's part, if it is known.

    Raises:
        UnsupportedState: it is not cut into boxes (``Partial``), this rank is not in its mesh, or the mesh is out of
            order.
    """
    about: Any = tensor
    coordinate = about.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedState(
            f"{name} is a DTensor on the mesh of ranks {about.device_mesh.mesh.flatten().tolist()[:8]}, which this "
            "rank is not in: hold it only on the ranks of its mesh"
        )
    try:
        placed, expected_shape = _placed(about.device_mesh, tensor.shape, tuple(coordinate), *about.placements)
    except UnsupportedState as error:
        raise UnsupportedState(f"{name} is a DTensor {error}") from None
    local_shape = (local_of(tensor) if local is None else local).shape
    if expected_shape != local_shape:
        raise UnsupportedState(
            f"{name} is a DTensor of shape {tuple(tensor.shape)} with placements {tuple(about.placements)}, of which "
            f"this rank must hold {expected_shape}, but it holds {tuple(local_shape)}: make it with distribute_tensor, "
            "or with from_local(..., shape=, stride=)"
        )
    return placed


def described_layout(layout: Layout) -> str:
    """Return the placement of a DTensor as text, equal for equal ones."""
    return repr((layout.mesh.shape, layout.mesh.ranks, layout.placements))


def refuse_sizes(topology: Topology) -> None:
    """Raise UnsupportedState for DTensors in a job that also cuts tensors in another way."""
    if (topology.tp, topology.pp, topology.ep) != (1, 1, 1):
        raise UnsupportedState(
            f"DTensors in a job of {topology.describe()}: to a checkpoint the ranks of device meshes are data-parallel "
            "ones; leave out topology=, and do not initialise neuronx_distributed's parallel state"
        )


def traits_of(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors in the same position on the same mesh; None for other tensors."""
    if not is_dtensor(tensor):
        return None
    about: Any = tensor
    kinds = tuple(map(type, about.placements))  # to torch 2.9 a strided shard equals a plain one
    return about.device_mesh, about.placements, kinds, tensor.shape


@lru_cache(maxsize=4096, typed=True)  # to torch a strided shard equals a plain one
def _placed(
    device_mesh: Any, shape: tuple[int, ...], coordinate: Coordinate, *placements: Any
) -> tuple[Placed, tuple[int, ...]]:
    """Return a position on a mesh, and its local shape: the tensors of a model have few, and share them.

    Raises UnsupportedState for a mesh out of order, and for placements that do not cut a tensor into boxes.
    """
    mesh = _mesh(device_mesh)
    if not mesh.is_ascending:
        raise UnsupportedState(
            f"on the mesh of ranks {device_mesh.mesh.tolist()}, which do not ascend along its dimensions: torch's "
            "collectives then place shards by ascending ranks, not by the mesh; make the mesh with init_device_mesh"
        )
    placed = Placed(Layout(mesh, tuple(map(_placement, placements))), tuple(shape), coordinate)
    return placed, placed.local_shape


@lru_cache(maxsize=64)
def _mesh(mesh: Any) -> Mesh:
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return Mesh(tuple(names), tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def _placement(placement: Any) -> Placement:
    library: Any = sys.modules["torch.distributed.tensor.placement_types"]
    if type(placement) is library.Replicate:
        return None
    if type(placement) is library.Shard:
        return Shard(placement.dim)
    if type(placement) is library._StridedShard:
        return Shard(placement.dim, int(placement.split_factor))
    raise UnsupportedState(
        f"with the placement {placement!r}, which has no element's value before the ranks add up theirs: "
        "redistribute() it to Shard or Replicate first"
        if type(placement) is library.Partial
        else f"with the placement {placement!r}, expected Shard or Replicate"
    )
