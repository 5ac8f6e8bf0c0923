"""Uploads to a bucket: in parts, several at a time, straight from the caller's memory.

A part is sent when all of its bytes are known. At most `IN_FLIGHT` of them are on their way in the whole process;
further writes wait.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import uuid
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from io import SEEK_CUR, SEEK_END, SEEK_SET
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.effects import in_forked_children, logger
from nxd_ckpt.formats.crc32 import crc32 as continued
from nxd_ckpt.storage.s3.bucket import TOKEN, Bucket, ConditionFailed
from nxd_ckpt.storage.wrapper import pause_after

_BLOCK = 2**20
"""Bytes that are sent at once: a timeout counts for all of them."""


class Body:
    """Pieces of memory as one file. `read` returns views of the pieces."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._nbytes = sum(map(len, views))
        self._position = 0

    def read(self, size: int | None = -1) -> bytes | memoryview:
        """Return at most ``size`` bytes, or a block of a whole piece if that is more.

        The HTTP library asks for 16 KiB at a time, at which sending costs a fifth more.
        """
        offset = self._position
        for view in self._views:
            if offset < len(view):
                block = view[offset : offset + _BLOCK]
                self._position += len(block)
                return block
            offset -= len(view)
        return b""

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._position = offset + {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._nbytes}[whence]
        return self._position

    def tell(self) -> int:
        return self._position


def crc32(views: Sequence[memoryview]) -> str:
    """Return the CRC-32 of all pieces, one after the other, in S3's form."""
    value = 0
    for view in views:
        value = continued(view, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


_TRIES = 6
"""Tries of a request that meets another one under way: the store then answers neither yes nor no."""


def put_if(bucket: Bucket, key: str, views: Sequence[memoryview], token: str, **condition: str) -> bool:
    """Put an object under a condition of S3's (``IfNoneMatch="*"``, ``IfMatch=etag``); False if it did not hold.

    ``token`` must be new: a request that is repeated because its reply was lost finds its own object.
    """
    for tries in range(_TRIES):
        try:
            bucket.call(
                "put_object",
                key,
                Key=bucket.full(key),
                Body=Body(views),
                ContentLength=sum(map(len, views)),
                ChecksumCRC32=crc32(views),
                Metadata={TOKEN: token},
                **condition,
            )
            return True
        except FileNotFoundError:  # IfMatch, and the object is gone
            return False
        except (ConditionFailed, ConnectionError) as error:
            writer = written_by(bucket, key)
            if writer == token:
                return True
            if isinstance(error, ConnectionError) or (error.conflict and tries == _TRIES - 1):
                raise
            if not error.conflict:
                return False
            effects.sleep(pause_after(tries))
    raise AssertionError("unreachable")


def written_by(bucket: Bucket, key: str) -> str | None:
    """Return the object's writer; None if unknown.

    It is called after a failure, whose error says more than an error of this call.
    """
    with contextlib.suppress(OSError):
        return bucket.token(key)
    return None


IN_FLIGHT = 8
PART = 16 * 2**20
"""Bytes of a part; a file up to this size is sent by one request."""
MOST_PARTS = 10_000
_COPIED = 2**30
"""Bytes that the store copies by one request."""


def part_nbytes(nbytes: int) -> int:
    """Return the bytes of the parts of a file of ``nbytes``: a multiple of `PART`, so that no file has too many."""
    return PART * max(1, -(-nbytes // (PART * MOST_PARTS)))


class _Lanes:
    """Daemon threads that send parts.

    They are not those of concurrent.futures, which an exiting interpreter stops before the last save is finished.
    """

    def __init__(self) -> None:
        self._tasks: effects.SimpleQueue[Callable[[], None]] = effects.SimpleQueue()
        self._free = effects.Semaphore(IN_FLIGHT)
        self._running = 0
        for number in range(IN_FLIGHT):
            with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is exiting
                effects.Thread(target=self._run, name=f"nxd_ckpt-upload-{number}", daemon=True).start()
                self._running += 1

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task``, which must not raise, soon. Waits while the maximum number of tasks is under way."""
        if not self._running:
            task()
            return
        self._free.acquire()
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                task()
            finally:
                self._free.release()
            del task  # it holds a view of memory that will be used again


_lanes: dict[int, _Lanes] = {}
"""Lanes by process: a simulated world has several processes."""
_making = threading.Lock()


def _shared_lanes() -> _Lanes:
    """Return the lanes of this process."""
    with _making:
        if effects.pid() not in _lanes:
            _lanes[effects.pid()] = _Lanes()
        return _lanes[effects.pid()]


def _start_anew() -> None:
    """Forget threads and locks in a forked child: neither threads nor a lock's holder survive a fork."""
    global _making
    _making = threading.Lock()
    _lanes.clear()


in_forked_children(_start_anew)


_Piece = tuple[int, memoryview]


class S3Writer:
    """A writer of one new object of ``nbytes`` bytes. Its key must still be free when it is closed."""

    def __init__(self, bucket: Bucket, key: str, nbytes: int) -> None:
        self._bucket = bucket
        self._key = key
        self._nbytes = nbytes
        self._part_nbytes = part_nbytes(nbytes)
        self._token = uuid.uuid4().hex
        self._upload_id: str | None = None
        self._partial: dict[int, list[_Piece]] = {}  # of parts that are not complete, in order
        self._written = 0
        self._changed = effects.Condition()
        self._on_their_way = 0
        self._sent: dict[int, dict[str, Any]] = {}
        self._error: BaseException | None = None

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._raise_error()
        if offset + len(view) > self._nbytes:
            raise OSError(f"{self._url}: {len(view)} bytes at byte {offset}, expected {self._nbytes} in all")
        self._written += len(view)
        while len(view):
            number = offset // self._part_nbytes
            count = min(len(view), (number + 1) * self._part_nbytes - offset)
            self._put(number, offset, view[:count])
            view = view[count:]
            offset += count

    def settle(self) -> None:
        self._wait()
        self._raise_error()
        for pieces in self._partial.values():
            pieces[:] = [(offset, memoryview(bytes(view))) for offset, view in pieces]

    def close(self) -> None:
        try:
            self._wait()
            self._raise_error()
            if self._written != self._nbytes:
                raise OSError(f"{self._url}: wrote {self._written} bytes, expected {self._nbytes}")
            won = self._put_whole() if self._is_small else self._complete()
        except BaseException:
            self.abort()
            raise
        if not won:
            self.abort()
            raise FileExistsError(f"{self._url} was written by somebody else meanwhile")
        self._upload_id = None

    def copy(self, source: str, etag: str) -> bool:
        """Let the store copy an object, while its ETag is ``etag``, in place of writes and `close`.

        It is copied in parts even if one request would do: all stores refuse to complete a multipart upload if the key
        was taken.

        Returns False if the key was taken. Raises OSError if the object does not exist any more.
        """
        copied = False
        self._upload_id = self._begin()
        try:
            for number, begin in enumerate(range(0, self._nbytes, _COPIED), start=1):
                reply = self._bucket.call(
                    "upload_part_copy",
                    self._key,
                    Key=self._full,
                    UploadId=self._upload_id,
                    PartNumber=number,
                    CopySource={"Bucket": self._bucket.name, "Key": self._bucket.full(source)},
                    CopySourceIfMatch=etag,
                    CopySourceRange=f"bytes={begin}-{min(begin + _COPIED, self._nbytes) - 1}",
                )
                part = reply["CopyPartResult"]
                digests = {name: part[name] for name in ("ETag", "ChecksumCRC32") if name in part}
                self._sent[number] = {"PartNumber": number, **digests}
            copied = self._complete()
        finally:
            if not copied:
                self.abort()
        self._upload_id = None
        return copied

    def abort(self) -> None:
        with self._changed:
            self._error = self._error or OSError(f"{self._url}: the upload was given up")
        self._wait()
        self._partial.clear()
        upload_id = self._upload_id
        self._upload_id = None
        if upload_id is not None:
            try:
                self._bucket.discard_upload(self._key, self._full, upload_id)
            except OSError as error:
                logger.warning("nxd_ckpt: an unfinished upload stays until the next save: %s", error)

    @property
    def _url(self) -> str:
        return f"{self._bucket.url}/{self._key}"

    @property
    def _is_small(self) -> bool:
        return self._nbytes <= self._part_nbytes

    def _put(self, number: int, offset: int, view: memoryview) -> None:
        pieces = self._partial.setdefault(number, [])
        insort(pieces, (offset, view), key=lambda piece: piece[0])
        expected = min(self._part_nbytes, self._nbytes - number * self._part_nbytes)
        if sum(len(piece) for _, piece in pieces) == expected and not self._is_small:
            del self._partial[number]
            self._send(number, [piece for _, piece in pieces])

    def _send(self, number: int, views: Sequence[memoryview]) -> None:
        if self._upload_id is None:
            self._upload_id = self._begin()
        with self._changed:
            self._on_their_way += 1
        try:
            _shared_lanes().submit(partial(self._upload, number, views))
        except BaseException:  # an interrupt while it waited
            self._arrived()
            raise

    def _begin(self) -> str:
        metadata = {TOKEN: self._token}
        try:
            reply = self._bucket.call(
                "create_multipart_upload", self._key, Key=self._full, Metadata=metadata, ChecksumAlgorithm="CRC32"
            )
        except ConnectionError:
            with contextlib.suppress(OSError):  # the first error says more
                self._discard_others(None)
            raise
        upload_id = str(reply["UploadId"])
        if reply["ResponseMetadata"].get("RetryAttempts"):
            self._discard_others(upload_id)
        return upload_id

    def _discard_others(self, own: str | None) -> None:
        """Abort the uploads of this key except the ``own`` one: lost replies leave uploads that nobody knows."""
        for name, upload_id in self._bucket.uploads(self._key, self._full):
            if name == self._full and upload_id != own:
                self._bucket.discard_upload(self._key, name, upload_id)

    def _upload(self, number: int, views: Sequence[memoryview]) -> None:
        try:
            if self._error is None:
                self._sent[number + 1] = self._upload_part(number + 1, views)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            self._arrived()

    def _upload_part(self, number: int, views: Sequence[memoryview]) -> dict[str, Any]:
        digest = crc32(views)
        reply = self._bucket.call(
            "upload_part",
            self._key,
            Key=self._full,
            UploadId=self._upload_id,
            PartNumber=number,
            Body=Body(views),
            ContentLength=sum(map(len, views)),
            ChecksumCRC32=digest,
        )
        return {"PartNumber": number, "ETag": reply["ETag"], "ChecksumCRC32": digest}

    def _arrived(self) -> None:
        with self._changed:
            self._on_their_way -= 1
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._on_their_way)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _put_whole(self) -> bool:
        views = [view for _, view in self._partial.pop(0, [])]
        return put_if(self._bucket, self._key, views, self._token, IfNoneMatch="*")

    def _complete(self) -> bool:
        """Complete the upload; True if the object is ours."""
        parts = [self._sent[number] for number in sorted(self._sent)]
        try:
            self._bucket.call(
                "complete_multipart_upload",
                self._key,
                Key=self._full,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
                IfNoneMatch="*",
            )
        except OSError as error:
            writer = written_by(self._bucket, self._key)
            if writer == self._token:  # done by a request whose reply was lost
                return True
            if writer is not None and isinstance(error, ConditionFailed):
                return False
            raise
        return True

    @property
    def _full(self) -> str:
        return self._bucket.full(self._key)
