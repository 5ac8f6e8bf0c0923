"""TorchTitan's checkpoints as tags: its own checkpoint manager, with what is written and read replaced.

Written for torchtitan 0.3, whose manager decides what is saved when, and what is loaded. In a trainer's config::

    checkpoint = CheckpointManager.Config(enable=True, interval=500, keep_latest_k=3, async_mode="async")

A checkpoint is the tag ``step-N`` in the checkpoint folder: complete or invisible, with digests, and of model and
optimizer by name, so that every tool of nxd_ckpt works on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torchtitan.components.checkpointer import MODEL, OPTIMIZER, AsyncMode
from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
from torchtitan.tools.utils import GarbageCollection

from nxd_ckpt.core.names import DONE
from nxd_ckpt.live.dtensor import canonical
from nxd_ckpt.output.locations import location_of
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.torch_dcp.storage_reader import StorageReader
from nxd_ckpt.torch_dcp.storage_writer import StorageWriter

_STEP = re.compile(r"step-(\d+)")


class CheckpointManager(TitanCheckpointManager):  # type: ignore[misc]
    """Takes the place of ``torchtitan.components.checkpointer.CheckpointManager``, with the same options.

    ``keep_latest_k`` never removes a tag before its successor is complete. Both async modes work; without an
    accelerator the memory of ``async_with_pinned_mem`` is not pinned. Checkpoints that TorchTitan's own manager wrote
    load too: a run continues with them. ``initial_load_path`` may be any tag, of neuronx-distributed too. Hugging Face
    checkpoints are read and written as by TorchTitan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanCheckpointManager.Config):  # type: ignore[misc]
        """See TorchTitan's."""

        durable: bool = True
        """Whether a checkpoint is fsynced before it becomes visible."""

    def __init__(self, config: Config, **parts: Any) -> None:
        # TorchTitan's own removal of checkpoints is by name, and whether they are complete or not.
        given: Any = config
        own = replace(given, keep_latest_k=0)
        super().__init__(own, **parts)
        if not self.enable:
            return
        self.keep_latest_k = config.keep_latest_k
        self._durable = config.durable
        self._buffers: dict[str, torch.Tensor] = {}
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM and not torch.accelerator.is_available():
            self.stager = DefaultStager(StagingOptions(False, True, True, False))

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save the tag ``checkpoint_id``; what TorchTitan's returns.

        Raises torch's CheckpointException on all ranks, of what failed on any; nothing became visible.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = StorageWriter(
            model_key="", optim_key=OPTIMIZER, num_kept_ckpts=self.keep_latest_k or None, durable=self._durable
        )
        common: dict[str, Any] = {"storage_writer": writer, "checkpoint_id": checkpoint_id, "process_group": self.pg}
        if async_mode == AsyncMode.DISABLED:
            found: Any = save(state_dict, **common)
        elif async_mode == AsyncMode.ASYNC:
            found = async_save(state_dict, **common)
        else:
            process, state_dict = AsyncCheckpointerType.PROCESS, state_dict | self._kept_buffers(state_dict)
            found = async_save(state_dict, async_checkpointer_type=process, async_stager=self.stager, **common)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return found

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load the tag ``checkpoint_id``, or what else TorchTitan loads.

        Raises torch's CheckpointException on all ranks, of what failed on any.
        """
        if from_hf or not _is_tag(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=StorageReader(checkpoint_id, model_key="", optim_key=OPTIMIZER))
        self.states[MODEL].load_state_dict(state_dict)

    def _kept_buffers(self, state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The model's buffers as they are now. They are staged beside the next forward pass, which may change them;
        parameters and the optimizer's state wait for it. The memory is the same each time: stagers cache by it.
        """
        for module in self.states[MODEL].model:
            for name in canonical((name for name, _ in module.named_buffers()), "the model"):
                if name in state_dict:
                    kept = self._buffers.setdefault(name, torch.empty_like(state_dict[name]))
                    kept.copy_(state_dict[name])
        return self._buffers

    def _find_load_step(self, folder: str = "") -> int:
        storage = open_storage(folder or self.folder)
        found = (_STEP.fullmatch(info.tag) for info in list_tags(storage) if info.complete)
        steps = [int(match.group(1)) for match in found if match]
        return max([*steps, int(super()._find_load_step(folder))])

    def _purge_stale_checkpoints(self) -> None:
        """Each save has removed what is too many."""


def _is_tag(path: str) -> bool:
    place = location_of(path, "checkpoint", None)
    return place.open().is_file(f"{place.name}/{DONE}")
