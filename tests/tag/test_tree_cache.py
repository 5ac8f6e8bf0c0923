"""What a tag keeps of its trees: those that were read last, and no more than a given number of tensors."""

from typing import Any

import pytest

from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.layouts import files
from nxd_ckpt.layouts.files import TreeCache


def tree_of(count: int) -> dict[str, Any]:
    return {str(number): Assembly("float32", (), ()) for number in range(count)}


def read_again(cache: TreeCache, key: str) -> bool:
    """Whether the tree of that key had to be read."""
    read: list[str] = []

    def read_tree() -> dict[str, Any]:
        read.append(key)
        return tree_of(2)

    cache.get(key, read_tree)
    return bool(read)


def test_a_tree_is_read_once() -> None:
    cache = TreeCache()
    assert [True, False] == [read_again(cache, "a"), read_again(cache, "a")]


def test_what_was_asked_for_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trees of two tensors fit into a cache of five; asking for one of them keeps it."""
    monkeypatch.setattr(files, "_CACHED", 5)
    cache = TreeCache()
    for key in "abac":
        read_again(cache, key)
    assert [False, False, True] == [read_again(cache, key) for key in "acb"]


def test_a_tree_larger_than_the_limit_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what is being read; it goes with the next one."""
    monkeypatch.setattr(files, "_CACHED", 1)
    cache = TreeCache()
    assert [True, False, True, True] == [read_again(cache, key) for key in "aaba"]
