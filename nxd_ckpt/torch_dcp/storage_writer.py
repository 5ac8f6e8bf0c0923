"""Tags that torch.distributed.checkpoint (DCP) writes: DTensor, FSDP2, plain tensors.

Users import it from ``nxd_ckpt.adapters.dcp``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nxd_ckpt.commit.session import open_session
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.meeting import meet
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.dcp_keys import DcpItem, names_of
from nxd_ckpt.core.dcp_names import DcpNames, DcpPart
from nxd_ckpt.core.retention import Rule, recorded_metrics, rules_of
from nxd_ckpt.core.tags import validate_tag
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import CheckpointError, InvalidArgument, UnsupportedState, as_checkpoint_errors
from nxd_ckpt.formats.tensors import dtype_name
from nxd_ckpt.output.locations import location_of
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.system import require_locks
from nxd_ckpt.storage.urls import StorageOptions, StrPath, join, open_storage
from nxd_ckpt.torch_dcp.collected_save import Chunk, CollectedSave, Share
from nxd_ckpt.torch_dcp.dcp_contents import contents_of
from nxd_ckpt.torch_dcp.results import collected, read_value

DEFAULT_TIMEOUT = 600.0
"""As a Checkpointer's."""

_COLLECTED = 64 * 2**20
"""Bytes of tensors of neither model nor optimizer that a rank may bring to rank 0."""


class StorageWriter(TorchStorageWriter):
    """Writes a tag for ``torch.distributed.checkpoint.save(state_dict, storage_writer=...)`` and ``async_save``.

    ::

        save({"model": model_state, "optim": optim_state}, storage_writer=StorageWriter("run", "step_1"))

    The tag is complete or invisible, its bytes are digested and synced, and :class:`StorageReader`, ``load_checkpoint``
    and the commands read it. Each rank writes what DCP's plan gives it. What fails on one rank, DCP raises on all, and
    nothing became visible. Saves from all ranks of the job, or with ``no_dist=True`` from one alone; from threads and
    processes of ``async_save`` too.

    What the state dict holds under ``model_key`` is the tag's model, under ``optim_key`` its optimizer, as torch's
    ``get_model_state_dict`` and ``get_optimizer_state_dict`` give them; all else is user content.

    Args:
        directory: the checkpoint directory or URL; with ``checkpoint_id=``, which is a tag's, ``save`` chooses another.
        tag: the tag's name.
        model_key, optim_key: the keys of model and optimizer in the state dict; "" for the state dict itself. None for
            both: they are found in each state dict, as nxd_ckpt.dcp does.
        num_kept_ckpts: complete tags to keep; None or -1 keeps all.
        retain: rules for which complete tags to keep, as of ``save_checkpoint``; ``num_kept_ckpts`` is one rule more.
        metrics: numbers by name that the tag keeps for the rule ``Best``; set ``metrics`` before each further save of
            the same writer. Rank 0's count.
        overwrite: whether a complete tag of this name may be replaced. None: on file systems, where it stays until its
            successor is complete; not on object stores.
        durable: fsync everything before the tag becomes visible.
        timeout: seconds without progress after which a rank counts as lost.
        trust_pickle: allow values that only an unsafe load can read back.
        storage_options: what a URL is opened with.
    """

    def __init__(
        self,
        directory: StrPath | None = None,
        tag: str | int | None = None,
        *,
        model_key: str | None = "model",
        optim_key: str | None = "optim",
        num_kept_ckpts: int | None = None,
        retain: Sequence[Rule] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool | None = None,
        durable: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
        trust_pickle: bool = False,
        storage_options: StorageOptions | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__()
        self._directory, self._tag = directory, tag
        if (model_key is None) != (optim_key is None):
            raise InvalidArgument("model_key and optim_key: give both, or None for both")
        self._names = None if model_key is None or optim_key is None else DcpNames(model_key, optim_key)
        self.members: tuple[int, ...] | None = None
        """The ranks of the job that save, where that is not all of them: those of ``process_group``."""
        self.refusal: Exception | None = None
        """Why this rank cannot save, which torch raises on all ranks in place of saving."""
        self._rules = rules_of(num_kept_ckpts, retain)
        self.metrics = metrics
        self._overwrite, self._timeout, self._trust = overwrite, timeout, trust_pickle
        self._durable, self._options, self._storage = durable, storage_options, storage
        self._is_coordinator, self._world_size = True, 1
        self._in_use = self._names or DcpNames()

    @property
    def checkpoint_id(self) -> str:
        """The tag, as logs name it."""
        return join(os.fspath(self._directory or ""), str(self._tag))

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Another save begins; with ``checkpoint_id``, of the tag with this path or URL."""
        if checkpoint_id:
            place = location_of(checkpoint_id, "tag", self._options)
            self._directory, self._tag = place.directory, place.name

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note what part this process plays.

        Raises InvalidArgument for ``use_collectives=False``: without them no rank knows what the others write.
        """
        if self.refusal is not None:
            raise self.refusal
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument(
                "use_collectives=False lets each rank plan for itself, and replicas would be written several times: "
                "leave it out, or save with no_dist=True from one rank"
            )
        self._is_coordinator, self._world_size = is_coordinator, 1

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, with what rank 0 has seen in them: under which keys model and optimizer are.

        Raises InvalidArgument for some, but not all, of the job's ranks, which torch does not name.
        """
        self._world_size = len(plans)
        job = len(self._members() or ()) or _job_size()
        if self._world_size not in (1, job):
            raise InvalidArgument(
                f"{self._world_size} of {job} ranks save: a tag is saved by all ranks of the job, or by one with "
                "no_dist=True; leave out process_group=, or call nxd_ckpt.dcp.save, which knows whose it is"
            )
        if self._names is not None:
            return plans
        names = names_of(_items(plans), _COLLECTED)
        return [replace(plan, storage_data=names) for plan in plans]

    @as_checkpoint_errors()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan asks for; done when this returns.

        Raises:
            DirectoryInUse, DirectoryNotShared, SaveFailed: nothing may be written there.
            UnsafePickle, UnsupportedState: what a tag cannot hold.
            PeerTimeout: another rank is gone.
        """
        require_locks("saving")
        metrics = recorded_metrics(self.metrics)
        topology, agreement = self._meet()
        storage = self._storage or open_storage(self._required_directory(), self._durable, self._options)
        if topology.rank == 0:
            _end_left(storage.url)
        tag = validate_tag(self._tag)
        session = open_session(storage, topology, agreement, None, self._timeout)
        save = CollectedSave(session, tag, self._overwrite, self._rules, metrics)
        try:
            names = decided_by_rank0(agreement, lambda: self._begin(save, plan))
            self._in_use = DcpNames.from_json(names.encode(), self.checkpoint_id)
            results = on_all(agreement, lambda: self._write(save, plan, planner))
        except BaseException:
            if topology.rank == 0:
                save.discard()
            save.close()
            raise
        if topology.rank == 0:
            _under_way[storage.url] = save
            self._saved_to = storage.url
        else:
            save.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @as_checkpoint_errors()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: complete the tag, and make it visible.

        Raises:
            SaveFailed, DirectoryInUse: it cannot be done; nothing is visible but what was before.
            OutcomeUnknown: the store does not say whether it was done.
        """
        save = _under_way.pop(self._saved_to)
        try:
            found = collected(metadata, results, self._trust)
            told = (result.storage_data for own in results for result in own)
            shares = [share for share in told if isinstance(share, Share)]
            save.complete(contents_of(found, self._in_use), shares)
        except BaseException:
            save.discard()
            raise
        finally:
            save.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether it names a place that a tag could be at."""
        try:
            validate_tag(location_of(checkpoint_id, "tag", None).name)
        except CheckpointError:
            return False
        return True

    def _meet(self) -> tuple[Topology, Agreement]:
        """This rank's place among those that save, and how they agree."""
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

    def _begin(self, save: CollectedSave, plan: SavePlan) -> str:
        save.begin()
        names = self._names or plan.storage_data
        if not isinstance(names, DcpNames):  # a planner that loses what is in a plan
            names = names_of(_items([plan]), _COLLECTED)
        return names.to_json().decode()

    def _required_directory(self) -> StrPath:
        if self._directory is None or self._tag is None:
            raise InvalidArgument("StorageWriter needs a directory and a tag, or save(checkpoint_id=)")
        return self._directory

    def _write(self, save: CollectedSave, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        paths = plan.planner_data or {}
        chunks: list[Chunk] = []
        results = []
        brought = 0
        for item in plan.items:
            name = item.index.fqn
            part = self._in_use.part_of(name, paths.get(name, (name,)), item.type != WriteItemType.BYTE_IO)
            if item.type == WriteItemType.BYTE_IO:
                value = _value_bytes(planner.resolve_data(item))
                read_value(value, name, self._trust)
                results.append(WriteResult(item.index, len(value), value))
            elif part in (DcpPart.MODEL, DcpPart.STATE):
                chunk = _chunk(self._in_use.tag_name(name, part), item, planner)
                chunks += [chunk] if chunk.box.numel else []
                results.append(WriteResult(item.index, chunk.nbytes, None))
            else:
                brought += _chunk(name, item, planner).nbytes
                _refuse_much(brought)
                value = _tensor_bytes(item, planner)
                results.append(WriteResult(item.index, len(value), value))
        share = save.write(chunks)
        return [*results, WriteResult(MetadataIndex(""), 0, share)]


_under_way: dict[str, CollectedSave] = {}
"""Saves of this process that were written and wait for ``finish``, by directory. DCP does not say where it never
comes, because another rank died in between; and writers are made anew for each save."""


def _end_left(url: str) -> None:
    """End what nobody else will: else this process keeps the directory."""
    save = _under_way.get(url)
    if save is not None and save.is_left:
        del _under_way[url]
        save.discard()
        save.close()


def _job_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _items(plans: Iterable[SavePlan]) -> list[DcpItem]:
    """What the plans write, each name once."""
    items: dict[str, DcpItem] = {}
    for plan in plans:
        paths = plan.planner_data or {}
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            size = None if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize
            before = items[name].nbytes if name in items else 0
            nbytes = None if size is None else size + (before or 0)
            items[name] = DcpItem(name, tuple(paths.get(name, (name,))), nbytes)
    return list(items.values())


def _chunk(name: str, item: WriteItem, planner: SavePlanner) -> Chunk:
    """What the item asks for, made when it is read."""
    data = item.tensor_data
    if data is None:
        raise InvalidArgument(f"{item.index.fqn}: the save plan has a tensor without saying which part of which it is")
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    dtype = data.properties.dtype

    def read() -> torch.Tensor:
        tensor = _tensor(item, planner)
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, box.size):
            raise InvalidArgument(
                f"{item.index.fqn}: planned as {dtype} {box.size}, but the planner gives {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        return tensor

    return Chunk(name, dtype_name(dtype), box, read)


def _tensor(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    found = planner.resolve_data(item)
    if not isinstance(found, torch.Tensor):
        raise InvalidArgument(f"{item.index.fqn}: planned as a tensor, but the planner gives {type(found).__name__}")
    if is_traceable_wrapper_subclass(found):
        raise UnsupportedState(
            f"{item.index.fqn} is a {type(found).__module__}.{type(found).__qualname__}, of whose values only a plain "
            "copy would be saved: save by nxd_ckpt.dcp.save, which saves the tensors that it is made of"
        )
    return found.detach()


def _tensor_bytes(item: WriteItem, planner: SavePlanner) -> bytes:
    written = io.BytesIO()
    torch.save(_tensor(item, planner).cpu().clone(), written)
    return written.getvalue()


def _value_bytes(found: Any) -> bytes:
    if not isinstance(found, io.BytesIO):
        raise InvalidArgument(f"planned as bytes, but the planner gives {type(found).__name__}")
    return found.getvalue()


def _refuse_much(nbytes: int) -> None:
    if nbytes > _COLLECTED:
        raise UnsupportedState(
            f"{nbytes} bytes of tensors are under neither model_key nor optim_key. Rank 0 writes those, so they must "
            "be few: name the keys, or save these tensors as the model of another tag"
        )
