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

from collections.abc import Callable
from contextlib import suppress

from nxd_ckpt.storage.base import Storage


class Replacement:
    """The move of ``finished`` to the name ``target``, whose old content is then called ``aside``. All are keys.

    Nothing here makes names durable: that is for the caller, before it relies on them.
    """

    def __init__(self, storage: Storage, finished: str, target: str, aside: str) -> None:
        self.storage: Storage = storage
        self.finished: str = finished
        self.target: str = target
        self.aside: str = aside
        self._is_made = self._replaces = False

    def make(self, replaces: bool | None = None) -> None:
        """Replace. Raises OSError; then call `restore`.

        ``replaces`` says whether there is something to replace; None looks.
        """
        storage = self.storage
        self._replaces = self.is_there(self.target) if replaces is None else replaces
        if not self._replaces:
            storage.rename(self.finished, self.target)
        elif storage.swap(self.finished, self.target):
            self._is_made = True
            storage.rename(self.finished, self.aside)
        else:
            storage.rename(self.target, self.aside)
            storage.rename(self.finished, self.target)
        self._is_made = True

    def happened(self, error: OSError, is_new: Callable[[], bool | None] | None = None) -> bool:
        """Return whether ``target`` is the new one although `make`, or a later step, raised ``error``.

        A server may have renamed it without an answer. ``is_new`` looks at it; without that, names decide.
        """
        if isinstance(error, (FileNotFoundError, FileExistsError)):
            return False  # it is for the caller: another process may have finished the replacement
        return self._is_made or bool((is_new or self._has_new_name)())

    def _has_new_name(self) -> bool:
        return self.is_there(self.target) and not self.is_there(self.finished)

    def restore(self, is_new: bool) -> None:
        """Restore the state before `make`. ``is_new`` says that ``target`` is the new one. Raises OSError.

        If the old one is gone, the new one stays: another process that took this one for dead has removed it.
        """
        storage = self.storage
        if is_new:
            if self.is_there(self.finished) and storage.swap(self.finished, self.target):
                return
            if not self._replaces or self.is_there(self.aside):
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
