"""Giving something finished, a file or a directory, the name of what it replaces.

Where the file system can exchange two names, one of the two has the name at every instant. Elsewhere it takes two
renames (the old one out, the new one in). Whoever finds that they were interrupted finishes them:

=====================  ==================================================
what is there          state, and what `Replacement.settle` does
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
    """What is ``finished`` gets the name ``target``; what has that is called ``aside`` afterwards. All are keys.

    Nothing here makes names durable: that is for the caller, before it relies on them.
    """

    storage: Storage
    finished: str
    target: str
    aside: str

    def make(self) -> None:
        """Raises OSError; then call `put_back`."""
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
        """Leave things as they were before `make`, which came to its end. Raises OSError."""
        self.storage.rename(self.target, self.finished)
        self.put_back()

    def put_back(self) -> None:
        """The old one to its name, if it is out. Raises OSError.

        What has the name may be the old one even where ``finished`` is not there: somebody who took this process for
        dead may have removed that.
        """
        if self.is_there(self.aside) and not self.is_there(self.target):
            self.storage.rename(self.aside, self.target)

    def settle(self) -> None:
        """Finish what was interrupted. Several processes may, at once: one that is faster is fine. Raises OSError."""
        with suppress(FileNotFoundError, FileExistsError):
            if not self.is_there(self.target):
                source = self.finished if self.is_there(self.finished) else self.aside
                self.storage.rename(source, self.target)

    def is_there(self, key: str) -> bool:
        """Whether one of the names is taken."""
        return self.storage.is_dir(key) or self.storage.is_file(key)
