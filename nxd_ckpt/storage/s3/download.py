"""An object being read: ranged requests straight into the caller's memory, all of the same version of the object."""

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
"""Memory for what is read along. Nobody looks into it."""


class Replaced(OSError):
    """The object is not the one any more that was opened."""


def read_object(bucket: Bucket, key: str, limit: int = DOCUMENT) -> tuple[bytes, str]:
    """All of an object, and its ETag; the newer one where it was replaced meanwhile. Raises as Storage.read.

    It takes one request, whose reply says how long it is before any of it is read.
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
    """Of the version that was there when it was opened: the store refuses to read from another."""

    def __init__(self, bucket: Bucket, key: str, reply: Mapping[str, Any] | None = None) -> None:
        """``reply`` is that of a request for the object, where there was one."""
        self._bucket, self._key = bucket, key
        head = bucket.head(key) if reply is None else reply
        self.etag, self.nbytes = str(head["ETag"]), int(head["ContentLength"])

    def read_ranges(self, ranges: Sequence[Range], body: Any = None) -> None:
        """``body`` is that of a reply that holds all of the first of them."""
        for run in runs(ranges):
            if run.end > self.nbytes:
                missing = run.end - max(run.begin, self.nbytes)
                raise EOFError(f"{self._url}: {missing} bytes missing at byte {self.nbytes}")
            self._fetch(run, body)
            body = None

    def close(self) -> None:
        """Nothing: every request is one of its own."""

    @property
    def _url(self) -> str:
        return f"{self._bucket.url}/{self._key}"

    def _fetch(self, run: ByteRun, begun: Any) -> None:
        """Where a connection breaks in the middle, the next request goes on from there."""
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
        """The body of bytes ``begin`` to ``end``."""
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
    """What reads a body of urllib3 straight into memory, which itself reads into its own and copies: the reply below
    it, if it has one like that."""
    reply = getattr(body, "_fp", None)
    return reply if isinstance(reply, HTTPResponse) else body


def _memories(run: ByteRun, begin: int, block: int) -> Iterator[memoryview]:
    """Where the bytes of ``run`` from ``begin`` on belong, a block at a time; what lies between goes nowhere."""
    position = begin
    for offset, buffer in [*run.wanted, (run.end, memoryview(b""))]:
        while position < offset:
            hole = _NOWHERE[: offset - position]
            yield hole
            position += len(hole)
        buffer = buffer[position - offset :]
        while len(buffer):
            yield buffer[:block]
            position += len(buffer[:block])
            buffer = buffer[block:]
