"""Files of an fsspec file system while they are read or written."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from nxd_ckpt.storage.ranges import Range, runs

if TYPE_CHECKING:
    from nxd_ckpt.storage.fsspec_storage import FsspecStorage


class FsspecReader:
    def __init__(self, storage: FsspecStorage, key: str) -> None:
        self._storage, self._key = storage, key
        self._version, self._size = storage.version(key)

    def read_ranges(self, ranges: Sequence[Range]) -> None:
        for run in runs(ranges):
            if run.end > self._size:
                missing = run.end - max(self._size, run.begin)
                raise EOFError(f"{self._storage.url}/{self._key}: {missing} bytes missing at byte {self._size}")
            data = memoryview(self._storage.read_at(self._key, run.begin, run.end))
            if len(data) != run.end - run.begin:
                raise OSError(f"{self._storage.url}/{self._key}: shorter than when it was opened")
            for offset, buffer in run.ranges:
                buffer[:] = data[offset - run.begin : offset - run.begin + len(buffer)]
        if self._storage.version(self._key)[0] != self._version:
            raise OSError(f"{self._storage.url}/{self._key}: replaced by another file while it was being read")

    def close(self) -> None:
        """Do nothing: every read is a request of its own."""


class WholeWriter:
    """A writer of a small file, which is kept until it is closed."""

    def __init__(self, storage: FsspecStorage, key: str, nbytes: int) -> None:
        self._storage, self._key, self._data = storage, key, bytearray(nbytes)
        self._written = 0

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        _check_end(self._storage, self._key, offset + len(view), len(self._data))
        self._data[offset : offset + len(view)] = view
        self._written += len(view)

    def settle(self) -> None:
        """Do nothing: the data was copied."""

    def close(self) -> None:
        _check_length(self._storage, self._key, self._written, len(self._data))
        self._storage.throttle.take(len(self._data))
        if not self._storage.link_new(self._key, bytes(self._data)):
            raise FileExistsError(f"{self._storage.url}/{self._key} was written by somebody else meanwhile")

    def abort(self) -> None:
        self._data = bytearray()


class StreamWriter:
    """A writer of a large file: data in order is sent at once, early data waits in an unnamed temporary file."""

    def __init__(self, storage: FsspecStorage, key: str, nbytes: int) -> None:
        self._storage, self._key, self._nbytes = storage, key, nbytes
        self._position = 0
        self._early: dict[int, int] = {}
        self._waiting: IO[bytes] | None = None
        self._done = False
        if storage.is_file(key):
            raise FileExistsError(f"{storage.url}/{key}: exists")
        with storage.doing(key):
            self._file = storage.fs.open(storage.path(key), "wb")

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        _check_end(self._storage, self._key, offset + len(view), self._nbytes)
        if offset != self._position:
            self._put_aside(offset, view)
            return
        self._append(view)
        while (length := self._early.pop(self._position, 0)) and self._waiting is not None:
            self._waiting.seek(self._position)
            while length:
                piece = self._waiting.read(min(length, 2**20))
                self._append(memoryview(piece))
                length -= len(piece)

    def settle(self) -> None:
        """Do nothing: the data was copied or sent."""

    def close(self) -> None:
        _check_length(self._storage, self._key, self._position, self._nbytes)
        with self._storage.doing(self._key):
            self._file.close()
        self._done = True
        self._end()

    def abort(self) -> None:
        self._end()
        if self._done:
            return
        self._done = True
        with contextlib.suppress(Exception):
            self._file.discard()
            self._file.closed = True  # else collecting it would complete it
        if not self._storage.fs.async_impl:  # the written part is visible already
            with contextlib.suppress(OSError):
                self._storage.remove(self._key)

    def _append(self, view: memoryview) -> None:
        self._storage.throttle.take(len(view))
        with self._storage.doing(self._key):
            self._file.write(view)
        self._position += len(view)

    def _put_aside(self, offset: int, view: memoryview) -> None:
        if self._waiting is None:
            self._waiting = tempfile.TemporaryFile()  # noqa: SIM115
        self._waiting.seek(offset)
        self._waiting.write(view)
        self._early[offset] = len(view)

    def _end(self) -> None:
        if self._waiting is not None:
            self._waiting.close()


def _check_end(storage: FsspecStorage, key: str, end: int, expected: int) -> None:
    if end > expected:
        raise OSError(f"{storage.url}/{key}: wrote up to byte {end}, expected {expected} in all")


def _check_length(storage: FsspecStorage, key: str, written: int, expected: int) -> None:
    if written != expected:
        raise OSError(f"{storage.url}/{key}: wrote {written} bytes, expected {expected}")
