"""Every storage there is, as the contract's tests see it."""

import uuid
from collections.abc import Callable
from pathlib import Path

from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.storage.wrapper import RetryingStorage
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, delaying
from tests.conftest import BUCKET
from tests.support.s3_server import S3Server

Maker = Callable[[Path, S3Server], Storage]


def s3(server: S3Server, **options: object) -> Storage:
    """A prefix of its own on the server."""
    return open_storage(f"s3://{BUCKET}/{uuid.uuid4().hex}/run", storage_options={**server.options, **options})


MAKERS: dict[str, Maker] = {
    "local": lambda path, server: LocalStorage(path),
    "local, not durable": lambda path, server: LocalStorage(path, durable=False),
    "memory": lambda path, server: MemoryStorage(),
    "fsspec": lambda path, server: open_storage(f"memory://{uuid.uuid4().hex}/run"),
    "s3": lambda path, server: s3(server),
    "hooked s3": lambda path, server: HookedStorage(s3(server), lambda operation: None),
    "slow local": lambda path, server: HookedStorage(LocalStorage(path), delaying("*", "*", 0.001)),
    "retrying local": lambda path, server: RetryingStorage(LocalStorage(path)),
}
