"""Comparison of replicas: ranks that hold copies of the same tensors, of which one is saved.

If copies have drifted apart (running means, a counter of each rank's own, a parameter that was never synchronised), a
load gives all ranks the values of one, and nothing in the files shows it. So ranks compare digests. The first save
takes those of plain values, small tensors and samples of larger ones, which costs little; `refuse_differences` takes
all of it, on request.

The ranks of a mesh job also compare their tensors and meshes at the first save (core.mesh). Only digests are
exchanged: names are sent if something is wrong, and by the leaders of several groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.core.mesh import Mesh, MeshGroup, MeshPlace, OutsideOfGroup, RankStructure, groups_of, ravelled
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import RanksDisagree
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.tensors import byte_view, iter_leaves, iter_tensors
from nxd_ckpt.live import torch_xla
from nxd_ckpt.live.dtensor import Placed
from nxd_ckpt.live.parameters import form_of
from nxd_ckpt.live.save_state import SaveState
from nxd_ckpt.live.state import State
from nxd_ckpt.save.mesh_plan import mesh_among

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
        raise RanksDisagree(_first_difference(lines_of_ranks))
    first_lines: dict[str, tuple[int, list[Any]]] = {}
    for rank, own_lines in lines_of_ranks:
        for name, line in own_lines.items():
            first, first_line = first_lines.setdefault(name, (rank, line))
            if (line[:2], line[2] is None) != (first_line[:2], first_line[2] is None):
                raise RanksDisagree(
                    f"{name} is {_line_text(first_line)} on rank {first}, and {_line_text(line)} on rank {rank}: "
                    "one name stands for one tensor; build the model alike on all ranks, or give them different names"
                )


def _first_difference(lines_of_ranks: Sequence[tuple[int, _Lines]]) -> str:
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


logger = logging.getLogger("nxd_ckpt")

_LARGEST, _MOST = 2**20, 64 * 2**20
"""Bytes up to which a tensor is compared whole at a first save, and maximum bytes of all that is compared."""

_SAMPLE = 2**14
"""Bytes of each of the three samples of a larger tensor."""

_Digests = dict[str, dict[str, int]]
"""Digests by name, for each part of a mesh whose ranks hold copies; "" is the whole group."""


class _Difference(NamedTuple):
    """Two ranks that count as replicas, and the names of tensors and values in which they differ."""

    ranks: tuple[int, int]
    names: Sequence[str]

    def __str__(self) -> str:
        return (
            f"ranks {self.ranks[0]} and {self.ranks[1]} count as replicas, and differ in {first_of(self.names)}: a tag "
            "has the values of one of them, and a load gives these to all. Synchronise them, or keep each rank's own "
            "in rank_content="
        )


def warn_of_differences(
    agreement: Agreement, state: SaveState, topology: Topology, groups: Sequence[MeshGroup] | None
) -> None:
    """Log on rank 0 the differences between ranks whose state counts as the same. Collective; raises nothing."""
    difference = _difference(agreement, _digests(state, whole=False), topology, groups)
    if difference is not None:
        logger.warning("%s", difference)


def refuse_differences(agreement: Agreement, topology: Topology, captured: Callable[[], SaveState]) -> None:
    """Raise RanksDisagree, on all ranks, for two replicas that differ. Collective; reads all of the state."""
    torch_xla.sync()
    state, summary = on_all(agreement, lambda: mesh_summary(captured(), topology.members))
    groups = agree_on_groups(agreement, summary)
    difference = _difference(agreement, on_all(agreement, lambda: _digests(state, whole=True)), topology, groups)

    def refuse() -> None:
        if difference is not None:
            raise RanksDisagree(str(difference))

    decided_by_rank0(agreement, refuse)


def _difference(
    agreement: Agreement, own: _Digests, topology: Topology, groups: Sequence[MeshGroup] | None
) -> _Difference | None:
    """Return, on rank 0, two ranks of one group whose digests differ; None if there are none. Collective."""
    group = _group_of(topology, groups)
    summary = [
        [f"{group} {part}", sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]]
        for part, digests in own.items()
    ]
    gathered = agreement.gather(summary)
    suspects = agreement.broadcast(_suspects(gathered or []))
    if not suspects:
        return None
    part, *pair = suspects
    digests = own.get(part.partition(" ")[2], {})
    answers = agreement.gather(digests if agreement.rank in pair else None)
    if answers is None:
        return None
    a, b = (answers[rank] or {} for rank in pair)
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return _Difference((pair[0], pair[1]), names)


def _suspects(gathered: Sequence[Any]) -> list[Any]:
    """Return a part of a group, and two ranks that should hold the same of it and do not; nothing if all agree."""
    first: dict[str, tuple[int, str]] = {}
    for rank, summary in enumerate(gathered):
        for part, digest in summary:
            leader, expected = first.setdefault(part, (rank, digest))
            if digest != expected:
                return [part, leader, rank]
    return []


def _group_of(topology: Topology, groups: Sequence[MeshGroup] | None) -> int:
    """Return the first of the ranks that hold the same as this one."""
    if groups is not None:
        return next((group.ranks[0] for group in groups if topology.rank in group.ranks), topology.rank)
    return topology.replicas(topology.coordinates, expert=topology.ep > 1)[0]


def _digests(state: SaveState, *, whole: bool) -> _Digests:
    left = _MOST
    digests: _Digests = {}
    trees: Mapping[str, State] = state.trees()
    for part, tree in trees.items():
        if part == "optimizer" and state.optimizer_kind not in (None, "plain"):
            continue  # ZeRO-1: each rank has shards of its own
        for of_mesh, name, value in _comparable(part, tree, whole):
            pieces = [value] if whole or not isinstance(value, torch.Tensor) else _samples(value)
            nbytes = sum(piece.nbytes for piece in pieces if isinstance(piece, torch.Tensor))
            if whole or nbytes <= left:
                left -= nbytes
                digests.setdefault(of_mesh, {})[name] = _digest(pieces)
    return digests


def _samples(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor if it is small, else its beginning, middle and end; nothing of another class or format."""
    if value.nbytes <= _LARGEST:
        return [value]
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.is_contiguous():
        return []
    flat, size = value.detach().view(-1), _SAMPLE // value.element_size()
    return [flat[start : start + size] for start in (0, flat.numel() // 2, flat.numel() - size)]


def _comparable(part: str, state: State, whole: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield each value that other ranks hold too: the part of a mesh that does, its name, and the value."""
    parts: dict[Any, str | None] = {}
    for path, value in iter_leaves(state.tree):
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (bool, int, float, str)):
                yield "", "/".join(map(str, (part, *path))), value
            continue
        about = state.tensors[path]
        if torch_xla.is_xla(value) and not whole:
            continue
        of_mesh: str | None = ""
        if about.placed is not None:
            key = id(about.placed.layout.mesh), about.placed.layout.placements
            if key not in parts:
                parts[key] = _part_of_mesh(about.placed)
            of_mesh = parts[key]
        if of_mesh is not None:
            yield of_mesh, about.name, value


def _part_of_mesh(placed: Placed) -> str | None:
    """Return what is equal on exactly the ranks that hold the same shard of a DTensor; None if only one rank does."""
    layout = placed.layout
    if layout.replicas == 1:
        return None
    cut = [
        (dim, placement.dim, placement.split, index)
        for dim, (placement, index) in enumerate(zip(layout.placements, placed.coordinate, strict=True))
        if placement is not None
    ]
    mesh = (layout.mesh.shape, layout.mesh.ranks)
    return sha256(repr((mesh, cut)).encode()).hexdigest()[:16]


def _digest(pieces: Sequence[Any]) -> int:
    digest = 0
    for piece in pieces:
        if not isinstance(piece, torch.Tensor):
            digest = crc32(repr(piece).encode(), digest)
        elif piece.numel():
            digest = crc32(byte_view(piece.detach().cpu().contiguous()), digest)
    return digest
