"""The machine beneath a measurement: fresh memory, peak memory, the page cache, the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

PIECE = 8 * 2**20
"""Bytes of one read or write: large enough that the call itself costs nothing."""


_MADV_POPULATE_WRITE = 23
"""Linux 5.14; not among mmap's constants."""


class Ballast:
    """Memory that is held between turns and given back just before one.

    On a virtual machine, memory that was not touched for a while may have to come from the host first, which costs
    seconds a GiB: whoever happens to allocate first would pay for it.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._held: mmap.mmap | None = None

    def hold(self) -> None:
        if self._nbytes and self._held is None:
            # Huge pages: of those that were just freed, a GiB is taken back in 50 ms.
            self._held = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._held.madvise(mmap.MADV_HUGEPAGE)
            self._held.madvise(_MADV_POPULATE_WRITE)

    def free(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def pages(nbytes: int) -> mmap.mmap:
    """Page-aligned memory of at least one byte, every page of it touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return mmap.mmap(-1, max(nbytes, 1), flags=flags)


def trim() -> None:
    """Give memory that was freed back to the system: who comes next cannot reuse it."""
    ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of memory that this process has, without what it has freed."""
    trim()
    return _status("VmRSS")


def reset_peak() -> int:
    """Start to watch this process's memory; its bytes now."""
    now = resident()
    Path("/proc/self/clear_refs").write_text("5")
    return now


def peak() -> int:
    """The most bytes that this process had since :func:`reset_peak`, mapped files included."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def available_memory() -> int:
    """Bytes that could be allocated now without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def free_space(directory: Path) -> int:
    """Bytes that could be written below ``directory``."""
    return shutil.disk_usage(directory).free


def make_durable(path: Path) -> None:
    """Sync every file at or below ``path``, every directory, and the directory that ``path`` is in."""
    for each in (*_files(path), *_directories(path), path.parent):
        _with_file(each, os.fsync)


def evict(path: Path) -> None:
    """Drop every file at or below ``path`` from the page cache; they are made durable first, or they would stay."""
    for each in _files(path):
        _with_file(each, os.fdatasync)
        _with_file(each, lambda number: os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED))


def cache(path: Path) -> None:
    """Read every file at or below ``path`` once, so that it is in the page cache."""
    scratch = bytearray(PIECE)
    for each in _files(path):
        with open(each, "rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


def _with_file(path: Path, act: Callable[[int], None]) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        act(number)
    finally:
        os.close(number)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(each for each in path.rglob("*") if each.is_file())


def _directories(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield path
        yield from sorted(each for each in path.rglob("*") if each.is_dir())
