"""Checkpoints that are no tags of NxD's: which layout a directory or a file has."""

from __future__ import annotations

from collections.abc import Iterable, Set

from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.layout import presharded, torch_xla_files
from nxd_ckpt.layout.dcp_directory import DcpDirectory
from nxd_ckpt.layout.files import TagFiles
from nxd_ckpt.layout.tag import TagLayout
from nxd_ckpt.layout.torch_dcp import METADATA, TIERED_DATA, TIERED_METADATA, TieredFiles
from nxd_ckpt.storage.base import Storage


def is_untagged(listing: Iterable[str]) -> bool:
    """Whether a directory of these files, which is no tag, has a layout that is read."""
    names = set(listing)
    return TIERED_DATA in names or bool(_layouts(names))


def open_untagged(storage: Storage, key: str) -> TagLayout:
    """The layout of the directory or file ``key``.

    Raises:
        PartNotFound: the directory holds none of the files of any layout.
        MalformedFile: it holds those of two layouts.
        CheckpointNotFound, MalformedFile: what opening its layout raises.
    """
    if storage.is_file(key):
        folder, _, file = key.rpartition("/")
        return torch_xla_files.open_files(TagFiles(storage, folder), file)
    files = TagFiles(storage, key)
    listing = set(files.names())
    found = _layouts(listing)
    if len(found) > 1:
        raise MalformedFile(
            f"{files.where('').rstrip('/')} has the files of two layouts: {' and '.join(found)}; move those of one to "
            "a place of their own"
        )
    if torch_xla_files.are_there(listing):
        return torch_xla_files.open_files(files)
    if presharded.are_there(listing):
        return presharded.PreshardedFiles(files)
    if METADATA in listing:
        return DcpDirectory(files)
    if TIERED_DATA in listing or TIERED_METADATA in listing:
        return DcpDirectory(TagFiles(storage, ""), places=TieredFiles(key))
    raise PartNotFound(f"{files.where('')}: no layout that is known; found {sorted(listing)[:8]}")


def _layouts(listing: Set[str]) -> list[str]:
    """The layouts, by name, that a directory of these files has."""
    found = {
        "torch-xla": torch_xla_files.are_there(listing),
        "NxD inference": presharded.are_there(listing),
        "torch DCP": METADATA in listing,
        "SageMaker's tiered storage": TIERED_METADATA in listing,
    }
    return [name for name, is_there in found.items() if is_there]
