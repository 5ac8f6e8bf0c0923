"""TorchTitan's checkpoints as tags: its own checkpoint manager, with its reading and writing replaced.

For torchtitan 0.3 and 0.2.2, whose managers decide what is saved when, and what is loaded. With 0.3, in a trainer's
config::

    checkpoint = CheckpointManager.Config(enable=True, interval=500, keep_latest_k=3, async_mode="async")

With 0.2.2, `nxd_ckpt.integrations.torchtitan_trainer` puts the manager into the trainer.

A checkpoint is the tag ``step-N`` in the checkpoint folder: complete or invisible, with digests, and of model and
optimizer by name, so that every tool of nxd_ckpt works on it.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace
from inspect import signature
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torchtitan.tools.utils import GarbageCollection

from nxd_ckpt.checkpoint import open_checkpoint
from nxd_ckpt.core.names import DONE
from nxd_ckpt.core.parameter_names import canonical
from nxd_ckpt.core.tags import in_order
from nxd_ckpt.errors import CheckpointError, IncompatibleState, PartNotFound
from nxd_ckpt.output.locations import location_of
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.torch_dcp.storage_reader import StorageReader
from nxd_ckpt.torch_dcp.storage_writer import StorageWriter, told_at_exit

_MODULES = {
    "torchtitan.components.checkpointer": "0.3",
    "torchtitan.components.checkpoint": "0.2.2",
}
"""Modules that have the manager, each with the first release that has it there."""

_OVERRIDDEN = ("dcp_save", "dcp_load", "_find_load_step", "_purge_stale_checkpoints")
_NAMES = ("CheckpointManager", "AsyncMode", "MODEL", "OPTIMIZER", "DATALOADER")
_STEP = re.compile(r"step-(\d+)")


def _titan_module() -> ModuleType:
    """Import the module of TorchTitan's manager. Raises ImportError, with the names that were looked for."""
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # something that TorchTitan itself needs
                raise
            continue
        missing = [needed for needed in _NAMES if not hasattr(module, needed)]
        missing += [
            f"CheckpointManager.{method}"
            for method in _OVERRIDDEN
            if not hasattr(getattr(module, "CheckpointManager", None), method)
        ]
        if missing:
            raise ImportError(
                f"this torchtitan is not supported: {name} has no {', '.join(missing)}. Releases 0.2.2 and 0.3 have; "
                "install one of them, or save through nxd_ckpt.adapters.dcp"
            )
        return module
    looked_for = ", ".join(f"{name}.CheckpointManager ({release})" for name, release in _MODULES.items())
    raise ImportError(
        f"this torchtitan is not supported: looked for {looked_for}, found neither. Install torchtitan 0.2.2 or 0.3, "
        "or save through nxd_ckpt.adapters.dcp"
    )


_titan = _titan_module()
MODEL, OPTIMIZER, DATALOADER = _titan.MODEL, _titan.OPTIMIZER, _titan.DATALOADER
AsyncMode: Any = _titan.AsyncMode
TitanCheckpointManager: Any = _titan.CheckpointManager


class CheckpointManager(TitanCheckpointManager):  # type: ignore[misc]
    """A drop-in for TorchTitan's ``CheckpointManager``, with the same arguments and options.

    ``keep_latest_k`` never removes a tag before its successor is complete. Both async modes work; without an
    accelerator the memory of ``async_with_pinned_mem`` is not pinned. Checkpoints that TorchTitan's own manager wrote
    load too: a run continues with them. ``initial_load_path`` may be any tag, of neuronx-distributed too. Hugging Face
    checkpoints are read and written as by TorchTitan. With torchft, each replica's data loader is saved and loaded as
    by TorchTitan 0.2.2.
    """

    durable: ClassVar[bool] = True
    """Fsync a checkpoint before it becomes visible. With 0.3, ``Config.durable`` decides for one manager."""

    if hasattr(TitanCheckpointManager, "Config"):  # from 0.3 on the manager builds itself from its own config

        @dataclass(kw_only=True, slots=True)
        class Config(TitanCheckpointManager.Config):  # type: ignore[misc]
            """TorchTitan's options, and ``durable``: fsync a checkpoint before it becomes visible."""

            durable: bool = True

    def __init__(self, *args: Any, **parts: Any) -> None:
        call = signature(super().__init__).bind(*args, **parts)
        name = "config" if "config" in call.arguments else "checkpoint_config"
        config = call.arguments[name]
        # TorchTitan's own removal of checkpoints is by name, and whether they are complete or not.
        call.arguments[name] = replace(config, keep_latest_k=0)
        super().__init__(*call.args, **call.kwargs)
        self.keep_latest_k: Any = config.keep_latest_k
        self._durable: bool = getattr(config, "durable", self.durable)
        self._buffers: dict[str, torch.Tensor] = {}
        pinned = self.enable and self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
        if pinned and not torch.accelerator.is_available():
            self.stager: DefaultStager = DefaultStager(StagingOptions(False, True, True, False))

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save the tag ``checkpoint_id``, and return the same as TorchTitan's method.

        Raises torch's CheckpointException on all ranks for a failure on any; nothing became visible then.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = StorageWriter(
            model_key="", optim_key=OPTIMIZER, num_kept_ckpts=self.keep_latest_k or None, durable=self._durable
        )
        group = getattr(self, "pg", None)  # 0.2.2 has it in its async modes alone
        common: dict[str, Any] = {"storage_writer": writer, "checkpoint_id": checkpoint_id, "process_group": group}
        if async_mode == AsyncMode.DISABLED:
            result: Any = save(state_dict, **common)
        elif async_mode == AsyncMode.ASYNC:
            result = told_at_exit(async_save(state_dict, **common))
        else:
            process = AsyncCheckpointerType.PROCESS
            state_dict = state_dict | self._kept_buffers(state_dict)
            saved = async_save(state_dict, async_checkpointer_type=process, async_stager=self.stager, **common)
            result = told_at_exit(saved)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load the tag ``checkpoint_id``, or another checkpoint that TorchTitan loads.

        Raises torch's CheckpointException on all ranks for a failure on any.
        """
        if from_hf or not _is_tag(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = StorageReader(checkpoint_id, model_key="", optim_key=OPTIMIZER)
        reader.refusal = _refusal(checkpoint_id, reader, state_dict)
        load(state_dict, storage_reader=reader)
        self.states[MODEL].load_state_dict(state_dict)

    def close(self) -> None:
        """Wait for the last save, then close as TorchTitan does: the trainer destroys the process group next.

        Raises the failure of that save.
        """
        last = getattr(self, "save_future", None)  # the manager may not be whole: its __del__ calls this too
        if last is not None:
            last.result()
        super().close()

    def _kept_buffers(self, state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Copy the model's buffers.

        They are staged beside the next forward pass, which may change them; parameters and the optimizer's state wait
        for it. The memory is the same each time: stagers cache by it.
        """
        for module in self.states[MODEL].model:
            for name in canonical((name for name, _ in module.named_buffers()), "the model"):
                if name in state_dict:
                    kept = self._buffers.setdefault(name, torch.empty_like(state_dict[name]))
                    kept.copy_(state_dict[name])
        return self._buffers

    def _find_load_step(self, folder: str = "") -> int:
        complete = (info for info in list_tags(open_storage(folder or self.folder)) if info.complete)
        steps = [int(match[1]) for info in in_order(complete) if (match := _STEP.fullmatch(info.tag))]
        # The newest, not the highest: the run may have gone on from an earlier step. TorchTitan's own have no order.
        return max([*steps[-1:], int(super()._find_load_step(folder))])

    def _purge_stale_checkpoints(self) -> None:
        """Do nothing: each save has removed the surplus tags."""


def _refusal(tag: str, reader: StorageReader, states: dict[str, Any]) -> CheckpointError | None:
    """Return why a run cannot go on from this tag: it may hold the model alone, or the data of other ranks."""
    ranks = getattr(states.get(DATALOADER), "dp_world_size", None)
    try:
        has_optimizer = open_checkpoint(tag).parts.optimizer is not None
        saved_ranks = reader.value(f"{DATALOADER}.world_size")
    except CheckpointError:  # the load raises it, on all ranks
        return None
    if OPTIMIZER in states and not has_optimizer:
        return PartNotFound(
            f"{tag} holds the model alone, as with last_save_model_only=True, so no run goes on from it. Load an "
            f"earlier step (load_step), or begin another run with its weights (initial_load_path={tag!r}, and another "
            "folder)"
        )
    if None not in (ranks, saved_ranks) and ranks != saved_ranks:
        return IncompatibleState(
            f"{tag} has the data positions of {saved_ranks} data-parallel ranks, and this run has {ranks}: TorchTitan "
            f"cannot divide them otherwise. Load it on {saved_ranks}, or begin the data again, with "
            f"exclude_from_loading=[{DATALOADER!r}]"
        )
    return None


def _is_tag(path: str) -> bool:
    place = location_of(path, "checkpoint", None)
    return place.open().is_file(f"{place.name}/{DONE}")
