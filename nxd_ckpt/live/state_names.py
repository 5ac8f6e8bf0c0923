"""Names of an optimizer's parameters, global names of its state dict's entries, and the state dict without some."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core.name_patterns import OPTIMIZER, PARAM_GROUPS, lineage
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS, MASTER_WEIGHTS, MASTERS
from nxd_ckpt.formats.tensors import CONTAINERS, Path, children_of, iter_tensors, like_tuple
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.named import OBJECTS

SECTIONS = ("state", "base_state", MASTERS)
"""Keys of a state dict under which state is by the indices of parameters."""

_EMPTY_SECTIONS = {(section,) for section in SECTIONS}
"""Paths at which an optimizer without state has an empty dict."""

_SHAPES = "shape_info"


def parameter_names(
    groups: Sequence[dict[str, Any]], model: ModelAdapter | None, param_names: Sequence[Sequence[str]] | None
) -> list[str]:
    """Return a name for each parameter, in the order of their indices; "#3" where it is unknown.

    ``groups`` may be live ones, or a state dict's, which have indices in place of parameters.
    """
    if param_names is not None:
        return _checked(param_names, [len(group["params"]) for group in groups])
    name_by_id = {} if model is None else model.parameter_names()
    names: list[str] = []
    for group in groups:
        own_names = group.get("param_names") or [None] * len(group["params"])  # torch: built from named parameters
        for parameter, own in zip(group["params"], own_names, strict=True):
            names.append(name_by_id.get(id(parameter)) or own or f"#{len(names)}")
    return names


def if_known(names: Sequence[str]) -> list[str] | None:
    """Return ``names``, or None if all are unknown."""
    return None if all(name.startswith("#") for name in names) else list(names)


def _checked(param_names: Sequence[Sequence[str]], sizes: list[int]) -> list[str]:
    if [len(names) for names in param_names] != sizes:
        raise InvalidArgument(
            f"param_names must list the names of each param group's parameters: expected lists of {sizes} names, "
            f"found {[len(names) for names in param_names]}"
        )
    flat = [name for names in param_names for name in names]
    twice = sorted(name for name, times in Counter(flat).items() if times > 1)
    if twice:
        raise InvalidArgument(f"param_names must be unique, found more than once: {twice[:8]}")
    return flat


def state_entries(tree: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[Path, str, Any]]:
    """Yield path, global name and value of every entry for one parameter, or for the optimizer as a whole.

    ``names`` are the parameters' names, in order.
    """
    for section in SECTIONS:
        name_by_index = _name_by_index(tree, section, names)
        for key, value in tree.get(section, {}).items():
            if isinstance(key, str):
                yield (section, key), f"optim/state/{key}", value
            elif section == MASTERS:
                yield (section, key), f"optim/{name_by_index.get(key, f'#{key}')}/{MASTER_WEIGHTS}", value
            else:
                name = name_by_index.get(key, f"#{key}")
                for entry, own in value.items():
                    yield (section, key, entry), f"optim/{name}/{entry}", own


def entries_beside(
    tree: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[Path, str]]:
    """Yield path and global name of the entries of ``tree`` that the ``other`` state dict does not have."""
    beside = dict(tree)
    for section in SECTIONS:
        own = tree.get(section, {})
        its = other.get(section, {})
        if section in tree:
            beside[section] = {at: one for at, one in own.items() if at not in its or _has_more(one, its[at])}
    for path, name, _ in state_entries(beside, names):
        of_other = other.get(path[0], {}).get(path[1], {}) if len(path) == 3 else other.get(path[0], {})
        if path[-1] not in of_other:
            yield path, name


def _has_more(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and isinstance(other, dict) and not one.keys() <= other.keys()


def without(
    tree: Mapping[str, Any], names: Sequence[str], ignores: Callable[[str], bool], covers: Callable[[str], bool]
) -> dict[str, Any]:
    """Return the state dict without the entries whose names ``ignores`` accepts; ``tree`` itself does not change.

    A parameter's shape is left out if ``covers`` accepts the parameter's name. A param group's options are left out if
    that is true of all its parameters, or if `PARAM_GROUPS` is ignored.
    """
    left = {**tree, **{section: dict(tree[section]) for section in (*SECTIONS, _SHAPES) if section in tree}}
    for path, name, _ in state_entries(tree, names):
        if ignores(name):
            _remove(left, path)
    for index, name in _name_by_index(tree, _SHAPES, names).items():
        if index in tree.get(_SHAPES, {}) and covers(f"optim/{name}"):
            del left[_SHAPES][index]
    left["param_groups"] = list(_groups(tree, names, ignores(PARAM_GROUPS), covers))
    return left


def leaf_name(part: str, path: Path, names: Sequence[str] | None, text: Callable[[Any], str] = str) -> str:
    """Return the global name of the leaf at ``path`` of the tree of a part, a field of SaveState.

    ``names`` are those of an optimizer's parameters; ``text`` makes text of a key.
    """
    if part != "optimizer":
        return "/".join((part, *map(text, path)))
    if len(path) < 2 or path[0] not in SECTIONS or not isinstance(path[1], int):
        return "/".join(("optim", *map(text, path)))
    name = names[path[1]] if names is not None and path[1] < len(names) else f"#{path[1]}"
    rest = (MASTER_WEIGHTS,) if path[0] == MASTERS else path[2:]
    return "/".join(("optim", name, *map(text, rest)))


def key_text(key: Any) -> str:
    """Return text that no other key of a container has, and no slash: "a/b" is not "b" in "a", nor "1" the number."""
    if type(key) is int or (type(key) is str and not key.removeprefix("-").isdecimal()):
        return str(key).replace("~", "~0").replace("/", "~1")
    return "~2" + repr(key).replace("~", "~0").replace("/", "~1")


def is_in(part: str, name: str) -> bool:
    """Return whether this is the name of something in a ``part``."""
    return name.partition("/")[0] == ("optim" if part == "optimizer" else part)


def is_below(name: str, known: Collection[str]) -> bool:
    """Return whether a value of this name, or a container that it is in, is ``known``.

    In a model "a/b" need not be in "a", and master weights are beside the state of their parameter.
    """
    if is_in("model", name):
        return name in known
    if name.endswith(f"/{MASTER_WEIGHTS}"):
        return name in known or OPTIMIZER in known
    return bool(known) and any(path in known for path in lineage(name))


class Container(NamedTuple):
    """A container of which the parts have names of their own."""

    tree: Any


def values_in(part: str, tree: Any, names: Sequence[str] | None) -> Iterator[tuple[str, Path, Any]]:
    """Yield everything in the tree of a part that is no tensor: name, path and value.

    A container without tensors, in the state of a parameter or as an option, is one value. Indices of parameters are
    left out. Each other container is a `Container`: all of a part, extra state, schedulers, objects and the state of
    parameters may have another form on each rank. Param groups and sections of an optimizer have no names.
    """

    def walk(node: Any, path: Path) -> Iterator[tuple[str, Path, Any]]:
        children = () if isinstance(node, torch.Tensor) else list(children_of(node))
        if children and (len(path) < _depth(part, path) or next(iter_tensors(node, torch.Tensor), None)):
            if part != "optimizer" or not path or (len(path) > 1 and path[0] in SECTIONS):
                yield leaf_name(part, path, names, key_text), path, Container(node)
            for key, child in children:
                yield from walk(child, (*path, key))
        elif not isinstance(node, torch.Tensor) and path[2:] != ("params",) and path not in _EMPTY_SECTIONS:
            yield leaf_name(part, path, names, key_text), path, node

    return walk(tree, ())


def groups_of(tree: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, int]:
    """Return for each of an optimizer's parameters the number of its param group, by which its options are known."""
    by_index = _name_by_index(tree, "state", names or ())
    return {
        by_index.get(index, f"#{index}"): number
        for number, group in enumerate(tree["param_groups"])
        for index in group["params"]
    }


def _depth(part: str, path: Path) -> int:
    """Return the depth down to which containers of a part are known ones."""
    if part == "optimizer":
        return 2 + (path[:1] == ("param_groups",) or (len(path) > 1 and isinstance(path[1], int)))
    return 1 if path[:1] != (OBJECTS,) else 3


def replaced(tree: Any, values: Mapping[Path, Any], absent: Collection[Path] = ()) -> Any:
    """Return ``tree`` with these ``values`` at their paths, also where there was none, and without the ``absent``.

    A value below another value, or below what is absent, is there too. ``tree`` itself does not change, and containers
    keep their types.
    """
    absent = frozenset(absent)  # there may be many
    above = {path[:length] for path in (*values, *absent) for length in range(len(path))}
    below: dict[Path, dict[Any, Any]] = {}
    for path in values:
        for length, key in enumerate(path):
            below.setdefault(path[:length], {})[key] = {}

    def walk(node: Any, path: Path) -> Any:
        node = values.get(path, node)
        if path not in above or not isinstance(node, CONTAINERS):
            return node
        children = dict(children_of(node))
        if isinstance(node, tuple):
            return like_tuple(node, [walk(child, (*path, key)) for key, child in children.items()])
        new = copy.copy(node)
        if isinstance(node, (list, deque)):
            for key, child in children.items():
                new[key] = walk(child, (*path, key))
            return new
        rest = {key: child for key, child in children.items() if (*path, key) not in absent}
        items = new if isinstance(node, dict) else vars(new)
        items.clear()
        for key, child in (rest | below.get(path, {}) | rest).items():
            items[key] = walk(child, (*path, key))
        return new

    return walk(tree, ())


def parameter_sections(tree: Mapping[str, Any]) -> list[str]:
    """Return the keys of the state dict under which entries are by the parameters' indices."""
    return [section for section in (*SECTIONS, _SHAPES) if section in tree]


def put_back(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set the value at ``path`` of the state dict."""
    *above, last = path
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _groups(
    tree: Mapping[str, Any], names: Sequence[str], bare: bool, covers: Callable[[str], bool]
) -> Iterator[dict[str, Any]]:
    rest = iter(names)
    for group in tree["param_groups"]:
        own = [name for _, name in zip(group["params"], rest, strict=False)]
        left_out = bool(own) and all(covers(f"optim/{name}") for name in own)
        yield {"params": group["params"]} if bare or left_out else group


def _remove(left: dict[str, Any], path: Path) -> None:
    section, index, *entry = path
    rest = {key: value for key, value in left[section][index].items() if key not in entry} if entry else {}
    if rest:
        left[section][index] = rest
    else:
        del left[section][index]


def _name_by_index(tree: Mapping[str, Any], section: str, names: Sequence[str]) -> dict[Any, str]:
    groups = tree.get("param_groups", [])
    indices = [index for group in groups for index in group["params"]]
    if section != "state" and all(key in tree for key in EXPERT_KEYS):
        ordinary = sum(len(group["params"]) for group in groups[: tree["ep_param_group_offset"]])
        first = tree["ep_base_state_offset" if section == "base_state" else "ep_shape_info_offset"]
        indices = [*range(ordinary), *range(first, first + len(indices) - ordinary)]
    return dict(zip(indices, names, strict=False))
