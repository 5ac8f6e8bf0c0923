"""The order time of a tag: the one number by which tags are ordered. docs/format.md lists the cases.

A tag of ours has it in its manifest, and that counts, wherever the tag was copied to and whatever times its files have.
``done`` has it too, as its modification time or, in a store, as text: it shows without the manifest's parameters that
nobody else wrote the marker. A tag of another program has the time of its ``done``, also one that was saved over a tag
of ours: its files are then not those that our index names.
"""

from __future__ import annotations

import re
from contextlib import closing, suppress

from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.manifest import Manifest, RankIndex, load_index, load_manifest
from nxd_ckpt.core.tags import LATEST, same_time
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.zip_container import Record
from nxd_ckpt.formats.zip_directory import read_records
from nxd_ckpt.layout import names
from nxd_ckpt.layout.names import DONE, MANIFEST
from nxd_ckpt.storage.base import Storage

_HEAD = 320
"""Bytes of a manifest, of which all have more, that hold its order time, unless the tag's name is very long."""
_ORDER_TIME = re.compile(
    rb'\{"format_version": ?\d+, ?"kind": ?"manifest", ?"tag": ?"(?:[^"\\]|\\.)*", ?"attempt": ?"[^"\\]*", ?'
    rb'"order_time": ?([0-9.e+]{1,40}), ?"'
)
_RECORDED = re.compile(rb"([0-9]{1,13}(?:\.[0-9]{1,6})?) [^ ]+")


def marker_time(storage: Storage, key: str) -> float:
    """The modification time of a marker in seconds; what is no clock's time counts as the latest one."""
    return min(storage.time(key), LATEST)


def recorded_order_time(storage: Storage, tag: str) -> float | None:
    """The order time that ``done`` holds, which only a save of ours into a store leaves there; else None.

    Another program that saves over such a tag leaves its own marker, ``1``.
    """
    key = f"{tag}/{DONE}"
    if storage.renames and not 1 < storage.size(key) <= NOTE:
        return None
    recorded = _RECORDED.match(storage.read(key, NOTE))
    order_time = float(recorded[1]) if recorded else None
    return order_time if order_time is None or order_time <= 2 * LATEST else None


def order_time_of_ours(storage: Storage, tag: str, marked: float) -> float:
    """The order time of a complete tag with a manifest, whose ``done`` holds none and is of the time ``marked``.

    A damaged manifest tells nothing: then the time of ``done`` counts.
    """
    key = f"{tag}/{MANIFEST}"
    try:
        order_time = _order_time_in_head(storage, key)
        if order_time is not None and same_time(order_time, marked):
            return order_time
        manifest = load_manifest(storage.read(key), key)
        return marked if is_written_over(storage, tag, manifest) else manifest.order_time
    except MalformedFile:
        return marked


def is_written_over(storage: Storage, tag: str, manifest: Manifest) -> bool:
    """True if another program saved over a tag of ours.

    It wrote its own ``done``, and a file of rank 0 that is whole, and of another size than our index says. A copy has
    another ``done`` time, and damage leaves files of another size that are not whole: neither is taken for a save.
    """
    order_time = manifest.order_time
    if recorded_order_time(storage, tag) == order_time or same_time(order_time, storage.time(f"{tag}/{DONE}")):
        return False
    topology = manifest.topology
    first = topology.coordinates_of(0)
    if manifest.leaders is not None:  # whose saves have no such file
        return storage.is_file(f"{tag}/{names.model_file(topology, first)}")
    kind = manifest.parts.optimizer or "plain"
    optimizer = names.DCP_METADATA if kind == "zero1_dcp" else names.optimizer_file(topology, first, kind)
    index = _index(storage, f"{tag}/{names.index_file(first)}")
    if index is None:
        return False  # damage is reported where it is met
    files = [file for file in (names.model_file(topology, first), optimizer) if file in index.files]
    return any(_is_another_file(storage, f"{tag}/{file}", index.files[file].nbytes) for file in files)


def _order_time_in_head(storage: Storage, key: str) -> float | None:
    """The order time in a manifest's first bytes, which nothing verifies."""
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


def _is_another_file(storage: Storage, key: str, nbytes: int) -> bool:
    """True for a file of another size that is a whole zip archive, or no archive at all, as torch DCP's metadata."""
    try:
        size = storage.size(key)
        if size == nbytes:
            return False
        return key.endswith(names.DCP_METADATA) or bool(_records(storage, key, size))
    except (FileNotFoundError, MalformedFile, EOFError):
        return False


def file_of_ours(storage: Storage, tag: str) -> str | None:
    """The key of a file that a save of ours wrote into a tag; None where none is found among the first and the last of
    the model and of the optimizer."""
    for part in (names.MODEL_DIR, names.OPTIMIZER_DIR):
        folder = f"{tag}/{part}" if tag else part
        files = [f"{folder}/{entry.name}" for entry in storage.list(folder) if not entry.is_dir]
        xser = [f"{folder}/{entry.name}" for entry in storage.list(folder) if entry.name.endswith(".tensors")]
        files += [f"{inner}/{entry.name}" for inner in xser[:1] for entry in storage.list(inner)[:1]]
        for key in dict.fromkeys([*files[:1], *files[-1:]]):
            if _is_of_ours(storage, key):
                return key
    return None


def _is_of_ours(storage: Storage, key: str) -> bool:
    """True for a torch zip file with its pickle after the tensors: torch puts it first."""
    try:
        records = [record.name.partition("/")[2] for record in _records(storage, key, storage.size(key))]
    except (FileNotFoundError, MalformedFile, EOFError):
        return False
    return records[-3:] == ["data.pkl", "byteorder", "version"] and records[0].startswith("data/")


def _records(storage: Storage, key: str, size: int) -> list[Record]:
    """Those of a file that is a whole zip archive. Raises MalformedFile for any other."""
    with closing(storage.open(key)) as reader:

        def pread(offset: int, count: int) -> bytes:
            data = bytearray(max(0, min(count, size - offset)))
            reader.read_ranges([(offset, memoryview(data))])
            return bytes(data)

        return read_records(pread, size, key)
