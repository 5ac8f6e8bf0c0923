"""A checkpoint that a path names itself: one tag, a file, or what another program wrote into a directory of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.tags import Tag, TagInfo
from nxd_ckpt.errors import CheckpointNotFound, InvalidTag
from nxd_ckpt.storage.archive.archive_storage import ArchiveStorage
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.storage.urls import (
    StorageOptions,
    StrPath,
    absolute,
    directory_and_name,
    open_storage,
)
from nxd_ckpt.tag.choosing import choose, tag_meant
from nxd_ckpt.tag.directory import find_tag
from nxd_ckpt.tag.foreign import nemo
from nxd_ckpt.tag.foreign.hugging_face_directory import WeightsLayout, open_weights
from nxd_ckpt.tag.foreign.recognise import Program, open_as, recognise
from nxd_ckpt.tag.foreign.torch_dcp import holds_ranks, is_of_rank
from nxd_ckpt.tag.foreign.weight_files import has_weights
from nxd_ckpt.tag.opened import OpenTag, open_complete_tag
from nxd_ckpt.tag.payload import PayloadFile
from nxd_ckpt.tag.verification import verify_file

logger = logging.getLogger("nxd_ckpt")

_INDEX = ".index.json"


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
        writer = Program(self.writer)
        layout = None if writer.writes_tags else open_as(writer, storage, key, trust_pickle=trust_pickle)
        if layout is None:
            return open_complete_tag(storage, key, trust_pickle=trust_pickle)
        if tells and isinstance(layout, PayloadFile) and layout.taken:
            logger.warning("%s: taken as a script's own dict: %s", layout.where, layout.taken)
        return OpenTag(storage, key, layout, None)


Place = tuple[StrPath, StorageOptions | None]
"""A path or URL, with the options for opening it."""

Opens = Callable[..., OpenTag]
"""`open_complete_tag`, or `ByPath.open`."""


def own_place(path: StrPath, opens: Callable[[str], Storage]) -> tuple[str, str]:
    """Return the directory or URL, which ``opens`` opens, and the key in it, by which a path names a checkpoint itself.

    An index stands for the directory that it is in, an archive of one directory for that, one rank's path for that of
    all ranks, and a number that is no tag for the only tag of that step.

    Raises CheckpointNotFound for the step of several tags.
    """
    whole = absolute(path)
    storage = opens(whole)
    if isinstance(storage, ArchiveStorage):
        entries = [entry for entry in storage.list() if entry.name[0] != "."]
        return whole, entries[0].name if len(entries) == 1 and entries[0].is_dir else ""
    directory, name = directory_and_name(whole)
    if name.endswith(_INDEX):
        directory, name = directory_and_name(directory)
    above, rank = directory_and_name(directory)
    of_all = f"{rank}/{name}"
    if nemo.is_of_rank(of_all) or (holds_ranks(rank) and is_of_rank(opens(above), of_all)):
        return above, of_all
    return directory, tag_meant(opens(directory), name)


def around(storage: Storage, tag: Tag | None, place: Place | None) -> tuple[Storage, str]:
    """Return where `find_by_path` is to look: for a named tag in ``storage``, else beside its own ``place``."""
    if tag is not None or place is None:
        return storage, "" if tag is None else str(tag)
    path, options = place
    opens = partial(open_storage, storage_options=options)
    directory, name = own_place(path, opens)
    return opens(directory), name


def open_anything(storage: Storage, tag: Tag | None, place: Place | None, *, trust_pickle: bool = False) -> OpenTag:
    """Open the tag that `choose` takes, or else what the path itself names. Raises the errors of both."""
    inside, found = choose_anything(storage, tag, place)
    return found.open(inside, found.key, trust_pickle=trust_pickle)


def choose_anything(storage: Storage, tag: Tag | None, place: Place | None) -> tuple[Storage, ByPath]:
    """Return the tag that `choose` takes, or else what the path itself names. Raises the errors of both."""
    try:
        return storage, _of_tag(choose(storage, tag))
    except CheckpointNotFound:
        inside, key = around(storage, tag, place)
        found = find_by_path(inside, key)
        if found is None:
            raise
        return inside, found


def _of_tag(info: TagInfo) -> ByPath:
    return ByPath(info.tag, Program.of_tag(info).value)


def find_by_path(storage: Storage, key: str) -> ByPath | None:
    """Return the checkpoint that is ``key`` itself; None if there is none of a layout that is known.

    Raises:
        CheckpointNotFound: it is a directory of several checkpoints, or a tag whose save was interrupted.
        MalformedFile: it has two layouts at once.
        UnsupportedState: it is a file with a part of a model, or another program's.
    """
    try:
        info = find_tag(storage, key) if key else None
        if info is not None and info.complete:  # without a look into it
            return _of_tag(info)
        what = recognise(storage, key)
        if what is None:
            return None
        return _of_tag(choose(storage, what.tag)) if what.writer.writes_tags else ByPath(what.tag, what.writer.value)
    except (InvalidTag, FileNotFoundError):
        return None


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
