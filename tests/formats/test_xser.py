"""References, tids, info, and who writes what."""

from collections import OrderedDict

import pytest
import torch

from nxd_ckpt.formats.tensors import TensorReference, map_tensors
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.formats.xser import balance, info, normalise, split
from tests.formats.helpers import comparable, loaded, rendered

pytestmark = pytest.mark.both


def test_split_numbers_every_tensor_depth_first() -> None:
    """tids count tensors in dict order, 0-dim ones included, and a tied weight twice; it is undone by them."""
    tied = torch.arange(6.0)
    tree = {"b": {"w": tied, "step": torch.tensor(3)}, "a": [tied, 7]}
    references, tensors = split(tree)
    assert {"b": {"w": TensorReference(0), "step": TensorReference(1)}, "a": [TensorReference(2), 7]} == references
    assert [0, 1, 2] == [tid for tid, _ in tensors]
    assert tensors[0][1] is tensors[2][1] is tied
    joined = map_tensors(references, lambda reference: dict(tensors)[reference.tid], TensorReference)
    assert comparable(tree) == comparable(joined)


def test_info_describes_each_tensor_by_tid() -> None:
    tensors = [(0, torch.ones(2, 3)), (1, torch.tensor(1))]
    expected = {
        0: {"dtype": torch.float32, "shape": torch.Size([2, 3]), "expert_model_parallel": False},
        1: {"dtype": torch.int64, "shape": torch.Size([]), "expert_model_parallel": True},
    }
    assert expected == info(tensors, expert={1})


@pytest.mark.parametrize(
    ("nbytes", "n", "expected"),
    [
        ([8, 1, 4], 1, [0, 0, 0]),
        ([8, 1, 4], 2, [0, 0, 1]),
        ([4, 4, 4, 4], 2, [0, 1, 0, 1]),
        ([1, 2, 3, 4, 5, 6], 3, [0, 1, 2, 0, 1, 2]),
        ([], 4, []),
    ],
)
def test_balance_gives_the_smallest_first_to_the_lightest(nbytes: list[int], n: int, expected: list[int]) -> None:
    """Ascending by bytes, each to the rank with the least so far; ties to the lower tid and rank."""
    assert expected == balance(nbytes, n)


def test_normalise_rewrites_types_as_nxd_does() -> None:
    """Tuples and sizes become lists, OrderedDicts dicts, and nothing else changes."""
    tree = OrderedDict(betas=(0.9, 0.95), shape_info={0: torch.Size([2, 3])}, none=None, name="x")
    normalised = normalise(tree)
    assert {"betas": [0.9, 0.95], "shape_info": {0: [2, 3]}, "none": None, "name": "x"} == normalised
    assert [dict, list, list] == [type(normalised), type(normalised["betas"]), type(normalised["shape_info"][0])]


def test_references_survive_a_file() -> None:
    """A tree of references is written and read without torch-xla, user text that looks like one included."""
    tree = {"text": "cnxd_ckpt.formats.tensors\nTensorReference\n", "a": TensorReference(0), "b": [TensorReference(12)]}
    data = rendered(image_of(tree))
    assert tree == loaded(data)
    assert data.count(b"ctorch_xla.utils.serialization\nTensorReference\n") == 1
