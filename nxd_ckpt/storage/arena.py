"""The staging arena: host memory that is allocated once and reused by every save.

A fresh allocation costs six to eight times the copy itself (page faults), so the buffer is kept between saves. It is
page aligned, as direct IO wants it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

PAGE = mmap.PAGESIZE
_SHARE = 0.8
"""Part of the available memory that staging may take: the training process itself needs the rest."""


class Arena:
    """One growing, reusable, page-aligned buffer of at most ``cap`` bytes."""

    def __init__(self, cap: int) -> None:
        self.cap: int = whole_pages(cap)
        self._memory: mmap.mmap | None = None

    def reserve(self, nbytes: int) -> memoryview:
        """Return a writable view of the first ``nbytes`` bytes, with any content.

        The caller must have dropped all views of earlier calls when it asks for more than the arena has.
        """
        if nbytes > self.cap:
            raise MemoryError(f"staging arena: {nbytes} bytes needed, its cap is {self.cap}")
        needed = max(-(-nbytes // PAGE) * PAGE, PAGE)
        if self._memory is None or len(self._memory) < needed:
            self._memory = None  # free the old one before asking for the new: the cap counts both
            self._memory = private_memory(needed)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # The first touch of 4 KiB pages costs several times as much as the copy into them.
                with contextlib.suppress(OSError):  # a kernel without them
                    self._memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._memory)[:nbytes]

    @property
    def nbytes(self) -> int:
        """Bytes of its present memory."""
        return 0 if self._memory is None else len(self._memory)

    def release(self) -> None:
        """Return the memory to the system."""
        self._memory = None


def whole_pages(nbytes: int) -> int:
    """Return the bytes of as many whole pages as ``nbytes`` has, but of one at least."""
    return max(nbytes // PAGE * PAGE, PAGE)


def private_memory(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory of this process alone, which costs nothing until it is used."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)  # Windows: no other process has it either


def default_cap(local_world_size: int) -> int:
    """Return the bytes that one of ``local_world_size`` ranks of this host may stage."""
    return max(int(available_memory() * _SHARE) // max(local_world_size, 1), 64 * 2**20)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes this process can still allocate: the smaller of the cgroup's room and MemAvailable."""
    rooms = [_cgroup_v2(root), _cgroup_v1(root), _meminfo(root)]
    limits = [room for room in rooms if room is not None]
    if limits:
        return min(limits)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _meminfo(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_v2(root: Path) -> int | None:
    base = root / "sys/fs/cgroup"
    own = [line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")]
    folder = base / own[0].lstrip("/") if own else base
    rooms = []
    # Every level limits: a job's own group may be unlimited inside a limited one.
    while folder == base or base in folder.parents:
        limit = _text(folder / "memory.max").strip()
        if limit.isdigit():
            used = int(_text(folder / "memory.current") or 0) - _reclaimable(folder)
            rooms.append(max(int(limit) - used, 0))
        folder = folder.parent
    return min(rooms, default=None)


def _cgroup_v1(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup/memory"
    limit = _text(folder / "memory.limit_in_bytes").strip()
    if not limit.isdigit() or int(limit) >= 2**60:  # "no limit" is a huge number there
        return None
    used = int(_text(folder / "memory.usage_in_bytes") or 0) - _reclaimable(folder)
    return max(int(limit) - used, 0)


def _reclaimable(folder: Path) -> int:
    """Return a cgroup's page cache: it counts as used, but gives way."""
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
