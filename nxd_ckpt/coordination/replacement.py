"""Replacement of a file or directory by a finished one, which takes its name.

Where the file system can exchange two names, one of the two has the name at every instant. Elsewhere it takes two
renames (the old one out, the new one in). A process that finds them interrupted finishes them:

=====================  ==================================================
names that exist       state, and what `Replacement.settle` does
=====================  ==================================================
target and finished    the old one or the new one is in place: nothing
finished               the old one is out: put the new one in
target                 the new one is in: nothing
neither                the new one is lost: put the old one back
=====================  ==================================================
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from nxd_ckpt.storage.base import Storage, Swapping


class Replacement(NamedTuple):
    """The move of ``finished`` to the name ``target``, whose old content is then called ``aside``. All are keys.

    Nothing here makes names durable: that is for the caller, before it relies on them.
    """

    storage: Storage
    finished: str
    target: str
    aside: str

    def make(self) -> None:
        """Replace. Raises OSError; then call `put_back`."""
        storage = self.storage
        if not self.is_there(self.target):
            storage.rename(self.finished, self.target)
        elif isinstance(storage, Swapping) and storage.swap(self.finished, self.target):
            try:
                storage.rename(self.finished, self.aside)
            except OSError:
                storage.swap(self.finished, self.target)
                raise
        else:
            storage.rename(self.target, self.aside)
            storage.rename(self.finished, self.target)

    def undo(self) -> None:
        """Restore the state before a `make` that succeeded, or whose exchange of names did. Raises OSError."""
        storage = self.storage
        if isinstance(storage, Swapping) and self.is_there(self.finished):
            storage.swap(self.finished, self.target)
            return
        storage.rename(self.target, self.finished)
        self.put_back()

    def put_back(self) -> None:
        """Give the old content its name again, if it lost it. Raises OSError.

        ``target`` may be the old content even if ``finished`` does not exist: another process that took this one for
        dead may have removed it.
        """
        if self.is_there(self.aside) and not self.is_there(self.target):
            self.storage.rename(self.aside, self.target)

    def settle(self) -> None:
        """Finish an interrupted replacement. Several processes may, at once. Raises OSError."""
        with suppress(FileNotFoundError, FileExistsError):
            if not self.is_there(self.target):
                source = self.finished if self.is_there(self.finished) else self.aside
                self.storage.rename(source, self.target)

    def is_there(self, key: str) -> bool:
        """Return whether a name exists."""
        return self.storage.is_dir(key) or self.storage.is_file(key)


def not_undone(error: OSError, name: str) -> OSError:
    """Return the error of a save that could not be made durable, and whose undoing could not be either."""
    return OSError(
        error.errno,
        f"{error.strerror or error}; its undoing is not durable either: {name} may be there after a power cut. Look at "
        "the disk, then save again",
        error.filename,
    )
