"""Seal of a directory that holds tags beside another library's files: size and digest of every file.

A seal lists all files, so a directory is compared with it both ways: files that are gone, that were added, or whose
bytes changed. The files of a tag are listed by its indexes; the seal has its manifest, which verifies those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.limits import checked_key
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.names import DONE, MANIFEST
from nxd_ckpt.errors import CheckpointError, CorruptCheckpoint, DigestMismatch, MalformedFile, PartLost
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.tag.verification import crc32_of

DIGESTS = "digests.json"
"""Name of the file with size in bytes and CRC-32 of every other file, by path; for a tag only its manifest."""

_DEEPEST = 32
"""Maximum directories above a file; deeper ones are ignored, as a link may lead back."""
_ELSEWHERE = "the checkpoint is damaged; resume from another one"


def read_seal(storage: Storage) -> dict[str, Any]:
    """Return size and CRC-32 of every file, by its path.

    Raises:
        PartLost, MalformedFile: there is no seal, or it is damaged.
    """
    where = f"{storage.url}/{DIGESTS}"
    try:
        seal = document.whole(storage.read(DIGESTS))
        for name in seal if isinstance(seal, dict) else ():
            checked_key(name)
    except FileNotFoundError as error:
        raise PartLost(f"{where} was saved, and is gone: {_ELSEWHERE}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{where} is no list of files: {error}: {_ELSEWHERE}") from error
    if not isinstance(seal, dict):
        raise MalformedFile(f"{where}: expected an object, found {type(seal).__name__}: {_ELSEWHERE}")
    return seal


def file_digest(storage: Storage, key: str, memory: memoryview) -> list[int]:
    """Return size in bytes and CRC-32 of a file, read in pieces of ``memory``."""
    size = storage.size(key)
    return [size, crc32_of(storage, key, 0, size, memory, Counter())]


def seal_problems(storage: Storage, tag: str, ignored: Sequence[str] = ()) -> Iterator[CheckpointError]:
    """Compare a directory with its seal; each problem names one file that is gone, changed, or was added.

    Args:
        tag: a tag in the directory, even if it lost files.
        ignored: glob patterns of files that may have been added.

    Raises:
        PartLost, MalformedFile: there is no seal, or it is damaged.
    """
    seal, memory = read_seal(storage), memoryview(bytearray(CRC_BLOCK))
    for name, expected in seal.items():
        path = f"{storage.url}/{name}"
        try:
            actual = file_digest(storage, name, memory)
        except FileNotFoundError:
            yield PartLost(f"{path} was saved, and is gone: {_ELSEWHERE}")
            continue
        except MalformedFile as error:
            yield error
            continue
        folder, _, file = name.rpartition("/")
        if actual != expected and folder and file == MANIFEST and storage.is_file(f"{folder}/{DONE}"):
            yield DigestMismatch(
                f"{storage.url}/{folder} is of another save than the files beside it: its {MANIFEST} should have size "
                f"and CRC-32 {expected}, as {DIGESTS} has them, found {actual}. Put the tag back that was saved with "
                "them, or resume from another checkpoint"
            )
        elif actual != expected:
            yield DigestMismatch(
                f"{path}: its bytes are not those that were saved, as {DIGESTS} has them: size and CRC-32 {expected}, "
                f"found {actual}. Resume from another checkpoint. If it was changed on purpose, remove "
                f"{storage.url}/{tag}, and with it the optimizer"
            )
    for name in sorted(_files(storage, _tags(storage, seal, tag)) - seal.keys()):
        if not any(fnmatchcase(name, pattern) for pattern in ignored):
            yield CorruptCheckpoint(
                f"{storage.url}/{name} was not saved: {DIGESTS}, which lists all files, does not have it. It was added "
                "since, perhaps by another job: move it elsewhere, or resume from another checkpoint"
            )


def _tags(storage: Storage, seal: Collection[str], tag: str) -> set[str]:
    """Return the directories whose files their own indexes list. Seals of older versions do not name them."""
    tags = {name.rpartition("/")[0] for name in seal if name.endswith(f"/{MANIFEST}")}
    if not tags:
        tags = {entry.name for entry in storage.list() if storage.is_file(f"{entry.name}/{DONE}")}
    return {*tags, tag}


def _files(storage: Storage, tags: Collection[str]) -> set[str]:
    """Return all files except those of tags, hidden ones (of file systems, desktops, our statistics), and the seal."""
    files, folders = set[str](), [""]
    for folder in folders:  # grows
        for entry in storage.list(folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith(".") or name in (DIGESTS, *tags):
                continue
            if not entry.is_dir:
                files.add(name)
            elif name.count("/") < _DEEPEST:
                folders.append(name)
    return files
