"""Deduplication: the storage duplicates files that are byte for byte those of an earlier tag, instead of a new write.

Equality is a comparison of the staged bytes with those that the earlier tag has now, not of digests. The reasons,
and possible changes meanwhile, are in docs/decisions/024.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from nxd_ckpt.core.names import DONE
from nxd_ckpt.core.tags import latest
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.base import Duplicating, Reader, Storage, Version, Writer
from nxd_ckpt.tag.directory import list_tags

_FIRST, _PIECE = 64 * 2**10, 2**20
"""Bytes that are compared first, and then at a time. In most files that changed, the first differ."""

_ABSENT = (OSError, EOFError, CheckpointError)
"""Errors of reading a file that does not exist, is damaged, or cannot be read."""


def parent_of(storage: Storage, last_saved: str | None) -> str | None:
    """Return the tag whose files may be unchanged: the one that this job saved last, else the newest complete one."""
    if not isinstance(storage, Duplicating):
        return None
    with suppress(*_ABSENT):
        if last_saved is not None and storage.is_file(f"{last_saved}/{DONE}"):
            return last_saved
        newest = latest(list_tags(storage))
        return None if newest is None else newest.tag
    return None


def create(storage: Storage, key: str, nbytes: int, source: str) -> Writer:
    """Create a file like ``storage.create(key, nbytes)``.

    If its bytes equal the file ``source``, that is duplicated.
    """
    with suppress(*_ABSENT):
        if isinstance(storage, Duplicating):
            version = storage.version(source)
            if version.nbytes == nbytes:
                return DedupWriter(storage, key, source, version)
    return storage.create(key, nbytes)


class DedupWriter:
    """Writer that compares its data with the file ``source``, and buffers them while they are equal.

    At the first byte that differs, or when the memory is needed, it writes all of them.
    """

    def __init__(self, storage: Storage, key: str, source: str, version: Version) -> None:
        self._storage, self._key, self._source, self._version = storage, key, source, version
        self._reader: Reader | None = storage.open(source)
        self._memory = np.empty(min(_PIECE, version.nbytes), np.uint8)
        self._equal: list[tuple[int, memoryview]] = []
        self._writer: Writer | None = None
        self.duplicated = False
        """True if nothing was written."""

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if self._writer is None and self._is_equal(offset, view):
            self._equal.append((offset, view))
        else:
            self._written().write_at(offset, view)

    def settle(self) -> None:
        self._written().settle()

    def close(self) -> None:
        if self._writer is None and self._is_whole and self._duplicate():
            self.duplicated = True
            self._release()
        else:
            self._written().close()

    def abort(self) -> None:
        self._release()
        if self._writer is not None:
            self._writer.abort()

    @property
    def _is_whole(self) -> bool:
        return sum(len(view) for _, view in self._equal) == self._version.nbytes

    def _is_equal(self, offset: int, view: memoryview) -> bool:
        done, size = 0, min(_FIRST, len(view))
        while done < len(view):
            part = view[done : done + size]
            stored = self._memory[: len(part)]
            try:
                assert self._reader is not None
                self._reader.read_ranges([(offset + done, stored.data)])
            except _ABSENT:
                return False
            if not np.array_equal(np.frombuffer(part, np.uint8), stored):
                return False
            done, size = done + len(part), _PIECE
        return True

    def _duplicate(self) -> bool:
        try:
            return isinstance(self._storage, Duplicating) and self._storage.duplicate(
                self._source, self._version, self._key
            )
        except OSError:  # the source was removed meanwhile, or there are no links, or too many: then it is written
            return False

    def _written(self) -> Writer:
        """Return the writer of the file, after writing all buffered data."""
        if self._writer is None:
            self._writer = self._storage.create(self._key, self._version.nbytes)
            for offset, view in self._equal:
                self._writer.write_at(offset, view)
            self._release()
        return self._writer

    def _release(self) -> None:
        self._equal.clear()
        if self._reader is not None:
            self._reader.close()
        self._reader = None
