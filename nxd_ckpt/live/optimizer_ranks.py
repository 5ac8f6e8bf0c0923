"""Optimizer state for a rank's own shard of a DTensor, as plain tensors that differ from rank to rank.

Nothing tells how such a tensor is cut: low-bit optimizers keep codes and scales of their shard. So all ranks' tensors
are saved as one tensor with a row for each rank of the mesh, under a name with the parameter's placement. A load on the
same mesh gives each rank its row back; on another one it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.formats.tensors import Path, iter_tensors, map_tensors
from nxd_ckpt.live.dtensor import Placed, is_dtensor, placed_of
from nxd_ckpt.live.optimizer_state import ON_HOST, ROWS
from nxd_ckpt.live.parameters import form_of


def is_of_rank(parameter: torch.Tensor, entry: Any, value: Any) -> bool:
    """Return whether a parameter's state entry has plain tensors that differ from rank to rank.

    True for plain tensors in the state of a parameter that is cut over ranks, and containers of them. Numbers, and
    tensors as large as the whole parameter, count as equal on all ranks.
    """
    if entry in ON_HOST or not _is_cut(parameter):
        return False
    tensors = [tensor for _, tensor in iter_tensors(value, torch.Tensor)]
    if any(map(is_dtensor, tensors)):
        return False
    return any(tensor.dim() and tensor.shape != parameter.shape for tensor in tensors)


def row_name(parameter: torch.Tensor, entry: Any) -> str:
    """Return the name under which the rows of an entry are saved: ``codes@ranks|2x2|S(0),R``."""
    about: Any = parameter
    sizes = "x".join(map(str, about.device_mesh.shape))
    return f"{entry}{ROWS}{sizes}|{','.join(map(str, about.placements))}"


def name_of_rows(entry: Any) -> str | None:
    """Return the name of the entry whose rows these are; None for an entry without rows."""
    name, mark, _ = str(entry).partition(ROWS)
    return name if mark else None


def as_rows(value: Any, parameter: torch.Tensor) -> Any:
    """Return the value with `as_row` applied to each of its tensors."""
    return map_tensors(value, lambda tensor: as_row(tensor, parameter), torch.Tensor)


def own_of_rows(rows: Any) -> Any:
    """Return this rank's value, from tensors of which each was loaded as this rank's row."""
    return map_tensors(rows, lambda row: row[0], torch.Tensor)


def as_row(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks of the parameter's mesh, as a DTensor of which this rank has ``value``."""
    library: Any = sys.modules["torch.distributed.tensor"]
    about: Any = parameter
    mesh, local = about.device_mesh, value.detach().unsqueeze(0)
    shape = torch.Size((mesh.size(), *value.shape))
    stride = torch.empty(shape, device="meta").stride()
    cuts = [library.Shard(0)] * mesh.ndim
    rows: torch.Tensor = library.DTensor.from_local(local, mesh, cuts, run_check=False, shape=shape, stride=stride)
    return rows


def placed_rows(name: str, parameter: torch.Tensor, saved: Any) -> dict[Path, Placed]:
    """Return the mesh positions of an entry's saved rows, by the path of each tensor in it."""

    def placed(shape: tuple[int, ...]) -> Placed:
        return placed_of(name, as_row(torch.empty(shape[1:], device="meta"), parameter))

    return {path: placed(form_of(leaf)[1]) for path, leaf in iter_tensors(saved)}


def check_rows(name: str, parameter: torch.Tensor, entries: Mapping[Any, Any]) -> None:
    """Raise OptimizerMismatch for rows that were saved with another placement of the parameter."""
    for entry in entries:
        own = name_of_rows(entry)
        if own is None or (is_dtensor(parameter) and entry == row_name(parameter, own)):
            continue
        placement = row_name(parameter, own).partition("|")[2] if is_dtensor(parameter) else "one rank"
        raise OptimizerMismatch(
            f"optim/{name}/{own} is a plain tensor that each rank keeps for its own shard. It was saved on a mesh "
            f"{str(entry).partition('|')[2]}, the live parameter lies on {placement}, and nothing tells how to cut it "
            f"for that: load on the mesh that it was saved on, or without it, ignore_keys=['optim/*/{own}*']"
        )


def _is_cut(parameter: torch.Tensor) -> bool:
    if not is_dtensor(parameter):
        return False
    about: Any = parameter
    cuts = zip(about.device_mesh.shape, about.placements, strict=True)
    return any(size > 1 and not placement.is_replicate() for size, placement in cuts)
