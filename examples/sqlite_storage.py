"""A storage of one's own: checkpoints in one SQLite database, a row a file.

It shows what a store without renames has to do, with nothing but Python's standard library; ``docs/own-storage.md``
explains it. A row holds at most 1 GB, and a writer keeps its file in memory.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.storage.base import DirEntry, Reader, Storage, Writer, checked_key, checked_length

TABLE = """CREATE TABLE IF NOT EXISTS files
(version INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, data BLOB, at REAL)"""


class SqliteStorage(Storage):
    """Keys of the database at ``path``, which is created. Any number of threads and processes may use it."""

    renames = False  # then tags are written in place, and nothing is ever renamed
    concurrency = 1
    read_nbytes = 4 * 2**20

    def __init__(self, path: Path) -> None:
        self.path, self.url = path, f"sqlite://{path}"
        with self._database() as database:
            database.execute(TABLE)

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        checked_length(self.size(key), limit, f"{self.url}/{key}")
        return bytes(self._row(key, "data"))

    def open(self, key: str) -> Reader:
        return _Reader(self, key, int(self._row(key, "version")))

    def size(self, key: str) -> int:
        return int(self._row(key, "length(data)"))

    def time(self, key: str) -> float:
        return float(self._row(key, "at"))

    def is_file(self, key: str) -> bool:
        return bool(self._all("SELECT 1 FROM files WHERE key = ?", key))

    def is_dir(self, key: str) -> bool:
        return bool(self.list(key))

    def list(self, key: str = "") -> list[DirEntry]:
        prefix = f"{checked_key(key, self.url)}/" if key else ""
        keys = self._all("SELECT key FROM files WHERE substr(key, 1, ?) = ?", len(prefix), prefix)
        names = [str(name)[len(prefix) :].partition("/") for (name,) in keys]
        return sorted({DirEntry(name, bool(slash)) for name, slash, _ in names})

    def write(self, key: str, data: bytes) -> None:
        replace = "REPLACE INTO files (key, data, at) VALUES (?, ?, ?)"
        self._change(replace, checked_key(key, self.url), data, time.time())

    def create(self, key: str, nbytes: int) -> Writer:
        return _Writer(self, key, nbytes)

    def link_new(self, key: str, data: bytes) -> bool:
        insert = "INSERT OR IGNORE INTO files (key, data, at) VALUES (?, ?, ?)"
        return 1 == self._change(insert, checked_key(key, self.url), data, time.time())

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        update = "UPDATE files SET data = ?, at = ? WHERE key = ? AND data = ?"
        return 1 == self._change(update, data, time.time(), key, expected)

    def remove(self, key: str) -> None:
        self._change("DELETE FROM files WHERE key = ? OR substr(key, 1, ?) = ?", key, len(key) + 1, f"{key}/")

    def bytes_at(self, key: str, version: int, offset: int, nbytes: int) -> bytes:
        """What that version of the file holds there; raises OSError once another file has its key."""
        select = "SELECT substr(data, ?, ?) FROM files WHERE key = ? AND version = ?"
        found = self._all(select, offset + 1, nbytes, key, version)
        if not found:
            raise OSError(f"{self.url}/{key} was replaced while it was read")
        return bytes(found[0][0])

    def _row(self, key: str, what: str) -> object:
        found = self._all(f"SELECT {what} FROM files WHERE key = ?", checked_key(key, self.url))
        if not found:
            raise FileNotFoundError(f"{self.url}/{key} does not exist")
        return found[0][0]

    def _all(self, query: str, *values: object) -> list[tuple[object, ...]]:
        with self._database() as database:
            return database.execute(query, values).fetchall()

    def _change(self, statement: str, *values: object) -> int:
        """The number of rows that changed, once that is on the disk."""
        with self._database() as database:
            return database.execute(statement, values).rowcount

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """A transaction. Every failure of SQLite is an OSError to the caller, as the contract wants it."""
        try:
            with closing(sqlite3.connect(self.path, timeout=600)) as database, database:
                yield database
        except sqlite3.Error as error:
            raise OSError(f"{self.url}: {error}") from error


class _Reader:
    def __init__(self, storage: SqliteStorage, key: str, version: int) -> None:
        self._storage, self._key, self._version = storage, key, version

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for offset, buffer in ranges:
            data = self._storage.bytes_at(self._key, self._version, offset, len(buffer))
            if len(data) < len(buffer):
                raise EOFError(f"{self._storage.url}/{self._key}: it ends before byte {offset + len(buffer)}")
            buffer[:] = data

    def close(self) -> None:
        """Nothing is held."""


class _Writer:
    """Keeps the file until it is closed. Nothing that was handed over is looked into later: ``settle`` has no work."""

    def __init__(self, storage: SqliteStorage, key: str, nbytes: int) -> None:
        self._storage, self._key, self._data, self._written = storage, key, bytearray(nbytes), 0

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        if offset + len(data) > len(self._data):
            raise OSError(f"{self._storage.url}/{self._key}: more than the {len(self._data)} bytes that it was to have")
        self._data[offset : offset + len(data)] = data
        self._written += len(data)

    def settle(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        where = f"{self._storage.url}/{self._key}"
        if self._written != len(self._data):
            raise OSError(f"{where}: {self._written} bytes were written, expected {len(self._data)}")
        if not self._storage.link_new(self._key, self._data):
            raise FileExistsError(f"{where} was written by somebody else meanwhile")

    def abort(self) -> None:
        """Nothing was written yet."""
