"""Whether the tensors that a tag's files show are those that its indexes say were written.

A file proves its own bytes (the CRC-32s in its zip directory), not that it belongs to this save: one that was copied
from another is whole too. The indexes, which the manifest vouches for, say what belongs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from nxd_ckpt.core.manifest import RankIndex, TensorEntry
from nxd_ckpt.errors import DigestMismatch, MalformedFile, PartNotFound
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.tensors import Path, TensorStub, iter_tensors
from nxd_ckpt.layout.files import MissingTensor

Entries = dict[tuple[str, int], TensorEntry]
"""Tensors by file and offset of their first byte in it."""


def prove_tensors(where: str, tree: Any, indexes: Iterable[RankIndex], *, left_out: bool = False) -> Entries:
    """Compare every leaf of ``tree`` with what the ``indexes`` hold; reads no tensor, and no more indexes than needed.

    Returns the leaves' entries. The bytes are still to be compared with the digests in their file. ``left_out`` says
    that tensors without a file are no loss as long as no index lists one.

    Raises:
        PartNotFound: a tensor's file is missing.
        DigestMismatch: a tensor is not the one that was written.
    """
    leaves = [(_named(path), leaf) for path, leaf in iter_tensors(tree, (TensorStub, MissingTensor))]
    entries, listed = _entries({leaf.file for _, leaf in leaves}, indexes)
    for name, leaf in leaves:
        if isinstance(leaf, MissingTensor):
            if leaf.file in listed or not left_out:
                raise PartNotFound(f"{where}/{leaf.file} is missing, tensor {name!r}: the tag has lost files since")
            continue
        entry = entries.get((leaf.file, leaf.storage.offset))
        if entry is None or _form(entry) != (leaf.dtype, leaf.shape, leaf.storage.nbytes, leaf.storage.crc32 or 0):
            raise DigestMismatch(
                f"{where}/{leaf.file}, tensor {name!r}: expected {_shown(entry)}, found {leaf.dtype} {leaf.shape} with "
                f"CRC-32 {leaf.storage.crc32 or 0:08x}; the file is of another save: restore it, or load another tag"
            )
    return entries


class Digest:
    """The CRC-32 that the bytes at ``where`` must have, which are read in ``segments``: in any order, by any thread."""

    __slots__ = ("_expected", "_found", "_lock", "_missing", "_where")

    def __init__(self, where: str, expected: int, segments: int) -> None:
        self._where, self._expected, self._missing = where, expected, segments
        self._found: list[tuple[int, int]] = [(0, 0)] * segments
        self._lock = threading.Lock()

    def take(self, segment: int, found: int, nbytes: int) -> None:
        """A segment's CRC-32 and length; raises DigestMismatch with the last one, unless all together are right."""
        with self._lock:
            self._found[segment] = found, nbytes
            self._missing -= 1
            if self._missing:
                return
        whole = 0
        for crc, length in self._found:
            whole = crc32.combine(whole, crc, length)
        if whole != self._expected:
            raise mismatch(self._where, self._expected, whole)


def mismatch(where: str, expected: int, found: int) -> DigestMismatch:
    """What is wrong with the bytes at ``where``: their CRC-32."""
    return DigestMismatch(
        f"{where}: expected CRC-32 {expected:08x}, found {found:08x}. The bytes changed since they were written: "
        "restore the file, or load another tag"
    )


class naming:
    """Puts the tensor's name into an error about its bytes."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (DigestMismatch, MalformedFile)):
            raise type(error)(f"tensor {self._name!r}: {error}") from error


def changed_tensors(data: bytes, entries: Iterable[TensorEntry]) -> list[str]:
    """Names of the tensors whose bytes in a file, all of it in ``data``, are not those that were written."""
    view = memoryview(data)
    return [
        entry.name
        for entry in entries
        if tuple(crc32.block_crcs(view[entry.offset : entry.offset + entry.nbytes])) != entry.crc32
    ]


def refuse_missing(where: str, tree: Any) -> None:
    """Raise PartNotFound, naming tensor and file, if a leaf of ``tree`` is in no file."""
    for path, leaf in iter_tensors(tree, MissingTensor):
        raise PartNotFound(f"{where}/{leaf.file} is missing: no file holds tensor {_named(path)!r}")


def _entries(files: set[str], indexes: Iterable[RankIndex]) -> tuple[Entries, set[str]]:
    """What the indexes say of ``files``, by file and offset, and which of the files they list."""
    entries: Entries = {}
    listed: set[str] = set()
    for index in indexes:
        entries |= {(entry.file, entry.offset): entry for entry in index.tensors if entry.file in files}
        listed |= files & index.files.keys()
        if listed == files:
            break
    return entries, listed


def _form(entry: TensorEntry) -> tuple[str, tuple[int, ...], int, int]:
    return entry.dtype, entry.shape, entry.nbytes, crc32.combine_blocks(entry.crc32, entry.nbytes)


def _shown(entry: TensorEntry | None) -> str:
    if entry is None:
        return "no tensor there"
    dtype, shape, _, crc = _form(entry)
    return f"{dtype} {shape} with CRC-32 {crc:08x}"


def _named(path: Path) -> str:
    return ".".join(map(str, path))
