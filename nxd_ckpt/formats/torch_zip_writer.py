"""Writing torch zip files whose layout is known before any tensor's bytes are.

A :class:`ZipImage` says where in the file each tensor belongs and, once their digests are known, what all
other bytes are. So tensors are staged straight into memory that is laid out as the file, hashed there and
written from there. The result is what ``torch.save`` would have written for CPU copies of the tensors, stored
tightly: ``torch.load`` (also with ``mmap=True``), ``xser.load`` and unzip read it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.formats import zip_container
from nxd_ckpt.formats.crc32 import combine, crc32
from nxd_ckpt.formats.pickling import pickle_tree
from nxd_ckpt.formats.zip_container import Record

LARGE = 64 * 2**10
"""Records of at least so many bytes begin at a multiple of 4,096 (direct IO), others of 64 (as torch's)."""

_ARCHIVE = "archive/"


@dataclass(frozen=True)
class Storage:
    """One tensor's place in the file: its ``nbytes`` tight, row-major bytes belong at ``offset``."""

    __slots__ = ("nbytes", "offset", "record_name", "tensor")

    record_name: str
    offset: int
    nbytes: int
    tensor: Any


@dataclass(frozen=True)
class ZipImage:
    """A torch zip file of ``nbytes`` bytes but for its tensors' contents.

    Those go where ``storages`` says, which are in file order. ``storages`` and :meth:`literals` cover
    [0, nbytes) exactly, without overlap.
    """

    nbytes: int
    storages: list[Storage]
    _contents: list[bytes] = field(repr=False)
    _records: list[Record] = field(repr=False)  # those of _contents, then those of storages

    def literals(self, crcs: Mapping[int, int]) -> list[tuple[int, bytes]]:
        """(offset, bytes) of everything that is not a tensor, by offset.

        ``crcs``: the CRC-32 of each storage's bytes by its index in ``storages``; they stand in the
        headers, so that a header can only be written once its tensor is hashed. Lengths and offsets do not
        depend on them.
        """
        digests = [crc32(content) for content in self._contents]
        digests += [crcs[index] for index in range(len(self.storages))]
        headers = list(map(zip_container.local_header, self._records, digests))
        count = len(self._contents)
        pending = b"".join(header + content for header, content in zip(headers, self._contents, strict=False))
        begin, literals = 0, []
        for header, record in zip(headers[count:], self._records[count:], strict=True):
            literals.append((begin, pending + header))
            begin, pending = record.end, b""
        return [*literals, (begin, pending + zip_container.directory(self._records, digests))]


def image_of(tree: Any, *, tensor_key: Callable[[Any], Hashable] = id) -> ZipImage:
    """The file that holds ``tree``; no tensor is read.

    Tensors may be on any device, meta included, or be TensorStubs or Assemblies. Tensors of the same ``tensor_key``,
    dtype and shape (ties) share one storage. Parameters become plain tensors, and nothing requires grad.
    TensorReferences are written as torch-xla's. Raises UnsupportedState for tensors that are not plain
    strided ones, UnsafePickle for what cannot be pickled at all; whether the rest is data only is for
    ``check_picklable_as_data`` to say.
    """
    pickled, tensors = pickle_tree(tree, tensor_key)
    contents = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
    sizes = {name: len(content) for name, content in contents.items()}
    sizes |= {f"data/{index}": nbytes for index, (_, nbytes) in enumerate(tensors)}
    records: list[Record] = []
    cursor = 0
    for name, nbytes in sizes.items():
        records.append(zip_container.place(_ARCHIVE + name, nbytes, cursor, 4096 if nbytes >= LARGE else 64))
        cursor = records[-1].end
    storages = [
        Storage(record.name.removeprefix(_ARCHIVE), record.offset, record.nbytes, tensor)
        for record, (tensor, _) in zip(records[len(contents) :], tensors, strict=True)
    ]
    total = cursor + zip_container.directory_nbytes(records)
    return ZipImage(total, storages, list(contents.values()), records)


def file_crc32(image: ZipImage, storage_crcs: Mapping[int, int]) -> int:
    """CRC-32 of the whole file, from those of its tensors' bytes by index in ``image.storages``."""
    whole = 0
    for index, (_, literal) in enumerate(image.literals(storage_crcs)):
        whole = crc32(literal, whole)
        if index < len(image.storages):
            whole = combine(whole, storage_crcs[index], image.storages[index].nbytes)
    return whole
