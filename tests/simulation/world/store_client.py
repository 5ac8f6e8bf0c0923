"""The product's S3 storage on a simulated store: what boto3's client would be, without a network.

A client repeats what may be repeated, as boto3 does, so a request whose reply is lost may happen twice.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from botocore.exceptions import ClientError, ConnectionClosedError

from nxd_ckpt import effects
from nxd_ckpt.storage.s3.bucket import Bucket, S3Options
from nxd_ckpt.storage.s3.s3_storage import S3Storage
from tests.simulation.world.store import ObjectStore, Refused, Reply

Network = Callable[[str, str, Callable[[], Reply]], Reply]
"""Called with the name of a request, its key, and what lets it happen. It returns the reply, or raises ConnectionLost
or Refused: before the request happens, or after. While it waits, others run."""

_TRANSIENT = {429, 500, 502, 503, 504}


class ConnectionLost(Exception):
    """No reply came: the client does not learn whether the request happened."""


def store_storage(
    store: ObjectStore, network: Network = lambda name, key, happen: happen(), retries: int = 2
) -> S3Storage:
    """``store`` as one process sees it, by way of its ``network``."""
    return S3Storage(Bucket("simulated", "", _Options(retries=retries, store=store, network=network)))


@dataclass(frozen=True, kw_only=True)
class _Options(S3Options):
    store: ObjectStore
    network: Network

    def client(self) -> Any:
        return StoreClient(self.store, self.network, self.retries)


class StoreClient:
    """Its methods are the requests of :class:`ObjectStore`, and raise botocore's errors."""

    def __init__(self, store: ObjectStore, network: Network, retries: int) -> None:
        self._store, self._network, self._retries = store, network, retries

    def __getattr__(self, operation: str) -> Callable[..., Reply]:
        request = self.__dict__[operation] = partial(self._request, operation)
        return request

    def _request(self, operation: str, **parameters: Any) -> Reply:
        key = parameters.get("Key", parameters.get("Prefix", ""))
        for attempt in range(self._retries + 1):
            try:
                reply = self._network(operation, key, partial(self._store.request, operation, _sent(parameters)))
            except (ConnectionLost, Refused) as error:
                is_transient = isinstance(error, ConnectionLost) or error.status in _TRANSIENT
                if attempt == self._retries or not is_transient:
                    raise _as_of_botocore(error, operation, key, attempt) from error
            else:
                return _received(reply, attempt)
            effects.sleep(effects.uniform(0, min(2.0**attempt, 20.0)))
        raise AssertionError("unreachable")


def _sent(parameters: dict[str, Any]) -> dict[str, Any]:
    """With the bytes of the body, which is read anew for every try."""
    if "Body" not in parameters:
        return parameters
    body = parameters["Body"]
    body.seek(0)
    data = b"".join(iter(body.read, b""))
    assert len(data) == parameters["ContentLength"]
    return {**parameters, "Body": data}


def _received(reply: Reply, attempt: int) -> Reply:
    body = {"Body": io.BytesIO(reply["Body"]), "ContentLength": len(reply["Body"])} if "Body" in reply else {}
    return {**reply, **body, "ResponseMetadata": {"RetryAttempts": attempt}}


def _as_of_botocore(error: ConnectionLost | Refused, operation: str, key: str, attempt: int) -> Exception:
    if isinstance(error, ConnectionLost):
        lost: Exception = ConnectionClosedError(endpoint_url=f"simulated://{key}")
        return lost
    metadata = {"HTTPStatusCode": error.status, "RetryAttempts": attempt}
    said = {"Error": {"Code": error.code, "Message": "as simulated"}, "ResponseMetadata": metadata}
    refused: Exception = ClientError(said, operation)
    return refused
