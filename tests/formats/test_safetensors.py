"""Safetensors files: what we write, their library reads, and the reverse; and whatever it refuses, we refuse."""

import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import load, save

from nxd_ckpt.errors import CheckpointError, MalformedFile, UnsupportedState
from nxd_ckpt.formats.crc32 import block_crcs
from nxd_ckpt.formats.safetensors import DIGESTS, Header, TensorForm, lay_out, read_header
from nxd_ckpt.formats.tensors import dtype_name, itemsize
from tests.formats.helpers import rendered, tensors, tight_bytes

States = dict[str, torch.Tensor]
UNKNOWN = (torch.complex128,)
"""Dtypes that the format does not have."""


def header_of(data: bytes) -> Header:
    return read_header(lambda offset, nbytes: data[offset : offset + nbytes], len(data), "x.safetensors")


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with any header, also a wrong one; ``length`` is what it says of the header's."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def written(state: States, metadata: dict[str, str]) -> bytes:
    image = lay_out((TensorForm(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in state.items()), metadata)
    return rendered(image.holding([state[form.name] for form in image.forms]))


def states() -> st.SearchStrategy[States]:
    known = tensors().filter(lambda tensor: tensor.dtype not in UNKNOWN).map(torch.Tensor.contiguous)
    return st.dictionaries(st.text(max_size=6).filter(lambda name: name != "__metadata__"), known, max_size=5)


def comparable(state: States) -> dict[str, Any]:
    return {name: (t.dtype, tuple(t.shape), tight_bytes(t)) for name, t in state.items()}


@given(states(), st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
def test_the_library_reads_what_we_write(state: States, metadata: dict[str, str]) -> None:
    """Any dtype and shape, bit for bit; every tensor aligned to its dtype."""
    data = written(state, metadata)
    assert comparable(state) == comparable(load(data))
    header = header_of(data)
    assert metadata == {key: text for key, text in header.metadata.items() if key != DIGESTS}
    assert {name: [*crcs] for name, crcs in header.blocks.items()} == {
        name: block_crcs(memoryview(tight_bytes(tensor))) for name, tensor in state.items()
    }
    assert [] == [stub for stub in header.tensors.values() if stub.offset % itemsize(stub.dtype)]


@given(states())
def test_we_read_what_the_library_writes(state: States) -> None:
    """Names, dtypes, shapes, and where the bytes lie."""
    data = save(state, metadata={"format": "pt"})
    header = header_of(data)
    assert {"format": "pt"} == header.metadata
    found = {
        name: (getattr(torch, stub.dtype), stub.shape, data[stub.offset : stub.offset + stub.nbytes])
        for name, stub in header.tensors.items()
    }
    assert comparable(state) == found


ONE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}

MALFORMED = {
    "empty file": (b"", "too few"),
    "no header": (struct.pack("<Q", 10), "the file has 8"),
    "a huge header": (file_of({}, length=2**63), "at most"),
    "a header longer than the file": (file_of({}, length=3), "the file has"),
    "no brace": (file_of(b" {}"), "begin with"),
    "a list": (file_of(b"[]"), "begin with"),
    "not JSON": (file_of(b"{,}"), "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not valid JSON"),
    "something behind the header": (file_of(b"{}\0"), "not valid JSON"),
    "too deep": (file_of(b'{"a":' + b"[" * 100_000), "not valid JSON"),
    "a name twice": (file_of(b'{"a":%s,"a":%s}' % ((json.dumps(ONE).encode(),) * 2), b"x"), "'a' appears twice"),
    "metadata that is no string": (file_of({"__metadata__": {"step": 1}}), "strings only"),
    "metadata that is a list": (file_of({"__metadata__": ["a"]}), "strings only"),
    "a tensor that is a list": (file_of({"a": []}), "expected dtype, shape and data_offsets"),
    "a tensor without offsets": (file_of({"a": {"dtype": "U8", "shape": [1]}}), "expected dtype"),
    "an unknown dtype": (file_of({"a": {**ONE, "dtype": "F80"}}, b"x"), "unknown dtype"),
    "a dtype that is no string": (file_of({"a": {**ONE, "dtype": ["U8"]}}, b"x"), "unknown dtype"),
    "a negative size": (file_of({"a": {**ONE, "shape": [-1]}}, b"x"), "expected sizes from 0 to 2..63"),
    "a fractional size": (file_of({"a": {**ONE, "shape": [1.0]}}, b"x"), "expected sizes from 0"),
    "a size that is no number": (file_of({"a": {**ONE, "shape": [True]}}, b"x"), "expected sizes from 0"),
    "NaN as a size": (file_of(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x"), "NaN is not JSON"),
    "three offsets": (file_of({"a": {**ONE, "data_offsets": [0, 1, 1]}}, b"x"), "begin and end"),
    "offsets that contradict the shape": (file_of({"a": {**ONE, "shape": [2]}}, b"x"), "has 2 bytes"),
    "a shape that overflows": (file_of({"a": {**ONE, "shape": [2**40, 2**40]}}, b"x"), "larger than a tensor can be"),
    "offsets in the wrong order": (file_of({"a": {**ONE, "shape": [0], "data_offsets": [1, 0]}}, b"x"), "span -1"),
    "a hole in front": (file_of({"a": {**ONE, "data_offsets": [1, 2]}}, b"xx"), "begins at byte 1"),
    "a hole": (file_of({"a": ONE, "b": {**ONE, "data_offsets": [2, 3]}}, b"xxx"), "begins at byte 2"),
    "an overlap": (file_of({"a": ONE, "b": ONE}, b"x"), "begins at byte 0 of the data, expected 1"),
    "bytes behind the last tensor": (file_of({"a": ONE}, b"xx"), "truncated, or not whole"),
    "too few bytes": (file_of({"a": ONE}), "truncated, or not whole"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused(name: str) -> None:
    data, complaint = MALFORMED[name]
    with pytest.raises(MalformedFile, match=complaint) as caught:
        header_of(data)
    assert str(caught.value).startswith("x.safetensors: ")


@given(states(), st.data())
def test_what_the_library_refuses_we_refuse(state: States, data: st.DataObject) -> None:
    raw = bytearray(written(state, {"format": "pt"}))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        deserialize(bytes(raw))
    except SafetensorError:
        with pytest.raises(CheckpointError):
            header_of(bytes(raw))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_dtypes_without_tensors_are_named(dtype: str) -> None:
    with pytest.raises(UnsupportedState, match=f"'a' is {dtype}"):
        header_of(file_of({"a": {"dtype": dtype, "shape": [4], "data_offsets": [0, 3]}}, b"xxx"))


def test_a_dtype_that_the_format_lacks_is_refused() -> None:
    """Naming the tensor, before anything is written."""
    with pytest.raises(UnsupportedState, match=r"wave: .*complex128.*\.pt"):
        lay_out([TensorForm("wave", "complex128", (2,))], {})
