"""Order time of a tag: the one number by which tags are ordered. docs/format.md lists the cases.

Our tags have it in their manifest, and that counts, wherever the tag was copied to and whatever times its files have.
``done`` has it too, as its modification time or, in a store, as text: it shows without reading the manifest that nobody
else wrote the marker. A tag of another program has the time of its ``done``, also one that was saved over a tag of
ours: its files are then not those that our index names.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress

from nxd_ckpt.core import names
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.manifest import FileEntry, Manifest, RankIndex, TensorEntry, load_index, load_manifest
from nxd_ckpt.core.names import DONE, MANIFEST
from nxd_ckpt.core.tags import LATEST, same_time
from nxd_ckpt.errors import CheckpointError, MalformedFile
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.zip_directory import Record, read_records
from nxd_ckpt.storage.base import Storage, pread_of

_HEAD = 320
"""Bytes at the beginning of a manifest that hold its order time, unless the tag's name is very long. All have more."""
_ORDER_TIME = re.compile(
    rb'\{"format_version": ?\d+, ?"kind": ?"manifest", ?"tag": ?"(?:[^"\\]|\\.)*", ?"attempt": ?"[^"\\]*", ?'
    rb'"order_time": ?([0-9.e+]{1,40}), ?"'
)
_RECORDED = re.compile(rb"([0-9]{1,13}(?:\.[0-9]{1,6})?) [^ ]+")


def marker_time(storage: Storage, key: str) -> float:
    """Return the modification time of a marker in seconds; an impossible time counts as the latest possible one."""
    return min(storage.time(key), LATEST)


def recorded_order_time(storage: Storage, tag: str) -> float | None:
    """Return the order time in ``done``, which only our saves into a store leave there; else None.

    Another program that saves over such a tag leaves its own marker, ``1``.
    """
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
    key = f"{tag}/{MANIFEST}"
    try:
        order_time = _order_time_in_head(storage, key)
        if order_time is not None and same_time(order_time, marked):
            return order_time
        manifest = manifest_of(storage, tag)
        return None if is_written_over(storage, tag, manifest) else manifest.order_time
    except MalformedFile:
        return marked


def manifest_of(storage: Storage, tag: str) -> Manifest:
    """Read the manifest of a tag. Raises MalformedFile, OSError."""
    key = f"{tag}/{MANIFEST}" if tag else MANIFEST
    return load_manifest(storage.read(key), f"{storage.url}/{key}")


def is_written_over(storage: Storage, tag: str, manifest: Manifest) -> bool:
    """True if another program saved over a tag of ours.

    It wrote its own ``done``, and whole files of rank 0 that are not those of our index. A copy has another ``done``
    time, and damage leaves files that are not whole, or whose own digests are still those of our index: neither counts
    as a save.
    """
    order_time = manifest.order_time
    if recorded_order_time(storage, tag) == order_time or same_time(order_time, storage.time(f"{tag}/{DONE}")):
        return False
    index = _index(storage, f"{tag}/{names.index_file(manifest.topology.coordinates_of(0))}")
    if index is None:
        return False  # damage is reported where it is met
    folders = (names.MODEL_DIR, names.OPTIMIZER_DIR)
    first = [f"{folder}/{names.rank_file(0, ep, 0, 0)}" for folder in folders for ep in (None, 0)]
    added = (f"{tag}/{file}" for file in first if file not in index.files)  # of another topology, or of a part we lack
    return (
        any(_is_another_file(storage, tag, file, index) for file in _first_files(index, folders))
        or any((records := _whole(storage, key)) and not _are_of_ours(records) for key in added)
        or (names.DCP_METADATA in index.files and _is_another_dcp_save(storage, tag, index))
    )


def _order_time_in_head(storage: Storage, key: str) -> float | None:
    """Return the order time in a manifest's first bytes, unverified."""
    with closing(storage.open(key)) as reader:
        head = bytearray(_HEAD)
        try:
            reader.read_ranges([(0, memoryview(head))])
        except EOFError:
            return None
    beginning = _ORDER_TIME.match(head)
    with suppress(ValueError):
        return float(beginning[1]) if beginning else None
    return None


def _index(storage: Storage, key: str) -> RankIndex | None:
    with suppress(MalformedFile, FileNotFoundError):
        return load_index(storage.read(key), f"{storage.url}/{key}")
    return None


def _first_files(index: RankIndex, folders: Iterable[str]) -> list[str]:
    """Return the first and the last zip file of a rank in each of the folders, and in their folders of xser tensors."""
    listed: dict[str, list[str]] = {}
    for file in sorted(index.files):
        if file.endswith(".pt") and file.split("/")[0] in folders:
            listed.setdefault(file.rpartition("/")[0], []).append(file)
    return [file for files in listed.values() for file in dict.fromkeys([files[0], files[-1]])]


def _is_another_file(storage: Storage, tag: str, file: str, index: RankIndex) -> bool:
    """True for a whole zip archive that is not the one in the index.

    It has another size; or its records, by their own digests, are not the tensors of the index; or there are no
    tensors, and it is undamaged, but with other bytes.
    """
    key, entry = f"{tag}/{file}", index.files[file]
    tensors = {tensor.offset: tensor for tensor in index.tensors if tensor.file == file and tensor.nbytes}
    try:
        size = storage.size(key)
        if size == entry.nbytes:
            if tensors and _holds(_records(storage, key, size, sorted(tensors)), tensors):
                return False
            if not tensors and (size > NOTE or crc32.crc32(storage.read(key, NOTE)) == entry.crc32):
                return False
        # Each header must agree with the directory: a flipped bit there is damage.
        records = _records(storage, key, size)
        if tensors or size != entry.nbytes:
            return bool(records)
        data = storage.read(key, NOTE)
        contents = [(record.crc32, crc32.crc32(data[record.offset : record.end])) for record in records]
        return bool(contents) and all(digest in (None, actual) for digest, actual in contents)
    except (FileNotFoundError, MalformedFile, EOFError):
        return False


def _holds(records: Iterable[Record], tensors: Mapping[int, TensorEntry]) -> bool:
    """True if tensors by their offsets are records, or lie within records, that may have their digests."""
    by_offset = {record.offset: record for record in records}
    begins = sorted(by_offset)
    for offset, tensor in tensors.items():
        at = bisect_right(begins, offset)
        record = by_offset[begins[at - 1]] if at else None
        if record is None or offset + tensor.nbytes > record.end:
            return False
        is_all = (record.offset, record.nbytes) == (offset, tensor.nbytes)
        if is_all and record.crc32 not in (None, crc32.combine_blocks(tensor.crc32, tensor.nbytes)):
            return False
    return True


def _is_another_dcp_save(storage: Storage, tag: str, index: RankIndex) -> bool:
    """True if ``.metadata`` of a ZeRO-1 optimizer is not the one of the index, and neither is a data file of rank 0.

    Both must be whole: the metadata can be read, and the file has the size it states. Damage of one of them is no save.
    """
    from nxd_ckpt.tag.files import TagFiles  # with torch, which a listing does without
    from nxd_ckpt.tag.foreign.torch_dcp import DcpFiles, read_metadata

    try:
        key, entry = f"{tag}/{names.DCP_METADATA}", index.files[names.DCP_METADATA]
        if storage.size(key) == entry.nbytes and crc32.crc32(storage.read(key, entry.nbytes)) == entry.crc32:
            return False
        metadata = read_metadata(TagFiles(storage, tag), DcpFiles(names.OPTIMIZER_DIR))
        ends: dict[str, int] = {}
        for chunk in (chunk for chunks in metadata.entries.values() for chunk in chunks):
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.nbytes)
        return any(
            storage.size(f"{tag}/{file}") == end and _has_other_bytes(storage, f"{tag}/{file}", index.files.get(file))
            for file, end in ends.items()
            if file.startswith(names.dcp_file(0, 0).removesuffix("0.distcp"))
        )
    except (FileNotFoundError, EOFError, CheckpointError):
        return False


def _has_other_bytes(storage: Storage, key: str, entry: FileEntry | None) -> bool:
    """True unless a file has the size and, if it is small, the digest of its entry."""
    size = storage.size(key)
    if entry is None or size != entry.nbytes:
        return True
    return size <= NOTE and crc32.crc32(storage.read(key, NOTE)) != entry.crc32


def _whole(storage: Storage, key: str) -> list[Record]:
    """Return the records of a file that is a whole zip archive; none for any other file."""
    try:
        return _records(storage, key, storage.size(key))
    except (FileNotFoundError, MalformedFile, EOFError):
        return []


def file_of_ours(storage: Storage, tag: str) -> str | None:
    """Return the key of a file that our save wrote into a tag, searching the first and last of each part; else None."""
    for part in (names.MODEL_DIR, names.OPTIMIZER_DIR):
        folder = f"{tag}/{part}" if tag else part
        files = [f"{folder}/{entry.name}" for entry in storage.list(folder) if not entry.is_dir]
        xser = [f"{folder}/{entry.name}" for entry in storage.list(folder) if entry.name.endswith(".tensors")]
        files += [f"{inner}/{entry.name}" for inner in xser[:1] for entry in storage.list(inner)[:1]]
        for key in dict.fromkeys([*files[:1], *files[-1:]]):
            if _are_of_ours(_whole(storage, key)):
                return key
    return None


def _are_of_ours(records: Sequence[Record]) -> bool:
    """True for those of a torch zip file with its pickle after the tensors: torch puts it first."""
    ends = [record.name.partition("/")[2] for record in records]
    return ends[-3:] == ["data.pkl", "byteorder", "version"] and ends[0].startswith("data/")


def _records(storage: Storage, key: str, size: int, begins: Sequence[int] = ()) -> list[Record]:
    """Return the records of a file that is a whole zip archive; ``begins`` as in `read_records`.

    Raises MalformedFile or EOFError for any other file.
    """
    with closing(storage.open(key)) as reader:
        return read_records(pread_of(reader), size, key, begins)
