"""A bucket of S3, or of a store with its protocol, below a prefix.

An object exists once its last request was answered, and lasts. Conditional requests (``If-None-Match``, ``If-Match``)
decide which of several writers wins; every object has the token of its writer, so that a request that is repeated
because its reply was lost is not taken for somebody else's. The library is boto3; ``docs/decisions/013`` says why.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from importlib.util import find_spec
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.base import (
    HOLE,
    ByteRun,
    DirEntry,
    Range,
    Reader,
    Storage,
    Version,
    Writer,
    checked_length,
    runs,
)
from nxd_ckpt.storage.s3.bucket import Bucket, ConditionFailed, OutOfRange, S3Options
from nxd_ckpt.storage.s3.upload import S3Writer, put_if
from nxd_ckpt.storage.wrapper import pause_after

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
                memory = bytearray(checked_length(int(reply["ContentLength"]), limit, f"{bucket.url}/{key}"))
                reader.read_ranges([(0, memoryview(memory))], body)
        except Replaced:
            if tries == _TRIES - 1:
                raise
        else:
            break
    return bytes(memory), str(reply["ETag"])


class S3Reader:
    """A reader of one version of an object: the store refuses to read from another."""

    def __init__(self, bucket: Bucket, key: str, reply: Mapping[str, Any] | None = None) -> None:
        """Open the version of ``reply``, an earlier one about all of the object; else that of the first read."""
        self._bucket = bucket
        self._key = key
        self.etag = None if reply is None else str(reply["ETag"])
        self.nbytes = None if reply is None else int(reply["ContentLength"])

    def read_ranges(self, ranges: Sequence[Range], body: Any = None) -> None:
        """Fill each memory from its offset on; ``body`` is a reply's that has all of the first ranges."""
        for run in runs(ranges):
            self._require(run)
            self._fetch(run, body)
            body = None

    def _require(self, run: ByteRun) -> None:
        """Raise EOFError if the object is known to end before the run."""
        if self.nbytes is not None and run.end > self.nbytes:
            missing = run.end - max(run.begin, self.nbytes)
            raise EOFError(f"{self._url}: {missing} bytes missing at byte {self.nbytes}")

    def close(self) -> None:
        """Do nothing: every read is a request of its own."""

    @property
    def _url(self) -> str:
        return f"{self._bucket.url}/{self._key}"

    def _fetch(self, run: ByteRun, begun: Any) -> None:
        """Read a run. If a connection breaks in the middle, the next request continues from there."""
        from urllib3.exceptions import HTTPError

        done = run.begin
        tries = 0
        while done < run.end:
            before = done
            with self._request(run, done) if begun is None else begun as body:
                begun = None
                try:
                    reply = _uncopied(body)
                    for memory in _memories(run, done):
                        while len(memory):
                            count = reply.readinto(memory)
                            if not count:
                                raise ConnectionResetError("the body ended early")
                            memory = memory[count:]
                            done += count
                    body.read()  # nothing is left: it gives its connection back
                except (HTTPException, HTTPError, OSError) as error:
                    tries = 0 if done > before else tries + 1
                    if tries > self._bucket.options.retries:
                        where = f"{self._url}: broke off at byte {done} {tries} times"
                        raise ConnectionError(f"{where}: {error}") from error
                    effects.sleep(pause_after(tries))

    def _request(self, run: ByteRun, begin: int) -> Any:
        """Return the body of the bytes of ``run`` from ``begin`` on. The first reply tells version and size."""
        full = self._bucket.full(self._key)
        condition = {} if self.etag is None else {"IfMatch": self.etag}
        try:
            reply = self._bucket.call(
                "get_object", self._key, Key=full, Range=f"bytes={begin}-{run.end - 1}", **condition
            )
        except ConditionFailed as error:
            raise Replaced(f"{self._url}: replaced by another object while it was being read") from error
        except OutOfRange:
            self.nbytes = int(self._bucket.head(self._key)["ContentLength"])
            self._require(run)
            raise
        if self.etag is None:
            size = str(reply.get("ContentRange", "")).rpartition("/")[2]
            self.etag = str(reply["ETag"])
            self.nbytes = int(size) if size.isdecimal() else None
        if reply["ContentLength"] != run.end - begin:
            with closing(reply["Body"]):
                self._require(run)
                sent = reply["ContentLength"]
                raise OSError(f"{self._url}: asked for {run.end - begin} bytes, the store sends {sent}")
        return reply["Body"]


def _uncopied(body: Any) -> Any:
    """Return a reader of urllib3's body straight into memory, if the reply below it is one.

    urllib3 itself reads into its own memory and copies.
    """
    reply = getattr(body, "_fp", None)
    return reply if isinstance(reply, HTTPResponse) else body


_BLOCK = 2**20
"""Bytes of which none counts as read if the connection breaks meanwhile."""


def _memories(run: ByteRun, begin: int) -> Iterator[memoryview]:
    """Yield the memories for the bytes of ``run`` from ``begin`` on, a block at a time; bytes between are dropped."""
    position = begin
    for offset, buffer in [*run.ranges, (run.end, memoryview(b""))]:
        while position < offset:
            hole = _NOWHERE[: offset - position]
            yield hole
            position += len(hole)
        buffer = buffer[position - offset :]
        while len(buffer):
            yield buffer[:_BLOCK]
            position += len(buffer[:_BLOCK])
            buffer = buffer[_BLOCK:]


_BATCH = 1000
"""Maximum number of keys that one request deletes."""
_GONE = {"NoSuchKey", "PreconditionFailed"}
"""Errors for a key whose object was to be deleted and does not exist any more."""


def open_s3(url: str, options: Mapping[str, Any]) -> S3Storage:
    """Open the storage of ``s3://bucket/prefix``, without a request.

    Raises InvalidArgument if boto3 is missing, the bucket has no name, or options are unknown.
    """
    if find_spec("boto3") is None:
        raise InvalidArgument(f"{url}: needs boto3: pip install boto3")
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket or "@" in bucket:
        raise InvalidArgument("expected s3://BUCKET/PREFIX, without credentials; these go into storage_options")
    return S3Storage(Bucket(bucket, prefix.strip("/"), S3Options.of(options, f"s3://{bucket}")))


class S3Storage(Storage):
    """A bucket's prefix as a storage. Safe for threads; may be pickled, with its options, and used after a fork."""

    concurrency = 16
    read_nbytes = 16 * 2**20
    duplicates = True

    def __init__(self, bucket: Bucket) -> None:
        self.url: str = bucket.url
        self._bucket = bucket

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        return read_object(self._bucket, key, limit)[0]

    def open(self, key: str) -> Reader:
        return S3Reader(self._bucket, key, self._bucket.head(key))

    def open_unseen(self, key: str) -> Reader:
        return S3Reader(self._bucket, key)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.open_unseen(key).read_ranges([(offset, memoryview(buffer).cast("B"))])

    def size(self, key: str) -> int:
        return int(self._bucket.head(key)["ContentLength"])

    def is_dir(self, key: str) -> bool:
        page = next(self._bucket.pages(key, MaxKeys=1))
        return bool(page.get("Contents"))

    def is_file(self, key: str) -> bool:
        if not key:
            return False
        try:
            self._bucket.head(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, key: str = "") -> list[DirEntry]:
        below = self._bucket.below(key)
        entries: list[DirEntry] = []
        for page in self._bucket.pages(key, Delimiter="/"):
            files = (item["Key"].removeprefix(below) for item in page.get("Contents", ()))
            folders = (item["Prefix"].removeprefix(below).rstrip("/") for item in page.get("CommonPrefixes", ()))
            # Some tools make an empty object that stands for the directory.
            entries += [DirEntry(name, False) for name in files if name]
            entries += [DirEntry(name, True) for name in folders if name]
        return sorted(entries)

    def write(self, key: str, data: bytes) -> None:
        put_if(self._bucket, key, [memoryview(data)], uuid.uuid4().hex)

    def create(self, key: str, nbytes: int) -> Writer:
        return S3Writer(self._bucket, key, nbytes)

    def link_new(self, key: str, data: bytes) -> bool:
        return put_if(self._bucket, key, [memoryview(data)], uuid.uuid4().hex, IfNoneMatch="*")

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        try:
            content, etag = read_object(self._bucket, key)
        except FileNotFoundError:
            return False
        token = uuid.uuid4().hex
        return content == expected and put_if(self._bucket, key, [memoryview(data)], token, IfMatch=etag)

    def remove(self, key: str) -> None:
        self.remove_if(key, lambda: True)

    def remove_if(self, key: str, confirm: Callable[[], bool]) -> bool:
        for objects in self._objects(key):
            if not confirm():
                return False
            self._delete(key, objects)
        return True

    def discard_unfinished(self, key: str) -> None:
        for name, upload_id in self._bucket.uploads(key, self._bucket.below(key)):
            self._bucket.discard_upload(key, name, upload_id)

    def time(self, key: str) -> float:
        return _seconds(self._bucket.head(key))

    def version(self, key: str) -> Version:
        head = self._bucket.head(key)
        return Version(int(head["ContentLength"]), str(head["ETag"]))

    def duplicate(self, source: str, version: Version, target: str) -> bool:
        return S3Writer(self._bucket, target, version.nbytes).copy(source, version.mark)

    def _objects(self, key: str) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield the object of that key, and those below it, as listed: some at a time."""
        full = self._bucket.full(key)
        below = self._bucket.below(key)
        # Its name begins those below it too; in between are others, such as "step_1.tmp", which may be many.
        page: dict[str, Any] = {"IsTruncated": True}
        if key:
            page = self._bucket.call("list_objects_v2", key, Prefix=full)
        if objects := [item for item in page.get("Contents", ()) if f"{item['Key']}/".startswith(below)]:
            yield objects
        if page.get("IsTruncated"):
            yield from (objects for page in self._bucket.pages(key) if (objects := page.get("Contents", ())))

    def _delete(self, key: str, objects: Sequence[Mapping[str, Any]]) -> None:
        """Delete these ``objects``, unless they have changed since they were listed.

        A changed one stays: otherwise a request that the store carries out long after we gave it up, and repeated it,
        would delete a new object.
        """
        for first in range(0, len(objects), _BATCH):
            batch = [{"Key": item["Key"], "ETag": item["ETag"]} for item in objects[first : first + _BATCH]]
            reply = self._bucket.call("delete_objects", key, Delete={"Objects": batch, "Quiet": True})
            for error in reply.get("Errors", ()):
                if error.get("Code") in _GONE:
                    continue
                kind = PermissionError if error.get("Code") == "AccessDenied" else OSError
                raise kind(f"{self.url}/{key}: cannot delete {error['Key']}: {error['Code']}: {error.get('Message')}")


def _seconds(facts: Mapping[str, Any]) -> float:
    """Return the time of an object in whole seconds: some stores list milliseconds, which a HEAD never has."""
    return float(int(facts["LastModified"].timestamp()))
