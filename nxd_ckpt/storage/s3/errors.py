"""Errors of S3 and its library, as OSErrors that name the URL, the store's code, and what to do."""

from __future__ import annotations

from typing import Any


class ConditionFailed(OSError):
    """A conditional request whose condition did not hold (412), or that met another one under way (409)."""

    def __init__(self, text: str, conflict: bool = False) -> None:
        super().__init__(text)
        self.conflict = conflict


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
    code, status = code_of(reply), int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
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
