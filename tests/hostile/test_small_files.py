"""Small files that ask for much: refused with what was found and what the limit is, before time or memory is spent."""

import decimal
import fractions
import itertools
import pathlib
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nxd_ckpt.core import limits
from nxd_ckpt.errors import MalformedFile, UnsafePickle
from nxd_ckpt.formats.machine import Machine
from nxd_ckpt.formats.plain_data import check_picklable_as_data
from nxd_ckpt.formats.tensors import StorageSpan
from nxd_ckpt.formats.torch_zip import read_directory, read_tree
from nxd_ckpt.formats.unpickle import unpickle
from tests.formats.helpers import comparable, loaded, pread_of, saved, torch_file
from tests.hostile.budget import within_budget
from tests.hostile.findings import HOSTILE, number


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_pickle_that_asks_for_much_is_refused(hostile: bytes) -> None:
    """Numbers, containers, keys, copies, tensors: each is bounded before it is made."""
    data = b"\x80\x04" + hostile + b"."
    with pytest.raises((UnsafePickle, MalformedFile), match=r"^file\.pt: ") as caught, within_budget(len(data)):
        unpickle(data, "file.pt", {"0": StorageSpan("data/0", 64, 4, None)})
    assert len(str(caught.value)) < 600


LARGE: dict[str, Callable[[], Any]] = {
    "many keys": lambda: {f"sample_{index}": index for index in range(100_000)},
    "many numbers": lambda: list(range(100_000)),
    "pairs as keys": lambda: {(index, ("a", index)): None for index in range(20_000)},
    "a large array": lambda: np.arange(10**6),
    "deep": lambda: _deep(90),
    "long numbers": lambda: [10**4000, decimal.Decimal("1" * 4000), fractions.Fraction(10**4000, 3), 2**100_000],
    "many long numbers": lambda: [fractions.Fraction(10**4000 + index, 10**4000) for index in range(40)],
    "a long path": lambda: pathlib.Path("x/" * 10_000),
    "one list many times": lambda: [[list(range(1000))] * 1000],
    "one tuple many times": lambda: {"x": [(0, 0)] * 120_000},
    "dicts with two keys of one hash": lambda: [{(-1, 0): 1, (-2, 0): 2, -1.0: 3, -2.0: 4} for _ in range(200)],
    "sets with two items of one hash": lambda: [{(-1, 0), (-2, 0)} for _ in range(200)],
    "keys of a grid": lambda: dict.fromkeys(itertools.product(range(-2, 2), repeat=4), 1),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE.keys())
def test_large_data_is_read(make: Callable[[], Any]) -> None:
    """What is large because there is much of it passes, at the save and at the load."""
    tree = make()
    check_picklable_as_data(tree)
    found = loaded(saved(tree))
    if isinstance(tree, np.ndarray):
        np.testing.assert_array_equal(tree, found, strict=True)
    else:
        assert comparable(tree) == comparable(found)


def _deep(depth: int) -> Any:
    return {"below": _deep(depth - 1)} if depth else "end"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (_deep(limits.TREE_DEPTH + 1), f"at most {limits.TREE_DEPTH}"),
        ({("k",) * 65: 1}, "of more than 64 values"),
        ({"s": {("k",) * 65}}, r"content\['s'\].*of more than 64 values"),
        pytest.param(
            [fractions.Fraction(10**5000)],
            r"content\[0\] .*at most 4300 digits",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot pickle it: 4300 digits"),
        ),
        ([decimal.Decimal("1" * 5000)], r"content\[0\] .*at most 4300 are"),
        ([pathlib.Path("x" * 33_000)], r"content\[0\] .*at most 32768 are"),
    ],
    ids=["depth", "key", "item", "fraction", "decimal", "path"],
)
def test_what_is_more_than_load_reads_is_said_when_saving(value: Any, what: str) -> None:
    """The save names it, and the load refuses the same."""
    with pytest.raises(UnsafePickle, match=what):
        check_picklable_as_data(value, "content")
    with pytest.raises((UnsafePickle, MalformedFile)):
        loaded(saved(value))


@pytest.mark.parametrize(
    ("begin", "each", "end"), [(b"}", b"N", b"u"), (b"}", b"N", b"s"), (b"\x8f", b"", b"\x90")], ids=["u", "s", "set"]
)
def test_keys_of_one_hash_are_counted_together(begin: bytes, each: bytes, end: bytes) -> None:
    """One dict or set that is filled in many steps is no different from one that is filled at once."""
    mark = b"" if end == b"s" else b"("

    def filled(count: int) -> bytes:
        keys = (number(index * (2**61 - 1)) for index in range(1, count + 1))
        return b"\x80\x04" + begin + b"".join(mark + key + each + end for key in keys) + b"."

    most = limits.KEYS_OF_ONE_HASH + 1
    assert most == len(Machine(filled(most)).load())
    with pytest.raises(MalformedFile, match=f"more than {most - 1} keys of one hash"), within_budget(1):
        Machine(filled(3000)).load()
    with pytest.raises(UnsafePickle, match=r"content\[0\] .*more than \d+ keys of one hash"):
        check_picklable_as_data([dict.fromkeys(index * (2**61 - 1) for index in range(1, most + 2))], "content")


def test_expanded_and_tied_tensors_are_read() -> None:
    """A mask that is expanded, and one tensor in a hundred layers, are larger than what the file stores."""
    mask, cache = torch.ones(1, dtype=torch.bool), torch.arange(1000.0)
    tree = {"mask": mask.expand(2048, 2048), **{f"layers.{index}.cache": cache for index in range(100)}}
    data = saved(tree)
    assert len(data) < 20_000
    assert comparable(tree) == comparable(loaded(data))


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
