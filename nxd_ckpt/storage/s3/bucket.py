"""A bucket and its client: options, one client per process, requests, and errors that say what to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.effects import logger
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.transfer import check_retries
from nxd_ckpt.version import __version__


class ConditionFailed(OSError):
    """A conditional request whose condition did not hold (412), or that met another one under way (409)."""

    def __init__(self, text: str, conflict: bool = False) -> None:
        super().__init__(text)
        self.conflict = conflict


class OutOfRange(OSError):
    """The object ends before the first byte that was asked for (416)."""


class UploadGone(OSError):
    """The multipart upload does not exist: completed by a request whose reply was lost, or aborted by someone."""


class NotOffered(OSError):
    """The store does not support the request (501)."""


_DENIED = {
    "AccessDenied": "the credentials do not allow this; ask for the right on this bucket and prefix",
    "AllAccessDisabled": "the bucket's owner disabled access",
    "ExpiredToken": "the credentials expired; renew them",
    "ExpiredTokenException": "the credentials expired; renew them",
    "TokenRefreshRequired": "the credentials expired; renew them",
    "InvalidAccessKeyId": "the store does not know this access key; check the credentials and the endpoint",
    "InvalidToken": "the session token is not valid; renew the credentials",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "RequestTimeTooSkewed": "this host's clock is wrong by more than 15 minutes; set it",
}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301", "307"}
_BUSY = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException"}
_CHANGED = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_LOST = {"InvalidPart", "InvalidPartOrder", "EntityTooSmall"}


def of_a_request() -> tuple[type[Exception], ...]:
    """Return the errors of a botocore request; ValueError for an endpoint that is no URL."""
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError, ValueError


def as_os_error(error: Exception, url: str, bucket: str) -> OSError:
    """Return an OSError for ``error`` of botocore, raised by a request on ``url``."""
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return _of_reply(error.response, url, bucket)
    text = f"{url}: {type(error).__name__}: {error}"
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError):
        return PermissionError(f"{text}; pass key and secret, a profile, or anon=True in storage_options, or set AWS_*")
    if isinstance(error, boto.ProxyConnectionError | boto.SSLError):
        return OSError(f"{text}; check endpoint_url and the proxy settings of this host")
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError):
        return ConnectionError(f"{text}; check endpoint_url, the region and this host's network")
    return OSError(text)


def code_of(reply: dict[str, Any]) -> str:
    """Return the code, such as ``NoSuchKey``; the reply to a HEAD has no body, so there it is the status."""
    return str(reply.get("Error", {}).get("Code", ""))


def _of_reply(reply: dict[str, Any], url: str, bucket: str) -> OSError:
    code = code_of(reply)
    status = int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    message = str(reply.get("Error", {}).get("Message", "")).rstrip(".")
    text = f"{url}: {code}: {message}"
    if code == "NoSuchBucket":
        return OSError(f"{url}: {code}: the bucket {bucket!r} does not exist; create it, or correct the URL")
    if code == "NoSuchUpload":
        return UploadGone(text)
    if status == 404:
        return FileNotFoundError(f"{url}: not found ({code})")
    if code in _REGION or status in (301, 307):
        return OSError(f"{text}; the bucket is in {_region(reply)}")
    if code == "InvalidRange" or status == 416:
        return OutOfRange(text)
    if code in ("PreconditionFailed", "412") or status == 412:
        return ConditionFailed(text)
    if code in ("ConditionalRequestConflict", "OperationAborted") or status == 409:
        return ConditionFailed(text, conflict=True)
    if code in _DENIED or status in (401, 403):
        return PermissionError(f"{text}; {_DENIED.get(code, 'check the credentials and what they allow')}")
    if code in _BUSY or status in (429, 500, 502, 503, 504):
        tries = reply.get("ResponseMetadata", {}).get("RetryAttempts", 0)
        return ConnectionError(f"{text}; still so after {tries} retries: try later, or pass more `retries`")
    if code == "NotImplemented" or status == 501:
        return NotOffered(text)
    if code in _CHANGED:
        return OSError(f"{text}; the bytes changed on their way to the store")
    if code in _LOST:
        return OSError(f"{text}; the store lost a part of the upload; save again")
    return OSError(text)


def _region(reply: dict[str, Any]) -> str:
    headers = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = reply.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region")
    if not region:
        return "another region; pass it as storage_options={'client_kwargs': {'region_name': ...}}"
    return f"region {region}; pass storage_options={{'client_kwargs': {{'region_name': {region!r}}}}}"


TOKEN = "nxd-ckpt-writer"
"""Metadata of every object: its writer. It distinguishes a lost reply from a key that somebody else took."""

_CONNECTIONS = 32


@dataclass(frozen=True)
class S3Options:
    """``storage_options`` of an ``s3://`` URL, under s3fs's names where it has them.

    Options that are not given come from the usual places: environment, ``~/.aws``, the instance's role.

    ``retries`` is the number of repetitions of a request.
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
        check_retries(checked.retries, url)
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
        self.name = name
        self.prefix = prefix
        self.options = options
        self.url: str = f"s3://{name}/{prefix}".rstrip("/")
        self._client: Any = None
        self._pid = 0
        self._seen = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

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
            raise OSError(f"{self.url}/{key}: the store redirects endlessly; check endpoint_url and region") from error
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
            self._client = self.options.client()
            self._pid = os.getpid()
        return self._client
