"""A bucket and its client: options, one client per process, and requests whose errors are OSErrors."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.s3.errors import NotOffered, UploadGone, as_os_error, code_of, of_a_request
from nxd_ckpt.storage.throttle import Limits, Throttle, shared_throttle
from nxd_ckpt.version import __version__

logger = logging.getLogger("nxd_ckpt")

TOKEN = "nxd-ckpt-writer"
"""Metadata of every object: its writer. It distinguishes a lost reply from a key that somebody else took."""

_CONNECTIONS = 32


@dataclass(frozen=True)
class S3Options:
    """``storage_options`` of an ``s3://`` URL, under s3fs's names where it has them.

    Options that are not given come from the usual places: environment, ``~/.aws``, the instance's role.

    ``retries`` is the number of repetitions of a request, ``max_bytes_per_second`` limits uploads and downloads
    together.
    """

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    anon: bool = False
    profile: str | None = None
    endpoint_url: str | None = None
    client_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    config_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    retries: int = 5
    max_bytes_per_second: float | None = None

    @staticmethod
    def of(options: Mapping[str, Any], url: str) -> S3Options:
        """Return the checked options.

        Raises InvalidArgument for unknown names; values, which may be secret, are not shown.
        """
        fields = S3Options.__dataclass_fields__
        unknown = sorted(set(options) - set(fields))
        if unknown:
            raise InvalidArgument(f"{url}: unknown storage_options {unknown}; known are {', '.join(fields)}")
        checked = S3Options(**options)
        Limits.of(checked.retries, checked.max_bytes_per_second, url)
        return checked

    def client(self) -> Any:
        """Make a client of botocore. Its own retries, with jitter, cover everything but the body of a download."""
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        config = {
            "retries": {"mode": "standard", "total_max_attempts": self.retries + 1},
            "max_pool_connections": _CONNECTIONS,
            "connect_timeout": 10,
            "read_timeout": 60,
            "user_agent": f"nxd_ckpt/{__version__}",  # botocore rebuilds its own for every request
            # Bodies carry our CRC-32, which the store compares: neither a second digest nor a hash for the signature.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **({"signature_version": UNSIGNED} if self.anon else {}),
            **self.config_kwargs,
            "s3": {"payload_signing_enabled": False, **self.config_kwargs.get("s3", {})},
        }
        session = boto3.Session(self.key, self.secret, self.token, profile_name=self.profile)
        arguments = {"endpoint_url": self.endpoint_url, **self.client_kwargs}
        try:
            return session.client("s3", config=Config(**config), **arguments)
        except TypeError as error:  # it names the option, and no value
            raise InvalidArgument(f"storage_options, client_kwargs or config_kwargs: {error}") from None


class Bucket:
    """The objects of one bucket below ``prefix``. Safe for threads, pickling and forks."""

    def __init__(self, name: str, prefix: str, options: S3Options) -> None:
        self.name, self.prefix, self.options = name, prefix, options
        self.url = f"s3://{name}/{prefix}".rstrip("/")
        self._client: Any = None
        self._pid = 0
        self._seen = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    @property
    def throttle(self) -> Throttle:
        return shared_throttle(self.options.max_bytes_per_second)

    def full(self, key: str) -> str:
        """Return the object's name in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix and key else self.prefix or key

    def below(self, key: str) -> str:
        """Return the beginning of the names of all objects in the directory ``key``."""
        full = self.full(key)
        return full and f"{full}/"

    def call(self, operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        """Send one request about ``key`` and return the reply; every failure is an OSError."""
        try:
            reply: dict[str, Any] = getattr(self._connected(), operation)(Bucket=self.name, **parameters)
        except InvalidArgument:
            raise
        except of_a_request() as error:
            raise as_os_error(error, f"{self.url}/{key}", self.name) from error
        except RecursionError as error:  # the library's, if every request is redirected to nowhere
            raise OSError(
                f"{self.url}/{key}: the store redirects endlessly; check endpoint_url and region"
            ) from error
        self._seen = True
        return reply

    def head(self, key: str, **parameters: Any) -> dict[str, Any]:
        """Return size, ETag, time and metadata of an object.

        The reply to a HEAD has no body with the reason of a refusal: another request asks for it.
        """
        try:
            return self.call("head_object", key, Key=self.full(key), **parameters)
        except FileNotFoundError:
            if not self._seen:
                self.call("list_objects_v2", key, Prefix=self.full(key), MaxKeys=1)
            raise
        except OSError as error:
            if code_of(getattr(error.__cause__, "response", None) or {}).isdigit():
                self.call("list_objects_v2", key, Prefix=self.full(key), MaxKeys=1)
            raise

    def token(self, key: str) -> str | None:
        """Return the object's writer; None if there is no object."""
        try:
            return str(self.head(key).get("Metadata", {}).get(TOKEN, ""))
        except FileNotFoundError:
            return None

    def pages(self, key: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing of objects in the directory ``key``."""
        more: dict[str, Any] = {}
        while True:
            page = self.call("list_objects_v2", key, Prefix=self.below(key), **parameters, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def uploads(self, key: str, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield (object name, upload id) of the unfinished multipart uploads whose names begin with ``prefix``.

        None from a store that cannot list them: it frees them by its own rules.
        """
        more: dict[str, Any] = {}
        while True:
            try:
                page = self.call("list_multipart_uploads", key, Prefix=prefix, **more)
            except NotOffered as error:
                logger.info("%s; the store itself must free the parts of unfinished uploads", error)
                return
            yield from ((upload["Key"], upload["UploadId"]) for upload in page.get("Uploads", ()))
            if not page.get("IsTruncated"):
                return
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def discard_upload(self, key: str, name: str, upload_id: str) -> None:
        """Abort the multipart upload of the object ``name``; one that is gone is fine."""
        with contextlib.suppress(UploadGone):
            self.call("abort_multipart_upload", key, Key=name, UploadId=upload_id)

    def _connected(self) -> Any:
        if self._client is None or self._pid != os.getpid():  # connections are not shared with a forked process
            self._client, self._pid = self.options.client(), os.getpid()
        return self._client
