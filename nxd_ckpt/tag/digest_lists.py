"""Lists of the digests of a directory's files: ``SHA256SUMS``, and the seal of a trainer's checkpoint.

``SHA256SUMS`` is for those who sign; ``sha256sum -c`` reads it. Version 0.1 wrote the seal: size and digest of each
file beside the tags that lie in the checkpoint. The files of a tag are listed by its indexes; the seal has its
manifest, which verifies those. Files that were added since are others'.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hashlib import sha256

from nxd_ckpt.core import document
from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.limits import checked, checked_key, integers, shown
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.errors import MalformedFile, PartLost
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.storage.base import Storage

SUMS = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")
_PIECE = 8 * 2**20


def sums_of(files: TagFiles, names: Iterable[str]) -> bytes:
    """Return the content of such a list for the files ``names``, which are read."""
    return "".join(f"{sha256_of(files, name)}  {name}\n" for name in sorted(names)).encode()


def read_sums(files: TagFiles) -> dict[str, str]:
    """Return the SHA-256 of each file by its name. Raises MalformedFile."""
    where = files.where(SUMS)
    sums: dict[str, str] = {}
    with parsing(where, "lines of a SHA-256 and a file's name"):
        for line in files.storage.read(files.key(SUMS)).decode().splitlines():
            match = _LINE.fullmatch(line)
            if match is None:
                raise MalformedFile(f"{where}: expected lines of a SHA-256 and a file's name, found {shown(line)}")
            sums[checked_key(match[2])] = match[1]
    return sums


def sha256_of(files: TagFiles, name: str, count: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the SHA-256 of a file, read in pieces of 8 MiB; ``count`` is called with the bytes of each."""
    key = files.key(name)
    digest = sha256()
    size = files.storage.size(key)
    memory = memoryview(bytearray(min(_PIECE, size)))
    for start in range(0, size, _PIECE):
        piece = memory[: min(_PIECE, size - start)]
        files.storage.read_into(key, start, piece)
        digest.update(piece)
        count(len(piece))
    return digest.hexdigest()


STATE = "training_state"
"""The tag in such a checkpoint; those of further models end in ``_1`` and so on."""
DIGESTS = "digests.json"
"""Name of the file with size in bytes and CRC-32 of every other file, by path; for a tag only its manifest."""


def read_seal(storage: Storage) -> dict[str, FileEntry]:
    """Return size and CRC-32 of every file, by its path.

    Raises:
        PartLost, MalformedFile: there is no seal, or it is damaged.
    """
    where = f"{storage.url}/{DIGESTS}"
    try:
        seal = checked(dict, document.whole(storage.read(DIGESTS)))
        return {checked_key(name): FileEntry(*integers(entry, 2)) for name, entry in seal.items()}
    except FileNotFoundError as error:
        raise PartLost(f"{where} was saved, and is gone: the checkpoint is damaged; resume from another one") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedFile(f"{where} is no list of files ({error}): resume from another checkpoint") from error
