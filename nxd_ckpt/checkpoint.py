"""One tag opened for reading, without a process group: the way tools and tests look into a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from nxd_ckpt.core.manifest import Manifest, Parts
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.formats.tensors import TensorStub, map_tensors
from nxd_ckpt.layout.files import MissingTensor
from nxd_ckpt.runtime.opening import OpenTag, choose_tag, open_complete_tag
from nxd_ckpt.storage.urls import open_storage


class Checkpoint:
    """A complete tag. Made by :func:`open_checkpoint`; reads on demand and holds no file open."""

    def __init__(self, opened: OpenTag) -> None:
        self._opened = opened

    @property
    def tag(self) -> str:
        return self._opened.tag

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None for a tag that neuronx_distributed wrote."""
        return self._opened.manifest

    @property
    def topology(self) -> Topology:
        """The sizes it was saved on, seen from rank 0."""
        return self._opened.topology

    @property
    def parts(self) -> Parts:
        """What it holds."""
        return self._opened.parts

    def model_state(self, rank: int = 0) -> dict[str, Any]:
        """The model's state dict as the global ``rank`` held it, on the CPU.

        Raises:
            PartNotFound: it was saved without a model, or a tensor is in no file.
        """
        return self._read(self._opened.model_tree(self.topology.coordinates_of(rank)))

    def optimizer_state(self, rank: int = 0) -> dict[str, Any]:
        """The optimizer's state dict as the global ``rank`` held it (its own shard under ZeRO-1), on the CPU."""
        return self._read(self._opened.optimizer_tree(self.topology.coordinates_of(rank)))

    def scheduler_state(self) -> Any:
        return self._opened.scheduler()

    def user_content(self) -> Any:
        """What the user saved beside the state; None if nothing."""
        return self._opened.user_content()

    def rank_content(self, rank: int) -> Any:
        """What the global ``rank`` saved for itself."""
        return self._opened.rank_content(rank)

    def _read(self, tree: dict[str, Any]) -> dict[str, Any]:
        def read(leaf: TensorStub | MissingTensor) -> torch.Tensor:
            if isinstance(leaf, MissingTensor):
                raise PartNotFound(f"{self._opened.where}: no file holds tensor {leaf.name!r} ({leaf.file} is missing)")
            return self._opened.read(leaf)

        whole: dict[str, Any] = map_tensors(tree, read, (TensorStub, MissingTensor))
        return whole


def open_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    *,
    trust_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open ``tag`` of the directory or URL ``path``, by default its latest complete one.

    Raises:
        CheckpointNotFound: no directory, no complete tag, or not this one.
    """
    storage = open_storage(path, storage_options=storage_options)
    return Checkpoint(open_complete_tag(storage, choose_tag(storage, tag), trust_pickle=trust_pickle))
