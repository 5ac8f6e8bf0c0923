"""Plan of one save: the files that this rank writes, and the layout of each, before any byte is copied.

Assignment of files to ranks (source: neuronx_distributed 0.18; notes mark omissions there):

===================  ===============================================================================
of a mesh job        each rank its boxes of model and optimizer, see save.mesh_plan
model, plain files   the first rank of each replica group, whole
model, xser          the replica group shares: tensors balanced by bytes, its first rank writes reference and info; but
                     the first rank alone if replicas hold other tensors
optimizer, ZeRO-1    every rank its own file; with use_zero1_dcp its own files, see `plan_dcp`
optimizer, unsharded the first rank of each replica group, whole (what the converter writes)
optimizer, plain     as the model (upstream never writes ep_rank > 0's in plain files: here it is written), but the
                     first rank alone if replicas hold other tensors, or may do so since the first save
scheduler, user      the master rank (global rank 0)
rank content         every rank its own file
===================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core import names
from nxd_ckpt.core.dcp_names import DcpChunk
from nxd_ckpt.core.manifest import ParameterSpec, Parts
from nxd_ckpt.core.mesh import MeshGroup, MeshRecord
from nxd_ckpt.core.partition import zero1_shape
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.formats import xser
from nxd_ckpt.formats.optimizer_trees import MASTERS, OWN_FORM
from nxd_ckpt.formats.state import ModelState, SaveState, State
from nxd_ckpt.formats.strides import stride_in_content
from nxd_ckpt.formats.tensors import Assembly, Path, form_of, is_tensor, iter_tensors, nbytes_of
from nxd_ckpt.formats.torch_zip_writer import JoinedImage, image_of
from nxd_ckpt.live.dtensor import refuse_sizes
from nxd_ckpt.saving.mesh_plan import Form, MeshPlan
from nxd_ckpt.saving.planned_file import NamedLeaf, NamedTensor, PlannedFile, file_of
from nxd_ckpt.saving.replicas import Replica, Replicas


@dataclass(frozen=True)
class SavePlan:
    """Files that this rank writes into the tag, and its report on them to the others (see core.votes.Vote).

    ``shared`` are its files of model and optimizer, ``objects`` those of scheduler, user content and rank content.
    ``groups`` are those of a mesh job, ``mesh`` describes this rank's own, which it may lead (``leads``). ``copies``
    are the tensors that other ranks hold too, ``writers`` the ranks that write the values of each part for all. A plan
    of several ranks has its ``replicas``, and what is ``staged`` for them and not written.
    """

    shared: tuple[PlannedFile, ...]
    objects: tuple[PlannedFile, ...]
    parts: Parts
    replica: str
    common: tuple[str, ...] = ()
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)
    optimizer_names: tuple[str, ...] | None = None
    left_out: Sequence[str] = ()
    groups: Sequence[MeshGroup] | None = None
    mesh: MeshRecord | None = None
    leads: bool = False
    copies: tuple[Replica, ...] = ()
    writers: Mapping[str, int] = field(default_factory=dict)
    replicas: Replicas | None = None
    staged: PlannedFile | None = None

    @cached_property
    def files(self) -> tuple[PlannedFile, ...]:
        return self.shared + self.objects

    @cached_property
    def staged_files(self) -> tuple[PlannedFile, ...]:
        """The files, and last, if there is any, what is staged and not written."""
        return self.files if self.staged is None else (*self.files, self.staged)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """All live tensors of the state, also those that another rank writes."""
        own = () if self.replicas is None else self.replicas.tensors.values()
        return (tensor for some in (*own, *(each.image.tensors for each in self.files)) for tensor in some)

    def agreed(self, tag: str, topology: Topology) -> dict[str, Any]:
        """Return the facts that all ranks must agree on for this save.

        A vote's ``plan``. State of single ranks is not in it.
        """
        everywhere = ("model", "optimizer", "use_xser", "lower_precision_weights")
        parts = {name: getattr(self.parts, name) for name in everywhere}
        chosen: dict[str, Any] = {"ignore_keys": list(self.left_out)} if self.left_out else {}
        chosen |= {} if self.groups is None else {"mesh": True}
        return {"tag": tag, "topology": topology.describe(), **parts, **chosen}


def plan_save(
    state: SaveState, topology: Topology, groups: Sequence[MeshGroup] | None = None, alone: Collection[str] = (),
    agreed: Collection[Form] | None = None,
) -> SavePlan:
    """Plan the save of the rank that ``topology`` is seen from. Reads no tensor data.

    The leaves of the state may be live tensors, or stubs of saved ones (TensorStub, Assembly). ``groups`` are those of
    a mesh job, whose ranks ``agreed`` on these tensors. Of the parts ``alone`` one replica writes all that others may
    hold in another form.

    Raises:
        InvalidArgument: ``partitions`` names a parameter that the model does not have, or an impossible partition.
        UnsupportedState: DTensors in a form that no mesh job holds.
    """
    if groups is not None or state.is_placed:
        return _plan_mesh(state, topology, groups, () if "model" in alone else agreed)
    parts = state.parts(state.has_master_weights())
    if parts.lower_precision_weights and not state.lower_precision_weights and topology.rank == 0:
        why = state.needs_all_weights(parts.master_weights)
        logger.warning("avoid_saving_lower_precision_weights=True has no effect, all weights are saved: %s", why)
    files: list[PlannedFile] = []
    copies: list[Replica] = []
    writers = {"scheduler": 0}
    group = topology.replicas(topology.coordinates, expert=topology.ep > 1)
    # Of a file that one rank writes, the others save for themselves what they hold in another form.
    shares = {"model", "optimizer"}.difference(alone) if state.use_xser else set()
    if state.optimizer_kind not in (None, "plain"):
        shares.discard("optimizer")
    if state.model is not None:
        skipped = set() if parts.lower_precision_weights else _covered(state)
        key = names.model_file(topology, topology.coordinates)
        files, copies = _plan_part("model", key, state, group, topology, skipped, alone="model" in alone)
        writers["model"] = group[0]
    if state.optimizer is not None and state.optimizer_kind == "zero1_dcp":
        files += plan_dcp(state.optimizer, state.optimizer_names, topology)
        writers["optimizer"] = topology.rank_of(Coordinates(topology.pp_rank))
        copies += _numbers("optimizer", state.optimizer, writers["optimizer"])
    elif state.optimizer is not None:
        kind = state.optimizer_kind or "plain"
        key = names.optimizer_file(topology, topology.coordinates, kind)
        owners = [topology.rank] if kind == "zero1" else group
        its_files, its_copies = _plan_part("optimizer", key, state, owners, topology, alone="optimizer" in alone)
        files += its_files
        copies += its_copies
        if kind == "plain":
            writers["optimizer"] = group[0]
    leads = topology.rank == group[0] and topology.tp_rank == 0
    shared = {part: own for part, own in state.trees().items() if part in shares}
    return SavePlan(
        shared=tuple(files),
        objects=plan_objects(state, topology),
        parts=parts,
        replica="".join(own.forms for own in shared.values()),
        common=tuple(_common(shared, topology)),
        parameters=state.model.parameters if leads and state.model is not None else {},
        optimizer_names=state.optimizer_names if leads else None,
        left_out=state.left_out,
        copies=tuple(_with_places(copies, files)),
        writers=writers,
    )


def _plan_part(
    part: str,
    key: str,
    state: SaveState,
    owners: list[int],
    topology: Topology,
    skipped: Collection[str] = (),
    *,
    alone: bool,
) -> tuple[list[PlannedFile], list[Replica]]:
    """Return this rank's files of a part that the ranks ``owners`` hold, and what they hold in common."""
    own = state.trees()[part]
    use_xser = state.use_xser
    group = owners
    if alone:
        group = owners[:1]
    if alone and topology.ep > 1:
        described = {path: about._replace(expert=False) for path, about in own.tensors.items()}
        own = replace(own, describe=lambda: described)  # each ep rank's file has all that is in it
    is_common = part == "model" or state.optimizer_kind in (None, "plain")
    writes = _owners(own, use_xser, group, topology, skipped, is_common and topology.ep_rank > 0)
    copies = list(_copies(part, own, writes, owners, topology))
    if use_xser and is_common:
        copies += _of_all_experts(part, own, topology, skipped)
    return _shared_files(part, key, own, use_xser, group, topology, writes), copies


def _with_places(copies: Iterable[Replica], files: Sequence[PlannedFile]) -> Iterator[Replica]:
    """Yield the copies with their places in the files that this rank writes."""
    places = {
        (planned.part, tensor.name): (number, tensor.storage)
        for number, planned in enumerate(files)
        for tensor in planned.tensors
    }
    return (copy._replace(place=places.get((copy.part, copy.name))) for copy in copies)


def _copies(
    part: str, state: State, owners: Mapping[int, int], group: Sequence[int], topology: Topology
) -> Iterator[Replica]:
    """Yield the tensors of a part that all ranks of the ``group`` hold; ``owners`` write them, by number.

    Of those that the first one, which writes them, gives to the others anyway, each rank's counts as its own.
    """
    ranks = tuple(rank if topology.members is None else topology.members[rank] for rank in group)
    for number, (path, leaf) in enumerate(iter_tensors(state.tree) if len(group) > 1 else ()):
        if number in owners:
            is_broadcast = owners[number] == group[0] and state.tensors[path].broadcast_ranks == ranks
            writes, what = (topology.rank, "broadcast") if is_broadcast else (owners[number], part)
            yield Replica.of(part, number, state.tensors[path].name, leaf, writes, what)


def _of_all_experts(part: str, state: State, topology: Topology, skipped: Collection[str]) -> Iterator[Replica]:
    """Yield the tensors of a part in xser files that all ep ranks hold, and ranks with ep_rank 0 write."""
    if topology.ep == 1:
        return
    first = Coordinates(topology.pp_rank, tp_rank=topology.tp_rank)
    owners = _owners(state, True, topology.replicas(first, expert=True), topology, skipped, False)
    experts = _experts(state, topology)
    for number, (path, leaf) in enumerate(iter_tensors(state.tree)):
        compares = topology.ep_rank > 0 or owners.get(number) == topology.rank  # the others compare more anyway
        if number in owners and number not in experts and compares:
            yield Replica.of(part, number, state.tensors[path].name, leaf, owners[number], f"{part} of all ep ranks")


def _common(shared: Mapping[str, State], topology: Topology) -> Iterator[str]:
    """Yield a digest for each part of what this ep rank refers to in the files of the first one, by number."""
    for part, state in shared.items() if topology.ep > 1 else ():
        experts = _experts(state, topology)
        leaves = enumerate(iter_tensors(state.tree))
        forms = [(tid, state.tensors[path].name, form_of(leaf)) for tid, (path, leaf) in leaves if tid not in experts]
        if forms:
            yield f"{part} {sha256(repr(forms).encode()).hexdigest()[:32]}"


def _numbers(part: str, state: State, writes: int) -> Iterator[Replica]:
    """Yield the tensors of one number in a torch DCP directory, of which it has one for all ranks of a stage."""
    for number, (path, leaf) in enumerate(iter_tensors(state.tree)):
        if not form_of(leaf)[1]:
            yield Replica.of(part, number, state.tensors[path].name, leaf, writes, part)


def _plan_mesh(
    state: SaveState, topology: Topology, groups: Sequence[MeshGroup] | None, agreed: Collection[Form] | None
) -> SavePlan:
    groups = groups or [MeshGroup(tuple(range(topology.world_size)))]
    refuse_on_mesh(state, topology)
    whole = {} if state.optimizer is None else state.optimizer.tree.get("state", {})
    if len(groups) > 1 and any(isinstance(key, str) and key.endswith(OWN_FORM) for key in whole):
        raise UnsupportedState(
            "optimizer: its state_dict() has a form of its own, or that of an object has DTensors, and pipeline stages "
            "hold other tensors: a tag would have the first stage's. Pass each stage's by a name of its own, "
            "state={'stage_1': ...}"
        )
    group = next(group for group in groups if topology.rank in group.ranks)
    plan = MeshPlan(state.trees(), group, topology.rank, topology.members, agreed)
    files = list(plan.files())
    return SavePlan(
        shared=tuple(files),
        objects=plan_objects(state, topology),
        parts=state.parts(state.has_master_weights()),
        replica=plan.digest,
        parameters=state.model.parameters if plan.leads and state.model is not None else {},
        optimizer_names=state.optimizer_names if plan.leads else None,
        left_out=state.left_out,
        groups=groups,
        mesh=plan.record,
        leads=plan.leads,
        copies=tuple(_with_places(plan.copies(), files)),
        writers=dict.fromkeys(state.trees(), group.ranks[0]) | {"scheduler": 0},
    )


def refuse_on_mesh(state: SaveState, topology: Topology) -> None:
    """Raise UnsupportedState for settings that a mesh job cannot have.

    Sizes of neuronx_distributed, forms of its files.
    """
    refuse_sizes(topology)
    if state.use_xser or state.optimizer_kind not in (None, "plain") or not state.lower_precision_weights:
        raise UnsupportedState(
            "DTensors are not saved in the files of neuronx_distributed: leave out use_xser, zero1_optimizer, "
            "use_zero1_dcp and avoid_saving_lower_precision_weights"
        )


def _shared_files(
    part: str,
    key: str,
    state: State,
    use_xser: bool,
    group: list[int],
    topology: Topology,
    owners: Mapping[int, int],
) -> list[PlannedFile]:
    """Return this rank's files of a part whose writing the ranks in ``group`` share, as ``owners`` of tensors."""
    tree = xser.normalise(state.tree)
    if not use_xser:
        if topology.rank != group[0]:
            return []
        leaves = list(iter_tensors(tree))
        return [replace(_planned(key, tree, state, topology, leaves), part=part, contents=xser.normalise)]
    references, tensors = xser.split(tree)
    leaves = list(iter_tensors(tree))
    experts = _experts(state, topology)
    mine = [tid for tid, owner in owners.items() if owner == topology.rank]
    files = [_planned(names.tensor_file(key, tid), leaves[tid][1], state, topology, [leaves[tid]]) for tid in mine]
    if topology.rank == group[0]:
        info = xser.info(tensors, experts)
        files.append(PlannedFile(key, image_of(references, records=True), contents=xser.references_of))
        files.append(PlannedFile(names.info_file(key), image_of(info, records=True)))
    return [replace(planned, part=part) for planned in files]


def _experts(state: State, topology: Topology) -> set[int]:
    """Return the numbers of the tensors of a part of which each ep rank has its own."""
    leaves = list(iter_tensors(state.tree))
    experts = {tid for tid, (path, _) in enumerate(leaves) if state.tensors[path].expert}
    # Without any, in a dict of plain tensors, or after attributes were dropped by a device move, any tensor may be an
    # expert's. Writing one too often costs space, leaving one out would lose it.
    return experts if experts or topology.ep == 1 else set(range(len(leaves)))


def _owners(
    state: State,
    use_xser: bool,
    group: list[int],
    topology: Topology,
    skipped: Collection[str],
    experts_only: bool,
) -> dict[int, int]:
    """Return the rank of the ``group`` that writes each tensor of a part, by its number.

    ``skipped`` names tensors that are referred to but not written. ``experts_only`` does the same for all but expert
    tensors: the others are equal on all ep ranks, and NxD keeps them in ep_rank_00's folder (xser only).
    """
    leaves = list(iter_tensors(state.tree))
    if not use_xser:
        return dict.fromkeys(range(len(leaves)), group[0])
    experts = _experts(state, topology)
    share = [
        tid
        for tid, (path, _) in enumerate(leaves)
        if (tid in experts or not experts_only) and state.tensors[path].name not in skipped
    ]
    owners = xser.balance([nbytes_of(*form_of(leaves[tid][1])) for tid in share], len(group))
    return {tid: group[owner] for tid, owner in zip(share, owners, strict=True)}


def _planned(
    key: str, tree: Any, state: State, topology: Topology, leaves: list[tuple[tuple[Any, ...], Any]]
) -> PlannedFile:
    named = []
    for path, tensor in leaves:
        about = state.tensors[path]
        partition = None
        if about.spec is not None and about.shards == 1 and about.name.startswith("model/"):
            partition = about.spec.partition
        replicated = partition is not None and partition.known and partition.replicated_over_tp
        tie = id(tensor) if about.tie is None else about.tie
        named.append(NamedLeaf(tensor, tie, about.name, about.pieces(topology, form_of(tensor)[1]), replicated))
    return file_of(key, tree, named, records=not is_tensor(tree))


def plan_objects(state: SaveState, topology: Topology) -> tuple[PlannedFile, ...]:
    """Plan scheduler, user content and rank content: pickled now, so that later changes do not affect them."""
    objects: list[tuple[str, Any]] = []
    if topology.rank == 0:
        objects += [(names.SCHEDULER, state.scheduler), (names.USER_CONTENT, state.user_content)]
    objects.append((names.rank_content_file(topology.rank), state.rank_content))
    return tuple(
        PlannedFile(key, image_of(value, stride_of=stride_in_content, records=True))
        for key, value in objects
        if value is not None
    )


def _covered(state: SaveState) -> set[str]:
    """Return the names of model tensors that the optimizer's master weights replace."""
    if state.model is None or state.optimizer is None:
        return set()
    return {f"model/{name}" for name in _with_ties(state.model, set(state.optimizer.master_weight_entries()))}


def _with_ties(model: ModelState, parameters: set[str]) -> set[str]:
    """Add tied names: tied parameters are one in the optimizer, and its master weights replace all of them."""
    ties = {about.name.removeprefix("model/"): about.tie for about in model.tensors.values() if about.tie is not None}
    covered = {ties[name] for name in parameters if name in ties}
    return parameters | {name for name, tie in ties.items() if tie in covered}


_BASE_STATE = "base_state"
_SHAPES = "shape_info"
_LEAVE_OUT = "leave use_zero1_dcp out: the plain files load on every rank"


def plan_dcp(state: State, parameters: Sequence[str] | None, topology: Topology) -> list[PlannedFile]:
    """Plan this rank's files of a ZeRO-1 optimizer in the form of NxD's ``use_zero1_dcp`` (layouts.zero1_dcp).

    ``parameters`` are the names by index. A tensor that is cut over data-parallel ranks is a chunk on each: in a file
    of its own, without the padding rows, which torch DCP does not support; a rank that holds only padding of it has
    none. State that all ranks have in common, values and tensors without dimensions, is written once by the first rank
    of each pipeline stage, the values in one file. Names are upstream's, which omits param groups and shapes of all
    stages but one. Here those of the later stages are stored beside them, with the suffix of their stage.

    Raises:
        UnsupportedState: unknown names or shapes, experts that are cut over other ranks, or an entry that is not cut
            like its parameter.
    """
    if topology.ep > 1:
        raise UnsupportedState(f"use_zero1_dcp=True with expert parallelism ({topology.describe()}): {_LEAVE_OUT}")
    if parameters is None or _SHAPES not in state.tree:
        missing = "the parameters' names are" if parameters is None else f"its {_SHAPES!r} is"
        raise UnsupportedState(
            f"use_zero1_dcp=True keeps the optimizer by name and shape of its parameters, but {missing} not known; "
            f"pass the live model, or param_names=, with a ZeRO-1 optimizer's state; or {_LEAVE_OUT}"
        )
    plan = _Plan(state, _Names(tuple(parameters), topology))
    values = [plan.values()] if topology.dp_rank == topology.tp_rank == 0 else []
    return [*values, *plan.tensors()]


class _Leaf(NamedTuple):
    """A leaf of the state dict: its path there and in DCP, and its ``position`` among all."""

    position: int
    path: Path
    at: tuple[str | int, ...]
    value: Any


@dataclass(frozen=True)
class _Names:
    """DCP's names of the leaves of a state dict. Holds no tensor, so that plans can be cached."""

    parameters: tuple[str, ...]
    topology: Topology

    def entries(self, tree: dict[str, Any]) -> list[_Leaf]:
        """Return all leaves."""
        leaves = _leaves((), xser.normalise(tree))
        return [_Leaf(position, path, self._at(path), value) for position, (path, value) in enumerate(leaves)]

    def values(self, tree: dict[str, Any]) -> list[Any]:
        """Return the leaves that are no tensors."""
        return [entry.value for entry in self.entries(tree) if not is_tensor(entry.value)]

    def of_shard(self, at: tuple[str | int, ...]) -> tuple[str | int, ...]:
        """Return the path of a tensor that differs between stages and tensor-parallel ranks."""
        stage = f"|pp-{self.topology.pp_rank:04d}" if self.topology.pp > 1 else ""
        part = f"|tp-{self.topology.tp_rank:04d}" if self.topology.tp > 1 else ""
        return (*at[:-1], f"{at[-1]}{stage}{part}")

    def _at(self, path: Path) -> tuple[str | int, ...]:
        section, *rest = path
        if section in (_BASE_STATE, MASTERS):
            index, *entry = rest
            if type(index) is not int or not 0 <= index < len(self.parameters):
                raise UnsupportedState(f"optimizer: {section!r} has {index!r}, which is no parameter's; {_LEAVE_OUT}")
            return (section, self.parameters[index], *map(_key, entry))
        at = (section, *map(_key, rest))
        later = self.topology.pp_rank > 0
        return (*at[:-1], f"{at[-1]}|pp-{self.topology.pp_rank:04d}") if later else at


class _Plan:
    def __init__(self, state: State, called: _Names) -> None:
        self._state = state
        self._called = called
        self._topology = called.topology
        self._shapes = state.tree[_SHAPES]
        self._entries = called.entries(state.tree)

    def values(self) -> PlannedFile:
        """Return the file of everything that is no tensor."""
        entries = [entry for entry in self._entries if not is_tensor(entry.value)]
        file = names.dcp_file(self._topology.rank, 0)
        return PlannedFile(
            file,
            JoinedImage.of(entry.value for entry in entries),
            part="optimizer",
            contents=self._called.values,
            chunks=tuple((entry.position, DcpChunk(entry.at, file=_base(file))) for entry in entries),
        )

    def tensors(self) -> Iterator[PlannedFile]:
        """Yield a file for each tensor that this rank writes."""
        number = 0
        for entry in self._entries:
            chunk = self._chunk(entry) if is_tensor(entry.value) else None
            if chunk is not None:
                number += 1
                yield self._file(entry, chunk, names.dcp_file(self._topology.rank, number))

    def _file(self, entry: _Leaf, chunk: DcpChunk, file: str) -> PlannedFile:
        about, (dtype, shape) = self._state.tensors[entry.path], form_of(entry.value)
        image = image_of(Assembly(dtype, chunk.size, ())).holding([entry.value])
        tensor = NamedTensor(about.name, 0, dtype, chunk.size, about.pieces(self._topology, shape))
        chunks = ((entry.position, chunk._replace(file=_base(file))),)
        return PlannedFile(file, image, (tensor,), "optimizer", chunks=chunks)

    def _chunk(self, entry: _Leaf) -> DcpChunk | None:
        """Return this rank's chunk of a tensor; None if it writes none."""
        topology, (dtype, shape) = self._topology, form_of(entry.value)
        if not shape:
            leads = topology.dp_rank == topology.tp_rank == 0
            return DcpChunk(entry.at, dtype) if leads else None
        whole = self._whole(entry, shape)
        start = min(topology.dp_rank * shape[0], whole[0])
        rows = min(shape[0], whole[0] - start)
        if rows == 0 and topology.dp_rank > 0:
            return None
        zeros = (0,) * (len(shape) - 1)
        return DcpChunk(self._called.of_shard(entry.at), dtype, whole, (start, *zeros), (rows, *shape[1:]))

    def _whole(self, entry: _Leaf, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor that this one is a shard of."""
        section, index = entry.path[:2]
        whole = tuple(self._shapes.get(index, ())) if section in (_BASE_STATE, MASTERS) else ()
        expected = zero1_shape(whole, self._topology.dp) if whole else None
        if shape != expected:
            raise UnsupportedState(
                f"optimizer: {'.'.join(map(str, entry.at))} has shape {shape}, expected {expected}, the ZeRO-1 shard "
                f"of a parameter of shape {whole}; use_zero1_dcp=True can keep nothing else. Instead, {_LEAVE_OUT}"
            )
        return whole


class _InList(int):
    """An index in a list, which DCP stores as a number; keys of dicts become text."""


def _key(key: Any) -> str | int:
    return int(key) if isinstance(key, _InList) else str(key)


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield DCP's entries: tensors, and values down to lists that hold only plain values."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves((*path, key), child)
    elif isinstance(value, list) and any(isinstance(child, (dict, list)) or is_tensor(child) for child in value):
        for number, child in enumerate(value):
            yield from _leaves((*path, _InList(number)), child)
    else:
        yield path, value


def _base(file: str) -> str:
    return file.rpartition("/")[2]
