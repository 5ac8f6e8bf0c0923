"""Reader of torch zip files, as ``torch.save`` writes them, from any storage, without executing their pickle.

The structure is read, as a tree of `TensorStub`. `stored_tensors` reads the tensors then.
"""

from __future__ import annotations

from typing import Any

from nxd_ckpt.core import limits
from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.limits import check_count, shown
from nxd_ckpt.errors import DigestMismatch, UnsupportedState
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.tensors import StorageSpan
from nxd_ckpt.formats.unpickle import Leaf, unpickle
from nxd_ckpt.formats.zip_directory import Pread, Record, malformed, read_records, remembering

_SMALL_FILE = 256 * 2**10
_BYTE_ORDER = 16


def read_directory(pread: Pread, size: int, file: str) -> dict[str, Record]:
    """Return the records of a torch zip file of ``size`` bytes, by name within the archive ("data.pkl", "data/0").

    ``file`` names it in errors. Raises MalformedFile.
    """
    records = read_records(pread, size, file)
    archives: set[str] = set()
    directory: dict[str, Record] = {}
    for record in records:
        archive, _, name = record.name.partition("/")
        archives.add(archive)
        directory[name] = record
    if len(archives) != 1 or "data.pkl" not in directory:
        raise malformed(file, f"expected one archive with a data.pkl, found {sorted(archives)[:5]}")
    return directory


def read_tree(
    pread: Pread,
    size: int,
    file: str,
    *,
    trust_pickle: bool = False,
    leaf: Leaf = lambda stub: stub,
    dtensors: bool = False,
) -> Any:
    """Return the file's contents, with ``leaf(stub)`` (by default the TensorStub itself) for each tensor.

    ``file`` is the key in stubs; ``dtensors`` goes to `unpickle`. With ``trust_pickle=True`` any class is unpickled;
    for objects with tensors inside, which no tree walk reaches, ``leaf`` must read them (`read_tensor`). Raises
    MalformedFile, DigestMismatch for a changed pickle, UnsafePickle, UnsupportedState for big-endian files.
    """
    with parsing(file, "a torch file"):
        if size <= _SMALL_FILE:
            pread = remembering(pread, 0, pread(0, size))
        directory = read_directory(pread, size, file)
        order = directory.get("byteorder")
        if order is not None and _contents(pread, order, file, _BYTE_ORDER) != b"little":
            raise UnsupportedState(f"{file}: written on a big-endian machine; save it again on a little-endian one")
        storages = {
            name.removeprefix("data/"): StorageSpan(name, record.offset, record.nbytes, record.crc32)
            for name, record in directory.items()
            if name.startswith("data/")
        }
        pickled = _contents(pread, directory["data.pkl"], file, limits.PICKLE_NBYTES)
        return unpickle(pickled, file, storages, trust_pickle=trust_pickle, leaf=leaf, dtensors=dtensors)


def _contents(pread: Pread, record: Record, file: str, limit: int) -> bytes:
    check_count(record.nbytes, limit, f"{file}: bytes of its record {shown(record.name)}")
    data = pread(record.offset, record.nbytes)
    if len(data) != record.nbytes:
        raise malformed(file, f"record {record.name!r} has {len(data)} bytes, expected {record.nbytes}")
    check_digest(crc32(data), record.crc32, file, record.name)
    return data


def check_digest(actual: int, expected: int | None, file: str, record: str) -> None:
    """Raise DigestMismatch if a record of the file has another digest than the one that it carries, if any."""
    if expected is not None and actual != expected:
        raise DigestMismatch(
            f"{file}, record {record!r}: expected CRC-32 {expected:08x}, found {actual:08x}. "
            "The bytes changed since they were written: restore the file, or load another tag"
        )
