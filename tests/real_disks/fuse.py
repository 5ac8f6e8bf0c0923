"""A file system in a process of its own: Linux' FUSE, without libfuse, which bare machines do not have. For root only.

Numbers, flags and structures are those of ``include/uapi/linux/fuse.h``, protocol 7.31.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NAMES = {
    **{1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename"},
    **{13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "flush"},
    **{26: "init", 27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 35: "create", 36: "interrupt"},
    **{42: "batch_forget", 45: "rename2"},
}
"""Requests that are answered, by their number: for any other the kernel is told that it is not there."""
_UNANSWERED = ("forget", "batch_forget", "interrupt")
_HEADER = struct.Struct("<IIQQIIIHH")  # length, number, unique, node, user, group, pid, extensions, padding
_REPLY = struct.Struct("<IiQ")  # length, minus errno, unique
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_LARGEST_WRITE = 2**17
_BUFFER = _LARGEST_WRITE + 2**12
ROOT = 1
"""The number of the directory that is mounted."""


class Request(NamedTuple):
    """``node``: the number of the file or directory that it is about."""

    name: str
    node: int
    body: bytes

    def fields(self, form: str) -> tuple[int, ...]:
        """The numbers that it begins with."""
        return struct.unpack_from("<" + form, self.body)

    def names(self, form: str = "") -> list[str]:
        """The names that follow these numbers."""
        return [name.decode() for name in self.body[struct.calcsize("<" + form) :].split(b"\0")[:-1]]


class Attributes(NamedTuple):
    """What stat(2) says. Times are in seconds."""

    node: int
    is_dir: bool
    nbytes: int
    modified: float
    changed: float

    def packed(self) -> bytes:
        """As an answer that the kernel does not keep."""
        modified, changed = (divmod(int(seconds * 1e9), 10**9) for seconds in (self.modified, self.changed))
        mode = stat.S_IFDIR | 0o755 if self.is_dir else stat.S_IFREG | 0o644
        seconds = (modified[0], modified[0], changed[0], modified[1], modified[1], changed[1])
        blocks = -(-self.nbytes // 512)
        fields = (self.node, self.nbytes, blocks, *seconds, mode, 1 + self.is_dir, 0, 0, 0, 4096, 0)
        return struct.pack("<QII", 0, 0, 0) + _ATTRIBUTES.pack(*fields)

    def entry(self) -> bytes:
        """The same, for a name that leads to it."""
        attributes = self.packed()[16:]
        return struct.pack("<QQQQII", self.node, 0, 0, 0, 0, 0) + attributes


OPENED = struct.pack("<QII", 0, 1, 0)
"""That a file is open; nothing of it is to be kept in the page cache."""


def opened(number: int) -> bytes:
    """The same, by a number by which later requests name it."""
    return struct.pack("<QII", number, 0, 0)


def listing(entries: list[tuple[int, str, bool]], begin: int, most: int) -> bytes:
    """Names of a directory from the ``begin``-th on, each with its node and whether it is a directory."""
    found = b""
    for number, (node, name, is_dir) in enumerate(entries[begin:], start=begin + 1):
        data = name.encode()
        kind = (stat.S_IFDIR if is_dir else stat.S_IFREG) >> 12
        entry = struct.pack("<QQII", node, number, len(data), kind) + data
        entry += bytes(-len(entry) % 8)
        if len(found) + len(entry) > most:
            break
        found += entry
    return found


def mounted(path: Path) -> int:
    """Mount at ``path``; the descriptor that requests come from. Raises OSError for whoever is not root."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"nxd_ckpt", os.fsencode(path), b"fuse", 0, options.encode()):
        number = ctypes.get_errno()
        os.close(fd)
        raise OSError(number, os.strerror(number), str(path))
    return fd


def unmount(path: Path) -> None:
    """Also while files are open."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.umount2(os.fsencode(path), 2)  # MNT_DETACH


def serve_one(fd: int, answer: Callable[[Request], bytes]) -> bool:
    """Answer the next request, by an error if ``answer`` raises OSError. False once nothing is mounted any more."""
    try:
        data = os.read(fd, _BUFFER)
    except OSError as error:  # EAGAIN: there was a request, and whoever asked was killed since
        return error.errno != errno.ENODEV
    _, number, unique, node, *_ = _HEADER.unpack_from(data)
    request = Request(NAMES.get(number, ""), node, data[_HEADER.size :])
    if request.name in _UNANSWERED:
        return True
    error_number, body = 0, b""
    try:
        body = _begun(request) if request.name == "init" else answer(request)
    except OSError as error:
        error_number = error.errno or errno.EIO
    with suppress(FileNotFoundError):  # whoever asked was killed
        os.write(fd, _REPLY.pack(_REPLY.size + len(body), -error_number, unique) + body)
    return True


def _begun(request: Request) -> bytes:
    """What this side of the protocol can: no flags, so that each request is made when the system call is."""
    major, _, readahead, _ = request.fields("IIII")
    return struct.pack("<IIIIHHIIHHI28x", major, 31, readahead, 0, 12, 9, _LARGEST_WRITE, 1, 0, 0, 0)

