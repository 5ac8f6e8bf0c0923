"""A checkpoint that a path names itself: one tag, a file, or what another program wrote into a directory of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.errors import CheckpointNotFound, InvalidTag
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import Counter
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
from nxd_ckpt.tag.directory import find_tag
from nxd_ckpt.tag.foreign.hugging_face_directory import WeightsLayout, open_weights
from nxd_ckpt.tag.foreign.recognise import Program, open_as, recognise
from nxd_ckpt.tag.foreign.weight_files import has_weights
from nxd_ckpt.tag.opened import OpenTag, open_complete_tag
from nxd_ckpt.tag.payload import PayloadFile
from nxd_ckpt.tag.verification import verify_file

logger = logging.getLogger("nxd_ckpt")

_INDEX = ".index.json"
OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Ends of the names of files that torch.save wrote."""
WEIGHT_FILES = (".safetensors", *OF_TORCH)
_ZIP = b"PK\x03\x04"


class ByPath(NamedTuple):
    """The checkpoint ``key`` of the storage, by ``writer``, a value of `Program`: plain data, for other ranks."""

    key: str
    writer: str

    @property
    def is_weights(self) -> bool:
        """True if it is a model in Hugging Face's form, and no more."""
        return self.writer == Program.HUGGING_FACE.value

    def open(self, storage: Storage, key: str, *, trust_pickle: bool = False, tells: bool = True) -> OpenTag:
        """Open it as ``key`` of the storage. Raises the errors of opening its layout.

        With ``tells`` a warning says which keys of a script's own dict were taken for model and optimizer.
        """
        if self.is_weights:
            return OpenTag(storage, key, WeightsLayout(open_weights(storage, key)), None)
        layout = open_as(Program(self.writer), storage, key, trust_pickle=trust_pickle)
        if layout is None:
            return open_complete_tag(storage, key, trust_pickle=trust_pickle)
        if tells and isinstance(layout, PayloadFile) and layout.taken:
            logger.warning("%s: taken as a script's own dict: %s", layout.where, layout.taken)
        return OpenTag(storage, key, layout, None)


Place = tuple[StrPath, StorageOptions | None]
"""A path or URL, with the options for opening it."""

Opens = Callable[..., OpenTag]
"""`open_complete_tag`, or `ByPath.open`."""


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
    inside, key, opens = choose_anything(storage, tag, place)
    return opens(inside, key, trust_pickle=trust_pickle)


def choose_anything(storage: Storage, tag: Tag | None, place: Place | None) -> tuple[Storage, str, Opens]:
    """Return the tag that `choose` takes, or else what the path itself names; with the function that opens it."""
    try:
        return storage, choose(storage, tag).tag, open_complete_tag
    except CheckpointNotFound:
        inside, key = around(storage, tag, place)
        found = find_by_path(inside, key)
        if found is None:
            raise
        return inside, found.key, found.open


def find_by_path(storage: Storage, key: str) -> ByPath | None:
    """Return the checkpoint that is ``key`` itself; None if there is none, or its save was interrupted.

    Raises:
        MalformedFile: it has two layouts at once.
        UnsupportedState: it is a file with a part of a model.
    """
    if not (storage.is_dir(key) or _may_be_one(storage, key)):
        return None
    info = find_tag(storage, key) if key else None
    if info is not None and info.complete:
        return ByPath(key, (Program.NXD_CKPT if info.ours else Program.NXD).value)
    if info is not None and info.ours:  # whatever files of others are in it
        return None
    try:
        what = recognise(storage, key)
        if what.writer.writes_tags:
            choose(storage, what.tag)
    except (CheckpointNotFound, InvalidTag, FileNotFoundError):
        return None
    return ByPath(what.tag, what.writer.value)


def with_given_model(opened: OpenTag, verifies: bool) -> OpenTag:
    """Return a tag whose model is among the files that its save was given, as one with that model; others unchanged.

    A trainer's tag holds optimizer and scheduler, and the weights as the trainer writes them. If it ``verifies``, their
    files are compared with the manifest, since they have no digests of their own. Raises PartNotFound, MalformedFile
    and DigestMismatch for such files.
    """
    manifest = opened.manifest
    if manifest is None or manifest.parts.model:
        return opened
    weights = [file for file in manifest.guests if has_weights([file])]
    if not weights:
        return opened
    storage, tag = opened.storage, opened.tag
    if verifies:
        memory = memoryview(bytearray(CRC_BLOCK))
        for file in weights:
            verify_file(storage, f"{tag}/{file}", manifest.guests[file], memory, Counter())
    return OpenTag(storage, tag, WeightsLayout(open_weights(storage, tag)), None, opened.identity)


def _may_be_one(storage: Storage, key: str) -> bool:
    """Return whether the file may be a checkpoint: by its name, or because it begins as files of torch.save do."""
    if not storage.is_file(key):
        return False
    beginning = bytearray(min(len(_ZIP), storage.size(key)))
    if not key.endswith(WEIGHT_FILES):
        storage.read_into(key, 0, memoryview(beginning))
    return key.endswith(WEIGHT_FILES) or beginning == _ZIP
