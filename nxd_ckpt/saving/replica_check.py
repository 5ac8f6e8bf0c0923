"""Agreement of a mesh job's ranks, at its first save, on which of them hold the same tensors; a check on request.

Only digests are exchanged: names are sent if something is wrong, and by the leaders of several groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.core.mesh import (
    Layout,
    Mesh,
    MeshGroup,
    MeshPlace,
    OutsideOfGroup,
    RankStructure,
    groups_of,
    leaders_of,
    ravelled,
)
from nxd_ckpt.core.name_patterns import OPTIMIZER, lineage
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import REPLICAS_ALIKE, Claim, unlike
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import RanksDisagree
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS
from nxd_ckpt.formats.state import SaveState
from nxd_ckpt.formats.tensors import form_of, iter_tensors
from nxd_ckpt.live import torch_xla
from nxd_ckpt.live.state_names import is_in
from nxd_ckpt.saving.mesh_plan import mesh_among
from nxd_ckpt.saving.plan import SavePlan
from nxd_ckpt.saving.replicas import differing_names
from nxd_ckpt.saving.save_planner import Planner

_Lines = dict[str, list[Any]]
"""dtype, shape, placements and number of the mesh of each tensor, by name."""


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


def differing_state(
    agreement: Agreement, summary: MeshSummary, plan: SavePlan, topology: Topology, groups: Sequence[MeshGroup] | None
) -> set[str]:
    """Return names of what ranks that share the writing do not all hold, or hold in another form. Collective.

    ``plan`` is this rank's, ``groups`` are those of a mesh job.

    Raises RanksDisagree, on all ranks, if they cannot save it each for itself.
    """
    digests = agreement.gather((plan.replica, plan.common))
    ask = decided_by_rank0(agreement, lambda: unlike(digests or [], topology, leaders_of(groups)))
    if not ask:
        return set()
    lines = _with_parameters(summary.lines, summary.state.optimizer_names or ())
    gathered = agreement.gather(lines if agreement.rank in ask else None) or []
    by_rank = {rank: gathered[rank] or {} for rank in ask if gathered}
    return {*decided_by_rank0(agreement, lambda: _differing_state(by_rank, on_mesh=groups is not None))}


def _differing_state(lines: Mapping[int, _Lines], *, on_mesh: bool) -> list[str]:
    names = names_that_differ(lines)
    if not names:
        _refuse(lines, _MESH_ALIKE if on_mesh else REPLICAS_ALIKE)
    warn_of_own(lines, names)
    return sorted(names)


def _with_parameters(lines: _Lines, parameters: Iterable[str]) -> _Lines:
    """Return the lines, and one without a tensor for each of an optimizer's parameters."""
    return {**lines, **{f"optim/{name}": [] for name in parameters}}


def names_that_differ(by_rank: Mapping[int, _Lines]) -> set[str]:
    """Return names of what two replicas may save each for itself, as they hold other tensors; none if they cannot.

    These are tensors of the model, master weights, the state of parameters, or all of an optimizer. DTensors cannot.
    """
    lines_a, lines_b = by_rank.values()
    names = differing_names(lines_a, lines_b)
    parameters = {name for name, line in lines_a.items() if line == [] == lines_b.get(name)}
    differing = set[str]()
    for name in names:
        if is_in("model", name) or name.endswith(f"/{MASTER_WEIGHTS}"):
            differing.add(name)
        else:
            differing.add(next((above for above in lineage(name) if above in parameters), OPTIMIZER))
    placed = [line for lines in by_rank.values() for name in names if (line := lines.get(name)) and line[2]]
    have_model = {any(is_in("model", name) for name in lines) for lines in by_rank.values()}
    return set() if placed or len(have_model) > 1 else differing


def warn_of_own(ranks: Iterable[int], names: Collection[str]) -> None:
    """Warn of what two replicas do not hold alike."""
    logger.warning(
        "ranks %d and %d count as replicas, and differ in %s. From now on each rank's own are saved, and come back to "
        "the same rank on the same sizes; on others a load refuses them. If they should be equal, synchronise them",
        *ranks,
        first_of(sorted(names)),
    )


def lines_of(plan: SavePlan) -> dict[str, list[Any]]:
    """Return the lines of what this rank and others hold, as a `MeshSummary` has them, from a later save's plan."""
    if plan.mesh is not None:
        layouts = [_placements(layout) for layout in plan.mesh.layouts]
        return {
            each.name: [each.dtype, list(each.shape), layouts[number] if any(layouts[number]) else None, None]
            for each in plan.mesh.tensors
            if (number := each.layout) is not None
        }
    values = () if plan.replicas is None else plan.replicas.values
    parameters = [name for each in values if each.part == "optimizer" for name in each.parameters or ()]
    lines: _Lines = {copy.name: [copy.form[0], list(copy.form[1]), None, None] for copy in plan.copies}
    return _with_parameters(lines, parameters)


def _placements(layout: Layout) -> list[Any]:
    return [split and [split.dim, split.split] for split in layout.placements]


def refuse_lines(by_rank: Mapping[int, _Lines], *, on_mesh: bool) -> None:
    """Raise RanksDisagree with the difference between the lines of two ranks that must hold the same tensors."""
    later = "; or try again: the next save keeps each rank's own" if names_that_differ(by_rank) else ""
    _refuse(by_rank, f"{_MESH_ALIKE if on_mesh else REPLICAS_ALIKE}{later}")


class MeshSummary:
    """Summary of the tensors of one rank's ``state``. Raises UnsupportedState for a DTensor not cut into boxes."""

    def __init__(self, state: SaveState, members: tuple[int, ...] | None = None) -> None:
        self.state: SaveState = state
        self.lines: _Lines = {}
        self._meshes: list[tuple[Mesh, tuple[int, ...]]] = []
        for part in state.trees().values():
            for path, leaf in iter_tensors(part.tree):
                about = part.tensors[path]
                dtype, shape = form_of(leaf)
                line: list[Any] = [dtype, list(shape), None, None]
                if about.placed is not None:
                    layout = about.placed.layout
                    mesh = mesh_among(members, about.name, layout.mesh), about.placed.coordinate
                    if mesh not in self._meshes:
                        self._meshes.append(mesh)
                    line = [dtype, list(about.placed.shape), _placements(layout), self._meshes.index(mesh)]
                self.lines[about.name] = line

    @property
    def summary(self) -> list[Any]:
        """True if there are DTensors, and a RankStructure of all tensors, and one of these alone.

        The first is without plain ones of an optimizer, which ranks of a mesh may hold in another form.
        """
        places = [_place(*mesh) for mesh in self._meshes]
        placed = {name: line for name, line in self.lines.items() if line[2] is not None}
        alike = {name: line for name, line in self.lines.items() if name in placed or not is_in("optimizer", name)}
        digests = [sha256(repr(lines).encode()).hexdigest()[:32] for lines in (alike, placed)]
        return [self.state.is_placed, *(RankStructure(digest, places) for digest in digests)]


def _place(mesh: Mesh, coordinate: tuple[int, ...]) -> MeshPlace:
    digest = sha256(repr((mesh.shape, mesh.ranks)).encode()).hexdigest()[:16]
    place = ravelled(coordinate, mesh.shape)
    return MeshPlace(digest, mesh.names, mesh.shape, place, mesh.ranks if place == 0 else None)


def _answer(summaries: Sequence[Any]) -> dict[str, Any] | None:
    """Return rank 0's conclusion from all summaries: the groups, or the ranks to compare; None for no mesh job."""
    if not any(is_placed for is_placed, *_ in summaries):
        return None
    by_all, by_placed = (
        [RankStructure(digest, [MeshPlace(*mesh) for mesh in meshes]) for digest, meshes in structures]
        for structures in zip(*(structures for _, *structures in summaries), strict=True)
    )
    try:
        try:
            groups = groups_of(by_all)
        except OutsideOfGroup:  # ranks of a mesh hold other plain tensors
            groups = groups_of(by_placed)
    except OutsideOfGroup as outside:
        return {"groups": [], "ask": [rank for rank in (outside.rank, outside.other) if rank is not None]}
    leaders = [group.ranks[0] for group in groups]
    return {"groups": [group.to_json() for group in groups], "ask": leaders if len(leaders) > 1 else []}


def _compare(answer: Mapping[str, Any], lines: Sequence[_Lines | None]) -> None:
    by_rank = {rank: lines[rank] or {} for rank in answer["ask"]}
    if not answer["groups"]:
        _refuse(by_rank, _MESH_ALIKE)
    first_lines: dict[str, tuple[int, list[Any]]] = {}
    for rank, own_lines in by_rank.items():
        for name, line in own_lines.items():
            first, first_line = first_lines.setdefault(name, (rank, line))
            if (line[:2], line[2] is None) != (first_line[:2], first_line[2] is None):
                raise RanksDisagree(
                    f"{name} is {_line_text(first_line)} on rank {first}, and {_line_text(line)} on rank {rank}: "
                    "one name stands for one tensor; build the model alike on all ranks, or give them different names"
                )


_MESH_ALIKE = (
    "all ranks of a mesh must hold the same tensors, placed alike: build model and mesh alike on all of them; one of "
    "several optimizers of a parameter without elements on a rank is needed there, too"
)


def _refuse(by_rank: Mapping[int, _Lines], advice: str) -> None:
    """Raise RanksDisagree with the difference between two ranks that must hold the same tensors."""
    rank, *others = by_rank
    if not others:
        raise RanksDisagree(
            f"rank {rank} holds DTensors on a mesh that other ranks of it do not know, or in another order; {advice}"
        )
    lines_a, lines_b = by_rank.values()
    name, *more = differing_names(lines_a, lines_b) or [""]
    if name:
        texts = [f"{_line_text(lines.get(name))} on rank {rank}" for rank, lines in by_rank.items()]
        also = f"; so differ {first_of(more)}" if more else ""
        raise RanksDisagree(f"{name} is {', and '.join(texts)}{also}; {advice}")
    how = "on different meshes" if [*lines_a] == [*lines_b] else "in another order, as of param groups"
    raise RanksDisagree(f"ranks {rank} and {others[0]} hold the same tensors {how}; {advice}")


def _line_text(line: Sequence[Any] | None) -> str:
    if not line:
        return "not there" if line is None else "a parameter"
    dtype, shape, placements, _ = line
    kind = "a plain tensor" if placements is None else f"a DTensor placed {placements}"
    return f"{kind} of {dtype} {tuple(shape)}"


def refuse_differences(agreement: Agreement, topology: Topology, captured: Callable[[], SaveState]) -> None:
    """Raise RanksDisagree, on all ranks, for two replicas that differ. Collective; reads all of the state."""
    summary = on_all(agreement, lambda: MeshSummary(captured(), topology.members))
    planner = Planner(topology)
    planner.groups = agree_on_groups(agreement, summary)
    own = on_all(agreement, lambda: _digests(planner.plan(summary.state)))
    gathered = agreement.gather({key: crc32(repr(sorted(each.items())).encode()) for key, each in own.items()})
    pairs = [] if gathered is None else _suspects(gathered)
    key, *ranks = agreement.broadcast(pairs) or ["", -1, -1]
    answers = agreement.gather(own.get(key, {}) if agreement.rank in ranks else None)

    def refuse() -> None:
        if answers is not None and key:
            names = sorted(differing_names(*(answers[rank] or {} for rank in ranks)))
            raise RanksDisagree(
                f"ranks {ranks[0]} and {ranks[1]} count as replicas, and differ in {first_of(names)}: a save keeps "
                "each rank's own, and a load on other sizes refuses them. Synchronise them if they should be equal"
            )

    decided_by_rank0(agreement, refuse)


def _digests(plan: SavePlan) -> dict[str, dict[str, int]]:
    """Return digests by claim and name, of all that this rank and others hold."""
    torch_xla.sync(plan.tensors)
    return {} if plan.replicas is None else plan.replicas.digests_of_live()


def _suspects(gathered: Sequence[Mapping[str, int]]) -> list[Any]:
    """Return a claim, the rank that writes, and one whose copies differ; nothing if all agree."""
    for rank, digests in enumerate(gathered):
        for key, digest in digests.items():
            writes = Claim.of(key).writes
            if gathered[writes].get(key) != digest:
                return [key, writes, rank]
    return []
