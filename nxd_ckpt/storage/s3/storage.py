"""A bucket of S3, or of a store with its protocol, below a prefix.

An object exists once its last request was answered, and lasts. Conditional requests (``If-None-Match``, ``If-Match``)
decide which of several writers wins; every object has the token of its writer, so that a request that is repeated
because its reply was lost is not taken for somebody else's. The library is boto3; ``docs/decisions/013`` says why.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from importlib.util import find_spec
from typing import Any

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.errors import InvalidArgument, MalformedFile
from nxd_ckpt.storage.base import DirEntry, Reader, Version, Writer
from nxd_ckpt.storage.s3.bucket import Bucket, S3Options
from nxd_ckpt.storage.s3.conditions import put_if
from nxd_ckpt.storage.s3.download import S3Reader, read_object
from nxd_ckpt.storage.s3.upload import S3Writer

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


class S3Storage:
    """A bucket's prefix as a storage. Safe for threads; may be pickled, with its options, and used after a fork."""

    renames = False
    concurrency = 16
    read_nbytes = 16 * 2**20

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.url = bucket, bucket.url

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        return read_object(self._bucket, key, limit)[0]

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, memoryview(buffer).cast("B"))])

    def open(self, key: str) -> Reader:
        return S3Reader(self._bucket, key)

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
        if not entries and self.is_file(key):
            raise MalformedFile(f"{self.url}/{key} is a file, expected a directory")
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

    def make_dir(self, key: str) -> None:
        """Do nothing: a directory is there while a key lies below it."""

    def sync_dir(self, key: str) -> None:
        """Do nothing: acknowledged writes last."""

    def rename(self, source: str, target: str) -> None:
        raise OSError(f"{self.url}: cannot rename {source} to {target}: an object store has no rename")

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
        return float(self._bucket.head(key)["LastModified"].timestamp())

    def version(self, key: str) -> Version:
        head = self._bucket.head(key)
        return Version(int(head["ContentLength"]), str(head["ETag"]))

    def duplicate(self, source: str, version: Version, target: str) -> bool:
        return S3Writer(self._bucket, target, version.nbytes).copy(source, version.mark)

    def set_time(self, key: str, seconds: float) -> None:
        """Do nothing: times belong to the store, which keeps whole seconds."""

    def _objects(self, key: str) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield the object of that key, and those below it, as listed: some at a time."""
        if key:
            with suppress(FileNotFoundError):
                yield [{"Key": self._bucket.full(key), "ETag": self._bucket.head(key)["ETag"]}]
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
