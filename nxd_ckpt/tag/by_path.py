"""A checkpoint that a path names itself: one tag, a file, or what another program wrote into a directory of its own."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from nxd_ckpt.core.tags import Tag
from nxd_ckpt.errors import CheckpointNotFound, InvalidTag
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import (
    ARCHIVES,
    StorageOptions,
    StrPath,
    directory_and_name,
    is_url,
    local_path,
    open_storage,
)
from nxd_ckpt.tag.choosing import choose
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign.hugging_face_directory import WeightsLayout, open_weights
from nxd_ckpt.tag.foreign.recognise import Writer, is_untagged, open_untagged, recognise
from nxd_ckpt.tag.opened import OpenTag, open_complete_tag
from nxd_ckpt.tag.payload import PayloadFile

logger = logging.getLogger("nxd_ckpt")

_INDEX = ".index.json"
_TAGS = (Writer.NXD_CKPT, Writer.NXD, Writer.NXDT)


class ByPath(NamedTuple):
    """The checkpoint ``key`` of the storage; ``is_weights`` if it is a model in Hugging Face's form, and no more."""

    key: str
    is_weights: bool


Place = tuple[StrPath, StorageOptions | None]
"""A path or URL, with the options for opening it."""


def around(storage: Storage, tag: Tag | None, place: Place | None) -> tuple[Storage, str]:
    """Return where `find_by_path` is to look: for a named tag in ``storage``, else beside its own ``place``."""
    if tag is not None or place is None:
        return storage, "" if tag is None else str(tag)
    path, options = place
    if os.fspath(path).endswith(ARCHIVES):  # the storage is what is packed into it
        return storage, ""
    directory, name = directory_and_name(path if is_url(path) else os.path.abspath(local_path(path)))
    if name.endswith(_INDEX):  # of the files beside it
        directory, name = directory_and_name(directory)
    return (open_storage(directory, storage_options=options), name) if name else (storage, "")


def open_anything(storage: Storage, tag: Tag | None, place: Place | None, *, trust_pickle: bool = False) -> OpenTag:
    """Open the tag that `choose` takes, or else what the path itself names. Raises the errors of both."""
    try:
        chosen = choose(storage, tag).tag
    except CheckpointNotFound:
        inside, key = around(storage, tag, place)
        found = find_by_path(inside, key)
        if found is None:
            raise
        return open_by_path(inside, found.key, trust_pickle=trust_pickle)
    return open_complete_tag(storage, chosen, trust_pickle=trust_pickle)


def find_by_path(storage: Storage, key: str) -> ByPath | None:
    """Return the checkpoint that is ``key`` itself; None if there is none, or its save was interrupted.

    Raises:
        MalformedFile: it has two layouts at once.
        UnsupportedState: it is a file with a part of a model.
    """
    try:
        what = recognise(storage, key)
        if what.writer in _TAGS:
            choose(storage, what.tag)
    except (CheckpointNotFound, InvalidTag, FileNotFoundError):
        return None
    return ByPath(what.tag, what.writer is Writer.HUGGING_FACE)


def open_by_path(storage: Storage, key: str, *, trust_pickle: bool = False, tells: bool = True) -> OpenTag:
    """Open what `find_by_path` found. Raises the errors of opening its layout.

    With ``tells`` a warning says which keys of a script's own dict were taken for model and optimizer.
    """
    writer = recognise(storage, key).writer
    if writer is Writer.HUGGING_FACE:
        return OpenTag(storage, key, WeightsLayout(open_weights(storage, key)), None)
    if not storage.is_file(key) and not is_untagged(TagFiles(storage, key).names()):
        return open_complete_tag(storage, key, trust_pickle=trust_pickle)
    layout = open_untagged(storage, key, trust_pickle=trust_pickle)
    if tells and isinstance(layout, PayloadFile) and layout.taken:
        logger.warning("%s: taken as a script's own dict: %s", layout.where, layout.taken)
    return OpenTag(storage, key, layout, None)
