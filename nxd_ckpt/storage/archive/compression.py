"""Compressed streams of bytes: gzip by the standard library, zstd by ``zstandard``, which is an extra."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from io import BufferedReader, RawIOBase
from typing import Any, BinaryIO, Protocol

from nxd_ckpt.errors import InvalidArgument, MalformedFile

GZIP, ZSTD = "gzip", "zstd"
SUFFIXES: Mapping[str, str] = {".tar.zst": ZSTD, ".tar.gz": GZIP, ".tgz": GZIP}
"""Compression by the end of a file's name."""

_ZSTD_PIECE = 2 * 2**10
"""Bytes that zstandard gets at once: in its format 4 bytes can expand to 128 KiB, so this bounds the memory."""
_ZSTD_WINDOW = 128 * 2**20
"""Maximum bytes that decompressing may look back on; ``zstd --ultra --long=31`` needs more, and as much memory."""
_GZIP_PIECE = 2**20
_BUFFER = 2**20


class Stream(Protocol):
    """A sink for bytes, which is closed after the last."""

    def write(self, data: memoryview, /) -> Any: ...

    def close(self) -> Any: ...


def compression_of(name: str) -> str | None:
    """Return the compression of the file ``name``, by its suffix; None if it has none.

    Raises InvalidArgument if the library for it is missing.
    """
    kind = next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)
    if kind == ZSTD and find_spec("zstandard") is None:
        raise InvalidArgument(f"{name}: needs zstandard: pip install zstandard")
    return kind


def compressing(kind: str, out: BinaryIO, nbytes: int) -> Stream:
    """Return a stream that compresses ``nbytes`` bytes to ``out``, with checksums, and always equally.

    gzip's fastest level, on one core; zstd's default one on all cores, but at most 4, to bound its memory. The result
    does not depend on the number of cores.
    """
    if kind == GZIP:
        return gzip.GzipFile("", "wb", 1, out, mtime=0)
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
            yield from _gunzipped(file) if kind == GZIP else _unzstd(file)
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


def _damaged(where: str, kind: str, error: Exception) -> MalformedFile:
    return MalformedFile(f"{where}: not a whole {kind} file: {error}; truncated or damaged: restore it from a copy")


class _Joined(RawIOBase):
    """Pieces of bytes as one file."""

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces, self._piece = iter(pieces), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._piece:
            self._piece = next(self._pieces, memoryview(b""))
        count = min(len(self._piece), len(buffer))
        buffer[:count], self._piece = self._piece[:count], self._piece[count:]
        return count
