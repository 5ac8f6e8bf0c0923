"""Compressed archives: decompressed to a local disk first, as one tar file, which is then read by ranges.

Processes of a host share that file: the first process makes it, under a lock that the system frees if that process
dies, and the others wait. It gets its name only when it is complete. Of all archives the last used one stays, and those
that a process has open.

An archive is not trusted: at most `RATIO` times its bytes are written, and no other file than this one.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.archive.compression import decompressed
from nxd_ckpt.storage.base import Reader, Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import locked, sync_file
from nxd_ckpt.storage.work_dir import default_work_dir, opened

logger = logging.getLogger("nxd_ckpt")

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


class UnpackedFile:
    """The archive ``key`` of ``inner`` with its compression ``compressed``, as a plain one: made at its first use.

    Raises then:
        MalformedFile: it is truncated, damaged, or has more content than `RATIO` times its bytes.
        OSError: reading it failed, or the disk is full.
    """

    renames = True

    def __init__(self, inner: Storage, key: str, compressed: str) -> None:
        self._inner, self._key, self._compressed = inner, key, compressed
        self.url = f"{inner.url.rstrip('/')}/{key}"
        self.concurrency, self.read_nbytes = LocalStorage(".").concurrency, LocalStorage.read_nbytes

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
        started, part = time.monotonic(), folder / "part"
        try:
            nbytes = self._write(part, size)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        part.rename(folder / _FILE)
        logger.info("unpacked %s to %s: %d bytes in %.1f s", self.url, folder, nbytes, time.monotonic() - started)

    def _write(self, part: Path, size: int) -> int:
        """Decompress to ``part``, durably; return its bytes."""
        nbytes, most, free = 0, max(RATIO * size, LEAST), shutil.disk_usage(part.parent).free
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
