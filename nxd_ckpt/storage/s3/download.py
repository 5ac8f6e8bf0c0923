"""Reading an object: ranged requests straight into the caller's memory, all of the same version of the object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.storage.base import checked_length
from nxd_ckpt.storage.ranges import HOLE, ByteRun, Range, runs
from nxd_ckpt.storage.retrying import pause_after
from nxd_ckpt.storage.s3.bucket import Bucket
from nxd_ckpt.storage.s3.errors import ConditionFailed

_TRIES = 10

_NOWHERE = memoryview(bytearray(HOLE))
"""Memory for bytes between ranges. It is never read."""


class Replaced(OSError):
    """The object was replaced since it was opened."""


def read_object(bucket: Bucket, key: str, limit: int = DOCUMENT) -> tuple[bytes, str]:
    """Return all of an object, and its ETag; the newer one if it was replaced meanwhile. Raises as Storage.read does.

    It takes one request, whose reply has the length before any of it is read.
    """
    for tries in range(_TRIES):
        reply = bucket.call("get_object", key, Key=bucket.full(key))
        try:
            with closing(reply["Body"]) as body:
                reader = S3Reader(bucket, key, reply)
                memory = bytearray(checked_length(reader.nbytes, limit, f"{bucket.url}/{key}"))
                reader.read_ranges([(0, memoryview(memory))], body)
        except Replaced:
            if tries == _TRIES - 1:
                raise
        else:
            break
    return bytes(memory), reader.etag


class S3Reader:
    """A reader of the object's version at its opening: the store refuses to read from another."""

    def __init__(self, bucket: Bucket, key: str, reply: Mapping[str, Any] | None = None) -> None:
        """Open the object; ``reply`` is the reply to an earlier request for it, if there was one."""
        self._bucket, self._key = bucket, key
        head = bucket.head(key) if reply is None else reply
        self.etag, self.nbytes = str(head["ETag"]), int(head["ContentLength"])

    def read_ranges(self, ranges: Sequence[Range], body: Any = None) -> None:
        """Fill each memory from its offset on; ``body`` is a reply's that has all of the first ranges."""
        for run in runs(ranges):
            if run.end > self.nbytes:
                missing = run.end - max(run.begin, self.nbytes)
                raise EOFError(f"{self._url}: {missing} bytes missing at byte {self.nbytes}")
            self._fetch(run, body)
            body = None

    def close(self) -> None:
        """Do nothing: every read is a request of its own."""

    @property
    def _url(self) -> str:
        return f"{self._bucket.url}/{self._key}"

    def _fetch(self, run: ByteRun, begun: Any) -> None:
        """Read a run. If a connection breaks in the middle, the next request continues from there."""
        from urllib3.exceptions import HTTPError

        done, tries = run.begin, 0
        while done < run.end:
            before = done
            with self._request(done, run.end) if begun is None else begun as body:
                begun = None
                try:
                    reply = _uncopied(body)
                    for memory in _memories(run, done, self._bucket.throttle.block):
                        self._bucket.throttle.take(len(memory))
                        while len(memory):
                            count = reply.readinto(memory)
                            if not count:
                                raise ConnectionResetError("the body ended early")
                            memory, done = memory[count:], done + count
                    body.read()  # nothing is left: it gives its connection back
                except (HTTPException, HTTPError, OSError) as error:
                    tries = 0 if done > before else tries + 1
                    if tries > self._bucket.options.retries:
                        where = f"{self._url}: broke off at byte {done} {tries} times"
                        raise ConnectionError(f"{where}: {error}") from error
                    effects.sleep(pause_after(tries))

    def _request(self, begin: int, end: int) -> Any:
        """Return the body of bytes ``begin`` to ``end``."""
        full = self._bucket.full(self._key)
        try:
            reply = self._bucket.call(
                "get_object", self._key, Key=full, Range=f"bytes={begin}-{end - 1}", IfMatch=self.etag
            )
        except ConditionFailed as error:
            raise Replaced(f"{self._url}: replaced by another object while it was being read") from error
        if reply["ContentLength"] != end - begin:
            raise OSError(f"{self._url}: asked for {end - begin} bytes, the store sends {reply['ContentLength']}")
        return reply["Body"]


def _uncopied(body: Any) -> Any:
    """Return a reader of urllib3's body straight into memory, if the reply below it is one.

    urllib3 itself reads into its own memory and copies.
    """
    reply = getattr(body, "_fp", None)
    return reply if isinstance(reply, HTTPResponse) else body


def _memories(run: ByteRun, begin: int, block: int) -> Iterator[memoryview]:
    """Yield the memories for the bytes of ``run`` from ``begin`` on, a block at a time; bytes between are dropped."""
    position = begin
    for offset, buffer in [*run.ranges, (run.end, memoryview(b""))]:
        while position < offset:
            hole = _NOWHERE[: offset - position]
            yield hole
            position += len(hole)
        buffer = buffer[position - offset :]
        while len(buffer):
            yield buffer[:block]
            position += len(buffer[:block])
            buffer = buffer[block:]
