"""Requests that depend on what is there, though replies get lost: an object's metadata says who wrote it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from nxd_ckpt import effects
from nxd_ckpt.storage.retrying import pause_after
from nxd_ckpt.storage.s3.body import Body, crc32
from nxd_ckpt.storage.s3.bucket import TOKEN, Bucket
from nxd_ckpt.storage.s3.errors import ConditionFailed

_TRIES = 6
"""Of a request that meets another one under way: the store answers neither yes nor no then."""


def put_if(bucket: Bucket, key: str, views: Sequence[memoryview], token: str, **condition: str) -> bool:
    """Put an object under a condition of S3's (``IfNoneMatch="*"``, ``IfMatch=etag``); False where it did not hold.

    ``token`` must be new: a request that is repeated since its reply was lost finds its own object.
    """
    for tries in range(_TRIES):
        try:
            bucket.call(
                "put_object",
                key,
                Key=bucket.full(key),
                Body=Body(views, bucket.throttle),
                ContentLength=sum(map(len, views)),
                ChecksumCRC32=crc32(views),
                Metadata={TOKEN: token},
                **condition,
            )
            return True
        except FileNotFoundError:  # IfMatch, and it is gone
            return False
        except (ConditionFailed, ConnectionError) as error:
            found = written_by(bucket, key)
            if found == token:
                return True
            if isinstance(error, ConnectionError) or (error.conflict and tries == _TRIES - 1):
                raise
            if not error.conflict:
                return False
            effects.sleep(pause_after(tries))
    raise AssertionError("unreachable")


def written_by(bucket: Bucket, key: str) -> str | None:
    """Who wrote the object; None if unknown.

    It is called after a failure, whose error says more than one of this call would.
    """
    with contextlib.suppress(OSError):
        return bucket.token(key)
    return None
