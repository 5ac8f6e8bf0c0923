"""Data, not code: what a checkpoint's pickle may be, and what becomes of one that is more."""

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib
import pickle
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nxd_ckpt.errors import MalformedFile, UnsafePickle, UnsupportedState
from nxd_ckpt.formats import safe_globals
from nxd_ckpt.formats.inert import Inert
from nxd_ckpt.formats.plain_data import check_picklable_as_data
from nxd_ckpt.formats.stored_tensors import read_tensor
from nxd_ckpt.formats.tensors import StorageSpan, TensorReference, TensorStub, map_tensors
from nxd_ckpt.formats.torch_zip import read_tree
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.formats.unpickle import unpickle
from tests.formats.helpers import comparable, loaded, pread_into_of, pread_of, rendered, saved, torch_file
from tests.formats.pickles import EMPTY_STORAGE, called, named, stacked, text

pytestmark = pytest.mark.both

EXECUTED: list[str] = []


def canary(*_: Any) -> dict[str, int]:
    """What a hostile pickle would call."""
    EXECUTED.append("canary")
    return {}


class Config:
    """A user's class: more than data."""

    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr
        self.weight = torch.arange(3.0)


class OnDevice:
    """How torch.save writes an XLA tensor."""

    def __reduce__(self) -> tuple[Any, ...]:
        args = (torch.ones(2), torch.float32, "xla:0", False)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, args


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return canary, ()


CANARY = named(__name__, "canary")
SLOTS = b"N}" + text("__call__") + CANARY + b"s\x86b"  # BUILD by setattr: __call__ = canary
HOSTILE = {
    "os.system": called(named("os", "system"), text("true")),
    "eval": called(named("builtins", "eval"), text("1")),
    "eval by its python 2 name": called(named("__builtin__", "eval"), text("1")),
    "getattr": called(named("builtins", "getattr"), named("torch", "Tensor"), text("data")),
    "a callable of ours": called(CANARY),
    "an attribute walk through an allowed module": called(stacked("torch.serialization", "os.system"), text("x")),
    "an attribute walk through an allowed function": stacked("torch._utils", "_rebuild_tensor_v2.__globals__"),
    "an attribute walk through an allowed type": stacked("builtins", "dict.fromkeys"),
    "copyreg": called(named("copyreg", "_reconstructor"), CANARY, named("builtins", "object"), b"N"),
    "torch.storage._load_from_bytes": called(named("torch.storage", "_load_from_bytes"), text("x")),
    "torch.nn.Module": named("torch.nn.modules.linear", "Linear") + b")\x81.",
    "functools.partial": called(named("functools", "partial"), CANARY),
    "INST": b"(i" + f"{__name__}\nEvil\n".encode(),
    "OBJ": b"(" + CANARY + b"o",
    "NEWOBJ": named(__name__, "Evil") + b")\x81",
    "an extension code": b"\x82\x01",
    "our own module": called(named("nxd_ckpt.formats.torch_zip", "read_tensor"), text("x")),
    "a defaultdict that makes canaries": called(named("collections", "defaultdict"), CANARY),
    "a defaultdict that makes paths": called(named("collections", "defaultdict"), named("pathlib", "PosixPath")),
    "numpy objects": called(
        named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), b"K\x00\x85", text("b")
    )
    + b"(K\x01K\x01\x85"
    + called(named("numpy", "dtype"), text("O8"), b"K\x00", b"K\x01")
    + b"\x89]"
    + CANARY
    + b"atb",
    "numpy records": called(named("numpy", "dtype"), text("V8"), b"K\x00", b"K\x01"),
    "a numpy dtype with an object field": called(named("numpy", "dtype"), text("f8"), b"K\x00", b"K\x01")
    + b"(K\x03"
    + text("<")
    + b"N"
    + text("a")
    + b"\x85}tb",
    "a numpy subclass": called(
        named("numpy.core.multiarray", "_reconstruct"), named("builtins", "dict"), b"K\x00\x85", text("b")
    ),
    "changing a function": named("torch._utils", "_rebuild_tensor_v2") + SLOTS,
    "changing our class": named("torch_xla.utils.serialization", "TensorReference") + SLOTS,
    "changing Namespace": named("argparse", "Namespace") + SLOTS,
    "changing UUID": named("uuid", "UUID") + SLOTS,
    "changing a builtin": named("builtins", "dict") + SLOTS,
    "changing a dtype": named("torch", "float32") + SLOTS,
    "a tensor's rebuild that is not one": called(
        named("torch._tensor", "_rebuild_from_type_v2"), named("builtins", "dict"), named("torch", "Tensor"), b")}"
    ),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_pickle_is_refused_and_runs_nothing(hostile: bytes, protocol: int) -> None:
    """Whatever a pickle names, calls or changes, nothing outside the allowlist is executed."""
    EXECUTED.clear()
    data = torch_file(bytes([0x80, protocol]) + hostile + b".")
    with pytest.raises((UnsafePickle, MalformedFile), match=r"file\.pt"):
        read_tree(pread_of(data), len(data), "file.pt")
    assert [] == EXECUTED


def test_stubs_cannot_be_pointed_elsewhere() -> None:
    """A pickle that sets attributes of a tensor it made is refused: a stub's place was checked once."""
    rebuild = named("torch._utils", "_rebuild_tensor_v2") + EMPTY_STORAGE + b"K\x00K\x01\x85K\x01\x85\x89NtR"
    span = StorageSpan("data/0", 100, 4, None)
    good = unpickle(b"\x80\x02" + rebuild + b".", "file.pt", {"0": span})
    assert TensorStub("file.pt", 100, "float32", (1,), (1,), span) == good
    for state in (b"}" + text("file") + text("/etc/passwd") + b"sb", b"N}" + text("offset") + b"K\x00s\x86b"):
        with pytest.raises(MalformedFile):
            unpickle(b"\x80\x02" + rebuild + state + b".", "file.pt", {"0": span})


def test_attributes_of_containers_are_dropped() -> None:
    """A state_dict's `_metadata`, or an attribute that would shadow a method, does not come back."""
    tree = collections.OrderedDict(a=1)
    tree._metadata = {"version": 1}  # type: ignore[attr-defined]
    tree.pop = "shadowed"  # type: ignore[method-assign, assignment]
    found = loaded(saved(tree))
    assert ({}, 1) == (vars(found), found.pop("a"))


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [(0, (5,), (1,)), (2, (3,), (1,)), (0, (2, 2), (3, 1)), (-1, (1,), (1,)), (0, (-1,), (1,)), (0, (2,), (1, 1))],
)
def test_a_tensor_must_lie_in_its_storage(offset: int, shape: Any, stride: Any) -> None:
    """Offset, shape and strides that reach outside a storage are malformed, not read."""
    storage = EMPTY_STORAGE.replace(b"K\x01tQ", b"K\x04tQ")
    arguments = b"".join(pickle.dumps(value, 2)[2:-1] for value in (offset, shape, stride))
    pickled = b"\x80\x02" + named("torch._utils", "_rebuild_tensor_v2") + storage + arguments + b"\x89NtR."
    with pytest.raises(MalformedFile, match="shape"):
        unpickle(pickled, "file.pt", {"0": StorageSpan("data/0", 64, 16, None)})


def test_a_storage_must_be_there_and_as_long_as_said() -> None:
    pickled = b"\x80\x02" + named("torch._utils", "_rebuild_tensor_v2") + EMPTY_STORAGE + b"K\x00))\x89NtR."
    with pytest.raises(MalformedFile, match="does not hold"):
        unpickle(pickled, "file.pt", {})
    with pytest.raises(MalformedFile, match="expected 1 elements of float32"):
        unpickle(pickled, "file.pt", {"0": StorageSpan("data/0", 64, 3, None)})


PLAIN: dict[str, Any] = {
    "scalars": [None, True, 3, 10**30, 2.5, 1 + 2j, "text", b"bytes", b"", bytearray(b"x"), bytearray()],
    "containers": {"l": [1], "t": (1, 2), "s": {1, 2}, "f": frozenset({3}), "o": collections.OrderedDict(a=1)},
    "counters": [collections.Counter("aab"), collections.defaultdict(list, {1: [2]}), collections.defaultdict()],
    "ranges": [range(1, 9, 2), slice(1, None, 2)],
    "types": [int, dict],
    "namespaces": [argparse.Namespace(lr=0.1, sub=argparse.Namespace(n=None)), types.SimpleNamespace(x=[1])],
    "paths": [pathlib.Path("a/b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("c:/y")],
    "numbers": [decimal.Decimal("1.25"), fractions.Fraction(1, 3), uuid.UUID(int=5)],
    "times": [
        datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc),
        datetime.date(2024, 2, 29),
        datetime.time(1, 2),
        datetime.timedelta(seconds=5),
    ],
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.device("xla", 1), torch.strided],
    "references": [TensorReference(3)],
    "numpy scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("ab")],
}


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN.keys())
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    """Types and values of plain data survive torch.save and our writer alike, and save says that they will."""
    check_picklable_as_data(value)
    files = [rendered(image_of(value))]
    if not any(isinstance(item, TensorReference) for item in value):
        files.append(saved(value))
    for file in files:
        found = loaded(file)
        assert value == found
        assert [type(item) for item in _items(value)] == [type(item) for item in _items(found)]


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


@pytest.mark.parametrize("name", ["float32", "int8", "bool", "complex128", "U3", "S2", ">i4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_numpy_arrays_come_back(name: str, order: Any) -> None:
    """Arrays of numbers and text survive, whatever their byte order and layout, and stay shared and writable."""
    array = np.array(np.arange(6).reshape(2, 3).astype(name), order=order)
    empty = np.zeros((0, 2), name)
    tree = {"rng": ("MT19937", array, 5), "again": array, "empty": empty, "dtype": array.dtype}
    check_picklable_as_data(tree)
    for data in (saved(tree), rendered(image_of(tree))):
        found = loaded(data)
        assert array.dtype == found["again"].dtype == found["dtype"]
        assert (array.tolist(), array.strides) == (found["again"].tolist(), found["again"].strides)
        assert (0, 2) == found["empty"].shape
        assert found["rng"][1] is found["again"]
        found["again"][0, 0] = array[1, 1]


def test_a_torch_version_comes_back_as_text() -> None:
    """`torch.__version__`, which user content often holds, is a str subclass and reads as a str."""
    check_picklable_as_data({"torch": torch.__version__})
    assert str(torch.__version__) == loaded(saved(torch.__version__))


def test_parameters_and_marked_tensors_are_tensors() -> None:
    """Parameters, XLA tensors, and those with Python attributes (as NxD's optimizers have), come back plain."""
    marked = torch.ones(2)
    marked.expert_model_parallel = True  # type: ignore[attr-defined]
    tree = {"p": torch.nn.Parameter(torch.zeros(3)), "m": marked}
    found = loaded(saved({**tree, "d": OnDevice()}))
    assert comparable({**tree, "d": torch.ones(2)}) == comparable(found)
    assert [torch.Tensor] * 3 == [type(tensor) for tensor in found.values()]
    assert not found["p"].requires_grad


@pytest.mark.parametrize(
    ("make", "where", "what"),
    [
        (lambda: {"args": {"model": Config()}}, r"user_content\['args'\]\['model'\]", r"Config"),
        (lambda: [argparse.Namespace(fn=len)], r"user_content\[0\]\.fn", "builtin_function_or_method"),
        (lambda: {"k": [lambda: 0]}, r"user_content\['k'\]\[0\]", "function"),
        (lambda: (torch.nn.Linear(1, 1),), r"user_content\[0\]", "Linear"),
        (lambda: {"d": collections.defaultdict(canary)}, r"\['d'\]\.default_factory", "function"),
        (lambda: {"a": np.array([object()])}, r"user_content\['a'\]", "ndarray"),
        (lambda: {"a": np.array([(1,)], dtype=[("x", "f4")])}, r"user_content\['a'\]", "ndarray"),
        (lambda: {"a": np.datetime64("2024-01-01")}, r"user_content\['a'\]", "datetime64"),
        (lambda: {"a": np.ma.array([1.0])}, r"user_content\['a'\]", "MaskedArray"),
        (lambda: {"r": np.random.default_rng(0)}, r"user_content\['r'\]", "Generator"),
        (lambda: {"c": Config}, r"user_content\['c'\]", "Config"),
        (lambda: {frozenset({Config}): 1}, "key", "Config"),
    ],
    ids=[
        *("object", "builtin", "lambda", "module", "factory", "objects"),
        *("records", "date", "mask", "rng", "class", "key"),
    ],
)
def test_what_load_refuses_is_said_when_saving(make: Callable[[], Any], where: str, what: str) -> None:
    """The check names class and place of exactly what reading would refuse."""
    value = make()
    with pytest.raises(UnsafePickle, match=f"{where}.*{what}"):
        check_picklable_as_data(value, "user_content")


def test_trusted_pickles_give_objects_with_their_tensors() -> None:
    """With trust_pickle any class is unpickled, tensors inside objects included if the leaf reads them."""
    data = saved({"config": Config(0.5), "array": np.array([1, 2]), "ns": argparse.Namespace(x=1)})
    tree = read_tree(
        pread_of(data),
        len(data),
        "file.pt",
        trust_pickle=True,
        leaf=lambda stub: read_tensor(pread_into_of(data), stub),
    )
    assert (0.5, [0, 1, 2]) == (tree["config"].lr, tree["config"].weight.tolist())
    assert [1, 2] == tree["array"].tolist()
    assert argparse.Namespace(x=1) == tree["ns"]


def test_the_allowlist_hands_out_nothing_mutable() -> None:
    """Every allowed global refuses attributes: immutable types and values, or sealed stand-ins."""
    classes = [value for value in safe_globals.GLOBALS.values() if isinstance(value, type)]
    for value in classes:
        if hasattr(value, "__setstate__"):
            continue  # a BUILD on the class calls it, without a state
        with pytest.raises(TypeError, match="immutable"):
            setattr(value, "canary", canary)  # noqa: B010
    for value in safe_globals.GLOBALS.values():
        if not isinstance(value, (type, torch.dtype)):
            assert isinstance(value, Inert)


def test_lazily_conjugated_tensors_are_refused_with_the_remedy() -> None:
    """A conjugate view keeps other bytes than its values: said, not read wrongly."""
    data = saved({"z": torch.ones(2, dtype=torch.complex64).conj()})
    with pytest.raises(UnsupportedState, match=r"resolve_conj"):
        read_tree(pread_of(data), len(data), "file.pt")


def test_reading_gives_places_not_bytes() -> None:
    """The tree of a file holds stubs that name dtype, shape, strides and the record with its digest."""
    weight = torch.arange(12.0).reshape(3, 4)
    data = saved({"w": weight.t()[1:]})
    stub = read_tree(pread_of(data), len(data), "model/x.pt")["w"]
    assert ("model/x.pt", "float32", (3, 3), (1, 4)) == (stub.file, stub.dtype, stub.shape, stub.stride)
    assert ("data/0", 48) == (stub.storage.record, stub.storage.nbytes)
    assert stub.storage.offset + 4 == stub.offset
    assert {"w": 1} == map_tensors({"w": stub}, lambda _: 1)
