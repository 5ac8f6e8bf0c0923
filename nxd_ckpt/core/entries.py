"""Entries of manifests and indexes (tensors, files and parameters) and their JSON."""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from nxd_ckpt.core import document
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.limits import checked_key, checked_text
from nxd_ckpt.core.partition import Partition, Piece

CRC_BLOCK = 4 * 2**20
"""Bytes that one block digest covers; a slice is verified by the blocks it touches, not the whole tensor."""

KindT = TypeVar("KindT")

_BY_VALUE = 2
"""Marshal's version whose bytes depend on values alone: unlike equality, they distinguish 1, True and 1.0."""


class TensorEntry(NamedTuple):
    """One tensor that one rank wrote: the place of its bytes, and its part of a global tensor.

    ``offset`` and ``nbytes`` count bytes in ``file`` (a key relative to the tag); the bytes are contiguous and little
    endian. ``crc32`` holds a CRC-32 per `CRC_BLOCK` bytes. ``pieces`` is None if the cut is unknown.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    crc32: tuple[int, ...]
    pieces: tuple[Piece, ...] | None = None


class FileEntry(NamedTuple):
    """One file that one rank wrote: its size in bytes, and the CRC-32 over all of them."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter or buffer of the model, with its shape on every rank of its pipeline stage.

    ``tie`` is equal for all names of one tensor, and None if it has only one name. ``explicit`` is True if attributes
    or the caller say that it is cut into ``partition.num_partitions``: then equal values on two ranks do not mean that
    they share it.
    """

    dtype: str
    shape: tuple[int, ...]
    partition: Partition
    trainable: bool = True
    tie: str | None = None
    explicit: bool = False


def tensor_text(entry: TensorEntry) -> str:
    """Return the JSON of one tensor."""
    quoted, listed = document.quoted, document.integers
    pieces = "null"
    if entry.pieces is not None:
        parts = [(piece.local.offset, piece.box.offset, piece.box.size) for piece in entry.pieces]
        pieces = document.array(document.array(map(listed, part)) for part in parts)
    return (
        f'{{"name":{quoted(entry.name)},"file":{quoted(entry.file)},"offset":{entry.offset},"nbytes":{entry.nbytes},'
        f'"dtype":{quoted(entry.dtype)},"shape":{listed(entry.shape)},"crc32":{listed(entry.crc32)},'
        f'"pieces":{pieces}}}'
    )


def parameters_text(parameters: Mapping[str, ParameterSpec]) -> str:
    """Return the JSON of all parameters, by name."""
    partitions: dict[Partition, str] = {}  # few, and most parameters have the same

    def text(spec: ParameterSpec) -> str:
        partition = partitions.get(spec.partition)
        if partition is None:
            partition = partitions[spec.partition] = document.plain(spec.partition.to_json())
        tie = "null" if spec.tie is None else document.quoted(spec.tie)
        explicit = ',"explicit":true' if spec.explicit else ""
        return (
            f'{{"dtype":{document.quoted(spec.dtype)},"shape":{document.integers(spec.shape)},"partition":{partition},'
            f'"trainable":{"true" if spec.trainable else "false"},"tie":{tie}{explicit}}}'
        )

    return document.members({name: text(spec) for name, spec in parameters.items()})


class Makers:
    """Converters from an element's JSON to its object. Equal parts share one object: many tensors have few shapes.

    They raise KeyError, TypeError, ValueError or MalformedFile if the element is invalid.
    """

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._forms: dict[bytes, tuple[tuple[int, ...], tuple[Piece, ...] | None]] = {}
        self._specs: dict[bytes, ParameterSpec] = {}

    @staticmethod
    def file(entry: Any) -> FileEntry:
        return FileEntry(*integers(entry, 2))

    def tensor(self, fields: Any) -> TensorEntry:
        key = marshal.dumps((fields["shape"], fields["pieces"]), _BY_VALUE)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _form(fields["name"], fields["shape"], fields["pieces"])
        offset, nbytes = integers((fields["offset"], fields["nbytes"]))
        return TensorEntry(
            checked_text(fields["name"]),
            self._file(fields["file"]),
            offset,
            nbytes,
            checked(str, fields["dtype"]),
            form[0],
            tuple(integers(fields["crc32"], -(-nbytes // CRC_BLOCK))),
            form[1],
        )

    def _file(self, key: Any) -> str:
        file = self._files.get(key)
        if file is None:
            file = self._files[key] = checked_key(key)
        return file

    def spec(self, fields: Any) -> ParameterSpec:
        key = marshal.dumps(fields, _BY_VALUE)
        spec = self._specs.get(key)
        if spec is None:
            partition = Partition.from_json(fields["partition"])
            shape, tie = tuple(integers(fields["shape"])), fields["tie"]
            partition.check_shape("a parameter", shape)
            trainable = checked(bool, fields["trainable"])
            explicit = checked(bool, fields.get("explicit", False))
            tie = None if tie is None else checked(str, tie)
            spec = ParameterSpec(checked(str, fields["dtype"]), shape, partition, trainable, tie, explicit)
            self._specs[key] = spec
        return spec


def _form(name: str, shape: Any, raw: Any) -> tuple[tuple[int, ...], tuple[Piece, ...] | None]:
    """Return a tensor's shape and pieces."""
    shape = tuple(integers(shape))
    if raw is None:
        return shape, None
    triples = [[tuple(integers(part)) for part in triple] for triple in raw]
    pieces = tuple(Piece(Box(local, size), Box(offset, size)) for local, offset, size in triples)
    outside = [piece.local for piece in pieces if not Box.whole(shape).contains(piece.local)]
    if outside:
        raise ValueError(f"{name}: a piece at {outside[0]} is not inside shape {shape}")
    return shape, pieces


def checked(kind: type[KindT], value: Any) -> KindT:
    """Return ``value``; raise TypeError unless it is of that kind."""
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, found {value!r:.80}")
    return value


def integers(values: Any, count: int | None = None) -> Sequence[int]:
    """Return ``values``; raise ValueError or TypeError unless they are ``count`` non-negative integers."""
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"expected non-negative integers, found {values!r}")
    if count is not None and len(values) != count:
        raise ValueError(f"expected {count} numbers, found {len(values)}")
    return values  # type: ignore[no-any-return]
