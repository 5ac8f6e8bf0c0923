"""Which storage a path names."""

from __future__ import annotations

import os

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage


def open_storage(path: str | os.PathLike[str], durable: bool = True) -> Storage:
    """The storage that a path names. Raises InvalidArgument for anything but a local directory."""
    text = os.fspath(path)
    if not text:
        raise InvalidArgument("the checkpoint directory must not be empty; pass '.' for the current one")
    if "://" in text:
        raise InvalidArgument(f"{text}: only directories are supported, not URLs")
    return LocalStorage(text, durable)
