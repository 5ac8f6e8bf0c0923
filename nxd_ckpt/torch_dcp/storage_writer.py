"""Storage writer of torch.distributed.checkpoint (DCP) for tags: DTensor, FSDP2, plain tensors.

Users import it from ``nxd_ckpt.adapters.dcp``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nxd_ckpt.commit.session import open_session
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.at_exit import ToldFuture
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.core.arguments import plain_value
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.dcp_names import DcpItem, DcpNames, DcpPart, names_of
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.retention_rules import GivenMetrics, NumKept, Retain, recorded_metrics, rules_of
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import Tag, validate_tag
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.units import Seconds
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    CheckpointError,
    InvalidArgument,
    MalformedFile,
    SaveFailed,
    UnsupportedState,
    as_checkpoint_errors,
)
from nxd_ckpt.formats.assembly import box_of
from nxd_ckpt.formats.crc32 import digest_of_value
from nxd_ckpt.formats.memory import byte_view
from nxd_ckpt.formats.stored_tensors import read_tensor
from nxd_ckpt.formats.tensors import dtype_name, form_of
from nxd_ckpt.formats.torch_zip import read_tree
from nxd_ckpt.live.dtensor import PLAIN
from nxd_ckpt.live.parameters import refuse_unsupported
from nxd_ckpt.output.locations import location_of
from nxd_ckpt.saving.replicas import compared_parts
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.system import require_locks
from nxd_ckpt.storage.urls import StorageOptions, StrPath, join, open_storage
from nxd_ckpt.torch_dcp.dcp_save import CollectedState, DcpSave, StagedChunk, WrittenTensor, contents_of


def read_value(data: bytes, name: str, trust_pickle: bool) -> Any:
    """Return the value in bytes of ``torch.save``.

    Raises UnsafePickle for more than plain data, UnsupportedState for other bytes.
    """
    memory = memoryview(data)

    def pread(offset: int, nbytes: int) -> bytes:
        return bytes(memory[offset : offset + nbytes])

    def pread_into(offset: int, out: memoryview) -> None:
        out[:] = memory[offset : offset + len(out)]

    try:
        return read_tree(pread, len(data), name, trust_pickle=trust_pickle, leaf=partial(read_tensor, pread_into))
    except MalformedFile as error:
        raise UnsupportedState(f"{name}: the planner returned bytes that are no torch.save file: {error}") from error


def collected(metadata: Metadata, results: Sequence[Sequence[WriteResult]], trust_pickle: bool) -> CollectedState:
    """Return the tensors that all ranks wrote, and the values that they sent.

    Raises SaveFailed unless they are all parts in the metadata.
    """
    ranks: dict[str, set[int]] = {}
    parts: dict[str, dict[tuple[int, ...], Any]] = {}
    for rank, own in enumerate(results):
        for result in own:
            if isinstance(result.storage_data, Vote):
                continue
            if result.size_in_bytes:
                ranks.setdefault(result.index.fqn, set()).add(rank)
            parts.setdefault(result.index.fqn, {})[tuple(result.index.offset or ())] = result.storage_data
    written: dict[str, WrittenTensor] = {}
    values: dict[str, Any] = {}
    for name, about in metadata.state_dict_metadata.items():
        own_parts = parts.get(name, {})
        tensor = about if isinstance(about, TensorStorageMetadata) else None
        expected = {()} if tensor is None else {tuple(chunk.offsets) for chunk in tensor.chunks}
        if own_parts.keys() != expected:
            raise SaveFailed(f"{name}: {len(own_parts)} of its {len(expected)} parts were written")
        if tensor is None:
            values[name] = read_value(own_parts[()], name, trust_pickle)
        elif None in own_parts.values():
            dtype = dtype_name(tensor.properties.dtype)
            shape = tuple(tensor.size)
            written[name] = WrittenTensor(dtype, shape, tuple(sorted(ranks.get(name, ()))))
        else:
            values[name] = _assembled(tensor, own_parts, name)
    paths = metadata.planner_data or {}
    all_paths = {name: tuple(paths.get(name, (name,))) for name in metadata.state_dict_metadata}
    return CollectedState(written, values, all_paths)


def _assembled(about: TensorStorageMetadata, parts: Mapping[tuple[int, ...], bytes], name: str) -> torch.Tensor:
    whole = torch.empty(about.size, dtype=about.properties.dtype)
    for offset, data in parts.items():
        part = read_value(data, name, False)
        box_of(whole, Box(offset, tuple(part.shape))).copy_(part)
    return whole


DEFAULT_TIMEOUT = 600.0
"""Seconds without progress after which a rank counts as lost, like a Checkpointer's default."""

_COLLECTED = 64 * 2**20
"""Bytes of tensors outside of model and optimizer that a rank may send to rank 0."""


class StorageWriter(TorchStorageWriter):
    """A writer of tags for ``torch.distributed.checkpoint.save(state_dict, storage_writer=...)`` and ``async_save``.

        save({"model": model_state, "optim": optim_state}, storage_writer=StorageWriter("run", "step_1"))

    The tag is complete or invisible, its bytes are digested and synced, and `StorageReader`, ``load_checkpoint`` and
    the commands read it. Each rank writes its part of DCP's plan. If one rank fails, DCP raises the error on all ranks,
    and nothing becomes visible. All ranks of the job save, or with ``no_dist=True`` one alone; also from threads and
    processes of ``async_save``.

    The state dict has the tag's model under ``model_key`` and its optimizer under ``optim_key``, in the form of torch's
    ``get_model_state_dict`` and ``get_optimizer_state_dict``; all other entries are user content.

    Args:
        directory: the checkpoint directory or URL; ``save(checkpoint_id=)``, the path of a tag, replaces both.
        tag: the tag's name.
        model_key, optim_key: the keys of model and optimizer in the state dict; "" for the state dict itself. None for
            both derives them from each state dict, like nxd_ckpt.dcp.
        num_kept_ckpts: complete tags to keep; None or -1 keeps all.
        retain: rules for the complete tags to keep, like those of ``save_checkpoint``; ``num_kept_ckpts`` adds a rule.
        metrics: numbers by name that the tag keeps for the rule ``Best``; set ``metrics`` before each further save of
            the same writer. Rank 0's values are used.
        overwrite: True if a complete tag of this name may be replaced. None allows it on file systems, where the old
            tag stays until its successor is complete, but not on object stores.
        durable: True to fsync everything before the tag becomes visible.
        timeout: seconds without progress after which a rank counts as lost.
        trust_pickle: True to allow values that only an unsafe load can read.
        storage_options: storage options of a URL.
        storage: an open storage to use instead of ``directory``.
    """

    @takes()
    def __init__(
        self,
        directory: StrPath | None = None,
        tag: Tag | None = None,
        *,
        model_key: str | None = "model",
        optim_key: str | None = "optim",
        num_kept_ckpts: NumKept = None,
        retain: Retain = None,
        metrics: GivenMetrics = None,
        overwrite: bool | None = None,
        durable: bool = True,
        timeout: Seconds = DEFAULT_TIMEOUT,
        trust_pickle: bool = False,
        storage_options: StorageOptions | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__()
        self._directory = directory
        self._tag = tag
        if (model_key is None) != (optim_key is None):
            raise InvalidArgument("model_key and optim_key: give both, or None for both")
        self._names = None if model_key is None or optim_key is None else DcpNames(model_key, optim_key)
        self.members: tuple[int, ...] | None = None
        """The ranks of the job that save, where that is not all of them: those of ``process_group``."""
        self.refusal: Exception | None = None
        """Why this rank cannot save, which torch raises on all ranks in place of saving."""
        self._rules = rules_of(num_kept_ckpts, retain)
        self.metrics = metrics
        self._overwrite = overwrite
        self._timeout = timeout
        self._trust = trust_pickle
        self._durable = durable
        self._options = storage_options
        self._storage = storage
        self._is_coordinator = True
        self._world_size = 1
        self._in_use = self._names or DcpNames()

    @property
    def checkpoint_id(self) -> str:
        """Path or URL of the tag, for logs."""
        return join(os.fspath(self._directory or ""), str(self._tag))

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin another save; with ``checkpoint_id``, of the tag with this path or URL."""
        if checkpoint_id:
            place = location_of(checkpoint_id, "tag", self._options)
            self._directory = place.directory
            self._tag = place.name

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Record whether this process is the coordinator.

        Raises InvalidArgument for ``use_collectives=False``, since without collectives ranks cannot coordinate.
        """
        if self.refusal is not None:
            raise self.refusal
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument(
                "use_collectives=False lets each rank plan for itself, so replicas would be written several times; "
                "leave it out, or save with no_dist=True from one rank"
            )
        self._is_coordinator = is_coordinator
        self._world_size = 1

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, with the keys of model and optimizer that rank 0 derived from them.

        Raises InvalidArgument for some, but not all, of the job's ranks, since torch does not say which ones.
        """
        self._world_size = len(plans)
        job = len(self._members() or ()) or _job_size()
        if self._world_size not in (1, job):
            raise InvalidArgument(
                f"{self._world_size} of {job} ranks save, but a tag must be saved by all ranks of the job, or by one "
                "with no_dist=True; leave out process_group=, or call nxd_ckpt.dcp.save, which supports it"
            )
        if self._names is not None:
            return plans
        names = names_of(_items(plans), _COLLECTED)
        return [replace(plan, storage_data=names) for plan in plans]

    @as_checkpoint_errors
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of the plan; all are written when this returns.

        Raises:
            DirectoryInUse, DirectoryNotShared, SaveFailed: the directory may not be written.
            UnsafePickle, UnsupportedState: a tag cannot hold a value.
            PeerTimeout: another rank was lost.
        """
        require_locks()
        self._recorded = recorded_metrics(plain_value(GivenMetrics, self.metrics, "metrics"))
        topology, agreement = self._meet()
        storage = self._storage or open_storage(self._required_directory(), self._durable, self._options)
        if topology.rank == 0:
            _end_abandoned(storage.url)
        tag = validate_tag(self._tag)
        session = open_session(storage, topology, agreement, None, self._timeout)
        save = DcpSave(session, tag, self._overwrite)
        try:
            names = decided_by_rank0(agreement, lambda: self._begin(save, plan))
            self._in_use = DcpNames.from_json(names.encode(), self.checkpoint_id)
            values = self._values(agreement, plan, planner)
            results = on_all(agreement, lambda: self._write(save, plan, planner, values))
        except BaseException:
            if topology.rank == 0:
                save.discard()
            save.close()
            raise
        if topology.rank == 0:
            _unfinished[storage.url] = save
            self._saved_to = storage.url
        else:
            save.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @as_checkpoint_errors
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the tag on rank 0, and make it visible.

        Raises:
            SaveFailed, DirectoryInUse: the tag cannot be completed; visible tags are unchanged.
            OutcomeUnknown: the store does not confirm whether the tag is visible.
        """
        save = _unfinished.pop(self._saved_to)
        try:
            state = collected(metadata, results, self._trust)
            reports = (result.storage_data for own in results for result in own)
            votes = [report for report in reports if isinstance(report, Vote)]
            save.complete(contents_of(state, self._in_use), votes, self._rules, self._recorded)
        finally:
            save.discard()
            save.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether it can be the path or URL of a tag."""
        try:
            validate_tag(location_of(checkpoint_id, "tag", None).name)
        except CheckpointError:
            return False
        return True

    def _meet(self) -> tuple[Topology, Agreement]:
        """Return this rank's place among the saving ranks, and their agreement."""
        members = self._members()
        job = len(members or ()) or _job_size()
        if job == 1 or (self._is_coordinator and self._world_size == 1):
            return Topology(), SingleProcessAgreement()
        rank = dist.get_rank()
        topology = Topology(dp=job, rank=rank if members is None else members.index(rank))
        agreement = meet(topology.rank, job, self._timeout, "save", members)
        assert agreement is not None  # there is a process group of this size
        return topology, agreement

    def _members(self) -> tuple[int, ...] | None:
        """None for all ranks of the job; a process that torch starts for async_save has a job of these alone."""
        return None if self.members is None or len(self.members) == _job_size() else self.members

    def _begin(self, save: DcpSave, plan: SavePlan) -> str:
        save.begin()
        names = self._names or plan.storage_data
        if not isinstance(names, DcpNames):  # a planner that loses what is in a plan
            names = names_of(_items([plan]), _COLLECTED)
        return names.to_json().decode()

    def _required_directory(self) -> StrPath:
        if self._directory is None or self._tag is None:
            raise InvalidArgument("StorageWriter needs a directory and a tag, or save(checkpoint_id=)")
        return self._directory

    def _values(self, agreement: Agreement, plan: SavePlan, planner: SavePlanner) -> dict[str, bytes]:
        """Return the values, by name, that no rank before this one has.

        A plan says only which rank writes a value or a plain tensor, and any that has it may be that. Rank 0 warns of
        those that differ. Collective.
        """
        planned = agreement.gather({item.index.fqn: item.type.name for item in plan.items})
        types = agreement.broadcast({name: kind for own in planned or () for name, kind in own.items()})
        names = sorted(name for name, kind in types.items() if kind == WriteItemType.BYTE_IO.name)
        values = on_all(agreement, lambda: dict(_own_values(names, plan, planner)))
        read = on_all(agreement, lambda: {name: read_value(data, name, self._trust) for name, data in values.items()})
        is_shared = agreement.world_size > 1
        tensors = sorted(name for name, kind in types.items() if is_shared and kind == WriteItemType.TENSOR.name)
        own = {name: digest_of_value(value) for name, value in read.items()}
        own |= on_all(agreement, lambda: dict(_tensor_digests(tensors, planner)))
        digests = agreement.gather(own)
        first_ranks = decided_by_rank0(agreement, lambda: self._first_ranks(digests or (), tensors))
        return {name: data for name, data in values.items() if first_ranks[name] == agreement.rank}

    def _first_ranks(self, digests: Sequence[Mapping[str, int]], tensors: Sequence[str]) -> dict[str, int]:
        first: dict[str, tuple[int, int]] = {}
        differing: dict[str, int] = {}
        for rank, own in enumerate(digests):
            for name, digest in own.items():
                if first.setdefault(name, (rank, digest))[1] != digest and name not in _differing:
                    differing.setdefault(name, rank)
        if differing:
            name, rank = next(iter(differing.items()))
            logger.warning(
                "%s: ranks %d and %d have different values of %s. Of each name %s is saved, the others' are lost: give "
                "each rank's its own name in the state dict, such as loader_0, or make them equal",
                self.checkpoint_id,
                first[name][0],
                rank,
                first_of(list(differing)),
                "one rank's" if differing.keys() & {*tensors} else "the first rank's",
            )
            _differing.update(differing)
        return {name: rank for name, (rank, _) in first.items()}

    def _write(
        self, save: DcpSave, plan: SavePlan, planner: SavePlanner, values: Mapping[str, bytes]
    ) -> list[WriteResult]:
        paths = plan.planner_data or {}
        chunks: list[StagedChunk] = []
        results = [WriteResult(MetadataIndex(name), len(value), value) for name, value in values.items()]
        sent = 0
        for item in plan.items:
            name = item.index.fqn
            part = self._in_use.part_of(name, paths.get(name, (name,)), item.type != WriteItemType.BYTE_IO)
            if item.type == WriteItemType.BYTE_IO:
                continue
            if part in (DcpPart.MODEL, DcpPart.STATE):
                chunk = _chunk(self._in_use.tag_name(name, part), item, planner)
                chunks += [chunk] if chunk.box.numel else []
                results.append(WriteResult(item.index, chunk.nbytes, None))
            else:
                sent += _chunk(name, item, planner).nbytes
                _refuse_many_bytes(sent)
                value = _tensor_bytes(item, planner)
                results.append(WriteResult(item.index, len(value), value))
        return [*results, WriteResult(MetadataIndex(""), 0, save.write(chunks))]


def told_at_exit(response: Any) -> Any:
    """Return what torch's ``async_save`` returned, with a future whose failure becomes the exit code if nobody asks."""
    if isinstance(response, futures.Future):
        return ToldFuture(response)
    return replace(response, upload_completion=ToldFuture(response.upload_completion))


_differing: set[str] = set()
"""Names of values that rank 0 has warned of."""

_unfinished: dict[str, DcpSave] = {}
"""Written saves of this process that wait for ``finish``, by directory.

DCP does not report that ``finish`` will never come, because another rank died in between, and every save has a new
writer.
"""


def _end_abandoned(url: str) -> None:
    """End an abandoned save, which would keep the directory."""
    save = _unfinished.get(url)
    if save is not None and save.is_abandoned:
        del _unfinished[url]
        save.discard()
        save.close()


def _job_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _items(plans: Iterable[SavePlan]) -> list[DcpItem]:
    """Return the items of the plans, each name once."""
    items: dict[str, DcpItem] = {}
    for plan in plans:
        paths = plan.planner_data or {}
        for item in plan.items:
            name = item.index.fqn
            data = item.tensor_data
            size = None if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize
            before = items[name].nbytes if name in items else 0
            nbytes = None if size is None else size + (before or 0)
            items[name] = DcpItem(name, tuple(paths.get(name, (name,))), nbytes)
    return list(items.values())


def _chunk(name: str, item: WriteItem, planner: SavePlanner) -> StagedChunk:
    """Return the item's chunk, whose tensor is made when it is read."""
    data = item.tensor_data
    if data is None:
        raise InvalidArgument(f"{item.index.fqn}: the save plan does not say which part of which tensor it is")
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    dtype = data.properties.dtype

    def read() -> torch.Tensor:
        tensor = _tensor(item, planner)
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, box.size):
            raise InvalidArgument(
                f"{item.index.fqn}: planned as {dtype} {box.size}, but the planner returned {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        return tensor

    return StagedChunk(name, dtype_name(dtype), box, read)


def _tensor(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(f"{item.index.fqn}: planned as a tensor, but the planner gives {type(value).__name__}")
    if is_traceable_wrapper_subclass(value):
        raise UnsupportedState(
            f"{item.index.fqn} is a {type(value).__module__}.{type(value).__qualname__}, of whose values only a plain "
            "copy would be saved: save by nxd_ckpt.dcp.save, which saves the tensors that it is made of"
        )
    refuse_unsupported(item.index.fqn, value)
    return value.detach()


def _tensor_bytes(item: WriteItem, planner: SavePlanner) -> bytes:
    written = io.BytesIO()
    torch.save(_tensor(item, planner).cpu().clone(), written)
    return written.getvalue()


def _own_values(names: Iterable[str], plan: SavePlan, planner: SavePlanner) -> Iterator[tuple[str, bytes]]:
    """Yield those values of these names that this rank has, by name."""
    planned = {item.index.fqn: item for item in plan.items if item.type == WriteItemType.BYTE_IO}
    for name in names:
        item = planned.get(name, WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        try:
            yield name, _value_bytes(planner.resolve_data(item))
        except (LookupError, ValueError):
            if name in planned:
                raise


def _tensor_digests(names: Iterable[str], planner: SavePlanner) -> Iterator[tuple[str, int]]:
    """Yield digests of those plain tensors of these names that this rank has; of large ones, of samples."""
    for name in names:
        try:
            value: Any = planner.resolve_data(WriteItem(MetadataIndex(name), WriteItemType.TENSOR))
        except (LookupError, ValueError):
            continue
        if type(value) in PLAIN and value.is_cpu and value.layout is torch.strided:
            refuse_unsupported(name, value)
            parts = [part.detach().contiguous() for part in compared_parts(value, value.nbytes)]
            yield name, digest_of_value([*form_of(value), *map(bytes, map(byte_view, parts))])


def _value_bytes(data: Any) -> bytes:
    if not isinstance(data, io.BytesIO):
        raise InvalidArgument(f"planned as bytes, but the planner returned {type(data).__name__}")
    return data.getvalue()


def _refuse_many_bytes(nbytes: int) -> None:
    if nbytes > _COLLECTED:
        raise UnsupportedState(
            f"{nbytes} bytes of tensors are under neither model_key nor optim_key, at most {_COLLECTED} are allowed, "
            "since rank 0 writes them; pass the keys, or save these tensors as the model of another tag"
        )
