"""The directory that an export makes: it appears when it is whole, and what was there stays until then.

On a file system it is written beside its place and renamed. An object store cannot: there the files are written in
place, that which readers look for first (the index, or the one file) at the end.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from fnmatch import fnmatchcase

from nxd_ckpt.convert.places import Place
from nxd_ckpt.errors import InvalidArgument

logger = logging.getLogger("nxd_ckpt")

_REPLACEABLE = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md")
"""What a Hugging Face directory holds: one with anything else is not replaced."""


class Output:
    """The directory ``place``. Raises InvalidArgument where it must not be written; nothing was touched then."""

    def __init__(self, place: Place, *, overwrite: bool, durable: bool) -> None:
        self.place, self.storage = place, place.open(durable)
        self._existed = self._check(overwrite)

    @property
    def folder(self) -> str:
        """The key below which files are written."""
        return f".{self.place.name}.incomplete" if self.storage.renames else self.place.name

    def begin(self) -> None:
        """Make room: remove what an export left that was interrupted, and on a store what is to be replaced."""
        self.storage.remove(self.folder)
        self.storage.make_dir(self.folder)

    def publish(self) -> None:
        """Make it visible, all files being written."""
        storage, name = self.storage, self.place.name
        storage.sync_dir(self.folder)
        if not storage.renames:
            return
        old = f".{name}.replaced"
        storage.remove(old)
        if self._existed:
            storage.rename(name, old)
        storage.rename(self.folder, name)
        storage.sync_dir("")
        storage.remove(old)

    def discard(self) -> None:
        """Remove what was written of one that failed."""
        with suppress(OSError):
            self.storage.remove(self.folder)

    def _check(self, overwrite: bool) -> bool:
        path, name = self.place.path, self.place.name
        if self.storage.is_file(name):
            raise InvalidArgument(f"output {path} is a file; choose another path")
        held = self.storage.list(name)
        if held and not overwrite:
            raise InvalidArgument(
                f"output {path} is not empty; pass --overwrite (overwrite=True) to replace it, or choose another path"
            )
        foreign = [
            entry.name
            for entry in held
            if entry.is_dir or not any(fnmatchcase(entry.name, pattern) for pattern in _REPLACEABLE)
        ]
        if foreign:
            raise InvalidArgument(
                f"output {path} holds {', '.join(foreign[:5])}, which no Hugging Face model has; it is left alone: "
                "choose another path"
            )
        return self.storage.is_dir(name)
