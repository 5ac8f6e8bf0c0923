"""Compressed archives: decompressed to a local disk first, as one tar file, which is then read by ranges.

Processes of a host share that file: the first process makes it, under a lock that the system frees if that process
dies, and the others wait. It gets its name only when it is complete. Of all archives the last used one stays, and those
that a process has open.

Streams are gzip, bzip2 and xz, by the standard library, and zstd by ``zstandard``, which is an extra. An archive is not
trusted: at most `RATIO` times its bytes are written, and no other file than this one.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import shutil
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial
from hashlib import sha256
from importlib.util import find_spec
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from nxd_ckpt.effects import logger
from nxd_ckpt.errors import InvalidArgument, MalformedFile
from nxd_ckpt.storage.archive_storage import ArchiveFile
from nxd_ckpt.storage.base import Reader, Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import default_work_dir, locked, opened, sync_file

GZIP, ZSTD, BZIP2, XZ, LZMA = "gzip", "zstd", "bzip2", "xz", "lzma"
SUFFIXES: Mapping[str, str] = {
    ".tar.zst": ZSTD,
    ".tzst": ZSTD,
    ".tar.gz": GZIP,
    ".tgz": GZIP,
    ".tar.bz2": BZIP2,
    ".tbz2": BZIP2,
    ".tbz": BZIP2,
    ".tar.xz": XZ,
    ".txz": XZ,
    ".tar.lzma": LZMA,
    ".tlz": LZMA,
}
"""Compression by the end of a file's name."""

_ZSTD_PIECE = 2 * 2**10
"""Bytes that zstandard gets at once: in its format 4 bytes can expand to 128 KiB, so this bounds the memory."""
_ZSTD_WINDOW = 128 * 2**20
"""Maximum bytes that decompressing may look back on; ``zstd --ultra --long=31`` needs more, and as much memory."""
_GZIP_PIECE = 2**20
_XZ_MEMORY = 256 * 2**20
"""Memory that decompressing xz may take; ``xz -9`` needs 65 MiB, a hostile file asks for up to 4 GiB."""
_BUFFER = 2**20


class Stream(Protocol):
    """A sink for bytes, which is closed after the last."""

    def write(self, data: memoryview, /) -> Any: ...

    def close(self) -> Any: ...


_MARKS = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD, b"BZh": BZIP2, b"\xfd7zXZ\0": XZ}
"""Compression by the first bytes of a file."""
LONGEST_MARK = 262
"""Bytes at the beginning of a file that tell: those of a plain archive end with "ustar"."""


def compression_of(name: str, start: bytes = b"") -> str | None:
    """Return the compression of a file by its first bytes, or else by the end of its name; None if it has none.

    Raises InvalidArgument if the library for it is missing.
    """
    kind = next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)
    kind = None if start[257:] == b"ustar" else next((_MARKS[mark] for mark in _MARKS if start.startswith(mark)), kind)
    if kind == ZSTD and find_spec("zstandard") is None:
        raise InvalidArgument(f"{name}: needs zstandard: pip install zstandard")
    return kind


def compressing(kind: str, out: BinaryIO, nbytes: int) -> Stream:
    """Return a stream that compresses ``nbytes`` bytes to ``out``, with checksums, and always equally.

    gzip's fastest level, bzip2's and xz's default one, on one core; zstd's default one on all cores, but at most 4, to
    bound its memory. The result does not depend on the number of cores.
    """
    if kind == GZIP:
        return gzip.GzipFile("", "wb", 1, out, mtime=0)
    if kind == BZIP2:
        return bz2.BZ2File(out, "wb")
    if kind in (XZ, LZMA):
        return lzma.LZMAFile(out, "wb", format=lzma.FORMAT_XZ if kind == XZ else lzma.FORMAT_ALONE)
    import zstandard

    threads = max(1, min(os.cpu_count() or 1, 4))  # 0 is single-threaded, with another result
    engine = zstandard.ZstdCompressor(level=3, write_checksum=True, write_content_size=True, threads=threads)
    stream: Stream = engine.stream_writer(out, size=nbytes, closefd=False)
    return stream


def decompressed(kind: str, pieces: Iterable[memoryview], where: str) -> Iterator[bytes]:
    """Yield the content of the compressed ``pieces``, checked by their checksums; at most 64 MiB at once.

    Raises MalformedFile: truncated, damaged, of another format, or of a zstd window above 128 MiB.
    """
    with BufferedReader(_Joined(pieces), _BUFFER) as file:
        try:
            yield from _DECOMPRESSORS[kind](file)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _damaged(where, kind, error) from error


def _gunzipped(file: BinaryIO) -> Iterator[bytes]:
    empty = True
    with gzip.GzipFile(fileobj=file) as stream:
        while piece := stream.read1(_GZIP_PIECE):
            empty = False
            yield piece
    if empty:
        raise EOFError("it is empty")


def _by_pieces(new: Callable[[], Any], file: BinaryIO) -> Iterator[bytes]:
    """Decompress every stream, one after the other, with an engine that ``new`` makes for each."""
    engine = new()
    while piece := file.read(_GZIP_PIECE):
        while piece or not (engine.eof or engine.needs_input):
            if engine.eof:
                engine = new()
            try:
                yield engine.decompress(piece, _GZIP_PIECE)
            except (OSError, lzma.LZMAError) as error:
                raise EOFError(str(error)) from error
            piece = engine.unused_data if engine.eof else b""
    if not engine.eof:
        raise EOFError("it ends within a stream")


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Decompress every frame, one after the other: some programs write several. Each must be complete."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    engine = decompressor.decompressobj()
    while piece := file.read(_ZSTD_PIECE):
        while piece:
            if engine.eof:
                engine = decompressor.decompressobj()
            try:
                yield engine.decompress(piece)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            piece = engine.unused_data if engine.eof else b""
    if not engine.eof:
        raise EOFError("it ends within a frame")


_DECOMPRESSORS: Mapping[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    GZIP: _gunzipped,
    ZSTD: _unzstd,
    BZIP2: partial(_by_pieces, bz2.BZ2Decompressor),
    XZ: partial(_by_pieces, partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY)),
    LZMA: partial(_by_pieces, partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY)),
}


def _damaged(where: str, kind: str, error: Exception) -> MalformedFile:
    return MalformedFile(f"{where}: not a whole {kind} file: {error}; truncated or damaged: restore it from a copy")


class _Joined(RawIOBase):
    """Pieces of bytes as one file."""

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._piece:
            self._piece = next(self._pieces, memoryview(b""))
        count = min(len(self._piece), len(buffer))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count


RATIO = 100
"""Maximum ratio of an archive's content to its bytes. Weights compress to half at best, gzip's limit is 1,000."""
LEAST = 2**30
"""Bytes of content that any archive may have."""

_FOLDER, _FILE = "archives", "archive.tar"
_PIECE = 8 * 2**20
_AT_ONCE = 8
"""Maximum number of pieces that are read ahead of the decompression."""
_TAIL = 2**10
"""Bytes at the end of an archive by which it is recognised: they have checksums of all its content."""


class UnpackedFile(ArchiveFile):
    """The archive ``key`` of ``inner`` with its compression ``compressed``, as a plain one: made at its first use.

    Raises then:
        MalformedFile: it is truncated, damaged, or has more content than `RATIO` times its bytes.
        OSError: reading it failed, or the disk is full.
    """

    def __init__(self, inner: Storage, key: str, compressed: str) -> None:
        super().__init__(inner, key)
        self._compressed = compressed
        self.renames = True
        self.concurrency = LocalStorage(".").concurrency
        self.read_nbytes = LocalStorage.read_nbytes

    def size(self) -> int:
        return self._local.size(_FILE)

    def open(self) -> Reader:
        return self._local.open(_FILE)

    @cached_property
    def _local(self) -> LocalStorage:
        size = self._inner.size(self._key)
        with ExitStack() as stack:
            folder = stack.enter_context(opened(default_work_dir() / _FOLDER, self._version(size)))
            folder.mkdir(exist_ok=True)
            with locked(folder / "lock"):
                if not (folder / _FILE).exists():
                    self._unpack(folder, size)
            weakref.finalize(self, stack.pop_all().close)
        return LocalStorage(folder, durable=False)

    def _version(self, size: int) -> str:
        tail = bytearray(min(_TAIL, size))
        self._inner.read_into(self._key, size - len(tail), memoryview(tail))
        identity = repr((self.url, size, self._inner.time(self._key), bytes(tail)))
        return sha256(identity.encode()).hexdigest()[:32]

    def _unpack(self, folder: Path, size: int) -> None:
        started = time.monotonic()
        part = folder / "part"
        try:
            nbytes = self._write(part, size)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        part.rename(folder / _FILE)
        logger.info("unpacked %s to %s: %d bytes in %.1f s", self.url, folder, nbytes, time.monotonic() - started)

    def _write(self, part: Path, size: int) -> int:
        """Decompress to ``part``, durably; return its bytes."""
        nbytes = 0
        most = max(RATIO * size, LEAST)
        free = shutil.disk_usage(part.parent).free
        with part.open("wb") as out:
            for piece in decompressed(self._compressed, _pieces(self._inner, self._key, size), self.url):
                nbytes += len(piece)
                if nbytes > most:
                    raise MalformedFile(
                        f"{self.url} has {size} bytes and more than {most} of content, as no checkpoint has: refused; "
                        "if you trust it, decompress it first, and load the .tar"
                    )
                if nbytes > free:
                    raise OSError(
                        errno.ENOSPC,
                        f"{self.url} holds more than the {free} bytes that are free here; set TMPDIR to a larger disk",
                        str(part.parent),
                    )
                out.write(piece)
            out.flush()
            sync_file(out.fileno())  # so that a file with this name is complete also after a crash of the host
        return nbytes


def _pieces(inner: Storage, key: str, size: int) -> Iterator[memoryview]:
    """Yield all of a file in order, several pieces read ahead, each lane with a reader of its own."""
    lanes = max(1, min(inner.concurrency, _AT_ONCE, -(-size // _PIECE)))
    with ExitStack() as stack:
        readers = deque[Reader]()
        for _ in range(lanes):
            readers.append(inner.open(key))
            stack.callback(readers[-1].close)
        pool = stack.enter_context(ThreadPoolExecutor(lanes, "nxd_ckpt-unpack"))  # left before they are closed
        ahead = deque[Future[memoryview]]()
        for start in range(0, size, _PIECE):
            if len(ahead) == lanes:
                yield ahead.popleft().result()  # and its reader is free
            ahead.append(pool.submit(_read, readers[0], start, min(_PIECE, size - start)))
            readers.rotate(-1)
        while ahead:
            yield ahead.popleft().result()


def _read(reader: Reader, start: int, nbytes: int) -> memoryview:
    memory = memoryview(bytearray(nbytes))
    reader.read_ranges([(start, memory)])
    return memory
