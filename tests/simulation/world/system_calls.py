"""System calls on simulated disks: what our own ``LocalStorage`` asks of ``os``, itself or by pathlib and shutil.

Within :meth:`SystemCalls.installed`, the functions of ``os`` that take a path or a descriptor look whether it belongs
to a simulated disk. All others go to the system. Nothing above ``os`` is replaced, so that a flag of open(2) or a sync
that is missing there is missing here.

Not simulated: symbolic links (there are none), other kinds of files, permissions, shared blocks (``FICLONE`` is
refused) and direct IO, which begins at 256 KiB.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import Any, NoReturn

from nxd_ckpt.storage import system
from tests.simulation.world.disk import Disk, File, Folder, Node, Unanswered

Turn = Callable[[str, str], None]
"""Called with the name of a system call (``look`` for one that changes nothing) and a path, before it happens: what it
raises is what fails, and while it waits, others run."""

_ROOT = "/simulated-disk-"
_FIRST_DESCRIPTOR = 1 << 24
_DEVICE = 1 << 20
_SHORT = 7
"""Of so many reads and writes, one moves half of what it could."""
_WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class _Mount:
    disk: Disk
    turn: Turn
    swaps: bool
    links: bool
    lives: Callable[[], bool]
    """Whether the process does that sees it: a dead one's locks are free."""


@dataclass
class _Open:
    """What a descriptor stands for: the file or folder that was at ``path`` when it was opened."""

    mount: _Mount
    path: str
    node: Node
    writes: bool
    position: int = 0


@dataclass(frozen=True)
class _Place:
    """A name on a disk, of which there may be nothing: below the root, or in a folder that was opened."""

    mount: _Mount
    name: str
    folder: _Open | None = None

    @property
    def path(self) -> str:
        """As it is now: the folder may be renamed while others run."""
        return self.name if self.folder is None else f"{_path_now(self.folder)}/{self.name}".lstrip("/")

    def node(self) -> Node:
        """Raises FileNotFoundError, NotADirectoryError."""
        node: Node = self.mount.disk.root
        for name in self.path.split("/") if self.path else ():
            below = node.names.get(name)
            if below is None:
                _fail(errno.ENOENT if isinstance(node, Folder) else errno.ENOTDIR, self.path)
            node = below
        return node

    def is_there(self) -> bool:
        try:
            self.node()
        except OSError:
            return False
        return True

    def call(self, name: str, change: Callable[[], None], path: str = "") -> None:
        """Do what a system call does, when it is its turn."""
        try:
            self.mount.turn(name, path or self.path)
        except Unanswered:
            change()
            raise
        change()


class _Stat:
    """As ``os.stat_result``. Of a file on a disk that lost power, nothing is decided before it is asked for."""

    st_dev, st_nlink, st_ctime_ns = _DEVICE, 1, 0
    """No number of a file is given twice, so that no time is needed to tell two files apart."""

    def __init__(self, node: Node, number: int) -> None:
        self._node, self.st_ino = node, number
        self.st_mode = stat.S_IFDIR | 0o755 if isinstance(node, Folder) else stat.S_IFREG | 0o644

    @property
    def st_size(self) -> int:
        return len(self._node.data) if isinstance(self._node, File) else 4096

    @property
    def st_mtime(self) -> float:
        return self._node.time if isinstance(self._node, File) else 0.0

    @property
    def st_mtime_ns(self) -> int:
        return round(self.st_mtime * 1e9)


class _Entry:
    """As ``os.DirEntry``."""

    def __init__(self, folder: str, name: str, node: Node, number: int) -> None:
        self.name, self.path = name, os.path.join(folder, name)
        self._stat = _Stat(node, number)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._stat.st_mode)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def is_junction(self) -> bool:
        return False

    def inode(self) -> int:
        return self._stat.st_ino

    def stat(self, *, follow_symlinks: bool = True) -> _Stat:
        return self._stat


class _Entries(Iterator[_Entry], AbstractContextManager["_Entries"]):
    """As what ``os.scandir`` returns."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""


class SystemCalls:
    """Those of the processes that each see a simulated disk under a path of its own, see :meth:`mount`."""

    def __init__(self) -> None:
        self._mounts: dict[str, _Mount] = {}
        self._open: dict[int, _Open] = {}
        self._descriptors, self._names, self._moved = count(_FIRST_DESCRIPTOR), count(1), 0
        self._numbers: dict[Node, int] = {}
        self._locks: dict[Node, list[tuple[_Open, int]]] = {}
        """Who has locked a file, and how."""

    def mount(
        self,
        disk: Disk,
        turn: Turn = lambda call, path: None,
        *,
        swaps: bool = True,
        links: bool = True,
        lives: Callable[[], bool] = lambda: True,
    ) -> str:
        """Show a disk, and give the path of its root. ``swaps``, ``links``: whether the file system can exchange two
        names, and has hard links."""
        root = f"{_ROOT}{len(self._mounts)}"
        if not self._mounts:
            self._names = count(max(disk.asides, 1))
        self._mounts[root] = _Mount(disk, turn, swaps, links, lives)
        return root

    @property
    def left_open(self) -> list[str]:
        """The paths of the files and folders that were opened and not closed."""
        return [one.path for one in self._open.values()]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the functions of ``os`` know these disks; names that this thread draws are the same in each run."""
        names = [name for name in vars(SystemCalls) if name[0] != "_" and hasattr(os, name)]
        before = [(os, name, getattr(os, name)) for name in names]
        before += [(fcntl, "ioctl", fcntl.ioctl), (fcntl, "flock", fcntl.flock)]
        before += [(system, "_renameat2", system._renameat2)]
        replaced = [self._for_ours(real, getattr(self, name)) for _, name, real in before]
        real_uuid4, ours = uuid.uuid4, threading.get_ident()

        def uuid4() -> uuid.UUID:
            # Other tests may have left threads that write, too, such as the heartbeat of a Checkpointer.
            return uuid.UUID(int=next(self._names) << 80) if threading.get_ident() == ours else real_uuid4()

        before.append((uuid, "uuid4", real_uuid4))
        replaced.append(uuid4)
        for (module, name, _), new in zip(before, replaced, strict=True):
            setattr(module, name, new)
        try:
            yield
        finally:
            for module, name, real in before:
                setattr(module, name, real)

    # The functions of os, which are installed by their names.

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = self._place(path, dir_fd)
        if flags & os.O_CREAT and (flags & os.O_EXCL or not place.is_there()):
            place.call("create", lambda: self._create(place, flags))
        else:
            place.mount.turn("look", place.path)
        node, writes = place.node(), bool(flags & _WRITING)
        if isinstance(node, Folder) and (writes or flags & os.O_CREAT):
            _fail(errno.EISDIR, place.path)
        if isinstance(node, File) and flags & os.O_DIRECTORY:
            _fail(errno.ENOTDIR, place.path)
        if isinstance(node, File) and flags & os.O_TRUNC:
            node.data.clear()
        fd = next(self._descriptors)
        self._open[fd] = _Open(place.mount, place.path, node, writes)
        return fd

    def _create(self, place: _Place, flags: int) -> None:
        """Another process may have made it since: that is seen only by O_EXCL."""
        if flags & os.O_EXCL or not place.is_there():
            place.mount.disk.create(place.path)

    def close(self, fd: int) -> None:
        self._unlock(self._opened(fd))
        del self._open[fd]

    def fstat(self, fd: int) -> _Stat:
        return self._stat(self._opened(fd).node)

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> _Stat:
        if isinstance(path, int):
            return self.fstat(path)
        place = self._place(path, dir_fd)
        place.mount.turn("look", place.path)
        return self._stat(place.node())

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> _Stat:
        return self.stat(path, dir_fd=dir_fd)

    def readlink(self, path: Any, *, dir_fd: int | None = None) -> str:
        _fail(errno.EINVAL, self._place(path, dir_fd).path)

    def listdir(self, path: Any) -> list[str]:
        return [entry.name for entry in self.scandir(path)]

    def scandir(self, path: Any) -> _Entries:
        place = self._place(path)
        place.mount.turn("look", place.path)
        node = self._opened(path).node if isinstance(path, int) else place.node()
        if isinstance(node, File):
            _fail(errno.ENOTDIR, place.path)
        where = "" if isinstance(path, int) else os.fspath(path)
        return _Entries([_Entry(where, name, below, self._number(below)) for name, below in sorted(node.names.items())])

    def read(self, fd: int, nbytes: int) -> bytes:
        one = self._opened(fd)
        one.mount.turn("look", one.path)
        data = bytes(_file(one).data[one.position : one.position + nbytes])
        data = data[: self._part_of(len(data))]
        one.position += len(data)
        return data

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        one = self._opened(fd)
        one.mount.turn("look", one.path)
        data = bytes(_file(one).data[offset : offset + sum(map(len, buffers))])
        data = data[: self._part_of(len(data))]
        at = 0
        for buffer in buffers:
            piece = data[at : at + len(buffer)]
            buffer[: len(piece)] = piece
            at += len(piece)
        return at

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        one = self._opened(fd)
        if not one.writes:
            _fail(errno.EBADF, one.path)
        one.mount.turn("write", one.path)
        file, view = _file(one), memoryview(data).cast("B")
        view = view[: self._part_of(len(view))]
        file.data.extend(bytes(max(offset + len(view) - len(file.data), 0)))
        file.data[offset : offset + len(view)] = view
        file.time = one.mount.disk.clock()
        return len(view)

    def fsync(self, fd: int) -> None:
        one = self._opened(fd)
        try:
            one.mount.turn("fsync", one.path)
        except OSError:
            if isinstance(one.node, File):
                one.node.drops_pages = True
            raise
        if isinstance(one.node, Folder):
            one.mount.disk.sync(one.node)
        else:
            one.node.sync()

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place.is_there():
            place.mount.turn("look", place.path)
            _fail(errno.EEXIST, place.path)
        place.call("mkdir", lambda: place.mount.disk.make_folder(place.path))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove(path, dir_fd, File, errno.EISDIR)

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove(path, dir_fd, File, errno.EISDIR)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove(path, dir_fd, Folder, errno.ENOTDIR)

    def rename(self, old: Any, new: Any) -> None:
        source, target = self._place(old), self._place(new)
        change = f"{source.path} -> {target.path}"
        source.call("rename", lambda: source.mount.disk.rename(source.path, target.path), change)

    def replace(self, old: Any, new: Any) -> None:
        self.rename(old, new)

    def link(self, old: Any, new: Any, *, follow_symlinks: bool = True) -> None:
        source, target = self._place(old), self._place(new)
        if not source.mount.links:
            _fail(errno.EPERM, target.path)
        target.call("link", lambda: target.mount.disk.link(_file_at(source), target.path))

    def utime(self, path: Any, times: tuple[float, float], *, follow_symlinks: bool = True) -> None:
        place = self._place(path)

        def set_time() -> None:
            _file_at(place).time = times[1]

        place.call("utime", set_time)

    # Of fcntl and of libc.

    def ioctl(self, fd: int, *_: Any) -> NoReturn:
        _fail(errno.EOPNOTSUPP, self._opened(fd).path)

    def flock(self, fd: int, operation: int) -> None:
        one = self._opened(fd)
        self._unlock(one)
        if operation & fcntl.LOCK_UN:
            return
        one.mount.turn("look", one.path)
        kind = operation & fcntl.LOCK_EX
        while any(kind or other for holder, other in self._locks.get(one.node, ()) if holder.mount.lives()):
            if operation & fcntl.LOCK_NB:
                _fail(errno.EWOULDBLOCK, one.path)
            one.mount.turn("look", one.path)
        self._locks.setdefault(one.node, []).append((one, kind))

    def _unlock(self, one: _Open) -> None:
        locks = self._locks.pop(one.node, ())
        if left := [lock for lock in locks if lock[0] is not one]:
            self._locks[one.node] = left

    def _renameat2(self, old: bytes, new: bytes, flags: int) -> int:
        one, other = self._place(old), self._place(new)
        if not flags:
            self.rename(old, new)
            return 0
        if not one.mount.swaps:
            ctypes.set_errno(errno.EINVAL)
            return -1
        exchange = f"{one.path} <-> {other.path}"
        one.call("rename", lambda: one.mount.disk.exchange(one.path, other.path), exchange)
        return 0

    # How they find what is meant.

    def _for_ours(self, real: Any, own: Callable[..., Any]) -> Any:
        """``own`` where a path or a descriptor is of these disks, else ``real``."""
        if own == self._renameat2:

            def renameat2(where: int, old: bytes, there: int, new: bytes, flags: int) -> Any:
                return own(old, new, flags) if _is_ours(old) else real(where, old, there, new, flags)

            return renameat2

        @wraps(real)
        def call(*given: Any, **named: Any) -> Any:
            is_ours = bool(given) and (_is_ours(given[0]) or _is_ours(named.get("dir_fd")))
            return own(*given, **named) if is_ours else real(*given, **named)

        return call

    def _place(self, path: Any, dir_fd: int | None = None) -> _Place:
        if isinstance(path, int):
            one = self._opened(path)
            return _Place(one.mount, one.path)
        text = os.fsdecode(path)
        if dir_fd is not None:
            one = self._opened(dir_fd)
            return _Place(one.mount, text, one)
        root, _, below = _plain(text)[1:].partition("/")
        return _Place(self._mounts[f"/{root}"], below)

    def _opened(self, fd: int) -> _Open:
        if fd not in self._open:
            _fail(errno.EBADF, f"descriptor {fd}")
        return self._open[fd]

    def _stat(self, node: Node) -> _Stat:
        return _Stat(node, self._number(node))

    def _number(self, node: Node) -> int:
        return self._numbers.setdefault(node, len(self._numbers) + 2)

    def _part_of(self, nbytes: int) -> int:
        """How many bytes a call moves of so many."""
        self._moved += 1
        return (nbytes + 1) // 2 if self._moved % _SHORT == 0 else nbytes

    def _remove(self, path: Any, dir_fd: int | None, kind: type[Node], otherwise: int) -> None:
        place = self._place(path, dir_fd)

        def unlink() -> None:
            if not isinstance(place.node(), kind):
                _fail(otherwise, place.path)
            place.mount.disk.unlink(place.path)

        place.call("unlink", unlink)


def _is_ours(given: Any) -> bool:
    if isinstance(given, int):
        return given >= _FIRST_DESCRIPTOR
    if given is None:
        return False
    text = os.fsdecode(given)
    return text.startswith(_ROOT) and _plain(text).startswith(_ROOT)


def _plain(path: str) -> str:
    return os.path.normpath(path) if "/." in path or "//" in path else path


def _file(one: _Open) -> File:
    if isinstance(one.node, Folder):
        _fail(errno.EISDIR, one.path)
    return one.node


def _file_at(place: _Place) -> File:
    node = place.node()
    if isinstance(node, Folder):
        _fail(errno.EPERM, place.path)
    return node


def _path_now(one: _Open) -> str:
    """Where the folder is that was opened, which may have been renamed since."""
    if one.mount.disk.find(one.path) is one.node:
        return one.path
    found = _search(one.mount.disk.root, "", one.node)
    return _fail(errno.ENOENT, one.path) if found is None else found


def _search(folder: Folder, path: str, node: Node) -> str | None:
    for name, below in folder.names.items():
        here = f"{path}/{name}".lstrip("/")
        if below is node:
            return here
        if isinstance(below, Folder) and (found := _search(below, here, node)) is not None:
            return found
    return None


def _fail(number: int, path: str) -> NoReturn:
    raise OSError(number, os.strerror(number), path)
