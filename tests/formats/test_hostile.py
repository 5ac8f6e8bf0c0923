"""Small files that ask for much: refused with what was found and what the limit is, before time or memory is spent."""

from __future__ import annotations

import decimal
import fractions
import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nxd_ckpt.core import limits
from nxd_ckpt.errors import CheckpointError, MalformedFile, UnsafePickle
from nxd_ckpt.formats.machine import Machine
from nxd_ckpt.formats.safetensors import read_header
from nxd_ckpt.formats.tensors import StorageSpan
from nxd_ckpt.formats.torch_zip import read_directory, read_tree
from nxd_ckpt.formats.unpickle import check_picklable_as_data, unpickle
from tests.formats.helpers import comparable, loaded, pread_of, saved, torch_file
from tests.formats.pickles import EMPTY_STORAGE, called, named, text

pytestmark = [pytest.mark.plain, pytest.mark.once]


def number(value: int) -> bytes:
    """LONG4"""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(raw)) + raw


def doubled(times: int, pair: bytes) -> bytes:
    """A value that holds itself twice, ``times`` levels deep; ``pair`` makes one of two on the stack."""
    return b"(l" + b"".join(b"q\x00h\x00" + pair for _ in range(times))


PAIR = b"\x86"
LIST_PAIR = b"q\x01q\x02(h\x01h\x02l"
LONG = text("x" * 1000) + b"q\x07"
REBUILD = named("torch._utils", "_rebuild_tensor_v2") + EMPTY_STORAGE


def tensor(shape: bytes, stride: bytes, offset: bytes = b"K\x00") -> bytes:
    return REBUILD + offset + shape + stride + b"\x89NtR"


def array(shape: bytes, raw: bytes = b"") -> bytes:
    made = called(
        named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), b"K\x00\x85", text("b")
    )
    dtype = called(named("numpy", "dtype"), text("f8"), b"K\x00", b"K\x01")
    content = called(named("_codecs", "encode"), text(raw.decode("latin1")), text("latin1"))
    return made + b"(K\x01" + shape + dtype + b"\x89" + content + b"tb"


def many(function: bytes, argument: bytes, times: int = 30_000) -> bytes:
    """A list of ``function(argument)``, named once each and called again and again."""
    again = b"h\x05h\x06\x85R"
    return function + b"q\x050" + argument + b"q\x060" + b"](" + again * times + b"e"


HOSTILE = {
    "a fraction with an exponent": called(named("fractions", "Fraction"), text("1e999999999")),
    "a fraction of digits": called(named("fractions", "Fraction"), text("1" * 10**6)),
    "a fraction of a decimal": called(
        named("fractions", "Fraction"), called(named("decimal", "Decimal"), text("1e999999"))
    ),
    "an int of a decimal": called(named("builtins", "int"), called(named("decimal", "Decimal"), text("1e999999999"))),
    "an int of digits": called(named("builtins", "int"), text("9" * 10**6)),
    "a decimal of digits": called(named("decimal", "Decimal"), text("9" * 10**6)),
    "a set of a range": called(named("builtins", "set"), called(named("builtins", "range"), b"J\xff\xff\xff\x0b")),
    "a list of a range": called(named("builtins", "list"), called(named("builtins", "range"), b"J\xff\xff\xff\x7f")),
    "a tuple of a range": called(named("builtins", "tuple"), called(named("builtins", "range"), b"J\xff\xff\xff\x7f")),
    "a frozenset of a range, by NEWOBJ": named("builtins", "frozenset")
    + called(named("builtins", "range"), b"J\xff\xff\xff\x0b")
    + b"\x85\x81",
    "a dict of a range": called(named("builtins", "dict"), called(named("builtins", "range"), b"J\xff\xff\xff\x7f")),
    "a Counter of a range": called(
        named("collections", "Counter"), called(named("builtins", "range"), b"J\xff\xff\xff\x0b")
    ),
    "an OrderedDict of a range": called(
        named("collections", "OrderedDict"), called(named("builtins", "range"), b"J\xff\xff\xff\x0b")
    ),
    "a Size of a range": called(named("torch", "Size"), called(named("builtins", "range"), b"J\xff\xff\xff\x0b")),
    "a Size of huge numbers": called(named("torch", "Size"), number(2**70) + b"\x85"),
    "bytes of a number": called(named("builtins", "bytes"), number(10**12)),
    "a bytearray of a number": called(named("builtins", "bytearray"), number(10**12)),
    "a complex of text": called(named("builtins", "complex"), text("1")),
    "text of a list": called(named("builtins", "str"), doubled(60, LIST_PAIR)),
    "a date of a list": called(named("datetime", "datetime"), doubled(60, LIST_PAIR)),
    "a long time": called(named("datetime", "timedelta"), number(10**400)),
    "a device by number": called(named("torch", "device"), b"K\x00"),
    "a lazy module of torch": called(named("torch.serialization", "_get_layout"), text("torch._inductor")),
    "a path of a long text": called(named("pathlib", "PosixPath"), *[b"h\x07"] * 200).replace(b"h\x07", LONG, 1),
    "bytes longer than the file": b"\x8e" + struct.pack("<Q", 10**12) + b"x",
    "text longer than the file": b"\x8d" + struct.pack("<Q", 10**12) + b"x",
    "a bytearray longer than the file": b"\x96" + struct.pack("<Q", 10**12) + b"x",
    "a negative number's length": b"\x8b" + struct.pack("<i", -5),
    "a memo slot far away, read": b"j\xff\xff\xff\x7f",
    "deep lists": b"]" * 100_000 + b"a" * 99_999,
    "deep tuples": b"N" + b"\x85" * 300_000,
    "a key of deep tuples": b"}N" + b"\x85" * 300_000 + b"Ns",
    "a set of deep tuples": b"\x8f(N" + b"\x85" * 300_000 + b"\x90",
    "a key that holds itself twice": b"}" + doubled(60, PAIR).replace(b"(l", b")", 1) + b"Ns",
    "a frozenset that holds itself twice": b"(" + doubled(60, PAIR).replace(b"(l", b")", 1) + b"\x91",
    "a dict whose key holds itself twice": b"(" + doubled(60, PAIR).replace(b"(l", b")", 1) + b"Nd",
    "an OrderedDict of such a key": called(
        named("collections", "OrderedDict"), b"](" + doubled(60, PAIR).replace(b"(l", b")", 1) + b"N\x86e"
    ),
    "a list that holds itself twice": doubled(60, LIST_PAIR),
    "lists of each other": b"".join(b"]q%c0" % n for n in range(20))
    + b"".join(b"h%c(" % n + b"".join(b"h%c" % k for k in range(20)) + b"e0" for n in range(20))
    + b"h\x00",
    "a persistent id that holds itself twice": doubled(60, LIST_PAIR) + b"Q",
    "a persistent id of deep tuples": b"(" + text("storage") + named("torch", "FloatStorage") + b"N"
    + b"\x85" * 300_000 + text("cpu") + b"K\x01tQ",
    "copies of a list": many(named("builtins", "set"), b"](" + b"K\x01" * 10_000 + b"e"),
    "copies of text": many(named("torch.torch_version", "TorchVersion"), text("x" * 10_000)),
    "copies of a dict": many(
        named("collections", "Counter"), b"}(" + b"".join(text(str(k)) + b"N" for k in range(1_000)) + b"u"
    ),
    "a tensor of stride 0": tensor(number(2**40) + b"\x85", b"K\x00\x85"),
    "a tensor larger than memory can be": tensor(b"K\x00" + number(2**70) + b"\x86", b"K\x01K\x01\x86"),
    "a tensor whose sizes overflow": tensor(b"K\x00" + number(2**62) * 2 + b"\x87", b"K\x01K\x01K\x01\x87"),
    "a tensor of huge strides": tensor(b"K\x00\x85", number(2**70) + b"\x85"),
    "a tensor far away": tensor(b"K\x01\x85", b"K\x01\x85", number(2**80)),
    "a tensor of many dimensions": tensor(b"(" + b"K\x01" * 1000 + b"t", b"(" + b"K\x01" * 1000 + b"t"),
    "tensors of stride 0": b"]("
    + tensor(number(2**27) + b"\x85", b"K\x00\x85") * 8
    + b"e",
    "an array of a huge shape": array(b"K\x00" + number(2**70) + b"\x86"),
    "an array of many dimensions": array(b"(" + b"K\x01" * 1000 + b"t", bytes(8)),
    "an array of a number": array(b"K\x05"),
    "a namespace of no names": named("argparse", "Namespace") + b")\x81}K\x01Nsb",
    "a path whose attributes are set": called(named("pathlib", "PosixPath"), text("x")) + b"N}"
    + text("_raw_paths") + b"Ns\x86b",
    "a fraction whose denominator is set": called(named("fractions", "Fraction"), b"K\x01", b"K\x02")
    + b"N}" + text("_denominator") + b"K\x00s\x86b",
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_pickle_that_asks_for_much_is_refused(hostile: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, containers, keys, copies, tensors: each is bounded before it is made."""
    monkeypatch.setattr(limits, "TREE_VALUES", 10**5)
    with pytest.raises((UnsafePickle, MalformedFile), match=r"^file\.pt: ") as caught:
        unpickle(b"\x80\x04" + hostile + b".", "file.pt", {"0": StorageSpan("data/0", 64, 4, None)})
    assert len(str(caught.value)) < 600


def test_a_pickle_makes_no_more_objects_than_are_read() -> None:
    """A set takes one byte of a pickle, and 216 of memory."""
    with pytest.raises(UnsafePickle, match="more than 1000 objects"):
        Machine(b"\x80\x04](" + b"\x8f" * 2000 + b"e.", objects=1000).load()


LARGE: dict[str, Callable[[], Any]] = {
    "many keys": lambda: {f"sample_{index}": index for index in range(100_000)},
    "many numbers": lambda: list(range(100_000)),
    "pairs as keys": lambda: {(index, ("a", index)): None for index in range(20_000)},
    "a large array": lambda: np.arange(10**6),
    "deep": lambda: _deep(90),
    "long numbers": lambda: [10**4000, decimal.Decimal("1" * 4000), fractions.Fraction(10**4000, 3), 2**100_000],
    "a long path": lambda: pathlib.Path("x/" * 10_000),
    "one list many times": lambda: [[list(range(1000))] * 1000],
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE.keys())
def test_large_data_is_read(make: Callable[[], Any]) -> None:
    """What is large because there is much of it passes, at the save and at the load."""
    tree = make()
    check_picklable_as_data(tree)
    found = loaded(saved(tree))
    if isinstance(tree, np.ndarray):
        tree, found = tree.tolist(), found.tolist()
    assert comparable(tree) == comparable(found)


def _deep(depth: int) -> Any:
    return {"below": _deep(depth - 1)} if depth else "end"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (_deep(limits.TREE_DEPTH + 1), f"at most {limits.TREE_DEPTH}"),
        ({("k",) * 65: 1}, "of more than 64 values"),
        ({"s": {("k",) * 65}}, r"content\['s'\].*of more than 64 values"),
        ([fractions.Fraction(10**5000)], r"content\[0\] is longer than the 4300"),
        ([decimal.Decimal("1" * 5000)], r"content\[0\] is longer than the 4300"),
        ([pathlib.Path("x" * 33_000)], r"content\[0\] is longer than the 32768"),
    ],
    ids=["depth", "key", "item", "fraction", "decimal", "path"],
)
def test_what_is_more_than_load_reads_is_said_when_saving(value: Any, what: str) -> None:
    """The save names it, and the load refuses the same."""
    with pytest.raises(UnsafePickle, match=what):
        check_picklable_as_data(value, "content")
    with pytest.raises((UnsafePickle, MalformedFile)):
        loaded(saved(value))


def test_expanded_and_tied_tensors_are_read() -> None:
    """A mask that is expanded, and one tensor in a hundred layers, are larger than what the file stores."""
    mask, cache = torch.ones(1, dtype=torch.bool), torch.arange(1000.0)
    tree = {"mask": mask.expand(2048, 2048), **{f"layers.{index}.cache": cache for index in range(100)}}
    data = saved(tree)
    assert len(data) < 20_000
    assert comparable(tree) == comparable(loaded(data))


def test_expanded_tensors_take_no_more_than_is_read() -> None:
    """A tensor of 2**40 equal elements is a file of a kilobyte."""
    with pytest.raises(MalformedFile, match=r"file\.pt.*shape \(1099511627776,\) and stride \(0,\) in 4 bytes"):
        loaded(saved({"x": torch.ones(1).expand(2**40)}))


@pytest.mark.parametrize("count", [10_000, pytest.param(250_000, marks=pytest.mark.soak)])
def test_many_tensors_in_one_file_are_read(count: int) -> None:
    """100,000 tensors are many, and no attack."""
    data = saved({f"model.layers.{index}.weight": torch.zeros(1) for index in range(count)})
    assert count == len(read_tree(pread_of(data), len(data), "file.pt"))


@pytest.mark.soak
def test_ten_million_values_are_read() -> None:
    """The order of a data set as a plain list, and a million keys."""
    tree = {"order": list(range(10**7)), **{f"sample_{index}": index for index in range(10**6)}}
    check_picklable_as_data(tree)
    assert tree == loaded(saved(tree))


def zip_end(count: int, nbytes: int, offset: int) -> bytes:
    """The marks that end a large zip file."""
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + nbytes, 1)
    return end64 + locator + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)


@pytest.mark.parametrize(
    ("count", "nbytes", "what"),
    [
        (10**6, 46 * 10**6, "records: at most 300000 are allowed, found 1000000"),
        (10, 10**12, "bytes of its directory: at most 153600000 are allowed, found 1000000000000"),
    ],
    ids=["records", "bytes"],
)
def test_a_zip_directory_is_bounded_before_it_is_read(count: int, nbytes: int, what: str) -> None:
    """A sparse file costs nothing to make: nothing of its size is read on its word."""
    end = zip_end(count, nbytes, 0)
    size = nbytes + len(end)

    def pread(offset: int, length: int) -> bytes:
        assert length <= 2**20
        return (bytes(length) + end[max(0, offset - nbytes) :])[-length:]

    with pytest.raises(MalformedFile, match=rf"file\.pt: {what}"):
        read_directory(pread, size, "file.pt")


def test_a_pickle_is_bounded_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of the pickle that is as large as a disk is refused by its size."""
    monkeypatch.setattr(limits, "PICKLE_NBYTES", 100)
    data = torch_file(b"\x80\x02" + b"N0" * 100 + b"N.")
    with pytest.raises(MalformedFile, match=r"bytes of its record 'archive/data.pkl': at most 100 are allowed"):
        read_tree(pread_of(data), len(data), "file.pt")


def safetensors(header: Any, nbytes: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(nbytes)


def about(shape: Any, offsets: Any = (0, 0), dtype: Any = "F32") -> Any:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


SAFETENSORS = {
    "a header of 10**12 bytes": struct.pack("<Q", 10**12) + b"{}",
    "sizes of which one is 0": safetensors(about([0, 2**70])),
    "sizes that overflow": safetensors(about([0, 2**62, 2**62])),
    "many dimensions": safetensors(about([1] * 100_000, [0, 4]), 4),
    "a huge number": safetensors(b'{"x": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b"]}}"),
    "offsets that are no numbers": safetensors(about([1], ["a", None])),
    "three offsets": safetensors(about([1], [0, 4, 4]), 4),
    "a dtype that is a list": safetensors(about([1], [0, 4], ["F32"]), 4),
    "deep JSON": safetensors(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a name twice, of many": safetensors(
        b"{" + b",".join(b'"%d":1' % index for index in range(50_000)) + b',"49999":1}'
    ),
    "no object": safetensors(b"{}")[:8] + b"[]",
    "metadata that is a list": safetensors({"__metadata__": [1]}),
    "no UTF-8": safetensors(b'{"\xff": 1}'),
}


@pytest.mark.parametrize("data", SAFETENSORS.values(), ids=SAFETENSORS.keys())
def test_a_hostile_safetensors_header_is_malformed(data: bytes) -> None:
    """Sizes, offsets and JSON that no writer makes are named."""
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(pread_of(data), len(data), "x.safetensors")
