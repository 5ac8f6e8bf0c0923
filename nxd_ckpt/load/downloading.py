"""Loading with ``pre_download``: a rank's files are copied to a local disk first, and read from there."""

from __future__ import annotations

import os
from collections.abc import Iterable

from nxd_ckpt import effects
from nxd_ckpt.core import names
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.cached import CachedStorage
from nxd_ckpt.storage.progress import Counter, is_watched, report, watched
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import Leaf


def open_cache(storage: Storage, tag: str, work_dir: str | os.PathLike[str] | None) -> CachedStorage:
    """Return ``storage`` with local copies of the files of ``tag``, in its present version; see `CachedStorage`."""
    return CachedStorage(storage, tag, _version(storage, tag), work_dir)


def download(
    cache: CachedStorage, opened: OpenTag, leaves: Iterable[Leaf], *, reports_progress: bool, progress: bool
) -> None:
    """Fetch the files that ``leaves`` are read from; the rank with ``reports_progress`` shows it for all.

    Raises OSError.
    """
    keys = {f"{opened.tag}/{file}".lstrip("/") for leaf in leaves for file in _files(leaf)}
    shown = reports_progress and progress and is_watched()
    total = sum(cache.size(key) for key in keys) if shown else 0
    counter = Counter()
    started = effects.monotonic()
    with watched("download", total, lambda: counter.nbytes, shown):
        nbytes = cache.fetch(keys, counter.add)
    if reports_progress:
        report("downloaded", opened.where, nbytes, started)


def _files(leaf: Leaf) -> set[str]:
    return {leaf.file} if isinstance(leaf, TensorStub) else {fragment.stub.file for fragment in leaf.fragments}


def _version(storage: Storage, tag: str) -> bytes:
    """Return bytes that differ when another save takes the tag's name: our manifest, or the times of NxD's files."""
    entries = [entry.name for entry in storage.list(tag) if not entry.is_dir]
    prefix = f"{tag}/" if tag else ""
    if names.MANIFEST in entries:
        return storage.read(f"{prefix}{names.MANIFEST}")
    return repr([(name, storage.time(f"{prefix}{name}")) for name in entries]).encode()
