"""Order time of a tag: the one number by which tags are ordered. docs/format.md lists the cases.

Our tags have it in their manifest, wherever they were copied to and whatever times their files have. ``done`` holds it
too, with the attempt, and has it as its modification time, by which NxD goes. A tag of another program has the time of
its ``done``, also one that was saved over a tag of ours: another program writes ``1`` there.
"""

from __future__ import annotations

import re

from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.manifest import Manifest, load_manifest
from nxd_ckpt.core.names import DONE, MANIFEST
from nxd_ckpt.core.tags import LATEST, order_text
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import Storage

FOREIGN_MARK = b"1"
"""What NxD writes into its markers."""
_RECORDED = re.compile(rb"([0-9]{1,13}(?:\.[0-9]{1,6})?) [^ ]+")


def mark_of(order_time: float, attempt: str) -> bytes:
    """Return the content of ``done`` of a tag of ours."""
    return f"{order_text(order_time)} {attempt}".encode()


def marker_time(storage: Storage, key: str) -> float:
    """Return the modification time of a marker in seconds; an impossible time counts as the latest possible one."""
    return min(storage.time(key), LATEST)


def recorded_order_time(storage: Storage, tag: str) -> float | None:
    """Return the order time in ``done``; None if there is none, as in tags of other programs and old ones of ours."""
    key = f"{tag}/{DONE}"
    if storage.renames and not 1 < storage.size(key) <= NOTE:
        return None
    recorded = _RECORDED.match(storage.read(key, NOTE))
    order_time = float(recorded[1]) if recorded else None
    return order_time if order_time is None or order_time <= 2 * LATEST else None


def order_time_of_ours(storage: Storage, tag: str, marked: float) -> float | None:
    """Return the order time of a complete tag with a manifest whose ``done``, of the time ``marked``, records none.

    None if another program saved over the tag. With a damaged manifest the time of ``done`` counts.
    """
    try:
        manifest = manifest_of(storage, tag)
        return None if is_written_over(storage, tag, manifest) else manifest.order_time
    except MalformedFile:
        return marked


def manifest_of(storage: Storage, tag: str) -> Manifest:
    """Read the manifest of a tag. Raises MalformedFile, OSError."""
    key = f"{tag}/{MANIFEST}" if tag else MANIFEST
    return load_manifest(storage.read(key), f"{storage.url}/{key}")


def is_written_over(storage: Storage, tag: str, manifest: Manifest) -> bool:
    """Return whether another program saved over a tag of ours: ``done``, which would name the attempt, is its own.

    Tags that older versions saved on a file system have such a ``done`` too. Of these it is not known.
    """
    return manifest.is_named_by_done and storage.read(f"{tag}/{DONE}", NOTE) == FOREIGN_MARK
