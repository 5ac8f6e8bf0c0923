"""One S3 server for all tests of storages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nxd_ckpt.testing.s3_server import S3Server
from tests.storage.storages import BUCKET


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server that has :data:`BUCKET`."""
    with S3Server() as server:
        server.make_bucket(BUCKET)
        yield server
