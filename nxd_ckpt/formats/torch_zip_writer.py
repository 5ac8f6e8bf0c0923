"""Writer of torch zip files whose layout is known before the tensors' bytes are.

A `ZipImage` has each tensor's place in the file and, once digests are known, all other bytes. So tensors are staged
directly into memory with the file's layout, hashed there and written from there. The result equals a ``torch.save`` of
tight CPU copies of the tensors: ``torch.load`` (also with ``mmap=True``), ``xser.load`` and unzip read it. Only the
order of records differs: the pickle follows the tensors, so that their offsets do not depend on its length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nxd_ckpt.formats import zip_directory
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.image import Image, StorageRecord
from nxd_ckpt.formats.pickling import pickle_tree
from nxd_ckpt.formats.recorded_tree import RecordedTree, recorded
from nxd_ckpt.formats.strides import Stride, stride_of
from nxd_ckpt.formats.tensors import Assembly, TensorStub
from nxd_ckpt.formats.zip_directory import Record

LARGE = 64 * 2**10
"""Records of at least this many bytes begin at a multiple of 4,096 (direct IO), others of 64 (as torch's)."""

_ARCHIVE = "archive/"


@dataclass(frozen=True)
class ZipImage(Image):
    """A torch zip file: each tensor after its record's header, then the pickle and the directory."""

    _contents: Sequence[bytes] = field(repr=False)
    _records: Sequence[Record] = field(repr=False)  # those of storages, then those of _contents
    _recorded: RecordedTree | None = field(repr=False)

    @property
    def recorded(self) -> RecordedTree | None:
        return self._recorded

    def header(self, index: int, crcs: Sequence[int]) -> tuple[int, bytes]:
        """Return (offset, bytes) of the header before storage ``index``, which contains its CRC-32."""
        record = self._records[index]
        return record.header_offset, zip_directory.local_header(record, crcs[index])

    def tail(self, crcs: Sequence[int]) -> bytes:
        """Return everything from ``tensor_nbytes`` on; ``crcs`` are the CRC-32s of all storages, in order."""
        digests = [crc32(content) for content in self._contents]
        headers = map(zip_directory.local_header, self._records[len(self.storages) :], digests)
        written = [header + content for header, content in zip(headers, self._contents, strict=True)]
        return b"".join([*written, zip_directory.directory(self._records, [*crcs, *digests])])

    def pickled_anew(self, tree: Any, tensor_key: Callable[[Any], Hashable]) -> ZipImage:
        """Return the image of ``tree``, whose tensors have the same dtypes, shapes, ties and places in the file."""
        pickled, tensors = pickle_tree(tree, tensor_key)
        if [storage.nbytes for storage in self.storages] != [nbytes for _, nbytes in tensors]:
            raise AssertionError("a state that should be unchanged has other tensors")
        tree_recorded = None if self._recorded is None else recorded(tree, stride_of)
        return _image(pickled, self._records[: len(self.storages)], self.storages, self.tensors, tree_recorded)


@dataclass(frozen=True)
class JoinedImage(Image):
    """Several torch zip files in one file."""

    _archives: Sequence[ZipImage] = field(repr=False)
    _starts: Sequence[int] = field(repr=False)  # of each archive its first byte
    _first: Sequence[int] = field(repr=False)  # of each archive the number of its first storage

    @staticmethod
    def of(values: Iterable[Any]) -> JoinedImage:
        """Return the image of a file for each of ``values``. Raises the errors of `image_of`."""
        archives = list(_images_of(values))
        end = 0
        storages: list[StorageRecord] = []
        starts: list[int] = []
        first: list[int] = []
        for archive in archives:
            start = -(-end // 64) * 64 if archive.storages else end  # so that tensors are aligned in memory
            end = start + archive.nbytes
            starts.append(start)
            first.append(len(storages))
            storages += [replace(storage, offset=start + storage.offset) for storage in archive.storages]
        tensors = [tensor for archive in archives for tensor in archive.tensors]
        return JoinedImage(end, storages, tensors, archives, starts, first)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(start, archive.nbytes) for start, archive in zip(self._starts, self._archives, strict=True)]

    def header(self, index: int, crcs: Sequence[int]) -> tuple[int, bytes]:
        """Return (offset, bytes) before storage ``index``, with the end of a file and whole files without tensors."""
        number = self._archive_of(index)
        first = self._first[number]
        start = self._starts[number]
        offset, header = self._archives[number].header(index - first, crcs[first : index + 1])
        if index > first:
            return start + offset, header
        begin = self.storages[index - 1].end if index else 0
        return begin, self._tails(index, number, crcs).ljust(start - begin, b"\0") + header

    def tail(self, crcs: Sequence[int]) -> bytes:
        """Return everything from ``tensor_nbytes`` on."""
        return self._tails(len(self.storages), len(self._archives), crcs)

    def pickled_anew(self, tree: Any, tensor_key: Callable[[Any], Hashable]) -> JoinedImage:
        """Return the image of other values, a list."""
        return JoinedImage.of(tree)

    def _archive_of(self, index: int) -> int:
        """Return the number of the archive that the storage is in."""
        return bisect_right(self._first, index) - 1

    def _tails(self, index: int, end: int, crcs: Sequence[int]) -> bytes:
        """Return the ends of archives from that of the storage before ``index`` up to archive ``end``."""
        begin = self._archive_of(index - 1) if index else 0
        bounds = [*self._first[begin:end], index]
        tails = zip(self._archives[begin:end], bounds, bounds[1:], strict=False)
        return b"".join(archive.tail(crcs[first:last]) for archive, first, last in tails)


def image_of(
    tree: Any,
    *,
    tensor_key: Callable[[Any], Hashable] = id,
    stride_of: Callable[[Any], Stride | None] = stride_of,
    records: bool = False,
) -> ZipImage:
    """Return the image of the file for ``tree``; no tensor is read.

    Tensors may be on any device, meta included, or be TensorStubs or Assemblies. Tensors of the same ``tensor_key``,
    dtype and shape (ties) share one storage. Parameters become plain tensors, and nothing requires grad.
    TensorReferences are written as torch-xla's. Strides from ``stride_of`` are recorded. Raises UnsupportedState for
    tensors that are not plain strided ones, UnsafePickle for values that cannot be pickled at all;
    `check_picklable_as_data` checks that the rest is plain data. With ``records`` the image has the tree for the index.
    """
    pickled, tensors = pickle_tree(tree, tensor_key, stride_of)
    placed = _placed(((f"data/{index}", nbytes) for index, (_, nbytes) in enumerate(tensors)), 0)
    storages = [StorageRecord(record.offset, record.nbytes) for record in placed]
    tree_recorded = recorded(tree, stride_of) if records else None
    return _image(pickled, placed, storages, [tensor for tensor, _ in tensors], tree_recorded)


def _images_of(values: Iterable[Any]) -> Iterator[ZipImage]:
    """Yield the image of each value. Those of two leaves of the same form differ only in the tensor that they hold."""
    forms: dict[Hashable, ZipImage] = {}
    for value in values:
        if isinstance(value, (TensorStub, Assembly)):
            form = value.dtype, value.shape, stride_of(value)
            if form not in forms:
                forms[form] = image_of(value)
            yield forms[form].holding([value])
        else:
            yield image_of(value)


def _image(
    pickled: bytes,
    records: Sequence[Record],
    storages: Sequence[StorageRecord],
    tensors: Sequence[Any],
    tree_recorded: RecordedTree | None,
) -> ZipImage:
    contents = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
    after = _placed(((name, len(content)) for name, content in contents.items()), records[-1].end if records else 0)
    all_records = [*records, *after]
    total = all_records[-1].end + zip_directory.directory_nbytes(all_records)
    return ZipImage(total, storages, tensors, list(contents.values()), all_records, tree_recorded)


def _placed(sizes: Iterable[tuple[str, int]], cursor: int) -> list[Record]:
    """Return records of these names and sizes, in order from ``cursor`` on."""
    records: list[Record] = []
    for name, nbytes in sizes:
        records.append(zip_directory.place(_ARCHIVE + name, nbytes, cursor, 4096 if nbytes >= LARGE else 64))
        cursor = records[-1].end
    return records
