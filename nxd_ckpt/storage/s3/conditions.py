"""Conditional requests, although replies get lost: an object's metadata names its writer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from nxd_ckpt import effects
from nxd_ckpt.storage.retrying import pause_after
from nxd_ckpt.storage.s3.body import Body, crc32
from nxd_ckpt.storage.s3.bucket import TOKEN, Bucket
from nxd_ckpt.storage.s3.errors import ConditionFailed

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
                Body=Body(views, bucket.throttle),
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
