"""Structures: what two trees have to have in common for one plan to serve both."""

import gc
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.formats.tensors import iter_tensors, map_tensors
from nxd_ckpt.saving.save_planner import Structure, structure_of

ONE = torch.ones(2)


def known(tree: Any) -> Structure:
    structure = structure_of(tree)
    assert structure is not None
    return structure


NUMBERS: list[Any] = [0, -1, 255, 256, 2**70, 0.0, -0.0, 1.0, float("nan"), float("inf"), True, False, None, 1j, -1j]
OTHERS: list[Any] = ["", "a", "é", b"", b"a", torch.float32, torch.int8, torch.device("cpu"), torch.Size([2])]
LEAVES = st.sampled_from([*NUMBERS, *OTHERS]) | st.builds(lambda n: torch.zeros(n), st.integers(0, 2))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.sampled_from(["a", "b", 0, 1, True, None]), inner, max_size=3)
    | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2).map(OrderedDict),
    max_leaves=8,
)


def described(tree: Any) -> Any:
    """All of a tree but for its tensors' values, as text: ``repr`` tells 0.0 from -0.0, and 1 from True."""
    if isinstance(tree, torch.Tensor):
        return f"tensor {tree.dtype} {tuple(tree.shape)}"
    if isinstance(tree, dict):
        return f"{type(tree)} {[(repr(key), described(value)) for key, value in tree.items()]}"
    if type(tree) in (list, tuple):
        return f"{type(tree)} {[described(value) for value in tree]}"
    return repr(tree)


def copied(tree: Any) -> Any:
    return map_tensors(tree, torch.clone, torch.Tensor)


@given(TREES, TREES)
def test_trees_are_alike_and_of_equal_values_if_only_tensors_values_differ(one: Any, other: Any) -> None:
    """And only then; a copy is."""
    first, second, again = known([one]), known([other]), known(copied([one]))
    alike = first.likeness == second.likeness and first.values == second.values
    if alike:
        assert described(one) == described(other)
    assert (first.likeness, first.values) == (again.likeness, again.values)


@given(TREES)
def test_tensors_come_in_the_order_of_the_tree(tree: Any) -> None:
    """As iter_tensors has them, by which files are laid out."""
    assert [id(leaf) for _, leaf in iter_tensors(tree, torch.Tensor)] == [id(leaf) for leaf in known(tree).tensors]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": None}),
        ({1: 0}, {True: 0}),
        ({1: 0}, {"1": 0}),
        ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
        ({"a": 0}, OrderedDict(a=0)),
        ([1, [2]], [[1], 2]),
        ([[1, 2]], [[1], 2]),
        ([1], (1,)),
        ((2,), torch.Size([2])),
        ([ONE, ONE], [ONE, ONE.clone()]),
        ([ONE, ONE.clone(), ONE], [ONE, ONE, ONE.clone()]),
        ([ONE], [ONE.to(torch.float64)]),
        ([ONE], [ONE.reshape(2, 1)]),
        ([ONE], [torch.ones(2, device="meta")]),
        ([ONE], [1.0]),
    ],
)
def test_other_types_keys_or_orders_are_unlike(one: Any, other: Any) -> None:
    """Another type of number, key or container, another order, another tensor that is the same object."""
    assert known(one).likeness != known(other).likeness


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1.0, 1.0 + 2**-52), (255, 256), ("a", "b"), (1j, -1j), (torch.int8, torch.int16), (b"", b"0")],
)
def test_other_values_are_alike_and_not_the_same(one: Any, other: Any) -> None:
    """Alike, and not the same."""
    first, second = known([one]), known([other])
    assert first.likeness == second.likeness
    assert first.values != second.values


@pytest.mark.parametrize("before", [{0.0: 1}, {(1,): 1}, {(1, (0.0,)): 1}])
def test_keys_that_are_equal_but_not_the_same(before: dict[Any, int]) -> None:
    """-0.0 for 0.0, and True for 1 inside of a tuple, make another pickle."""

    def twin(key: Any) -> Any:
        return tuple(map(twin, key)) if isinstance(key, tuple) else -0.0 if isinstance(key, float) else bool(key)

    one, other = structure_of(before), structure_of({twin(key): value for key, value in before.items()})
    if one is not None and other is not None:
        assert (one.likeness, one.values) != (other.likeness, other.values)


class Number(int):
    """Could hold anything."""


LIST: list[int] = [1]
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": Number(3)},
        {"a": {1, 2}},
        {"a": bytearray(b"a")},
        {"a": np.float64(1.0)},
        {"a": np.ones(2)},
        defaultdict(int),
        {"a": object()},
        {"a": LIST, "b": LIST},
        ((LIST,), (LIST,)),
        ITSELF,
    ],
)
def test_what_could_change_unseen_is_planned_anew(tree: Any) -> None:
    """Then nothing is known, and everything is planned anew."""
    assert structure_of(tree) is None


def test_no_tensor_is_held() -> None:
    """The likeness stays with the plan; the tensors are the caller's."""
    tree = {"a": [torch.ones(2), 1]}
    reference = weakref.ref(tree["a"][0])
    likeness = known(tree).likeness
    del tree
    gc.collect()
    assert reference() is None
    assert likeness is not None
