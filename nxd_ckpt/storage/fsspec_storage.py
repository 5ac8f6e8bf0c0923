"""Any file system of fsspec (``gs://``, ``abfs://``, ``memory://``, ...), as a store without renames.

The file system limits how far the contract holds:

- `FsspecStorage.link_new` is one conditional request if ``pipe_file`` takes ``mode="create"``, as for Google Cloud
  Storage. Elsewhere, and for `FsspecStorage.exchange` always, it is a look followed by a write, which is safe among the
  threads of a process and, since jobs have a lease, against all but two jobs that start together.
- A file above `_WHOLE` bytes streams; file systems that are no object stores show it while it grows.
- A reader compares the file's properties (etag, generation, times) after each reading with those at its opening.

A web server (``http``) is refused: it has neither listings nor times that a directory of tags needs.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.core.suggestions import closest
from nxd_ckpt.errors import CheckpointError, InvalidArgument, MalformedFile
from nxd_ckpt.storage.base import (
    DirEntry,
    Range,
    Reader,
    Storage,
    Writer,
    checked_key,
    checked_length,
    runs,
)
from nxd_ckpt.storage.transfer import check_retries
from nxd_ckpt.storage.wrapper import RetryingStorage


class FsspecReader:
    def __init__(self, storage: FsspecStorage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._version, self._size = storage.file_version(key)

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
        if self._storage.file_version(self._key)[0] != self._version:
            raise OSError(f"{self._storage.url}/{self._key}: replaced by another file while it was being read")

    def close(self) -> None:
        """Do nothing: every read is a request of its own."""


class WholeWriter:
    """A writer of a small file, which is kept until it is closed."""

    def __init__(self, storage: FsspecStorage, key: str, nbytes: int) -> None:
        self._storage = storage
        self._key = key
        self._data = bytearray(nbytes)
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
        if not self._storage.link_new(self._key, bytes(self._data)):
            raise FileExistsError(f"{self._storage.url}/{self._key} was written by somebody else meanwhile")

    def abort(self) -> None:
        self._data = bytearray()


class StreamWriter:
    """A writer of a large file: data in order is sent at once, early data waits in an unnamed temporary file."""

    def __init__(self, storage: FsspecStorage, key: str, nbytes: int) -> None:
        self._storage = storage
        self._key = key
        self._nbytes = nbytes
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


_WHOLE = 32 * 2**20
"""Bytes up to which a file is kept in memory and written by one request when it is closed."""

_looking = threading.Lock()
"""Lock between a look and the write that depends on it."""


def open_fsspec(url: str, options: Mapping[str, Any]) -> Storage:
    """Open the storage of an fsspec URL. ``retries`` is ours, other options are fsspec's.

    Raises InvalidArgument if fsspec or the library behind it is missing, or options are invalid.
    """
    public = without_password(url)
    options = dict(options)
    retries = options.pop("retries", 5)
    check_retries(retries, public)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise InvalidArgument(f"{public}: needs fsspec: pip install fsspec") from None
    try:
        fs, root = url_to_fs(url, **options)
    except ImportError as error:
        raise InvalidArgument(_missing_package(public, error)) from None
    except (TypeError, ValueError) as error:  # an unknown scheme, or options that the file system does not know
        raise InvalidArgument(_unknown_scheme(public) or f"{public}: {_without_values(str(error), options)}") from None
    if type(fs).__name__ == "HTTPFileSystem":
        raise InvalidArgument(
            f"{public}: checkpoints are not read from web servers: download it first (such as wget --mirror), or pass "
            "the store behind the server, such as s3://BUCKET/FOLDER"
        )
    return RetryingStorage(FsspecStorage(fs, root, public), retries)


def without_password(url: str) -> str:
    """Return ``sftp://user@host/dir`` for ``sftp://user:secret@host/dir``, for logs and errors."""
    return re.sub(r"(://[^/:@]*):[^/@]*@", r"\1@", url)


def _missing_package(url: str, error: ImportError) -> str:
    """Return the error for a package that fsspec needs: "Please install gcsfs ..." or "No module named 'pyarrow'"."""
    match = re.search("install [\"']?([A-Za-z0-9_-]+)", str(error))
    package = match[1] if match else error.name
    return f"{url}: {error}" if package is None else f"{url}: needs {package}: pip install {package}"


def _unknown_scheme(url: str) -> str | None:
    """Return the error for a URL of no known scheme; None if it is known."""
    from fsspec.registry import available_protocols

    scheme = url.partition("::")[0].partition("://")[0]
    schemes = available_protocols()
    if scheme in schemes:
        return None
    meant = closest(scheme, [*schemes, "s3"])
    question = "" if meant is None else f" (did you mean {meant}://?)"
    return f"{url}: unknown scheme {scheme!r}{question}; expected a path, s3://, or a scheme of fsspec such as gs://"


def _without_values(text: str, options: Mapping[str, Any]) -> str:
    """Return ``text`` without the values of options, which may be secret."""
    for value in options.values():
        if isinstance(value, str) and value:
            text = text.replace(value, "...")
    return text


class FsspecStorage(Storage):
    """The directory ``root`` of the file system ``fs`` as a storage."""

    concurrency = 16
    read_nbytes = CRC_BLOCK

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self.fs = fs
        self.root: str = root.rstrip("/")
        self.url: str = url.rstrip("/")
        put = getattr(fs, "_pipe_file", fs.pipe_file)
        self._creates = "mode" in inspect.signature(put).parameters
        self._in_memory = type(fs).__name__ == "MemoryFileSystem"
        # Not object stores (the asynchronous ones), where a directory to be made or removed may be a bucket.
        self._has_directories = not fs.async_impl and not self._in_memory
        # All readers of one of its files share one position in it.
        self._serial: Any = _memory if self._in_memory else contextlib.nullcontext()

    def path(self, key: str) -> str:
        return f"{self.root}/{checked_key(key, self.url)}" if key else self.root

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        checked_length(self.size(key), limit, f"{self.url}/{key}")
        with self.doing(key):
            return bytes(self.fs.cat_file(self.path(key)))

    def open(self, key: str) -> Reader:
        return FsspecReader(self, key)

    def read_at(self, key: str, begin: int, end: int) -> bytes:
        with self.doing(key):
            return bytes(self.fs.cat_file(self.path(key), start=begin, end=end))

    def file_version(self, key: str) -> tuple[str, int]:
        """Return a mark that changes with the file, and its size in bytes."""
        with self.doing(key):
            self.fs.invalidate_cache()
            return self.fs.ukey(self.path(key)), int(self.fs.size(self.path(key)))

    def size(self, key: str) -> int:
        with self.doing(key):
            self.fs.invalidate_cache()
            return int(self.fs.size(self.path(key)))

    def is_dir(self, key: str) -> bool:
        with self.doing(key):
            self.fs.invalidate_cache()
            return bool(self.fs.isdir(self.path(key)))

    def is_file(self, key: str) -> bool:
        with self.doing(key):
            self.fs.invalidate_cache()
            return bool(self.fs.isfile(self.path(key)))

    def list(self, key: str = "") -> list[DirEntry]:
        with self.doing(key):
            self.fs.invalidate_cache()
            try:
                infos = self.fs.ls(self.path(key) or "/", detail=True)
            except FileNotFoundError:
                return []
            own = self.path(key).strip("/")
            if any(info["name"].strip("/") == own and info["type"] != "directory" for info in infos):
                raise MalformedFile(f"{self.url}/{key} is a file, expected a directory")
            below = ((info["name"].rstrip("/"), info["type"] == "directory") for info in infos)
            # Some stores list the directory's own marker as well.
            return sorted(DirEntry(name.rpartition("/")[2], is_dir) for name, is_dir in below if name.strip("/") != own)

    def write(self, key: str, data: bytes) -> None:
        with self.doing(key):
            self._make_parent(key)
            self.fs.pipe_file(self.path(key), bytes(data))

    def link_new(self, key: str, data: bytes) -> bool:
        with self.doing(key):
            self._make_parent(key)
            return self._put_new(key, data)

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        with self.doing(key), _looking:
            self.fs.invalidate_cache()
            try:
                content = bytes(self.fs.cat_file(self.path(key)))
            except FileNotFoundError:
                return False
            if content == expected:
                self.fs.pipe_file(self.path(key), bytes(data))
            return content == expected

    def create(self, key: str, nbytes: int) -> Writer:
        with self.doing(key):
            self._make_parent(key)
        return WholeWriter(self, key, nbytes) if nbytes <= _WHOLE else StreamWriter(self, key, nbytes)

    def remove(self, key: str) -> None:
        with self.doing(key):
            self.fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm(self.path(key), recursive=True)

    def drop_empty(self, key: str) -> None:
        if self._has_directories and not self.list(key):  # some file systems remove all that is in it
            with self.doing(key):
                self.fs.rmdir(self.path(key))

    def time(self, key: str) -> float:
        with self.doing(key):
            self.fs.invalidate_cache()
            modified: datetime.datetime = self.fs.modified(self.path(key))
            return (modified if modified.tzinfo else modified.replace(tzinfo=datetime.timezone.utc)).timestamp()

    def _put_new(self, key: str, data: bytes) -> bool:
        with _looking:
            if not self._creates or self._in_memory:
                self.fs.invalidate_cache()
                if self.fs.isfile(self.path(key)):
                    return False
            try:
                self.fs.pipe_file(self.path(key), bytes(data), **({"mode": "create"} if self._creates else {}))
            except FileExistsError:
                return False
        return True

    def _make_parent(self, key: str) -> None:
        if self._has_directories:
            self.fs.makedirs(self.path(key).rpartition("/")[0], exist_ok=True)

    @contextlib.contextmanager
    def doing(self, key: str) -> Iterator[None]:
        """Run one operation on ``key``; any failure becomes an OSError that names it."""
        try:
            with self._serial:
                yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.url}/{key}: not found") from error
        except CheckpointError:
            raise
        except Exception as error:
            raise _as_os_error(error, f"{self.url}/{key}") from error


_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


def _as_os_error(error: Exception, what: str) -> OSError:
    """Return an OSError for any library's ``error``: ConnectionError or TimeoutError if it may go away by itself."""
    text = f"{what}: {type(error).__name__}: {without_password(str(error))}"
    status = next((code for name in ("status", "code", "status_code") if (code := getattr(error, name, None))), None)
    if isinstance(error, ConnectionError | TimeoutError) or status in _TRANSIENT:
        return ConnectionError(text)
    if isinstance(error, PermissionError) or status in (401, 403):
        return PermissionError(f"{text}; check the credentials and what they allow")
    if type(error).__module__.partition(".")[0] in ("aiohttp", "requests", "urllib3", "asyncio"):
        return OSError(text) if status else ConnectionError(text)
    if isinstance(error, NotImplementedError):
        return OSError(f"{what}: fsspec's file system for such URLs lacks a needed operation ({text})")
    if isinstance(error, OSError) and type(error) in (FileExistsError, IsADirectoryError):
        return type(error)(text)
    return OSError(text)


_memory = threading.RLock()
