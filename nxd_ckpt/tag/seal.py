"""The seal of a trainer's checkpoint, which version 0.1 wrote: size and digest of each file beside the tags in it.

The files of a tag are listed by its indexes; the seal has its manifest, which verifies those. Files that were added
since are others'.
"""

from __future__ import annotations

from nxd_ckpt.core import document
from nxd_ckpt.core.limits import checked, checked_key, integers
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.errors import MalformedFile, PartLost
from nxd_ckpt.storage.base import Storage

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
