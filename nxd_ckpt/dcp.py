"""``save``, ``async_save`` and ``load`` as torch.distributed.checkpoint has them; what they write and read are tags.

A script switches by one import::

    from nxd_ckpt import dcp  # in place of: import torch.distributed.checkpoint as dcp

    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id="run/step_100")

``checkpoint_id`` is the path or URL of a tag. All else that torch.distributed.checkpoint offers is here under the same
name. Importing this imports it.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as torch_async_save
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter

from nxd_ckpt.core.dcp_names import DcpItem, names_of
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats.memory import is_shards
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.live.environment import default_topology, require_all_ranks
from nxd_ckpt.live.parameters import refuse_unsupported
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.torch_dcp.storage_reader import StorageReader
from nxd_ckpt.torch_dcp.storage_writer import StorageWriter, told_at_exit
from nxd_ckpt.torch_dcp.subclasses import settle, taken_apart, with_parts

__all__ = ["StorageReader", "StorageWriter", "async_save", "load", "save"]


@takes()
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: StrPath | None = None,
    storage_writer: TorchStorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state dict as a tag, each rank its shards; as torch's ``save``.

    Model and optimizer are found in the state dict, whatever their keys: the optimizer is what torch's
    ``get_optimizer_state_dict`` gives, the model what has tensors of its parameters' names, else what is under "model".
    All else is user content; if it is more than 64 MiB of tensors, they are kept as the model's. Tensor subclasses are
    saved as the tensors that they are made of.

    Args:
        state_dict: any state dict; of Stateful objects in it, what their ``state_dict()`` gives.
        checkpoint_id: the tag's path or URL, as ``run/step_100``.
        storage_writer: a `StorageWriter` with options of its own. With another library's writer this is torch's
            ``save``.
        planner, no_dist: as torch's.
        process_group: the ranks that save; None for all of the job.
        use_collectives: False is refused: without collectives no rank knows what the others write.

    Raises:
        InvalidArgument: neither ``checkpoint_id`` nor ``storage_writer``.
        CheckpointException: torch's, on all ranks, with what failed on each. Nothing became visible.
    """
    writer = _writer(checkpoint_id, storage_writer, process_group, no_dist)
    metadata: Metadata = torch_save(
        _state_of(state_dict, writer),
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )
    return metadata


@takes()
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: StrPath | None = None,
    storage_writer: TorchStorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Save as `save`, from a thread or a process, once the state dict is copied; as torch's ``async_save``.

    A script may end meanwhile: its exit waits, and a failure that nobody asked the future for makes the exit code 1.

    Returns:
        A future of the metadata; where ``async_stager`` copies in the background, torch's ``AsyncSaveResponse``.
    """
    writer = _writer(checkpoint_id, storage_writer, process_group, no_dist)
    response: Future[Metadata] | Any = torch_async_save(
        _state_of(state_dict, writer, copies_first=True),
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        planner=planner,
        process_group=process_group,
        async_checkpointer_type=async_checkpointer_type,
        async_stager=async_stager,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )
    return told_at_exit(response)


@takes()
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: StrPath | None = None,
    storage_reader: TorchStorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool = True,
) -> None:
    """Load a tag into a state dict, each rank its shards; as torch's ``load``.

    The tag may be of `save`, of ``save_checkpoint`` or of neuronx-distributed, on any sizes. Tensors are loaded
    in place, other values replaced, and Stateful objects are given what was loaded of them.

    Args:
        state_dict: what is wanted; each rank asks for what it holds.
        checkpoint_id: the tag's path or URL.
        storage_reader: a `StorageReader` with options of its own. With another library's reader this is torch's
            ``load``.
        planner, process_group, no_dist: as torch's.
        strict: False loads what the tag has, and warns of the names that it has not, which stay as they are.

    Raises:
        InvalidArgument: neither ``checkpoint_id`` nor ``storage_reader``; ``strict=False`` beside a planner that knows
            no ``allow_partial_load``.
        CheckpointException: torch's, on all ranks, with what failed on each.
    """
    planner = planner if strict else _lenient(planner)
    if storage_reader is not None and not isinstance(storage_reader, StorageReader):
        torch_load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
        return
    reader = storage_reader or StorageReader(_required(checkpoint_id))
    if checkpoint_id is not None:
        reader.reset(checkpoint_id)
    plain = {key: _plain(state_dict[key]) for key in sorted(state_dict)}
    targets = _targets(plain, reader)
    torch_load(targets, storage_reader=reader, planner=planner, process_group=process_group, no_dist=no_dist)
    settle(targets, plain)
    for key, value in plain.items():
        if isinstance(state_dict[key], Stateful):
            state_dict[key].load_state_dict(value)
        else:
            state_dict[key] = value


def _targets(plain: dict[str, Any], reader: StorageReader) -> dict[str, Any]:
    """The tensors that torch loads into. If a rank has none, its reader refuses, and torch raises that on all ranks."""
    reader.refusal = None
    try:
        if not (dist.is_available() and dist.is_initialized()):
            _allocate(plain)
        reader.usual = names_of(_items(plain), 0)
        return with_parts(plain, reader)
    except Exception as error:
        reader.refusal = error
        return plain


def _state_of(state_dict: dict[str, Any], writer: TorchStorageWriter, copies_first: bool = False) -> dict[str, Any]:
    """Return the state that torch saves: none if the writer refuses it, which torch raises on all ranks."""
    if not isinstance(writer, StorageWriter):
        return state_dict
    state = {key: _plain(value) for key, value in state_dict.items()}
    writer.refusal = None
    try:
        state = taken_apart(state)
        for path, tensor in iter_tensors(state, torch.Tensor):
            if copies_first or not is_shards(tensor):  # which torch plans, and cannot copy
                refuse_unsupported(".".join(map(str, path)), tensor)
        return state
    except Exception as error:
        writer.refusal = error
        return {}


def _plain(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _allocate(state: Any) -> None:
    """Give tensors on the meta device memory, as torch does where there is a process group."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, torch.Tensor) and value.is_meta:
            state[key] = torch.empty_like(value, device="cpu")
        elif isinstance(value, (dict, list)):
            _allocate(value)


def _writer(
    checkpoint_id: StrPath | None, writer: TorchStorageWriter | None, group: Any, no_dist: bool
) -> TorchStorageWriter:
    require_all_ranks(default_topology(), no_dist or None, group)
    if writer is None:
        _required(checkpoint_id)
        writer = StorageWriter(model_key=None, optim_key=None)
    if isinstance(writer, StorageWriter):
        writer.members = None if group is None else tuple(dist.get_process_group_ranks(group))
    return writer


def _required(checkpoint_id: StrPath | None) -> StrPath:
    if not checkpoint_id:
        raise InvalidArgument("checkpoint_id is missing: pass a tag's path, such as 'run/step_100'")
    return checkpoint_id


def _items(state: dict[str, Any]) -> list[DcpItem]:
    """The entries of the state dict, as a planner sees them."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return [
        DcpItem(name, tuple(planner.mappings[name]), 0 if hasattr(value, "shape") else None)
        for name, value in planner.state_dict.items()
        if name in planner.mappings
    ]


class _LenientPlanner(DefaultLoadPlanner):
    """Loads what there is, and says what there is not."""

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        saved = self.metadata.state_dict_metadata if self.metadata else {}
        missing = [name for name in self.state_dict if name not in saved]
        if missing:
            logger.warning(
                "strict=False: the checkpoint has no %s%s; they stay as they are",
                ", ".join(missing[:5]),
                f" and {len(missing) - 5} more" if len(missing) > 5 else "",
            )
        return plan


def _lenient(planner: LoadPlanner | None) -> LoadPlanner:
    if planner is None:
        return _LenientPlanner()
    if not hasattr(planner, "allow_partial_load"):
        raise InvalidArgument(
            f"strict=False: {type(planner).__name__} knows no allow_partial_load; leave out one of the two"
        )
    planner.allow_partial_load = True
    return planner


if not TYPE_CHECKING:  # a type checker asks torch.distributed.checkpoint itself

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(checkpoint, name)
