"""What an export, an unsharding or a packing makes: it appears when it is whole, and what was there stays until then.

On a file system it is written beside its place, and gets its name at the end (see coordination.replacement). An
object store has no renames: there the files are written in place. What readers look for first (the index, or the one
file) comes last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.output.locations import Location, settle
from nxd_ckpt.storage.base import DirEntry


@dataclass(frozen=True)
class Kind:
    """Which files such a directory may hold, as patterns (``DIR/*.pt`` for files in a subdirectory). One with any other
    file is not replaced."""

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
    """The directory ``place``, or without a ``kind`` the file. It is written as ``folder``, a key of ``storage``.

    Raises InvalidArgument where it must not be written; nothing was touched then.
    """

    def __init__(self, place: Location, *, overwrite: bool, durable: bool, kind: Kind | None = HUGGING_FACE) -> None:
        self.place, self.storage, self._kind = place, place.open(durable), kind
        settle(place, self.storage)
        self._check(overwrite)

    @property
    def folder(self) -> str:
        """The key below which files are written, or of the file."""
        return self.place.replacement(self.storage).finished if self.storage.renames else self.place.name

    @contextmanager
    def made(self) -> Iterator[None]:
        """Within, it is written. It is visible afterwards; if anything is raised, nothing of it is left."""
        try:
            self.begin()
            yield
            self.publish()
        except BaseException:
            self.discard()
            raise

    def begin(self) -> None:
        """Make room: remove what an interrupted one left, and on a store what is to be replaced."""
        self._remove_remains()
        if self._kind is not None:
            self.storage.make_dir(self.folder)

    def publish(self) -> None:
        """Make it visible, all files being written."""
        storage, replacement = self.storage, self.place.replacement(self.storage)
        if self._kind is not None:
            storage.sync_dir(self.folder)
        if not storage.renames:
            return
        restore = replacement.put_back
        try:
            replacement.make()
            restore = replacement.undo
            storage.sync_dir("")
        except OSError:
            with suppress(OSError):  # whoever opens it next tries again
                restore()
            raise
        self._remove_remains()

    def discard(self) -> None:
        """Remove what was written of one that failed."""
        with suppress(OSError):
            self.storage.remove(self.folder)

    def _remove_remains(self) -> None:
        storage, replacement = self.storage, self.place.replacement(self.storage)
        storage.remove(self.folder)
        if storage.renames and replacement.is_there(replacement.aside):
            # While it is being removed it must not have the name from which it would be put back.
            storage.rename(replacement.aside, replacement.finished)
            storage.remove(replacement.finished)

    def _check(self, overwrite: bool) -> None:
        path, name = self.place.path, self.place.name
        if self._kind is None:
            if self.storage.is_dir(name):
                raise InvalidArgument(f"output {path} is a directory; choose another path")
            if self.storage.is_file(name) and not overwrite:
                raise InvalidArgument(f"output {path} exists; pass overwrite=True to replace it")
            return
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

    def _files(self, entry: DirEntry) -> Iterator[str]:
        """The entry itself, and of a directory what is in it."""
        held = self.storage.list(f"{self.place.name}/{entry.name}") if entry.is_dir else []
        yield from (f"{entry.name}/{below.name}{'/' * below.is_dir}" for below in held)
        if not held:
            yield entry.name + "/" * entry.is_dir
