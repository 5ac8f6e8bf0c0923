"""How many steps the optimizer had made: of each parameter, on each rank."""

from __future__ import annotations

from typing import Any

import torch

from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import OptimizerMismatch, PartLost, PartNotFound
from nxd_ckpt.examine.counters import whole_number
from nxd_ckpt.formats.tensors import Assembly, TensorStub
from nxd_ckpt.live.optimizer_state import STEP
from nxd_ckpt.reshard.saved_optimizer import saved_optimizer
from nxd_ckpt.tag.opened import OpenTag


def steps_of(opened: OpenTag) -> tuple[dict[str, dict[int, int]], dict[str, int]]:
    """Steps by parameter and global rank, and the pipeline stage of each parameter where there are several.

    Parameters without a count have none. Those of experts differ between expert-parallel ranks, and have names of their
    own for each. A count whose digest is that of another one is not read again.
    """
    steps: dict[str, dict[int, int]] = {}
    stages: dict[str, int] = {}
    read: dict[Any, int | None] = {}
    for at in _writers(opened):
        prefix = f"#{at.pp_rank}." if opened.topology.pp > 1 else "#"
        try:
            tree, names = opened.optimizer_tree(at), opened.optimizer_names(at)
            slots = saved_optimizer(tree, names, prefix, lambda name: None, opened.where).slots
        except PartLost:
            raise
        except (OptimizerMismatch, PartNotFound):
            continue
        for name, slot in slots.items():
            key = f"{name} of expert rank {at.dp_rank % opened.topology.ep}" if slot.expert else name
            step = _number(opened, slot.entries.get(STEP), read)
            if step is not None:
                steps.setdefault(key, {})[opened.topology.rank_of(at)] = step
                if opened.topology.pp > 1:
                    stages[key] = at.pp_rank
    return steps, stages


def _writers(opened: OpenTag) -> list[Coordinates]:
    """One rank for each file of the optimizer."""
    kind, sizes = opened.parts.optimizer, opened.topology
    if kind is None:
        return []
    if opened.manifest is not None and opened.manifest.leaders is not None:
        return [sizes.coordinates_of(rank) for rank in opened.manifest.leaders]
    every = map(sizes.coordinates_of, range(sizes.world_size))
    return list(every) if kind in ("zero1", "zero1_dcp") else list(dict.fromkeys(map(sizes.writer_of, every)))


def _number(opened: OpenTag, value: Any, read: dict[Any, int | None]) -> int | None:
    if not isinstance(value, (TensorStub, Assembly)):
        return whole_number(value)
    stubs = [fragment.stub for fragment in Assembly.of(value).fragments]
    if [stub.numel for stub in stubs] != [1]:
        return None
    (stub,) = stubs
    key = (stub.dtype, stub.storage.crc32, stub.storage.nbytes, stub.offset - stub.storage.offset)
    if key not in read or stub.storage.crc32 is None:
        found = opened.read(stub)
        read[key] = None if found.is_complex() or found.dtype == torch.bool else whole_number(found.item())
    return read[key]
