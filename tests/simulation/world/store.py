"""A service like S3, in memory: objects by key, and uploads in parts that stay until somebody ends them.

Every request happens at one instant or is refused, and all see it from then on. Two do not: a listing that is longer
than a page takes several requests, between which things change, and a request that deletes several keys deletes one
after the other, in any order. Requests have the names and parameters of boto3's client, and replies its fields.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from threading import RLock
from typing import Any, NamedTuple

from nxd_ckpt.storage.s3.upload import crc32

Reply = dict[str, Any]


class Refused(Exception):
    """The service's answer to a request that it does not carry out: an HTTP status, and S3's code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code = status, code


class StoredObject(NamedTuple):
    """``etag`` follows from the bytes, as S3's does: it does not tell who wrote them. ``time`` is in seconds."""

    data: bytes
    etag: str
    metadata: Mapping[str, str]
    time: float


@dataclass
class Upload:
    """One that was begun: ``parts`` by number, each with its ETag."""

    key: str
    metadata: Mapping[str, str]
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


class ObjectStore:
    """One bucket. ``page`` is how many names a listing gives at once; ``deleting`` yields those of a request's
    keys that it deletes, each when it is its turn; the reply names the others. Times are in whole seconds; a listing
    has them in milliseconds if ``lists_milliseconds``, as MinIO's, Ceph's and R2's."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        page: int = 1000,
        deleting: Callable[[Sequence[str]], Iterable[str]] = iter,
        *,
        lists_milliseconds: bool = False,
    ) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.uploads: dict[str, Upload] = {}
        """Those that are neither complete nor aborted, by id."""
        self._clock, self._page, self._deleting = clock, page, deleting
        self._listed_unit = 0.001 if lists_milliseconds else 1.0
        self._lock = RLock()
        self._begun = 0

    def request(self, operation: str, parameters: Mapping[str, Any]) -> Reply:
        """What the service replies. Raises Refused."""
        with self._lock:
            reply: Reply = getattr(self, operation)(**parameters)
            return reply

    def put_object(
        self, *, Key: str, Body: bytes, ChecksumCRC32: str, Metadata: Mapping[str, str], **given: Any
    ) -> Reply:
        if ChecksumCRC32 != crc32([memoryview(Body)]):
            raise Refused(400, "BadDigest")
        self._require_condition(Key, **given)
        return self._put(Key, Body, _etag(Body), Metadata)

    def get_object(self, *, Key: str, Range: str = "", IfMatch: str = "", **given: Any) -> Reply:
        found = self._object(Key, "NoSuchKey")
        if IfMatch and found.etag != IfMatch:
            raise Refused(412, "PreconditionFailed")
        begin, end = map(int, Range.removeprefix("bytes=").split("-")) if Range else (0, len(found.data) - 1)
        if Range and begin >= len(found.data):
            raise Refused(416, "InvalidRange")
        shown = {"ContentRange": f"bytes {begin}-{end}/{len(found.data)}"} if Range else {}
        return {"Body": found.data[begin : end + 1], "ETag": found.etag, **shown}

    def head_object(self, *, Key: str, **given: Any) -> Reply:
        found = self._object(Key, "404")
        return {**_facts(found, "ContentLength"), "Metadata": dict(found.metadata)}

    def list_objects_v2(
        self,
        *,
        Prefix: str,
        Delimiter: str = "",
        MaxKeys: int = 1000,
        ContinuationToken: str = "",
        **given: Any,
    ) -> Reply:
        limit, names = min(MaxKeys, self._page), list[str]()
        keys = sorted([key for key in self.objects if key.startswith(Prefix)])
        for name in _names(keys, Prefix, Delimiter):
            if name > ContinuationToken:
                names.append(name)
            if len(names) > limit:
                break
        shown = names[:limit]
        more = {"IsTruncated": True, "NextContinuationToken": shown[-1]} if len(names) > limit else {}
        folders = [{"Prefix": name} for name in shown if name.endswith(Delimiter)] if Delimiter else []
        files = [name for name in shown if not name.endswith(Delimiter)] if Delimiter else shown
        entries = [{"Key": name, **_facts(self.objects[name], "Size", self._listed_unit)} for name in files]
        return {"Contents": entries, "CommonPrefixes": folders, **more}

    def delete_objects(self, *, Delete: Mapping[str, Any], **given: Any) -> Reply:
        etags = {item["Key"]: item.get("ETag", "") for item in Delete["Objects"]}
        failed = dict.fromkeys(etags, "InternalError")
        for key in self._deleting(list(etags)):
            try:
                self._require_condition(key, IfMatch=etags[key])
            except Refused as error:
                failed[key] = error.code
            else:
                self.objects.pop(key, None)
                del failed[key]
        return {"Errors": [{"Key": key, "Code": code} for key, code in failed.items()]}

    def create_multipart_upload(self, *, Key: str, Metadata: Mapping[str, str], **given: Any) -> Reply:
        self._begun += 1
        upload_id = f"upload-{self._begun}"
        self.uploads[upload_id] = Upload(Key, Metadata)
        return {"UploadId": upload_id}

    def upload_part(self, *, UploadId: str, PartNumber: int, Body: bytes, ChecksumCRC32: str, **given: Any) -> Reply:
        upload = self._upload(UploadId)
        if ChecksumCRC32 != crc32([memoryview(Body)]):
            raise Refused(400, "BadDigest")
        upload.parts[PartNumber] = _etag(Body), Body
        return {"ETag": upload.parts[PartNumber][0]}

    def upload_part_copy(
        self,
        *,
        UploadId: str, PartNumber: int, CopySource: Mapping[str, str], CopySourceIfMatch: str, CopySourceRange: str,
        **given: Any,
    ) -> Reply:
        data = self.get_object(Key=CopySource["Key"], Range=CopySourceRange, IfMatch=CopySourceIfMatch)["Body"]
        upload = self._upload(UploadId)
        upload.parts[PartNumber] = _etag(data), data
        return {"CopyPartResult": {"ETag": upload.parts[PartNumber][0]}}

    def complete_multipart_upload(
        self, *, Key: str, UploadId: str, MultipartUpload: Mapping[str, Any], **given: Any
    ) -> Reply:
        upload = self._upload(UploadId)
        named = [(part["PartNumber"], part["ETag"]) for part in MultipartUpload["Parts"]]
        if any(upload.parts.get(number, ("",))[0] != etag for number, etag in named):
            raise Refused(400, "InvalidPart")
        self._require_condition(Key, **given)
        del self.uploads[UploadId]
        data = b"".join(upload.parts[number][1] for number, _ in named)
        return self._put(Key, data, f"{_etag(data)}-{len(named)}", upload.metadata)

    def abort_multipart_upload(self, *, UploadId: str, **given: Any) -> Reply:
        self._upload(UploadId)
        del self.uploads[UploadId]
        return {}

    def list_multipart_uploads(self, *, Prefix: str, **given: Any) -> Reply:
        found = sorted((upload.key, number) for number, upload in self.uploads.items())
        return {"Uploads": [{"Key": key, "UploadId": number} for key, number in found if key.startswith(Prefix)]}

    def _require_condition(self, key: str, IfNoneMatch: str = "", IfMatch: str = "", **given: Any) -> None:
        found = self.objects.get(key)
        if IfMatch and found is None:
            raise Refused(404, "NoSuchKey")
        if found is not None and (IfNoneMatch == "*" or (IfMatch and found.etag != IfMatch)):
            raise Refused(412, "PreconditionFailed")

    def _put(self, key: str, data: bytes, etag: str, metadata: Mapping[str, str]) -> Reply:
        self.objects[key] = StoredObject(data, etag, metadata, self._clock())
        return {"ETag": etag}

    def _object(self, key: str, code: str) -> StoredObject:
        if key not in self.objects:
            raise Refused(404, code)
        return self.objects[key]

    def _upload(self, upload_id: str) -> Upload:
        if upload_id not in self.uploads:
            raise Refused(404, "NoSuchUpload")
        return self.uploads[upload_id]


def _facts(stored: StoredObject, size: str, unit: float = 1.0) -> Reply:
    written = datetime.fromtimestamp(stored.time // unit * unit, timezone.utc)
    return {"ETag": stored.etag, size: len(stored.data), "LastModified": written}


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _names(keys: Sequence[str], prefix: str, delimiter: str) -> Iterator[str]:
    """The ``keys``, all of which begin so, in order; those that go on alike up to the delimiter as one."""
    last = None
    for key in keys:
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
        name = f"{prefix}{head}{found}"
        if name != last:
            yield name
        last = name
