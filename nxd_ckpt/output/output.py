"""The output of an export, an unsharding or a packing: it replaces what was there only when it is complete.

On a file system it is written under another name, and renamed at the end (see coordination.journal). An object
store has no renames, so there files are written in place; the file that readers look for first (the index, or the
single file) comes last. A lease keeps other processes from writing it meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nxd_ckpt.coordination.lease import OutputLease, is_in_use_here
from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import DirectoryInUse, InvalidArgument
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.output.locations import Location, directories_to_make, remove_unused, settle
from nxd_ckpt.output.source import Source
from nxd_ckpt.storage.base import DirEntry, Storage, can_rename
from nxd_ckpt.storage.progress import Counter, report, watched
from nxd_ckpt.storage.system import tell_room
from nxd_ckpt.storage.urls import is_url
from nxd_ckpt.tag.digest_lists import SUMS, sums_of
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.verify import files_of


@dataclass(frozen=True)
class OutputKind:
    """A kind of directory, by patterns of its files (``DIR/*.pt`` for files in a subdirectory).

    A directory with any other file is not replaced. ``beside`` are patterns of files that others than this kind have
    too: a directory with such files is replaced only if it also has a file of the first pattern.
    """

    noun: str
    patterns: tuple[str, ...]
    beside: tuple[str, ...] = ()

    def foreign(self, files: Sequence[str]) -> list[str]:
        """Return those of the ``files`` of a directory that no directory of this kind has."""
        is_one = any(fnmatchcase(file, self.patterns[0]) for file in files)
        patterns = (*self.patterns, *self.beside) if is_one else self.patterns
        return [file for file in files if not matches(file, (*patterns, SUMS))]


def matches(file: str, patterns: Sequence[str]) -> bool:
    """Return whether a file is one of the patterns, which do not reach into other directories."""
    return any(file.count("/") == pattern.count("/") and fnmatchcase(file, pattern) for pattern in patterns)


HUGGING_FACE = OutputKind(
    "Hugging Face model",
    ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md"),
    ("*.py", "*.spm", "*.bpe", "vocab.*", "LICENSE*", "additional_chat_templates/*.jinja"),
)
TORCH_DCP = OutputKind("torch DCP checkpoint", ("*.distcp", ".metadata"))


class Output:
    """The directory at ``place``, or without a ``kind`` the file. It is written as ``folder``, a key of ``storage``.

    Raises InvalidArgument, before anything is touched, if it may not be written.
    """

    def __init__(self, place: Location, chosen: ConvertOptions, kind: OutputKind | None = HUGGING_FACE) -> None:
        self.place = place
        self.storage: Storage = place.open(chosen.durable)
        self._kind = kind
        self._chosen = chosen
        self._made: list[str] = []
        self._lease: OutputLease | None = None
        settle(place, self.storage)
        self._check()

    @property
    def folder(self) -> str:
        """Key below which files are written, or the file's key."""
        return self.place.replacement(self.storage).finished if self.storage.renames else self.place.name

    @contextmanager
    def writing(self, nbytes: int = 0) -> Iterator[None]:
        """Write ``nbytes`` in this context: visible at its end; after an error, nothing of it is left.

        Raises DirectoryInUse, before anything is touched, if another process writes it.
        """
        try:
            self.begin()
            yield
            self.publish()
        except BaseException as error:
            tell_room(error, self.storage.url, nbytes)
            self.discard()
            raise

    @contextmanager
    def filled(
        self, source: Source, opened: OpenTag, nbytes: int, progress: bool, *, verified: bool = False
    ) -> Iterator[Counter]:
        """Write in this context what was ``opened`` of the source, and count its bytes; see `writing` and `guarded`."""
        started = time.monotonic()
        written = Counter()
        with (
            self.writing(nbytes),
            opened.guarded(verified=verified),
            watched("convert", nbytes, lambda: written.nbytes, progress),
        ):
            yield written
        report("converted", f"{source.root.path} to {self.place.path}", written.nbytes, started)

    def begin(self) -> None:
        """Make room: remove the rest of an interrupted output, and on a store the output to be replaced.

        Raises DirectoryInUse, before anything is touched, if another process writes it.
        """
        self._made = directories_to_make(self.place)
        try:
            if self._made:
                self.storage.make_dir("")  # durable, which the lease is not
            self._lease = self._leased()
            self._check()  # another process may have been first
            if self._kind is not None and self.storage.renames:
                self.storage.renames = can_rename(self.storage, f".{self.place.name}.probe")
            self._remove_remains()
            if self._kind is not None:
                self.storage.make_dir(self.folder)
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, content: bytes) -> None:
        """Write a small file of the output's directory. Raises DirectoryInUse if another process took over a store.

        There it is visible at once, and might be the file that completes the other process's output.
        """
        if not self.storage.renames:
            self.require()
        self.storage.write(f"{self.folder}/{name}", content)

    def require(self) -> None:
        """Raise DirectoryInUse if another process took over. Processes without the lease need not ask."""
        if self._lease is not None:
            self._lease.require()

    def publish(self) -> None:
        """Make it visible, after all files are written. Raises DirectoryInUse if another process took over.

        Files are not written in order, so their SHA-256 is that of what is read here.
        """
        if self._chosen.sha256:
            files = TagFiles(self.storage, self.folder)
            self.write(SUMS, sums_of(files, (name for name in files_of(files) if name != SUMS)))
        self.require()
        self._make_visible()
        self._release()

    def discard(self) -> None:
        """Remove the files of a failed output, and the directories that were made for it."""
        if self._lease is not None:
            with suppress(OSError, DirectoryInUse):
                self.require()  # else they are another process's
                self._remove_unfinished()
        self._release()
        remove_unused(self._made)

    def _leased(self) -> OutputLease:
        shown = f"output {self.place.path}"
        directory = self.place.lease_directory()
        if is_in_use_here(directory):
            raise DirectoryInUse(f"{shown} is being written by another thread of this process; wait for it")
        return OutputLease(directory, shown=shown)

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if not is_url(self.place.directory):
            remove_unused([self.place.lease_path])
            return
        with suppress(OSError):
            for key in (HIDDEN, ""):
                self.place.lease_directory().drop_empty(key)

    def _make_visible(self) -> None:
        storage = self.storage
        replacement = self.place.replacement(self.storage)
        if self._kind is not None:
            storage.sync_dir(self.folder)
        if not storage.renames:
            return
        try:
            replacement.make()
            storage.sync_dir("")
        except OSError as error:
            with suppress(OSError):  # the next process that opens it tries again
                replacement.restore(replacement.happened(error))
            raise
        try:
            self._remove_remains()
        except OSError as error:  # the next output of this name removes it
            logger.warning("%s is complete, but the one that it replaces was not removed: %s", self.place.path, error)

    def _remove_unfinished(self) -> None:
        storage = self.storage
        if storage.renames and self.place.replacement(storage).is_there(self.folder):
            # It may have been visible for a moment: its name must be gone for good before its files are.
            storage.sync_dir("")
        storage.remove(self.folder)

    def _remove_remains(self) -> None:
        storage = self.storage
        replacement = self.place.replacement(self.storage)
        self._remove_unfinished()
        if storage.renames and replacement.is_there(replacement.aside):
            # While it is removed, it must not have the name from which it would be restored.
            storage.rename(replacement.aside, replacement.finished)
            storage.remove(replacement.finished)

    def _check(self) -> None:
        path = self.place.path
        name = self.place.name
        overwrite = self._chosen.overwrite
        if self._kind is None:
            if self.storage.is_dir(name):
                raise InvalidArgument(f"output {path} is a directory; choose another path")
            if self.storage.is_file(name) and not overwrite:
                raise InvalidArgument(f"output {path} exists; pass overwrite=True to replace it")
            return
        if self.storage.is_file(name):
            raise InvalidArgument(f"output {path} is a file; choose another path")
        entries = self.storage.list(name)
        if entries and not overwrite:
            raise InvalidArgument(
                f"output {path} is not empty; pass overwrite=True to replace it, or choose another path"
            )
        foreign = self._kind.foreign([file for entry in entries for file in self._files(entry)])
        if foreign:
            raise InvalidArgument(
                f"output {path} holds {', '.join(foreign[:5])}, which no {self._kind.noun} has, so it is not replaced; "
                "choose another path"
            )

    def _files(self, entry: DirEntry) -> Iterator[str]:
        """Yield the entry, or the files in it if it is a directory."""
        children = self.storage.list(f"{self.place.name}/{entry.name}") if entry.is_dir else []
        yield from (f"{entry.name}/{child.name}{'/' * child.is_dir}" for child in children)
        if not children:
            yield entry.name + "/" * entry.is_dir
