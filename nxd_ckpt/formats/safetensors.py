"""Safetensors files: 8 bytes with the length of a JSON header, the header, and the tensors' bytes without gaps.

Source: the format's own description and the checks of its library (github.com/huggingface/safetensors), all of which
this reader makes. Only headers are handled here; the tensors' bytes are read and written as for any other file.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from nxd_ckpt.core.document import HEAD, instead_of_data, parsing
from nxd_ckpt.core.limits import check_form, check_sizes, shown
from nxd_ckpt.errors import DigestMismatch, InvalidArgument, MalformedFile, UnsupportedState
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.image import Image, StorageRecord
from nxd_ckpt.formats.tensors import StorageSpan, TensorStub, contiguous_stride, itemsize
from nxd_ckpt.formats.zip_directory import Pread

METADATA = "__metadata__"
DIGESTS = "nxd_ckpt.crc32"
"""The key in the metadata of our digests: of the list of tensors, then of each block of each tensor, sorted by name.

They lie in the header because other programs keep it together with the bytes, or write the file again without them.
"""

REWRITTEN = f". If another program wrote it since, and kept our digests: write it without {DIGESTS!r} in its {METADATA}"
"""Advice in errors of a file that has not the digests that it carries."""

_LENGTH = struct.Struct("<Q")
_LONGEST = 100_000_000
"""Largest header in bytes, by the library's limit."""
_ALIGNMENT = 8
_DIGITS = 8
"""Hexadecimal digits of a CRC-32."""

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_OTHERS = ("F4", "F6_E2M3", "F6_E3M2")
"""Dtypes of newer files that torch has no tensors for, or that our files cannot hold."""


class TensorForm(NamedTuple):
    """A tensor to be written: its name, dtype (torch's name without prefix) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Header:
    """A file's header: a stub for each tensor by name, the writer's metadata (plain strings), and our digests.

    ``blocks`` are the CRC-32s of each tensor's blocks, by its name; empty if the file has none.
    """

    tensors: Mapping[str, TensorStub]
    metadata: Mapping[str, str]
    blocks: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SafetensorsImage(Image):
    """A file of a head, with room for digests, and a storage for each of ``forms``."""

    room: bytes = field(repr=False)
    forms: Sequence[TensorForm]

    @property
    def begin(self) -> int:
        return len(self.room)

    def header(self, index: int, crcs: Sequence[int]) -> tuple[int, bytes]:
        return self.storages[index].offset, b""

    def tail(self, crcs: Sequence[int]) -> bytes:
        return b""

    def head(self, blocks: Sequence[Sequence[int]]) -> bytes:
        by_name = sorted(zip(self.forms, blocks, strict=True))
        digests = _digits([_digest_of(self.forms), *(crc for _, crcs in by_name for crc in crcs)])
        return self.room.replace(_digits([0] * (len(digests) // _DIGITS)), digests, 1)


def lay_out(tensors: Iterable[TensorForm], metadata: Mapping[str, str]) -> SafetensorsImage:
    """Lay out a file of such tensors, sorted like the library's, so that each is aligned to its dtype.

    Raises:
        UnsupportedState: the format does not have a dtype, or a tensor has a reserved name.
        InvalidArgument: more names than a header may hold.
    """
    ordered = sorted(tensors, key=lambda form: (-itemsize(form.dtype), form.name))
    room = _digits([0] * (1 + sum(crc32.count_blocks(form.nbytes) for form in ordered)))
    header: dict[str, Any] = {METADATA: {DIGESTS: room.decode(), **metadata}}
    at = 0
    storages = []
    for form in ordered:
        if form.name == METADATA:
            raise UnsupportedState(
                f"safetensors files cannot hold a tensor named {METADATA}, the key of the metadata; rename the "
                "tensor, or write torch files (.pt)"
            )
        if form.dtype not in _NAMES:
            raise UnsupportedState(f"{form.name}: safetensors files cannot hold {form.dtype}; write torch files (.pt)")
        offsets = [at, at + form.nbytes]
        header[form.name] = {"dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
        storages.append(StorageRecord(at, form.nbytes))
        at += form.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _LONGEST:
        count = len(ordered)
        raise InvalidArgument(f"{count} tensors need a header of {len(text)} bytes; use a smaller size_per_shard")
    head = _LENGTH.pack(len(text)) + text
    storages = [replace(storage, offset=len(head) + storage.offset) for storage in storages]
    return SafetensorsImage(len(head) + at, storages, (), head, ordered)


def read_header(pread: Pread, size: int, file: str) -> Header:
    """Read the header of a file of ``size`` bytes. ``file`` names it in errors, and is the key in stubs.

    Raises:
        MalformedFile: truncated, or not a safetensors file; the message names the fault.
        UnsupportedState: a dtype for which torch has no tensors.
    """
    with parsing(file, "a safetensors file"):
        return _header(pread, size, file)


def _header(pread: Pread, size: int, file: str) -> Header:
    header, begin = _parse(pread, size, file)
    metadata = header.pop(METADATA, None) or {}
    has_strings = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if not has_strings:
        raise _malformed(file, f"{METADATA} must hold strings only")
    spans = {name: _span(name, about, file) for name, about in header.items()}
    end = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin != end:
            raise _malformed(file, f"tensor {shown(name)} begins at byte {span.begin} of the data, expected {end}")
        end = span.end
    if begin + end != size:
        raise _malformed(file, f"its header describes {begin + end} bytes, it has {size}: truncated, or not whole")
    blocks = _blocks(metadata.get(DIGESTS), spans, file)
    stubs = {name: _stub(file, begin, span, blocks.get(name)) for name, span in spans.items()}
    return Header(stubs, metadata, blocks)


def _blocks(digits: str | None, spans: Mapping[str, _Span], file: str) -> dict[str, tuple[int, ...]]:
    """Return the digests of each tensor's blocks. Raises DigestMismatch if they are of other tensors."""
    if digits is None:
        return {}
    counts = {name: crc32.count_blocks(spans[name].end - spans[name].begin) for name in sorted(spans)}
    expected = _digits([_digest_of(TensorForm(name, span.dtype, span.shape) for name, span in spans.items())]).decode()
    if digits[:_DIGITS] != expected or len(digits) != _DIGITS * (1 + sum(counts.values())):
        raise DigestMismatch(
            f"{file}: the list of its tensors is not the one that was written with its digests: restore the file"
            f"{REWRITTEN}"
        )
    numbers = (int(digits[at : at + _DIGITS], 16) for at in range(_DIGITS, len(digits), _DIGITS))
    return {name: tuple(islice(numbers, count)) for name, count in counts.items()}


def _digits(crcs: Iterable[int]) -> bytes:
    return "".join(f"{crc:0{_DIGITS}x}" for crc in crcs).encode()


def _digest_of(forms: Iterable[TensorForm]) -> int:
    """Return a digest of names, dtypes and shapes, in whatever order they lie in the file."""
    return crc32.crc32(json.dumps(sorted(forms)).encode())


class _Span(NamedTuple):
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]


def _parse(pread: Pread, size: int, file: str) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset of the first tensor's bytes."""
    if size < _LENGTH.size:
        raise _malformed(file, f"{size} bytes are too few for the length of its header")
    length: int = _LENGTH.unpack(pread(0, _LENGTH.size))[0]
    if length > _LONGEST:
        other = instead_of_data(pread(0, min(size, HEAD)))
        fault = f"its header should have {length} bytes, at most {_LONGEST} are allowed"
        raise _malformed(file, fault if other is None else f"it is {other}")
    if _LENGTH.size + length > size:
        raise _malformed(file, f"its header should have {length} bytes, the file has {size}")
    text = pread(_LENGTH.size, length)
    if text[:1] != b"{":
        raise _malformed(file, "its header does not begin with '{'")
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _malformed(file, f"its header is not valid JSON: {error}") from error
    return header, _LENGTH.size + length


def _span(name: str, about: Any, file: str) -> _Span:
    if not isinstance(about, dict) or not {"dtype", "shape", "data_offsets"} <= set(about):
        raise _malformed(file, f"tensor {shown(name)}: expected dtype, shape and data_offsets, found {shown(about)}")
    dtype = about["dtype"]
    shape = about["shape"]
    offsets = about["data_offsets"]
    if dtype in _OTHERS:
        raise UnsupportedState(
            f"{file}: tensor {shown(name)} is {dtype}, of which torch has no plain numbers; dequantize the model with "
            "the program that quantized it, and use that"
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _malformed(file, f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    where = f"{file}: not a whole safetensors file: tensor {shown(name)}"
    shape = check_form(shape, itemsize(_DTYPES[dtype]), where)
    offsets = check_sizes(offsets, where)
    if len(offsets) != 2:
        raise _malformed(file, f"tensor {shown(name)}: data_offsets must be begin and end, found {shown(offsets)}")
    begin, end = offsets
    expected = prod(shape) * itemsize(_DTYPES[dtype])
    if end - begin != expected:
        sizes = f"{dtype} {list(shape)} has {expected} bytes, but its offsets span {end - begin}"
        raise _malformed(file, f"tensor {shown(name)}: {sizes}")
    return _Span(begin, end, _DTYPES[dtype], shape)


def _stub(file: str, data: int, span: _Span, blocks: Sequence[int] | None) -> TensorStub:
    nbytes = span.end - span.begin
    crc = None if blocks is None else crc32.combine_blocks(blocks, nbytes)
    record = StorageSpan("", data + span.begin, nbytes, crc)
    return TensorStub(file, data + span.begin, span.dtype, span.shape, contiguous_stride(span.shape), record)


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name)} appears twice")
    return values


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _malformed(file: str, what: str) -> MalformedFile:
    return MalformedFile(f"{file}: not a whole safetensors file: {what}")
