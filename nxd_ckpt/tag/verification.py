"""Checks that the tensors in a tag's files are those that its indexes list.

A file verifies its own bytes (the CRC-32s in its zip directory), but not that it belongs to this save: one that was
copied from another save is intact too. The indexes, which the manifest verifies, say what belongs. So a file with a
single tensor need not be opened to know its expected content: the index's digests verify its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.core.limits import REPEATED_NBYTES, REPEATS
from nxd_ckpt.core.manifest import FileEntry, RankIndex, TensorEntry
from nxd_ckpt.errors import DigestMismatch, MalformedFile, PartLost, PartNotFound, UnsupportedState
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.safetensors import REWRITTEN
from nxd_ckpt.formats.tensors import (
    Assembly,
    Path,
    StorageSpan,
    TensorStub,
    contiguous_stride,
    itemsize,
    iter_tensors,
)
from nxd_ckpt.layouts.files import MissingTensor, UnfinishedTensor
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.storage.transfer import require_equal

Entries = dict[tuple[str, int], TensorEntry]
"""Tensors by file and offset of their first byte in it."""


class WrittenFiles:
    """Files below ``part`` ("model" or "optim") in the ``indexes`` of the ranks that share a state.

    Indexes are read one after the other, and no more of them than needed.
    """

    def __init__(self, part: str, indexes: Iterable[RankIndex]) -> None:
        self._part = f"{part}/"
        self._indexes = iter(indexes)
        self._files: dict[str, tuple[FileEntry, list[TensorEntry]]] = {}
        self.entries: Entries = {}

    def has(self, file: str) -> bool:
        """Return whether a rank wrote this file."""
        while file not in self._files:
            index = next(self._indexes, None)
            if index is None:
                return False
            own = ((file, about) for file, about in index.files.items() if file.startswith(self._part))
            self._files.update((file, (about, [])) for file, about in own)
            for entry in index.tensors:
                if entry.file in self._files:
                    self._files[entry.file][1].append(entry)
                    self.entries[entry.file, entry.offset] = entry
        return True

    def tensor(self, file: str) -> tuple[TensorStub, int] | None:
        """Return the tensor of a file that holds a single one, and the file's size, as written; None if unknown."""
        about, entries = self._files[file] if self.has(file) else (None, [])
        if about is None or len(entries) != 1:
            return None
        return stub_of(entries[0]), about.nbytes


def stub_of(entry: TensorEntry) -> TensorStub:
    """Return the stub of a tensor that was written."""
    _, file, offset, nbytes, dtype, shape, crcs, _ = entry
    crc = crc32.combine_blocks(crcs, nbytes)
    record = StorageSpan("data/0", offset, nbytes, crc if crc or not nbytes else None)
    return TensorStub(file, offset, dtype, shape, contiguous_stride(shape), record)


def check_extents(entries: Iterable[TensorEntry], nbytes: int, where: str) -> None:
    """Raise MalformedFile if tensors do not have the bytes of their forms, or not within the ``nbytes`` of the file.

    Ties may share bytes, as often as in a file that is parsed.
    """
    left = REPEATS * nbytes + REPEATED_NBYTES
    for entry in entries:
        if entry.nbytes != math.prod(entry.shape) * itemsize(entry.dtype) or entry.offset + entry.nbytes > nbytes:
            raise MalformedFile(
                f"{where}: its index has a tensor {entry.name!r}, {entry.dtype} {entry.shape}, of {entry.nbytes} bytes "
                f"at {entry.offset}, in a file of {nbytes}"
            )
        left -= entry.nbytes
    if left < 0:
        raise MalformedFile(f"{where}: by repetition, the tensors in its index have far more than its {nbytes} bytes")


def verify_tensors(where: str, tree: Any, written: WrittenFiles, *, left_out: bool = False) -> None:
    """Compare every leaf of ``tree`` with the files ``written``; reads no tensor.

    The bytes are still to be compared with the leaves' digests. ``left_out`` allows tensors without a file if no index
    lists one.

    Raises:
        PartLost: a tensor's file is missing.
        DigestMismatch: a tensor is not the one that was written.
    """
    for path, leaf in _saved(tree):
        is_listed = written.has(leaf.file)
        if isinstance(leaf, MissingTensor):
            if is_listed or not left_out:
                name = _dotted(path)
                raise PartLost(
                    f"{where}/{leaf.file} is missing, tensor {name!r}: the tag lost files since it was saved"
                )
            continue
        entry = written.entries.get((leaf.file, leaf.storage.offset))
        if entry is None or _form(entry) != (leaf.dtype, leaf.shape, leaf.storage.nbytes, leaf.storage.crc32 or 0):
            raise DigestMismatch(
                f"{where}/{leaf.file}, tensor {_dotted(path)!r}: expected {_entry_text(entry)}, found {leaf.dtype} "
                f"{leaf.shape} with CRC-32 {leaf.storage.crc32 or 0:08x}; the file is of another save: restore it, or "
                "load another tag"
            )


class Digest:
    """Expected CRC-32 of the bytes at ``where``, which are read in ``segments``: in any order, by any thread."""

    __slots__ = ("_crcs", "_expected", "_lock", "_missing", "_where")

    def __init__(self, where: str, expected: int, segments: int) -> None:
        self._where = where
        self._expected = expected
        self._missing = segments
        self._crcs: list[tuple[int, int]] = [(0, 0)] * segments
        self._lock = effects.Lock()

    def take(self, segment: int, crc: int, nbytes: int) -> None:
        """Add a segment's CRC-32 and length; with the last one, raise DigestMismatch unless all together match."""
        with self._lock:
            self._crcs[segment] = crc, nbytes
            self._missing -= 1
            if self._missing:
                return
        whole = 0
        for each, length in self._crcs:
            whole = crc32.combine(whole, each, length)
        if whole != self._expected:
            raise mismatch(self._where, self._expected, whole)


def mismatch(where: str, expected: int, actual: int) -> DigestMismatch:
    """Return the error for bytes at ``where`` with another CRC-32."""
    remedy = f"restore the file, or load another tag{REWRITTEN if '.safetensors' in where.rpartition('/')[2] else ''}"
    return DigestMismatch(
        f"{where}: expected CRC-32 {expected:08x}, found {actual:08x}. The bytes changed since they were written: "
        f"{remedy}"
    )


class naming:
    """Context that adds the tensor's name to an error about its bytes."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (DigestMismatch, MalformedFile)):
            raise type(error)(f"tensor {self._name!r}: {error}") from error


def changed_tensors(entries: Iterable[TensorEntry], crc_of: Callable[[int, int], int]) -> list[str]:
    """Return the names of the tensors in a file whose bytes are not those that were written.

    ``crc_of`` returns the CRC-32 of bytes of the file, by their offset and number: one block at a time.
    """

    def crcs(entry: TensorEntry) -> Iterator[int]:
        for start in range(0, entry.nbytes, crc32.BLOCK):
            yield crc_of(entry.offset + start, min(crc32.BLOCK, entry.nbytes - start))

    return [entry.name for entry in entries if tuple(crcs(entry)) != entry.crc32]


def refuse_unfinished(where: str, tree: Any) -> None:
    """Raise UnsupportedState for references that NxD left in lists."""
    for path, leaf in iter_tensors(tree, UnfinishedTensor):
        raise UnsupportedState(
            f"{where}: the reference to tensor {_dotted(path)!r} ({leaf.file}) lies in nested lists, where "
            "neuronx-distributed's use_xser=True leaves references unfinished, and reads none back: such state (LBFGS "
            "keeps lists) does not load. Load without it (optimizer=None), and save it with "
            "use_xser=False, or with nxd_ckpt"
        )


def refuse_missing(where: str, tree: Any) -> None:
    """Raise PartLost, naming tensor and file, if a leaf of ``tree`` is in no file. Nothing may be left out of it.

    Raises UnsupportedState for references that NxD left in lists.
    """
    refuse_unfinished(where, tree)
    for path, leaf in iter_tensors(tree, MissingTensor):
        raise PartLost(f"{where}/{leaf.file} is missing: no file holds tensor {_dotted(path)!r}")


def _saved(tree: Any) -> Iterator[tuple[Path, TensorStub | MissingTensor]]:
    """Yield every leaf with its path; an assembled one as its parts."""
    for path, leaf in iter_tensors(tree, (TensorStub, Assembly, MissingTensor)):
        if isinstance(leaf, Assembly):
            yield from ((path, fragment.stub) for fragment in leaf.fragments)
        else:
            yield path, leaf


def _form(entry: TensorEntry) -> tuple[str, tuple[int, ...], int, int]:
    return entry.dtype, entry.shape, entry.nbytes, crc32.combine_blocks(entry.crc32, entry.nbytes)


def _entry_text(entry: TensorEntry | None) -> str:
    if entry is None:
        return "no tensor there"
    dtype, shape, _, crc = _form(entry)
    return f"{dtype} {shape} with CRC-32 {crc:08x}"


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def check_bytes(data: bytes | memoryview, expected: FileEntry, where: str) -> None:
    """Raise unless ``data`` has the size and CRC-32 that were written."""
    require_equal(expected, FileEntry(len(data), crc32.crc32(data)), where)


def verify_file(storage: Storage, key: str, expected: FileEntry, memory: memoryview, done: Counter) -> None:
    """Read a whole file in pieces of ``memory``, and compare it with its index entry. ``done`` counts its bytes.

    Raises:
        PartNotFound, MalformedFile, DigestMismatch: it is missing, has another size, or other bytes.
    """
    where = f"{storage.url}/{key}"
    try:
        size = storage.size(key)
    except FileNotFoundError as error:
        raise PartNotFound(f"{where} is missing") from error
    if size != expected.nbytes:
        raise MalformedFile(f"{where} has {size} bytes, expected {expected.nbytes}")
    try:
        crc = crc32_of(storage, key, 0, size, memory, done)
    except FileNotFoundError as error:
        raise PartNotFound(f"{where} is missing") from error
    except EOFError as error:
        raise MalformedFile(f"{where} is shorter than when it was opened: {error}") from error
    require_equal(expected, FileEntry(size, crc), where)


def crc32_of(storage: Storage, key: str, start: int, nbytes: int, memory: memoryview, done: Counter) -> int:
    """Return the CRC-32 of ``nbytes`` of a file from ``start`` on, read in pieces of ``memory``."""
    crc = 0
    for offset in range(0, nbytes, len(memory) or 1):
        part = memory[: min(len(memory), nbytes - offset)]
        storage.read_into(key, start + offset, part)
        crc = crc32.crc32(part, crc)
        done.add(len(part))
    return crc
