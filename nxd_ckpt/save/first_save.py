"""Comparisons of ranks at the first save: the tensors and meshes of a mesh job, see core.mesh_groups; and replicas.

Of a mesh job only digests are exchanged: names are sent if something is wrong, and by the leaders of several groups.

Replicas that differ are warned of. Data-parallel ranks hold copies of the model, and one of each group writes it. If
the copies have drifted apart (a counter of each rank's own, running means, a parameter that was never synchronised),
the others get its values back, and nothing in the files shows it. So ranks compare small tensors and the optimizer's
plain values once, by digests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0
from nxd_ckpt.core.mesh import Mesh, ravelled
from nxd_ckpt.core.mesh_groups import MeshGroup, MeshPlace, OutsideOfGroup, RankStructure, groups_of
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import RanksDisagree
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.tensors import byte_view, iter_leaves, iter_tensors
from nxd_ckpt.live.parameters import form_of
from nxd_ckpt.live.save_state import SaveState
from nxd_ckpt.live.state import State
from nxd_ckpt.live.torch_xla import is_xla
from nxd_ckpt.save.mesh_plan import mesh_among

logger = logging.getLogger("nxd_ckpt")


_Lines = dict[str, list[Any]]
"""dtype, shape, placements and number of the mesh of each tensor, by name."""


def mesh_summary(state: SaveState, members: tuple[int, ...] | None) -> tuple[SaveState, MeshSummary]:
    """Return the state and this rank's summary. Raises UnsupportedState for a DTensor that is not cut into boxes."""
    return state, MeshSummary(state, members)


def agree_on_groups(agreement: Agreement, summary: MeshSummary) -> list[MeshGroup] | None:
    """Return the groups of a mesh job; None if no rank holds a DTensor. Collective.

    Raises RanksDisagree, on all ranks: ranks of one mesh hold other tensors, or in another way; or one name stands for
    different tensors.
    """
    summaries = agreement.gather(summary.summary)
    answer = decided_by_rank0(agreement, lambda: _answer(summaries or []))
    if answer is None:
        return None
    lines = agreement.gather(summary.lines if agreement.rank in answer["ask"] else None)
    decided_by_rank0(agreement, lambda: _compare(answer, lines or []))
    return [MeshGroup.from_json(group) for group in answer["groups"]]


class MeshSummary:
    """Summary of one rank's tensors."""

    def __init__(self, state: SaveState, members: tuple[int, ...] | None = None) -> None:
        self._is_placed = state.is_placed
        self.lines: _Lines = {}
        self._meshes: list[tuple[Mesh, tuple[int, ...]]] = []
        for part in state.trees().values():
            for path, leaf in iter_tensors(part.tree):
                about = part.tensors[path]
                dtype, shape = form_of(leaf)
                line: list[Any] = [dtype, list(shape), None, None]
                if about.placed is not None:
                    layout = about.placed.layout
                    placements = [None if split is None else [split.dim, split.split] for split in layout.placements]
                    mesh = mesh_among(members, about.name, layout.mesh), about.placed.coordinate
                    if mesh not in self._meshes:
                        self._meshes.append(mesh)
                    line = [dtype, list(about.placed.shape), placements, self._meshes.index(mesh)]
                self.lines[about.name] = line

    @property
    def summary(self) -> list[Any]:
        """True if there are DTensors, and a RankStructure."""
        structure = sha256(repr(self.lines).encode()).hexdigest()[:32]
        return [self._is_placed, RankStructure(structure, [_place(*mesh) for mesh in self._meshes])]


def _place(mesh: Mesh, coordinate: tuple[int, ...]) -> MeshPlace:
    digest, place = sha256(repr((mesh.shape, mesh.ranks)).encode()).hexdigest()[:16], ravelled(coordinate, mesh.shape)
    return MeshPlace(digest, mesh.names, mesh.shape, place, mesh.ranks if place == 0 else None)


def _answer(summaries: Sequence[Any]) -> dict[str, Any] | None:
    """Return rank 0's conclusion from all summaries: the groups, or the ranks to compare; None for no mesh job."""
    if not any(is_placed for is_placed, _ in summaries):
        return None
    try:
        groups = groups_of(
            [RankStructure(structure[0], [MeshPlace(*mesh) for mesh in structure[1]]) for _, structure in summaries]
        )
    except OutsideOfGroup as outside:
        return {"groups": [], "ask": [rank for rank in (outside.rank, outside.other) if rank is not None]}
    leaders = [group.ranks[0] for group in groups]
    return {"groups": [group.to_json() for group in groups], "ask": leaders if len(leaders) > 1 else []}


def _compare(answer: Mapping[str, Any], lines: Sequence[_Lines | None]) -> None:
    lines_of_ranks = [(rank, lines[rank] or {}) for rank in answer["ask"]]
    if not answer["groups"]:
        raise RanksDisagree(_difference(lines_of_ranks))
    first_lines: dict[str, tuple[int, list[Any]]] = {}
    for rank, own_lines in lines_of_ranks:
        for name, line in own_lines.items():
            first, first_line = first_lines.setdefault(name, (rank, line))
            if (line[:2], line[2] is None) != (first_line[:2], first_line[2] is None):
                raise RanksDisagree(
                    f"{name} is {_line_text(first_line)} on rank {first}, and {_line_text(line)} on rank {rank}: "
                    "one name stands for one tensor; build the model alike on all ranks, or give them different names"
                )


def _difference(lines_of_ranks: Sequence[tuple[int, _Lines]]) -> str:
    """Describe the difference between two ranks of a mesh."""
    rank, lines_a = lines_of_ranks[0]
    other_rank, lines_b = lines_of_ranks[1] if len(lines_of_ranks) > 1 else (None, {})
    advice = "all ranks of a mesh must hold the same tensors, placed alike: build model and mesh alike on all of them"
    if other_rank is None:
        return f"rank {rank} holds DTensors on a mesh that other ranks of it do not know, or in another order; {advice}"
    for name in {**lines_a, **lines_b}:
        if lines_a.get(name) != lines_b.get(name):
            texts = [_line_text(lines.get(name)) for lines in (lines_a, lines_b)]
            return f"{name} is {texts[0]} on rank {rank}, and {texts[1]} on rank {other_rank}; {advice}"
    return f"ranks {rank} and {other_rank} hold the same tensors on different meshes; {advice}"


def _line_text(line: Sequence[Any] | None) -> str:
    if line is None:
        return "not there"
    dtype, shape, placements, _ = line
    kind = "a plain tensor" if placements is None else f"a DTensor placed {placements}"
    return f"{kind} of {dtype} {tuple(shape)}"


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
