"""Opening the storage of a path or URL, and the arithmetic of URLs.

``s3://bucket/prefix`` is `nxd_ckpt.storage.s3`, ``file://`` and everything without ``scheme://`` a directory, any other
scheme a file system of fsspec. Libraries are imported when a URL needs them. A file that ends in ``.tar``, in any
place, is the directory that was packed into it (`nxd_ckpt.storage.archive_storage`); so is a compressed one, once it is
unpacked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any

from nxd_ckpt.core.arguments import Kind, plain_mapping
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats.zip_directory import LOCAL_MARK
from nxd_ckpt.storage.archive_storage import SUFFIX, ArchiveFile, ArchiveStorage
from nxd_ckpt.storage.archive_unpacking import LONGEST_MARK, SUFFIXES, UnpackedFile, compression_of
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import aliases, is_below

ARCHIVES = (SUFFIX, *SUFFIXES)
"""Ends of names of archives that are read and written."""

StrPath = str | os.PathLike[str]
StorageOptions = Annotated[Mapping[str, Any], Kind("a dict of options by name", plain_mapping, secret=True)]
"""Options for opening a URL."""


def open_storage(path: StrPath, durable: bool = True, storage_options: StorageOptions | None = None) -> Storage:
    """Open the storage of a path or URL.

    ``storage_options`` go to the store's library, under the names that fsspec and s3fs use; a local directory has none.
    ``durable=False`` skips every fsync of a local directory; a store has none to skip.

    Raises InvalidArgument: empty, an unknown scheme, a library that is not installed, invalid options.
    """
    text = os.fspath(path)
    if not text:
        raise InvalidArgument("the checkpoint directory must not be empty; pass '.' for the current one")
    if text.endswith(ARCHIVES):
        directory, name = directory_and_name(text)
        inner = _open_directory(directory, durable, storage_options)
        if inner.is_file(name):
            start = bytearray(min(LONGEST_MARK, inner.size(name)))
            inner.read_into(name, 0, memoryview(start))
            if not start.startswith(LOCAL_MARK):  # torch.save's files are called checkpoint.pth.tar in many scripts
                return _open_archive(inner, name, compression_of(name, bytes(start)))
    return _open_directory(text, durable, storage_options)


def _open_archive(inner: Storage, name: str, compressed: str | None) -> Storage:
    return ArchiveStorage(ArchiveFile(inner, name) if compressed is None else UnpackedFile(inner, name, compressed))


def _open_directory(text: str, durable: bool, storage_options: Mapping[str, Any] | None) -> Storage:
    options = dict(storage_options or {})
    scheme = _scheme(text)
    if scheme in ("", "file", "local"):
        path = local_path(text)
        if options:
            raise InvalidArgument(f"{text}: a directory takes no storage_options, found {', '.join(sorted(options))}")
        return LocalStorage(path, durable)
    if scheme in ("s3", "s3a"):
        from nxd_ckpt.storage.s3.s3_storage import open_s3

        return open_s3(text, options)
    from nxd_ckpt.storage.fsspec_storage import open_fsspec

    return open_fsspec(text, options)


def is_url(path: StrPath) -> bool:
    """Return whether ``path`` is a place in a store: a URL that is not of the local file system."""
    return _scheme(os.fspath(path)) not in ("", "file", "local")


def options_for(path: StrPath, options: StorageOptions | None) -> StorageOptions | None:
    """Return the options of this one of several places, given the options for all: a local path has none."""
    return options if is_url(path) else None


def local_path(path: StrPath) -> str:
    """Return the path of a local directory, given as itself (``~`` is expanded) or as a ``file://`` URL.

    Raises InvalidArgument for a NUL, for another host, and for a URL that pathlib mangled into a path: it must not
    become a directory.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise InvalidArgument(f"{text!r} holds a NUL, which no path may")
    if not _scheme(text):
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
            raise InvalidArgument(f"{text!r} is a URL that lost a slash when it became a path; pass URLs as strings")
        return os.path.expanduser(text)
    rest = text.partition("://")[2]
    host, slash, below = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise InvalidArgument(f"{text}: expected an absolute path of this host, as in file:///data/checkpoints")
    return slash + below


def absolute(path: StrPath) -> str:
    """Return a URL as it is, and a path from the root on; links stay, since only names show what some files are."""
    text = os.fspath(path)
    return text if is_url(text) or not text else os.path.abspath(local_path(text))


def normalised(path: StrPath) -> str:
    """Normalise a path or URL so that spellings of one directory compare equal; it ends in a slash.

    Links, ``~``, relative paths, doubled and trailing slashes, ``file://``, ``s3a://`` and the case of schemes and
    hosts make no difference.
    """
    text = os.fspath(path)
    if not is_url(text):
        return os.path.realpath(local_path(text)).rstrip("/") + "/"
    scheme, _, rest = text.rpartition("://")
    parts = [part for part in re.split("/+", rest) if part not in ("", ".")]
    scheme = re.sub("s3[an]$", "s3", scheme.lower())
    if scheme.endswith(("http", "https", "s3")) and parts:  # names of hosts and buckets
        parts[0] = parts[0].lower()
    return f"{scheme}://{'/'.join(parts)}/"


def overlap(first: StrPath, second: StrPath, *, inside: bool = True) -> bool:
    """Return whether two paths or URLs are one place, or one lies ``inside`` the other, also by a link or bind mount.
    """
    if inside:
        return lies_in(first, second) or lies_in(second, first)
    return lies_in(first, second) and lies_in(second, first)


def lies_in(inner: StrPath, outer: StrPath) -> bool:
    """Return whether the path or URL ``inner`` is ``outer``, or leads into it, also by a link or bind mount."""
    first = normalised(inner)
    second = normalised(outer)
    if first.startswith(second):
        return True
    if is_url(inner) or is_url(outer):
        return False
    if any(is_below(alias, second.rstrip("/") or "/") for alias in aliases(first)):
        return True
    return os.path.isdir(first) and os.path.isdir(second) and os.path.samefile(first, second)


def join(place: StrPath, *names: str) -> str:
    """Return ``place`` with names below it: a URL stays one, a path follows the rules of ``os.path.join``."""
    text = os.fspath(place)
    below = [name for name in names if name]
    if not is_url(text):
        return os.path.join(text, *below)
    root = text[:-1] if text.endswith("://") else text.rstrip("/")  # "s3://" alone names no bucket yet
    return "/".join([root, *below])


def directory_and_name(place: StrPath) -> tuple[str, str]:
    """Split ``s3://bucket/run/step_300`` into (``s3://bucket/run``, ``step_300``); likewise for paths.

    The name is empty for the root of a bucket or of a file system.
    """
    text = os.fspath(place)
    if not is_url(text):
        directory, name = os.path.split(local_path(text).rstrip("/") or "/")
        return directory or ".", name
    scheme, _, rest = text.partition("://")
    root, _, below = rest.rstrip("/").partition("/")
    directory, _, name = below.rpartition("/")
    return f"{scheme}://" + "/".join(filter(None, (root, directory))), name


def _scheme(text: str) -> str:
    """Return the scheme in lower case; empty for a path. Of chained ones (``simplecache::gs://``) the first."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)(://|::.*://)", text)
    return match[1].lower() if match else ""
