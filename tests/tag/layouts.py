"""The layout of a tag, in one call, and trees of one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.tensors import TensorStub, map_tensors
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.nxd_tag import TagLayout, layout_of
from nxd_ckpt.storage.base import Storage
from tests.core.documents import MANIFEST


def open_tag(
    storage: Storage, tag: str = "", *, topology: Topology | None = None, trust_pickle: bool = False
) -> TagLayout:
    """The layout of ``tag``, or of the storage's root itself for ``""``; with a ``topology`` as of a manifest's."""
    manifest = None if topology is None else replace(MANIFEST, topology=topology)
    return layout_of(TagFiles(storage, tag, trust_pickle=trust_pickle), manifest)


def whole(tag: TagLayout, tree: Any) -> Any:
    """The tree with its tensors read."""
    return map_tensors(tree, tag.files.read, TensorStub)


def save(tree: Any, path: Path) -> None:
    """As torch does, with the directories that lead there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tree, path)
