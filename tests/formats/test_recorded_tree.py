"""Trees in an index: what is recorded comes back as from the pickle, and nothing else is believed."""

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core import limits
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.recorded_tree import recorded, tree_of
from nxd_ckpt.formats.strides import Stride, note, stride_of, with_note
from nxd_ckpt.formats.tensors import TensorReference

KEYS = st.one_of(st.text(max_size=5), st.integers(-5, 5), st.booleans(), st.none(), st.tuples(st.integers(0, 3)))
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=9),
    st.just(torch.Size([2, 3])), st.just(torch.bfloat16),
)
TREES = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


def read(element: Any) -> Any:
    """The tree of an element that was written and read as JSON."""
    return tree_of(json.loads(json.dumps(element, allow_nan=False)), made)


def made(stride: Stride | None, tid: int | None) -> Any:
    return ("tensor", stride) if tid is None else TensorReference(tid, None if stride is None else note(stride))


def text(tree: Any) -> str:
    """Types, order and values; NaN is equal to itself."""
    return repr(tree)


@given(TREES)
def test_what_is_recorded_comes_back(tree: Any) -> None:
    found = recorded(tree, stride_of)
    assert found is not None
    assert text(read(found.element)) == text(tree)


def test_tensors_are_counted_and_keep_their_notes() -> None:
    noted = with_note(torch.ones(2, 3), Stride((1, 2), as_parameter=True))
    tree = {"a": torch.ones(1), "state": {0: [noted, torch.ones(2)]}, "xser": TensorReference(7, {"live_stride": (1,)})}
    found = recorded(tree, stride_of)
    assert found is not None
    assert found.tensors == 3
    back = read(found.element)
    assert back["state"][0] == [("tensor", Stride((1, 2), True)), ("tensor", None)]
    assert (back["xser"].tid, back["xser"].noted) == (7, {"live_stride": (1,)})


def twice() -> Any:
    shared = [1]
    return {"a": shared, "b": shared}


def endless() -> Any:
    tree: list[Any] = []
    tree.append(tree)
    return tree


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else []


@pytest.mark.parametrize(
    "tree",
    [twice(), endless(), deep(limits.TREE_DEPTH + 2), {1, 2}, np.float64(1), 1 << 20_000, 1 + 2j, b"x" * 2**24, object],
    ids=["twice", "endless", "deep", "set", "number of NumPy", "long integer", "complex", "large", "class"],
)
def test_only_the_file_has_anything_else(tree: Any) -> None:
    assert recorded({"tree": tree}, stride_of) is None


@pytest.mark.parametrize(
    "element",
    [
        ["set", 1],
        ["dict", "a"],
        ["dict", "a", 1, "a", 2],
        ["dict", ["list"], 1],
        ["dtype", "made_up", 1],
        ["dtype"],
        ["bytes", "not base64!"],
        ["float", "1e5"],
        ["Size", -1],
        ["Size", "2"],
        ["reference", -1],
        ["reference", "1"],
        ["reference", 2**70],
        ["tensor", [-1], True],
        ["tensor", 3],
        [3, 4],
        [["list"]],
        deep(2 * limits.TREE_DEPTH),
    ],
    ids=lambda element: json.dumps(element)[:30],
)
def test_nothing_else_is_believed(element: Any) -> None:
    with pytest.raises(MalformedFile):
        read({"a": element})


def test_numbers_that_json_lacks() -> None:
    back = read(recorded([math.nan, math.inf, -math.inf, -0.0], stride_of).element)  # type: ignore[union-attr]
    assert text(back) == "[nan, inf, -inf, -0.0]"
