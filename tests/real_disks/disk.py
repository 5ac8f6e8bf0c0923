"""The simulated disk as a real file system: what real processes do to it goes through the kernel, and may fail."""

import errno
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from tests.real_disks.fuse import OPENED, ROOT, Attributes, Request, listing, opened
from tests.simulation.world.disk import Disk, File, Folder, Node

EFFECTS = ("create", "write", "fsync", "fsyncdir", "mkdir", "rename", "rename2", "link", "unlink", "rmdir", "setattr")
"""Requests that change something, or what lasts of it."""
LOOKS = ("lookup", "getattr", "open", "read", "opendir", "readdir")


class Fault(NamedTuple):
    """What happens at the ``number``-th request of ``among``, from 1 on.

    ``what`` is the name of an errno, as of which that request and the next ``times - 1`` fail; ``short``: a write takes
    half of its bytes; ``cut``: the power fails. Power is off until :meth:`MountedDisk.restore`.
    """

    what: str
    among: tuple[str, ...]
    number: int
    times: int = 1


class MountedDisk:
    """Answers the kernel. ``swaps``, ``links``: whether the file system exchanges names, and has hard links."""

    def __init__(self, *, swaps: bool, links: bool) -> None:
        self.disk = Disk(time.time)
        self._swaps, self._links = swaps, links
        self._nodes: list[Node] = [Folder(), self.disk.root]  # by number; those are kept for ever, and 0 is none
        self._numbers = {id(self.disk.root): ROOT}
        self._changed = dict[int, float]()
        self._listings = dict[int, list[tuple[int, str, bool]]]()
        self._is_dark = False
        self._fault: Fault | None = None
        self.counts = Counter[str]()
        """Requests since a fault was set."""
        self.struck = 0
        """How many requests met it."""

    def set(self, fault: Fault | None) -> None:
        """What is to go wrong from now on."""
        self._fault, self.counts, self.struck = fault, Counter(), 0

    def cut(self) -> None:
        """Power fails."""
        self._is_dark = True

    def restore(self, seed: int | None) -> None:
        """Power is back. Of what was not synced any part is lost, which ``seed`` decides, or all of it."""
        if seed is None:
            self.disk.crash(lambda change: False, lambda file: file.synced)
        else:
            self.disk.crash_at_random(Random(seed))
        self._fault, self._is_dark = None, False

    def answer(self, request: Request) -> bytes:
        """Raises OSError."""
        method: Callable[[Request], bytes] | None = getattr(self, f"_{request.name}", None)
        if method is None:
            raise OSError(errno.ENOSYS, request.name)
        self.counts[request.name] += 1
        strikes = self._strikes(request.name)
        if strikes == "cut":
            self.cut()
        if self._is_dark:
            raise OSError(errno.EIO, "no power")
        if strikes == "short" and request.name == "write":
            half = (request.fields("QQI")[2] + 1) // 2
            return self._write(request, half)
        if strikes and strikes != "short":
            if request.name == "fsync":
                self._file(request).drops_pages = True
            raise OSError(getattr(errno, strikes), strikes)
        return method(request)

    def _strikes(self, name: str) -> str:
        """What goes wrong with this request."""
        if self._fault is None or name not in self._fault.among:
            return ""
        past = sum(self.counts[one] for one in self._fault.among) - self._fault.number
        if not 0 <= past < self._fault.times:
            return ""
        self.struck += 1
        return self._fault.what

    def _lookup(self, request: Request) -> bytes:
        (name,) = request.names()
        node = self._node(request).names.get(name)
        if node is None:
            raise OSError(errno.ENOENT, name)
        return self._attributes(node).entry()

    def _getattr(self, request: Request) -> bytes:
        return self._attributes(self._node(request)).packed()

    def _setattr(self, request: Request) -> bytes:
        valid, _, _, nbytes, _, _, modified, _, _, nanoseconds = request.fields("IIQQQQQQII")
        node = self._node(request)
        if valid & 8 and isinstance(node, File):
            del node.data[nbytes:]
            node.data.extend(bytes(nbytes - len(node.data)))
        if valid & 32 and isinstance(node, File):
            node.time = time.time() if valid & 256 else modified + nanoseconds / 1e9
        self._changed[id(node)] = time.time()
        return self._attributes(node).packed()

    def _mkdir(self, request: Request) -> bytes:
        path = self._path(request, *request.names("II"))
        self.disk.make_folder(path)
        return self._found(path).entry()

    def _create(self, request: Request) -> bytes:
        path = self._path(request, *request.names("IIII"))
        self.disk.create(path)
        return self._found(path).entry() + OPENED

    def _unlink(self, request: Request) -> bytes:
        self.disk.unlink(self._path(request, *request.names()))
        return b""

    _rmdir = _unlink

    def _rename(self, request: Request, form: str = "Q", flags: int = 0) -> bytes:
        old, new = request.names(form)
        source, target = self._path(request, old), f"{self._path_of(request.fields('Q')[0])}/{new}".lstrip("/")
        if flags == 2 and self._swaps:
            self.disk.exchange(source, target)
            self._changed[id(self.disk.find(source))] = time.time()
        elif flags:
            raise OSError(errno.EINVAL, "flags of rename")
        else:
            self.disk.rename(source, target)
        self._changed[id(self.disk.find(target))] = time.time()
        return b""

    def _rename2(self, request: Request) -> bytes:
        return self._rename(request, "QII", request.fields("QI")[1])

    def _link(self, request: Request) -> bytes:
        if not self._links:
            raise OSError(errno.EPERM, "no links")
        path = self._path(request, *request.names("Q"))
        self.disk.link(self._nodes[request.fields("Q")[0]], path)
        return self._found(path).entry()

    def _open(self, request: Request) -> bytes:
        return OPENED

    def _read(self, request: Request) -> bytes:
        _, offset, nbytes = request.fields("QQI")
        return bytes(self._file(request).data[offset : offset + nbytes])

    def _write(self, request: Request, most: int | None = None) -> bytes:
        _, offset, nbytes = request.fields("QQI")
        data = request.body[40 : 40 + nbytes][:most]
        file = self._file(request)
        file.data.extend(bytes(max(offset - len(file.data), 0)))
        file.data[offset : offset + len(data)] = data
        file.time = self._changed[id(file)] = time.time()
        return struct.pack("<Q", len(data))

    def _statfs(self, request: Request) -> bytes:
        many = 2**30
        return struct.pack("<QQQQQIII28x", many, many, many, many, many, 4096, 255, 4096)

    def _flush(self, request: Request) -> bytes:
        return b""

    _release = _flush

    def _fsync(self, request: Request) -> bytes:
        self._file(request).sync()
        return b""

    def _opendir(self, request: Request) -> bytes:
        names = self._node(request).names.items()
        number = len(self._listings) + 1
        self._listings[number] = [(self._number(node), name, isinstance(node, Folder)) for name, node in names]
        return opened(number)

    def _readdir(self, request: Request) -> bytes:
        number, begin, most = request.fields("QQI")
        return listing(self._listings[number], begin, most)

    _releasedir = _flush

    def _fsyncdir(self, request: Request) -> bytes:
        folder = self._node(request)
        assert isinstance(folder, Folder)
        self.disk.sync(folder)
        return b""

    def _node(self, request: Request) -> Node:
        return self._nodes[request.node]

    def _file(self, request: Request) -> File:
        file = self._node(request)
        assert isinstance(file, File)
        return file

    def _number(self, node: Node) -> int:
        number = self._numbers.setdefault(id(node), len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(node)
        return number

    def _found(self, path: str) -> Attributes:
        node = self.disk.find(path)
        assert node is not None
        return self._attributes(node)

    def _attributes(self, node: Node) -> Attributes:
        changed = self._changed.setdefault(id(node), time.time())
        number = self._number(node)
        if isinstance(node, File):
            return Attributes(number, False, len(node.data), node.time, max(changed, node.time))
        return Attributes(number, True, 0, changed, changed)

    def _path(self, request: Request, name: str) -> str:
        return f"{self._path_of(request.node)}/{name}".lstrip("/")

    def _path_of(self, number: int) -> str:
        """Raises OSError where the directory was removed."""
        for path, folder in _folders(self.disk.root, ""):
            if folder is self._nodes[number]:
                return path
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _folders(folder: Folder, path: str) -> Iterator[tuple[str, Folder]]:
    yield path, folder
    for name, node in folder.names.items():
        if isinstance(node, Folder):
            yield from _folders(node, f"{path}/{name}".lstrip("/"))
