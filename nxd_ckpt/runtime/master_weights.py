"""Model weights from an optimizer's master weights, for tags saved without their lower-precision copies.

Each data-parallel rank holds one ZeRO-1 shard: rows of the parameter, the last padded. A :class:`MasterWeight` is the
parameter put together from them, cast to the model's dtype; it is read row block by row block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.formats.tensors import TensorStub, torch_dtype

if TYPE_CHECKING:
    from nxd_ckpt.adapters.model import ModelAdapter
    from nxd_ckpt.runtime.opening import OpenTag

_KEY = "sharded_master_weights"


@dataclass(frozen=True)
class MasterWeight:
    """A parameter of ``shape`` to be read from its shards ``stubs``, in order of rows, as ``dtype``."""

    dtype: str
    shape: tuple[int, ...]
    stubs: tuple[TensorStub, ...]

    def read(self, read: Callable[[TensorStub], torch.Tensor]) -> torch.Tensor:
        """The parameter on the CPU; one shard in memory at a time beside it."""
        whole = torch.empty(self.shape, dtype=torch_dtype(self.dtype))
        row = 0
        for stub in self.stubs:
            count = min(stub.shape[0], self.shape[0] - row)
            if count > 0:
                whole[row : row + count].copy_(read(stub)[:count])
                row += count
        return whole


def find_master_weights(
    opened: OpenTag,
    topology: Topology,
    missing: Iterable[str],
    names: Sequence[str] | None,
    model: ModelAdapter,
) -> dict[str, MasterWeight]:
    """The missing parameters that master weights of the tag stand for, by name.

    ``names`` says which parameter each of the optimizer's indices is (from a live optimizer, or from the caller);
    where it is None, the tag may know. A tied parameter is found under any of its names.
    """
    if not opened.parts.master_weights:
        return {}
    names = names or opened.optimizer_names(topology.coordinates)
    if names is None:
        return {}
    at, saved = topology.coordinates, opened.topology
    trees = {
        dp_rank: opened.optimizer_tree(Coordinates(at.pp_rank, dp_rank, at.tp_rank), names)
        for dp_rank in range(saved.dp)
    }
    own = trees[topology.ep_rank]
    first_expert = own.get("ep_shape_info_offset", len(names))
    indices = {alias: index for index, name in enumerate(names) for alias in model.aliases(name)}
    dtypes = opened.model_dtypes(at)
    found = {}
    for name in missing:
        index = indices.get(name)
        if index is None or name not in dtypes:
            continue
        holders = range(topology.ep_rank, saved.dp, saved.ep) if index >= first_expert else range(saved.dp)
        shards = [trees[dp_rank].get(_KEY, {}).get(index) for dp_rank in holders]
        shape = tuple(own["shape_info"][index])
        if all(shard is not None for shard in shards) and sum(shard.shape[0] for shard in shards) >= shape[0]:
            found[name] = MasterWeight(dtypes[name], shape, tuple(shards))
    return found
