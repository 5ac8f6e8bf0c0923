"""A writer that compresses. The file's size is known only at the end, but stores need it at the beginning."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from typing import BinaryIO

from nxd_ckpt.storage.archive.compression import compressing
from nxd_ckpt.storage.base import Storage, completed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import sync_file
from nxd_ckpt.storage.work_dir import default_work_dir

_PIECE = 16 * 2**20


class CompressedWriter:
    """A writer of ``nbytes`` bytes in ascending order, which become the compressed file ``key`` of ``storage``.

    A directory gets them at once; a file for a store is first an unnamed file on this host (see TMPDIR).
    """

    def __init__(self, storage: Storage, key: str, kind: str, nbytes: int) -> None:
        self._storage, self._key = storage, key
        self._file = _scratch(storage, key)
        self._stream = compressing(kind, self._file, nbytes)
        self._written = 0

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        if offset != self._written:
            raise ValueError(f"{self._key}: expected byte {self._written} next in a compressed file, found {offset}")
        self._stream.write(memoryview(data))
        self._written += len(data)

    def settle(self) -> None:
        """Do nothing: the bytes were already copied or compressed."""

    def close(self) -> None:
        """Finish the file. Raises OSError, like every write."""
        self._stream.close()
        self._file.flush()
        if not isinstance(self._storage, LocalStorage):
            self._send(self._storage)
        elif self._storage.durable:
            sync_file(self._file.fileno())
        self._file.close()

    def abort(self) -> None:
        with suppress(OSError, ValueError):
            self._file.close()

    def _send(self, storage: Storage) -> None:
        nbytes = self._file.tell()
        self._file.seek(0)
        writer = storage.create(self._key, nbytes)
        with completed(writer):
            for offset in range(0, nbytes, _PIECE):
                writer.write_at(offset, self._file.read(_PIECE))
                writer.settle()  # or memory would grow with the file


def _scratch(storage: Storage, key: str) -> BinaryIO:
    if isinstance(storage, LocalStorage):
        return storage.path(key).open("xb")
    return tempfile.TemporaryFile(dir=default_work_dir())
