"""Uploads in the smallest parts that S3 takes, so that little data goes up in several."""

import pytest

from nxd_ckpt.storage.s3 import upload
from tests.support.s3_server import SMALLEST_PART


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; ranks of a job are processes of their own."""
    monkeypatch.setattr(upload, "PART", SMALLEST_PART)
