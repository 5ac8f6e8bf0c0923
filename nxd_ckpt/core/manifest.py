"""What a checkpoint holds: the manifest of a tag and the index of each rank, and their JSON.

The manifest is O(parameters + ranks); an index is O(tensors of one rank). Both carry ``format_version`` and are
validated on reading. docs/format.md describes the JSON for other implementers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Partition, Piece
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile

FORMAT_VERSION = 1
CRC_BLOCK = 4 * 2**20
"""Bytes that one block digest covers: a slice is proved by reading the blocks it touches, not the tensor."""
_SEAL = b',"crc32":'


@dataclass(frozen=True)
class TensorEntry:
    """One tensor that one rank wrote: where its bytes lie, and which part of which global tensor they are.

    ``offset`` and ``nbytes`` count bytes in ``file`` (a key relative to the tag); the bytes are contiguous and little
    endian. ``crc32`` holds a CRC-32 per :data:`CRC_BLOCK` bytes. ``pieces`` is None where the cut is unknown.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    crc32: tuple[int, ...]
    pieces: tuple[Piece, ...] | None = None


@dataclass(frozen=True)
class FileEntry:
    """One file that one rank wrote: its size in bytes, and the CRC-32 over all of them."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter or buffer of the model, as every rank of its pipeline stage holds it.

    ``tie`` is equal for all names of one tensor, and None where it has only one.
    """

    dtype: str
    shape: tuple[int, ...]
    partition: Partition
    trainable: bool = True
    tie: str | None = None


@dataclass(frozen=True)
class RankIndex:
    """Everything that the rank at ``coordinates`` wrote into a tag. ``parameters`` are those that it *holds*."""

    coordinates: Coordinates
    files: Mapping[str, FileEntry]
    tensors: tuple[TensorEntry, ...]
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)
    optimizer_names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RankLine:
    """One rank's line in the manifest: the size and CRC-32 of its index file."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Parts:
    """What was asked to be saved.

    ``optimizer`` is ``"plain"``, ``"zero1"`` (every rank its shard), ``"zero1_full"`` (the same unsharded, a file for
    each tp, pp and ep rank; what the converter writes), ``"zero1_dcp"`` or None.
    """

    model: bool = False
    optimizer: str | None = None
    scheduler: bool = False
    user_content: bool = False
    rank_content: bool = False
    use_xser: bool = False
    master_weights: bool = False
    lower_precision_weights: bool = True


@dataclass(frozen=True)
class Manifest:
    """One complete tag. ``order_time`` in seconds since the epoch; ``ranks`` by global rank, in order."""

    tag: str
    attempt: str
    order_time: float
    topology: Topology
    parts: Parts
    ranks: tuple[RankLine, ...]
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def dump_index(index: RankIndex) -> bytes:
    at = index.coordinates
    document = {
        "format_version": FORMAT_VERSION,
        "kind": "rank_index",
        "coordinates": [at.pp_rank, at.dp_rank, at.tp_rank],
        "files": {key: [entry.nbytes, entry.crc32] for key, entry in index.files.items()},
        "tensors": [_tensor_to_json(entry) for entry in index.tensors],
        "parameters": {name: _spec_to_json(spec) for name, spec in index.parameters.items()},
        "optimizer_names": None if index.optimizer_names is None else list(index.optimizer_names),
    }
    return _encode(document)


def load_index(data: bytes, where: str) -> RankIndex:
    """Parse an index file. Raises MalformedFile, naming ``where``, for anything but a valid one."""
    document = _decode(data, "rank_index", where)
    with _naming(where):
        names = document["optimizer_names"]
        return RankIndex(
            coordinates=Coordinates(*_ints(document["coordinates"], 3)),
            files={key: FileEntry(*_ints(entry, 2)) for key, entry in document["files"].items()},
            tensors=tuple(_tensor_from_json(fields) for fields in document["tensors"]),
            parameters={name: _spec_from_json(spec) for name, spec in document["parameters"].items()},
            optimizer_names=None if names is None else tuple(names),
        )


def dump_manifest(manifest: Manifest) -> bytes:
    topology = manifest.topology
    rank_map = topology.rank_map
    places = None if rank_map is None else [[at.pp_rank, at.dp_rank, at.tp_rank] for at in rank_map]
    document = {
        "format_version": FORMAT_VERSION,
        "kind": "manifest",
        "tag": manifest.tag,
        "attempt": manifest.attempt,
        "order_time": manifest.order_time,
        "topology": {**topology.sizes, "rank_map": places},
        "parts": asdict(manifest.parts),
        "ranks": [[line.nbytes, line.crc32] for line in manifest.ranks],
        "parameters": {name: _spec_to_json(spec) for name, spec in manifest.parameters.items()},
        "timings": dict(manifest.timings),
        "versions": dict(manifest.versions),
    }
    # It vouches for the indexes, and nothing for it: so it carries a digest of the bytes that come before this field.
    unsealed = _encode(document)
    return unsealed[:-1] + _SEAL + b"%d}" % zlib.crc32(unsealed[:-1])


def load_manifest(data: bytes, where: str) -> Manifest:
    """Parse a manifest. Raises MalformedFile, naming ``where``, for anything but a valid one."""
    document = _decode(data, "manifest", where)
    found = zlib.crc32(data.rpartition(_SEAL)[0])
    if document.get("crc32") != found:
        raise MalformedFile(f"{where}: expected CRC-32 {document.get('crc32')}, found {found}: its bytes changed")
    with _naming(where):
        sizes = dict(document["topology"])
        places = sizes.pop("rank_map")
        rank_map = None if places is None else [Coordinates(*_ints(place, 3)) for place in places]
        return Manifest(
            tag=document["tag"],
            attempt=document["attempt"],
            order_time=float(document["order_time"]),
            topology=Topology(**sizes, rank=0, rank_map=rank_map),
            parts=Parts(**document["parts"]),
            ranks=tuple(RankLine(*_ints(line, 2)) for line in document["ranks"]),
            parameters={name: _spec_from_json(spec) for name, spec in document["parameters"].items()},
            timings=dict(document["timings"]),
            versions=dict(document["versions"]),
        )


def _tensor_to_json(entry: TensorEntry) -> dict[str, Any]:
    pieces = entry.pieces
    return {
        "name": entry.name,
        "file": entry.file,
        "offset": entry.offset,
        "nbytes": entry.nbytes,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "crc32": list(entry.crc32),
        "pieces": None if pieces is None else [[p.local.offset, p.box.offset, p.box.size] for p in pieces],
    }


def _tensor_from_json(fields: dict[str, Any]) -> TensorEntry:
    raw, shape = fields["pieces"], tuple(_ints(fields["shape"]))
    pieces = None
    if raw is not None:
        triples = [[tuple(_ints(part)) for part in triple] for triple in raw]
        pieces = tuple(Piece(Box(local, size), Box(offset, size)) for local, offset, size in triples)
        outside = [piece.local for piece in pieces if not Box.whole(shape).contains(piece.local)]
        if outside:
            raise ValueError(f"{fields['name']}: a piece at {outside[0]} is not inside shape {shape}")
    offset, nbytes = _ints((fields["offset"], fields["nbytes"]))
    return TensorEntry(
        name=fields["name"],
        file=fields["file"],
        offset=offset,
        nbytes=nbytes,
        dtype=fields["dtype"],
        shape=shape,
        crc32=tuple(_ints(fields["crc32"], -(-nbytes // CRC_BLOCK))),
        pieces=pieces,
    )


def _spec_to_json(spec: ParameterSpec) -> dict[str, Any]:
    return {
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "partition": spec.partition.to_json(),
        "trainable": spec.trainable,
        "tie": spec.tie,
    }


def _spec_from_json(fields: dict[str, Any]) -> ParameterSpec:
    partition = Partition.from_json(fields["partition"])
    shape = tuple(_ints(fields["shape"]))
    return ParameterSpec(fields["dtype"], shape, partition, fields["trainable"], fields["tie"])


def _ints(values: Any, count: int | None = None) -> list[int]:
    numbers = list(values)
    if not all(type(value) is int and value >= 0 for value in numbers):
        raise ValueError(f"expected non-negative integers, found {numbers!r}")
    if count is not None and len(numbers) != count:
        raise ValueError(f"expected {count} numbers, found {len(numbers)}")
    return numbers


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _decode(data: bytes, kind: str, where: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{where}: not valid JSON ({error}); the file was damaged or cut off") from error
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise MalformedFile(f"{where}: expected a JSON object of kind {kind!r}, found {str(document)[:80]!r}")
    if document.get("format_version") != FORMAT_VERSION:
        raise MalformedFile(
            f"{where}: format_version {document.get('format_version')!r}, this nxd_ckpt reads {FORMAT_VERSION}; "
            "use the version of nxd_ckpt that wrote it, or a newer one"
        )
    return document


class _naming:
    """Turns what a malformed document makes of the parser into one MalformedFile that names the file."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MalformedFile):  # a part of the document that does not know its file
            raise MalformedFile(f"{self.where}: {error}") from error
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)):
            raise MalformedFile(f"{self.where}: malformed ({type(error).__name__}: {error})") from error
