"""Stubs, and trees of tensors."""

import copy
import pickle
from argparse import Namespace
from collections import OrderedDict
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats.memory import byte_view, torch_dtype
from nxd_ckpt.formats.tensors import (
    NBYTES,
    StorageSpan,
    TensorStub,
    dtype_name,
    is_floating,
    itemsize,
    iter_tensors,
    map_tensors,
)
from tests.formats.helpers import DTYPES

pytestmark = pytest.mark.both


@pytest.mark.parametrize("name", NBYTES)
def test_dtypes_are_as_torch_says(name: str) -> None:
    """Torch is not asked for it. A dtype that neither knows has none."""
    dtype = getattr(torch, name, None)
    assert dtype is None or (dtype.itemsize, dtype.is_floating_point) == (itemsize(name), is_floating(name))
    with pytest.raises(InvalidArgument, match="no dtype 'float7'"):
        itemsize("float7")


def stub(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str = "float32") -> TensorStub:
    return TensorStub("model/x.pt", 64, dtype, shape, stride, StorageSpan("data/0", 64, 4096, None))


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((), (), True),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((1, 3), (7, 1), True),
        ((3, 1), (1, 9), True),
        ((0, 3), (1, 5), True),
        ((2,), (0,), False),
    ],
)
def test_contiguity_is_torchs(shape: tuple[int, ...], stride: tuple[int, ...], expected: bool) -> None:
    """A stub is contiguous exactly if torch says so of a tensor with its shape and strides."""
    assert expected == torch.empty(64).as_strided(shape, stride).is_contiguous()
    assert expected == stub(shape, stride).is_contiguous


def test_a_stub_counts_the_bytes_of_the_tight_tensor() -> None:
    assert 12 == stub((2, 3), (9, 2), "bfloat16").nbytes


def test_a_stub_can_be_copied_and_sent_but_not_changed() -> None:
    """Where a tensor's bytes lie is a value: equal after pickling, and frozen."""
    original = stub((2, 3), (3, 1))
    assert original == pickle.loads(pickle.dumps(original)) == copy.deepcopy(original)
    with pytest.raises(FrozenInstanceError):
        original.offset = 0  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_have_torchs_names(dtype: torch.dtype) -> None:
    assert dtype == torch_dtype(dtype_name(dtype))


def test_an_unknown_dtype_is_named() -> None:
    """A dtype of another torch version, or no dtype at all, is refused by name."""
    with pytest.raises(InvalidArgument, match="float7"):
        torch_dtype("float7")
    with pytest.raises(InvalidArgument, match="nn"):
        torch_dtype("nn")


def test_map_keeps_structure_order_and_sharing() -> None:
    """Only leaves change: containers keep type and order, one that occurs twice is one object still."""
    shared = [torch.ones(1)]
    tree = OrderedDict(z=shared, a=(shared, torch.zeros(2)), n=Namespace(t=torch.ones(3), k=1), s=torch.Size([2]))
    mapped = map_tensors(tree, lambda tensor: tensor.numel())
    assert OrderedDict(z=[1], a=([1], 2), n=Namespace(t=3, k=1), s=torch.Size([2])) == mapped
    assert [OrderedDict, list, tuple] == [type(mapped), type(mapped["z"]), type(mapped["a"])]
    assert mapped["z"] is mapped["a"][0]


def test_iteration_gives_paths_depth_first() -> None:
    """Paths are keys, indices and attribute names, dicts in their order."""
    tree = {"z": [torch.ones(1), {"y": torch.ones(2)}], "a": Namespace(t=torch.ones(3))}
    expected = [(("z", 0), 1), (("z", 1, "y"), 2), (("a", "t"), 3)]
    assert expected == [(path, tensor.numel()) for path, tensor in iter_tensors(tree)]


def test_a_tree_that_holds_itself_is_walked_once() -> None:
    """A cyclic object, which pickle allows, ends neither walk in endless recursion."""
    tree: dict[str, Any] = {"t": torch.ones(1)}
    tree["self"] = tree
    assert [("t",)] == [path for path, _ in iter_tensors(tree)]
    mapped = map_tensors(tree, lambda tensor: "leaf")
    assert "leaf" == mapped["self"]["self"]["t"]


def test_byte_view_is_the_tensors_memory() -> None:
    """Writing through the view writes the tensor; a tensor that is not contiguous has no such view."""
    tensor = torch.zeros(2, 2, dtype=torch.bfloat16)
    byte_view(tensor)[:2] = b"\x80\x3f"
    assert [1, 0, 0, 0] == tensor.flatten().tolist()
    with pytest.raises(InvalidArgument, match="contiguous"):
        byte_view(tensor.t())
