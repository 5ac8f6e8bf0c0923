"""The directory that an export makes: it appears when it is whole, and what was there stays until then.

On a file system it is written beside its place and renamed. An object store cannot: there the files are written in
place, that which readers look for first (the index, or the one file) at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nxd_ckpt.convert.locations import Location
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.base import DirEntry

logger = logging.getLogger("nxd_ckpt")


@dataclass(frozen=True)
class Kind:
    """What such a directory holds: patterns of files, ``DIR/*.pt`` for those in a directory. One with anything else is
    not replaced."""

    noun: str
    patterns: tuple[str, ...]

    def knows(self, file: str) -> bool:
        return any(
            file.count("/") == pattern.count("/") and fnmatchcase(file, pattern) for pattern in self.patterns
        )


HUGGING_FACE = Kind(
    "Hugging Face model", ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md")
)
TORCH_DCP = Kind("torch DCP checkpoint", ("*.distcp", ".metadata"))


class Output:
    """The directory ``place``. Raises InvalidArgument where it must not be written; nothing was touched then."""

    def __init__(self, place: Location, *, overwrite: bool, durable: bool, kind: Kind = HUGGING_FACE) -> None:
        self.place, self.storage, self._kind = place, place.open(durable), kind
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
                f"output {path} is not empty; pass overwrite=True to replace it, or choose another path"
            )
        foreign = [file for entry in held for file in self._files(entry) if not self._kind.knows(file)]
        if foreign:
            raise InvalidArgument(
                f"output {path} holds {', '.join(foreign[:5])}, which no {self._kind.noun} has; it is left alone: "
                "choose another path"
            )
        return self.storage.is_dir(name)

    def _files(self, entry: DirEntry) -> Iterator[str]:
        """The entry itself, and of a directory what is in it."""
        held = self.storage.list(f"{self.place.name}/{entry.name}") if entry.is_dir else []
        yield from (f"{entry.name}/{below.name}{'/' * below.is_dir}" for below in held)
        if not held:
            yield entry.name + "/" * entry.is_dir
