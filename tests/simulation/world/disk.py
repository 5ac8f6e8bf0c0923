"""A POSIX file system in memory that knows what a loss of power leaves of it.

What programs see is in the page cache. What lasts is less: the bytes of a file as of its last sync, and the names in a
directory as of its last sync. Everything since is *pending*. At a crash any of it may have reached the disk, in any
order, but for this: two changes of the same name keep theirs, and one rename is there or is not. A file's bytes may
have reached the disk in part (*torn*). That is what POSIX allows, and more than most file systems do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import NamedTuple

from nxd_ckpt.errors import MalformedFile


class File:
    """``data`` and ``time`` as programs see them; ``synced`` and ``synced_time`` as they last."""

    names: Mapping[str, Node] = {}  # nothing lies below it

    def __init__(self, time: float) -> None:
        self.data, self.synced = bytearray(), b""
        self.time = self.synced_time = time
        self.drops_pages = False
        """Whether a sync of it failed: the pages count as clean since, and no later sync brings them to the disk."""

    def sync(self) -> None:
        if not self.drops_pages:
            self.synced = bytes(self.data)
        self.synced_time = self.time


class Folder:
    """``names`` as programs see them; ``synced`` as they last."""

    def __init__(self) -> None:
        self.names: dict[str, Node] = {}
        self.synced: dict[str, Node] = {}
        self.pending = 0
        """How many pending edits are of its names."""
        self.listed: list[tuple[str, bool]] | None = None
        """The names in order, each with whether it is a folder; None if they have changed since."""

    def listing(self) -> list[tuple[str, bool]]:
        """See :attr:`listed`."""
        if self.listed is None:
            self.listed = [(name, isinstance(node, Folder)) for name, node in sorted(self.names.items())]
        return self.listed

    def names_to_remove(self) -> list[str]:
        """Those that go before the folder itself can."""
        return sorted(self.names)


Node = File | Folder


class Edit(NamedTuple):
    """A name in a folder that leads to ``node`` from now on; to nothing, if that is None."""

    folder: Folder
    name: str
    node: Node | None


class Change(NamedTuple):
    """Edits that last together or not at all: one system call."""

    what: str
    edits: tuple[Edit, ...]

    @property
    def touches(self) -> frozenset[tuple[Folder, str]]:
        """The names that it is about."""
        return frozenset([edit[:2] for edit in self.edits])


class Unanswered(OSError):
    """A call of which the reply is lost, as of a server: it happens, and whoever makes it gets this error."""


class Disk:
    """Folders, files, and the changes of names that are pending, in their order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.root = Folder()
        self.pending: list[Change] = []
        self.asides = 0
        """How many temporary names were given."""

    def find(self, path: str) -> Node | None:
        node: Node = self.root
        for name in path.split("/") if path else ():
            below = node.names.get(name)
            if below is None:
                return None
            node = below
        return node

    def folder(self, path: str) -> Folder:
        """Raises FileNotFoundError, or NotADirectoryError."""
        node = self.find(path)
        if isinstance(node, Folder):
            return node
        raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)

    def file(self, path: str) -> File:
        """Raises FileNotFoundError, or MalformedFile for a directory."""
        node = self.find(path)
        if isinstance(node, File):
            return node
        if node is None:
            raise _error(errno.ENOENT, path)
        raise MalformedFile(f"{path} is a directory, expected a file")

    def files(self, path: str) -> list[str]:
        """The paths of all files below a folder; none where it is not there."""
        found = []
        for name, node in getattr(self.find(path), "names", {}).items():
            below = f"{path}/{name}".lstrip("/")
            found += [below] if isinstance(node, File) else self.files(below)
        return found

    def create(self, path: str) -> File:
        file = File(self.clock())
        self.link(file, path)
        return file

    def link(self, node: Node, path: str) -> None:
        """Another name for it. Raises FileExistsError."""
        folder, name = self._place(path)
        if name in folder.names:
            raise _error(errno.EEXIST, path)
        self._change(f"link {path}", Edit(folder, name, node))

    def make_folder(self, path: str) -> None:
        """Raises FileExistsError."""
        self.link(Folder(), path)

    def rename(self, source: str, target: str) -> None:
        """As rename(2): it replaces a file, or a directory that is empty by another one. Raises FileNotFoundError,
        FileExistsError for what cannot be replaced."""
        (old, old_name), (new, new_name) = self._place(source), self._place(target)
        node = old.names.get(old_name)
        if node is None:
            raise _error(errno.ENOENT, source)
        replaced = new.names.get(new_name)
        if replaced is not None and (isinstance(node, Folder) != isinstance(replaced, Folder) or replaced.names):
            raise _error(errno.EEXIST, target)
        self._change(f"rename {source} -> {target}", Edit(old, old_name, None), Edit(new, new_name, node))

    def exchange(self, one: str, other: str) -> None:
        """As renameat2(2) with RENAME_EXCHANGE. Raises FileNotFoundError."""
        (first, first_name), (second, second_name) = self._place(one), self._place(other)
        a, b = first.names.get(first_name), second.names.get(second_name)
        if a is None or b is None:
            raise _error(errno.ENOENT, other if b is None else one)
        self._change(f"exchange {one} <-> {other}", Edit(first, first_name, b), Edit(second, second_name, a))

    def unlink(self, path: str) -> None:
        """Raises FileNotFoundError, or OSError for a directory that is not empty."""
        folder, name = self._place(path)
        node = folder.names.get(name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if isinstance(node, Folder) and node.names:
            raise _error(errno.ENOTEMPTY, path)
        self._change(f"unlink {path}", Edit(folder, name, None))

    def sync(self, folder: Folder) -> None:
        """Let the changes of its names last, with what they build on."""
        if not folder.pending:
            return
        lasting, left = list[Change](), list[Change]()
        elsewhere = set[tuple[Folder, str]]()  # names in other folders: a rename lasts in both, or in none
        for change in reversed(self.pending):
            first, last = change.edits[0].folder, change.edits[-1].folder
            if first is folder or last is folder or (elsewhere and not elsewhere.isdisjoint(change.touches)):
                lasting.append(change)
                if first is not folder or last is not folder:
                    elsewhere |= change.touches
            else:
                left.append(change)
        for change in reversed(lasting):
            _last(change)
            for edit in change.edits:
                edit.folder.pending -= 1
        self.pending = left[::-1]

    def sync_all(self) -> None:
        """As sync(2): everything lasts."""
        self.crash(lambda change: True, lambda file: bytes(file.data))

    def crash(self, lasts: Callable[[Change], bool], content: Callable[[File], bytes]) -> None:
        """Lose power: of the pending changes those last for which ``lasts`` is true, unless an earlier one of the same
        name does not; of a file that is not synced, ``content``."""
        lost = set[tuple[Folder, str]]()
        for change in self.pending:
            touched = change.touches
            if touched & lost or not lasts(change):
                lost |= touched
            else:
                _last(change)
        self.pending = []
        for node in _lasting(self.root):
            if isinstance(node, Folder):
                node.names, node.pending, node.listed = dict(node.synced), 0, None
            else:
                node.data = bytearray(content(node) if node.data != node.synced else node.synced)
                node.synced, node.time, node.drops_pages = bytes(node.data), node.synced_time, False

    def crash_at_random(self, random: Random) -> None:
        """Lose power, and of what was pending what a ``random`` disk loses: nothing, everything, or anything."""
        share = random.choice((0.0, 0.5, 0.5, 0.9, 1.0))

        def content(file: File) -> bytes:
            return random.choice(contents(file))

        self.crash(lambda change: random.random() < share, content)

    def _place(self, path: str) -> tuple[Folder, str]:
        parent, _, name = path.rpartition("/")
        return self.folder(parent), name

    def _change(self, what: str, *edits: Edit) -> None:
        for edit in edits:
            _put(edit.folder.names, edit)
            edit.folder.pending += 1
            edit.folder.listed = None
        self.pending.append(Change(what, edits))


def contents(file: File) -> list[bytes]:
    """What a crash may leave of a file that is not synced: what was, what is, the half of it, zeros."""
    data = bytes(file.data)
    half = data[: len(data) // 2]
    return [file.synced, data, half, half + bytes(len(data) - len(half)), bytes(len(data))]


def _last(change: Change) -> None:
    for edit in change.edits:
        _put(edit.folder.synced, edit)


def _put(names: dict[str, Node], edit: Edit) -> None:
    if edit.node is None:
        names.pop(edit.name, None)
    else:
        names[edit.name] = edit.node


def _lasting(folder: Folder) -> Iterator[Node]:
    yield folder
    for node in folder.synced.values():
        if isinstance(node, Folder):
            yield from _lasting(node)
        else:
            yield node


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
