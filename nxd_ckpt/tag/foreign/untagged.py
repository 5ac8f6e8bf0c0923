"""Checkpoints that are no NxD tags: recognising the layout of a directory or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign import nemo, presharded, rank_items, torch_xla_files
from nxd_ckpt.tag.foreign.dcp_directory import DcpDirectory, DcpTensors
from nxd_ckpt.tag.foreign.rank_items import RankItems
from nxd_ckpt.tag.foreign.torch_dcp import METADATA, TIERED_DATA, TIERED_METADATA, DcpFiles, TieredFiles
from nxd_ckpt.tag.nxd_tag import TagLayout


def is_untagged(listing: Iterable[str]) -> bool:
    """Return whether a directory of these files, which is no tag, has a readable layout."""
    names = set(listing)
    return TIERED_DATA in names or bool(_layouts(names))


def open_untagged(storage: Storage, key: str) -> TagLayout:
    """Return the layout of the directory or file ``key``.

    Raises:
        PartNotFound: the directory holds none of the files of any layout.
        MalformedFile: it holds those of two layouts.
        CheckpointNotFound, MalformedFile: errors of opening its layout.
    """
    if storage.is_file(key):
        folder, _, file = key.rpartition("/")
        if nemo.is_of_rank(key):
            return nemo.open_files(TagFiles(storage, folder.rpartition("/")[0]), file)
        return torch_xla_files.open_files(TagFiles(storage, folder), file)
    files = TagFiles(storage, key)
    listing = set(files.names())
    layouts = _layouts(listing)
    if len(layouts) > 1:
        both = " and ".join(layout.name for layout in layouts)
        raise MalformedFile(
            f"{files.where('').rstrip('/')} has the files of two layouts: {both}; move those of one to a place of "
            "their own"
        )
    if layouts:
        return layouts[0].open(files)
    if TIERED_DATA in listing:
        return _open_tiered(files)
    raise PartNotFound(f"{files.where('')}: no layout that is known; found {sorted(listing)[:8]}")


def _open_tiered(files: TagFiles) -> TagLayout:
    root = TagFiles(files.storage, "")
    return DcpDirectory(root, DcpTensors(root, TieredFiles(files.tag)))


class _Layout(NamedTuple):
    name: str
    is_present: Callable[[Set[str]], bool]
    """Returns whether a directory of these files has it."""
    open: Callable[[TagFiles], TagLayout]


_LAYOUTS = (
    _Layout("torch-xla", torch_xla_files.is_present, torch_xla_files.open_files),
    _Layout("NxD inference", presharded.is_present, presharded.PreshardedFiles),
    _Layout(
        "torch DCP",
        lambda listing: METADATA in listing,
        lambda files: DcpDirectory(files, DcpTensors(files, DcpFiles())),
    ),
    _Layout("torch_checkpointing", rank_items.is_present, lambda files: DcpDirectory(files, RankItems(files))),
    _Layout("SageMaker's tiered storage", lambda listing: TIERED_METADATA in listing, _open_tiered),
)


def _layouts(listing: Set[str]) -> list[_Layout]:
    return [layout for layout in _LAYOUTS if layout.is_present(listing)]
