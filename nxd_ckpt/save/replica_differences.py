"""Detection, at the first save, of replicas that differ: a checkpoint keeps the values of one of them.

Data-parallel ranks hold copies of the model, and one of each group writes it. If the copies have drifted apart (a
counter of each rank's own, running means, a parameter that was never synchronised), the others get its values back, and
nothing in the files shows it. So ranks compare small tensors and the optimizer's plain values once, by digests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.core.mesh_groups import MeshGroup
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.tensors import byte_view, iter_leaves
from nxd_ckpt.live.save_state import SaveState
from nxd_ckpt.live.state import State
from nxd_ckpt.live.torch_xla import is_xla

logger = logging.getLogger("nxd_ckpt")

_LARGEST, _MOST = 2**20, 64 * 2**20
"""Maximum bytes of a tensor that is compared, and of all of them together."""


def warn_of_differences(
    agreement: Agreement, state: SaveState, topology: Topology, groups: Sequence[MeshGroup] | None
) -> None:
    """Log on rank 0 the differences between ranks whose state counts as the same. Collective; raises nothing."""
    own = _digests(state)
    group = _group_of(topology, groups)
    digests = agreement.gather([group, sha256(repr(sorted(own.items())).encode()).hexdigest()[:16]])
    pair = agreement.broadcast(_suspects(digests or []))
    if not pair:
        return
    answers = agreement.gather(own if agreement.rank in pair else None)
    if answers is not None:
        a, b = (answers[rank] or {} for rank in pair)
        names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        logger.warning(
            "ranks %d and %d count as replicas, and differ in %s: the tag has the values of one of them, and a load "
            "gives these to all. Synchronise them, or keep each rank's own in rank_content=",
            *pair,
            first_of(names),
        )


def _suspects(digests: Sequence[Any]) -> list[int]:
    """Return two ranks of one group whose digests differ; none if all groups agree."""
    first: dict[Any, tuple[int, str]] = {}
    for rank, (group, digest) in enumerate(digests):
        leader, expected = first.setdefault(group, (rank, digest))
        if digest != expected:
            return [leader, rank]
    return []


def _group_of(topology: Topology, groups: Sequence[MeshGroup] | None) -> int:
    """Return the first of the ranks that hold the same as this one."""
    if groups is not None:
        return next((group.ranks[0] for group in groups if topology.rank in group.ranks), topology.rank)
    return topology.replicas(topology.coordinates, expert=topology.ep > 1)[0]


def _digests(state: SaveState) -> dict[str, int]:
    left = _MOST
    digests = {}
    trees: Mapping[str, State] = state.trees()
    for part, tree in trees.items():
        if part == "optimizer" and state.optimizer_kind not in (None, "plain"):
            continue  # ZeRO-1: each rank has shards of its own
        for name, value in _comparable(part, tree):
            nbytes = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
            if nbytes <= min(_LARGEST, left):
                left -= nbytes
                digests[name] = _digest(value)
    return digests


def _comparable(part: str, state: State) -> Iterator[tuple[str, Any]]:
    for path, value in iter_leaves(state.tree):
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (bool, int, float, str)):
                yield "/".join(map(str, (part, *path))), value
        elif state.tensors[path].placed is None and not is_xla(value):
            yield state.tensors[path].name, value


def _digest(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        local = value.detach().cpu().contiguous()
        return crc32(byte_view(local)) if local.numel() else 0
    return crc32(repr(value).encode())
