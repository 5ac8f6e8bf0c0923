"""The edges of what a pickle may be: exact limits, opcodes that few picklers write, names that only look right."""

import argparse
import decimal
import fractions
import gc
import itertools
import pathlib
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

from nxd_ckpt.core import limits
from nxd_ckpt.errors import MalformedFile, UnsafePickle
from nxd_ckpt.formats.machine import Machine, check_walk
from nxd_ckpt.formats.plain_data import check_picklable_as_data
from nxd_ckpt.formats.tensors import StorageSpan, TensorReference, TensorStub
from nxd_ckpt.formats.torch_zip import read_tree
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.formats.unpickle import unpickle
from tests.formats.helpers import comparable, loaded, pread_of, rendered, saved
from tests.formats.pickles import EMPTY_STORAGE, called, named, text
from tests.hostile.findings import LONG, number

SPAN = StorageSpan("data/0", 100, 4, None)
REFERENCE = named("torch_xla.utils.serialization", "TensorReference")
V1, V2, V3 = (named("torch._utils", name) for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"))
ONE = b"K\x00K\x01\x85K\x01\x85"  # offset, shape and stride of one element
DTYPE = called(named("numpy", "dtype"), text("f8"), b"K\x00", b"K\x01")
ORDER = b"(K\x03" + text("<") + b"NNNtb"  # a dtype's state
ARRAY = called(named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), b"K\x00\x85", text("b"))


def read(pickled: bytes, **storages: StorageSpan) -> Any:
    return unpickle(b"\x80\x04" + pickled + b".", "file.pt", storages or {"0": SPAN})


def stub(count: int = 1, stride: int = 1, span: StorageSpan = SPAN) -> TensorStub:
    return TensorStub("file.pt", 100, "float32", (count,), (stride,), span)


REFUSED = {
    "a changed function": (V2 + b"N}" + text("x") + text("y") + b"s\x86b", "tries to change a function"),
    "a reference to no tensor": (called(REFERENCE), "without a `tid`"),
    "another class of torch_xla": (named("torch_xla.utils", "Other"), "asks for torch_xla.utils.Other"),
    "a storage of somebody's": (named("somebody", "FloatStorage"), "asks for somebody.FloatStorage"),
    "a storage that torch has no more": (named("torch", "QInt8Storage"), "asks for torch.QInt8Storage"),
    "a tensor rebuilt by a dict": (
        called(named("torch._tensor", "_rebuild_from_type_v2"), named("collections", "OrderedDict"), b"N)}"),
        "is rebuilt by",
    ),
    "a persistent id that is none": (b"NQ", "its pickle refers to None"),
    "a persistent id of no storage's class": (
        b"(" + text("storage") + b"N" + text("0") + text("cpu") + b"K\x01tQ", "its pickle refers to "
    ),
    "a persistent id of a number": (EMPTY_STORAGE[1:].replace(text("0"), b"K\x00"), "its pickle refers to "),
    "a persistent id of four": (b"(NNNNtQ", "its pickle refers to "),
    "a persistent id that is a list": (b"](NNNNNeQ", "its pickle refers to "),
    "a dtype that is text": (V3 + EMPTY_STORAGE + ONE + b"\x89N" + text("float32") + b"tR", "a tensor of dtype"),
    "a shape that is text": (V2 + EMPTY_STORAGE + b"K\x00" + text("1") + b"K\x01\x85\x89NtR", "a tensor of offset 0"),
    "bytes in UTF-8": (called(named("_codecs", "encode"), text("x"), text("utf-8")), "written as latin1"),
    "an OrderedDict of Python 2 with tuples": (
        called(named("collections", "OrderedDict"), b"(K\x01\x85N\x86l"), "only text or numbers as keys"
    ),
    "no device": (called(named("torch", "device")), "with its name and index"),
    "a device by number": (called(named("torch", "device"), b"K\x00"), "with its name and index"),
    "an object with keywords": (named("argparse", "Namespace") + b")}" + text("x") + b"Ns\x92", "with keywords"),
    "a list of a list": (called(named("builtins", "list"), b"]"), "makes a list of"),
    "an extension code": (b"\x82\x01", "the opcode EXT1"),
    "a value twice on the stack": (b"]2", "the opcode DUP"),
    "keys and no value": (b"}(K\x01K\x02K\x03u", "not that of a torch file"),
    "an array without its state": (ARRAY, "a numpy object without contents"),
    "a dtype without its state": (b"]" + DTYPE + b"a", "a numpy object without contents"),
    "an array that is called for before its state": (ARRAY + b"q\x070]h\x07a", "a numpy array without contents"),
    "a dtype that a function gives back before its state": (
        DTYPE + b"\x85q\x07" + (named("torch._utils", "_rebuild_parameter") + b"h\x07R" + ORDER) * 2 + b"\x87",
        "a numpy object without contents",
    ),
}


@pytest.mark.parametrize(("pickled", "what"), REFUSED.values(), ids=REFUSED.keys())
def test_what_only_looks_right_is_refused_for_what_it_is(pickled: bytes, what: str) -> None:
    with pytest.raises((UnsafePickle, MalformedFile), match=what):
        read(pickled)


READ: dict[str, tuple[bytes, Any]] = {
    "a dict by DICT": (b"(" + text("a") + b"K\x01d", {"a": 1}),
    "a frozenset by FROZENSET": (b"(K\x01\x91", frozenset({1})),
    "a bytearray by BYTEARRAY8": (b"\x96\x02" + bytes(7) + b"ab", bytearray(b"ab")),
    "an object by NEWOBJ_EX": (named("argparse", "Namespace") + b")}\x92", argparse.Namespace()),
    "a bytearray of text": (called(named("builtins", "bytearray"), text("x"), text("latin-1")), bytearray(b"x")),
    "a fraction of text": (called(named("fractions", "Fraction"), text("1/3")), fractions.Fraction(1, 3)),
    "a tensor of the first kind": (V1 + EMPTY_STORAGE + ONE + b"tR", stub()),
    "a tensor of the third kind": (V3 + EMPTY_STORAGE + ONE + b"\x89N" + named("torch", "float32") + b"tR", stub()),
}


@pytest.mark.parametrize(("pickled", "expected"), READ.values(), ids=READ.keys())
def test_what_few_picklers_write_is_read(pickled: bytes, expected: Any) -> None:
    found = read(pickled)
    assert type(expected) is type(found)
    assert expected == found


def test_a_reference_is_read_with_trust_too() -> None:
    """It is none of torch-xla's then, either."""
    data = rendered(image_of([TensorReference(3)]))
    [found] = read_tree(pread_of(data), len(data), "file.pt", trust_pickle=True)
    assert (TensorReference, 3) == (type(found), found.tid)


def test_tensors_without_a_storage_class_and_without_elements_are_read() -> None:
    """Newer dtypes are written untyped; what is empty begins where its storage does."""
    tree = {"untyped": torch.ones(2, dtype=torch.uint16), "empty": torch.zeros(0)}
    assert comparable(tree) == comparable(loaded(saved(tree)))
    span = StorageSpan("data/0", 100, 0, None)
    storage = EMPTY_STORAGE.replace(b"K\x01tQ", b"K\x00tQ")
    assert stub(0, span=span) == read(V2 + storage + b"K\x00K\x00\x85K\x01\x85\x89NtR", **{"0": span})


def test_a_tensor_of_as_many_dimensions_as_are_allowed_is_read() -> None:
    sizes = [b"(" + b"K\x01" * count + b"t" for count in (limits.DIMENSIONS, limits.DIMENSIONS + 1)]
    good, bad = (V2 + EMPTY_STORAGE + b"K\x00" + some + some + b"\x89NtR" for some in sizes)
    assert (1,) * limits.DIMENSIONS == read(good).shape
    with pytest.raises(MalformedFile, match="a tensor of offset 0"):
        read(bad)


def test_tensors_repeat_as_much_as_is_allowed() -> None:
    """To the byte: what a file stores, so often, and what any may have beside."""
    most = (limits.REPEATS * SPAN.nbytes + limits.REPEATED_NBYTES) // 4
    good, bad = (V2 + EMPTY_STORAGE + b"K\x00" + number(count) + b"\x85K\x00\x85\x89NtR" for count in (most, most + 1))
    assert stub(most, 0) == read(good)
    with pytest.raises(MalformedFile, match="by repetition, the tensors of the file"):
        read(bad)


EXACT: dict[str, Any] = {
    "a decimal": [decimal.Decimal("1" * limits.NUMBER_DIGITS)],
    "a path": [pathlib.PurePosixPath("x" * limits.PATH_LENGTH)],
    "a path of two": [pathlib.PurePosixPath("x" * (limits.PATH_LENGTH // 2 - 1), "y" * (limits.PATH_LENGTH // 2))],
    "a key": {("k",) * limits.KEY_VALUES: 1},
    "keys of one hash": dict.fromkeys(itertools.product((-1, -2), repeat=5), 1),
}


@pytest.mark.parametrize("value", EXACT.values(), ids=EXACT.keys())
def test_what_is_exactly_as_long_as_allowed_is_saved_and_read(value: Any) -> None:
    check_picklable_as_data(value)
    assert value == loaded(saved(value))


def test_the_parts_of_a_path_may_be_as_long_as_one() -> None:
    half = text("x" * (limits.PATH_LENGTH // 2))
    path = named("pathlib", "PurePosixPath")
    assert pathlib.PurePosixPath("x" * (limits.PATH_LENGTH // 2), "x" * (limits.PATH_LENGTH // 2)) == read(
        called(path, half, half)
    )
    with pytest.raises(MalformedFile, match="a path of more than"):
        read(called(path, half, half, text("x")))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 writes a Fraction as text, of 4300 digits at most")
def test_a_fraction_is_refused_at_the_save_from_where_it_is_at_the_load() -> None:
    good, bad = ([fractions.Fraction(2**bits)] for bits in (14332, 14333))
    check_picklable_as_data(good)
    assert good == loaded(saved(good))
    with pytest.raises(UnsafePickle, match=r"content\[0\] .*digits"):
        check_picklable_as_data(bad, "content")
    with pytest.raises(MalformedFile, match="a Fraction is written with"):
        loaded(saved(bad))


def test_long_keys_of_one_hash_are_fewer() -> None:
    keys = dict.fromkeys(itertools.product((-1, -2), repeat=8), 1)
    for refuse in (check_picklable_as_data, lambda tree: loaded(saved(tree))):
        with pytest.raises((UnsafePickle, MalformedFile), match="more than 50 keys of one hash"):
            refuse(keys)


def test_keys_are_counted_whatever_comes_before_them() -> None:
    """Text does not hide them, and the same key again counts once."""
    most = limits.KEYS_OF_ONE_HASH + 1
    keys = [number(index * (2**61 - 1)) + b"N" for index in range(1, most + 2)]
    again = b"}(" + text("a") + b"N" + keys[0] + b"".join(keys[:most])
    assert most + 1 == len(read(again + b"u"))
    with pytest.raises(MalformedFile, match="keys of one hash"):
        read(again + keys[most] + b"u")


def test_an_ordered_dict_of_python_2_is_filled_with_few_keys_of_one_hash() -> None:
    """It is made of a list of pairs."""
    most = limits.KEYS_OF_ONE_HASH + 1
    pairs = [number(index * (2**61 - 1)) + b"N\x86" for index in (-1, *range(1, most + 1))]

    def filled(some: list[bytes]) -> Any:
        return read(called(named("collections", "OrderedDict"), b"](" + b"".join(some) + b"e"))

    assert most == len(filled(pairs[1:])) == len(filled(pairs[:-1]))
    with pytest.raises(MalformedFile, match="keys of one hash"):
        filled(pairs)


COPIES = {
    "states": b"}(" + b"".join(text(str(index)) + b"N" for index in range(2000)) + b"uq\x050](" + (
        named("argparse", "Namespace") + b")Rh\x05b"
    ) * 2000 + b"e",
    "arrays": b"](" + LONG.replace(b"q\x07", b"") + b"0e0"
    + called(named("_codecs", "encode"), text("x" * 80_000), text("latin1")) + b"q\x070"
    + DTYPE + ORDER + b"q\x080](" + (
        ARRAY + b"(K\x01" + number(10_000) + b"\x85h\x08\x89h\x07tb"
    ) * 100 + b"e",
    "numbers": number(1 << 800_000) + b"q\x070](" + called(named("builtins", "slice"), b"h\x07") * 100 + b"e",
    "arguments": b"(" + text("") * 20_000 + b"tq\x070](" + (named("pathlib", "PurePosixPath") + b"h\x07R") * 200 + b"e",
    "keys": b"(" + b"N" * 60 + b"tq\x070](" + b"}h\x07Ns" * 40_000 + b"e",
    "items": b"(" + b"N" * 60 + b"tq\x070](" + b"(h\x07\x91" * 40_000 + b"e",
    "items of calls": b"(" + b"N" * 60 + b"tq\x070](" + b"h\x07" * 1000 + b"eq\x080](" + (
        called(named("builtins", "set"), b"h\x08") * 200 + b"e"
    ),
    "tuples": b"(" + b"N" * 20_000 + b"tq\x070](" + (named("collections", "OrderedDict") + b")Rh\x07b") * 200 + b"e",
}


@pytest.mark.parametrize("pickled", COPIES.values(), ids=COPIES.keys())
@pytest.mark.one_in(2)
def test_what_is_used_again_and_again_counts_each_time(pickled: bytes) -> None:
    with pytest.raises(UnsafePickle, match="copies its own values"):
        read(pickled)


def test_arrays_are_as_many_as_their_bytes_allow() -> None:
    tree = [np.full(1000, float(index)) for index in range(200)]
    assert [array.tolist() for array in tree] == [array.tolist() for array in loaded(saved(tree))]


def test_as_many_objects_as_allowed_are_made() -> None:
    lists, more = (b"\x80\x04](" + b"]" * count + b"e." for count in (8, 9))
    assert (14, 15) == (len(lists), len(more))  # which allows 4 objects, and 5
    assert [[]] * 8 == Machine(lists, objects=6).load()
    with pytest.raises(UnsafePickle, match="more than 10 objects"):
        Machine(more, objects=5).load()
    items = b"\x80\x04](" + b"}NNs" * 8 + b"e."  # 12 for its length; a dict and its item are two
    assert [{None: None}] * 8 == Machine(items, objects=6).load()
    with pytest.raises(UnsafePickle, match="more than 17 objects"):
        Machine(items, objects=5).load()


EXPENSIVE = {
    "a set": b"\x8f",
    "a frozenset": b"(\x91",
    "a function called": named("builtins", "set") + b")R",
    "an object by NEWOBJ": named("builtins", "set") + b")\x81",
    "an object by NEWOBJ_EX": named("builtins", "set") + b")}\x92",
}


@pytest.mark.parametrize("pickled", EXPENSIVE.values(), ids=EXPENSIVE.keys())
def test_what_takes_long_counts_as_several_objects(pickled: bytes) -> None:
    """A set, and whatever is called, as three."""
    count = 3 + pickled.count(b"(") + pickled.count(b"}") - len(pickled + b"...") // limits.PICKLE_OBJECT_NBYTES
    whole = b"\x80\x04" + pickled + b"."
    assert set() == Machine(whole, objects=count).load()
    with pytest.raises(UnsafePickle, match="objects, which is the limit"):
        Machine(whole, objects=count - 1).load()


def test_a_pickle_of_tensors_has_fewer_objects_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: each has thirteen, in a hundred bytes. The same of calls and of small pairs. Here a pickle
    makes only those objects that its bytes allow."""
    monkeypatch.setattr(Machine.__init__, "__defaults__", (0,))
    for tree in (
        {str(index): torch.zeros(()) for index in range(100)},
        {str(index): torch.nn.Parameter(torch.zeros(1, 1)) for index in range(100)},
        [np.float32(index) for index in range(300)],
        [(index, 0) for index in range(1000)],
        [{None: None} for _ in range(1000)],
    ):
        assert len(tree) == len(loaded(saved(tree)))


def test_no_garbage_is_collected_while_a_pickle_runs() -> None:
    """It is walked through again and again, though all is kept. Afterwards it goes on, if it did before."""
    seen = list[bool]()
    tensor = V2 + EMPTY_STORAGE + ONE + b"\x89NtR"

    def watched(pickled: bytes) -> None:
        unpickle(b"\x80\x04" + pickled + b".", "file.pt", {"0": SPAN}, leaf=lambda _: seen.append(gc.isenabled()))

    for wanted in (True, False):
        (gc.enable if wanted else gc.disable)()
        try:
            watched(tensor)
            with pytest.raises(UnsafePickle):
                watched(tensor + b"\x82\x01")
            assert wanted == gc.isenabled()
        finally:
            gc.enable()
    assert [False] * 4 == seen


def test_what_holds_itself_is_plain_data() -> None:
    tree: list[Any] = ["x"]
    tree.append(tree)
    check_walk(tree)
    check_picklable_as_data(tree)
    found = loaded(saved(tree))
    assert found[1] is found


def test_containers_may_be_as_deep_as_allowed() -> None:
    """Empty ones at the end do not count."""
    tree: list[Any] = [None]
    for _ in range(limits.TREE_DEPTH - 1):
        tree = [tree]
    check_walk(tree)
    with pytest.raises(MalformedFile, match="nested containers"):
        check_walk([tree])


def test_pickles_of_every_protocol_are_read() -> None:
    value = {"b": bytearray(b"x" * 300), "f": frozenset({1}), "s": {2}, "t": (1, 2, 3, 4), "n": -1, "g": 2.5}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert value == unpickle(pickle.dumps(value, protocol), "file.pt", {})
