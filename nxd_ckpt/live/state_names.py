"""Global names of the entries of an optimizer's state dict, and the state dict without some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nxd_ckpt.formats.tensors import Path
from nxd_ckpt.live.state import MASTER_WEIGHTS
from nxd_ckpt.live.zero1 import EXPERT_KEYS, MASTERS

PARAM_GROUPS = "optim/param_groups"
"""Name of the options of all param groups."""

_SECTIONS = ("state", "base_state", MASTERS)
_SHAPES = "shape_info"


def state_entries(tree: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield the path and the global name of every entry for one parameter, or for the optimizer as a whole.

    ``names`` are the parameters' names, in order.
    """
    for section in _SECTIONS:
        name_by_index = _name_by_index(tree, section, names)
        for key, value in tree.get(section, {}).items():
            if isinstance(key, str):
                yield (section, key), f"optim/state/{key}"
            elif section == MASTERS:
                yield (section, key), f"optim/{name_by_index.get(key, f'#{key}')}/{MASTER_WEIGHTS}"
            else:
                name = name_by_index.get(key, f"#{key}")
                yield from (((section, key, entry), f"optim/{name}/{entry}") for entry in value)


def without(
    tree: Mapping[str, Any], names: Sequence[str], ignores: Callable[[str], bool], covers: Callable[[str], bool]
) -> dict[str, Any]:
    """Return the state dict without the entries whose names ``ignores`` accepts; ``tree`` itself does not change.

    A parameter's shape is left out if ``covers`` accepts the parameter's name. A param group's options are left out if
    that is true of all its parameters, or if `PARAM_GROUPS` is ignored.
    """
    left = {**tree, **{section: dict(tree[section]) for section in (*_SECTIONS, _SHAPES) if section in tree}}
    for path, name in state_entries(tree, names):
        if ignores(name):
            _remove(left, path)
    for index, name in _name_by_index(tree, _SHAPES, names).items():
        if index in tree.get(_SHAPES, {}) and covers(f"optim/{name}"):
            del left[_SHAPES][index]
    left["param_groups"] = list(_groups(tree, names, ignores(PARAM_GROUPS), covers))
    return left


def parameter_sections(tree: Mapping[str, Any]) -> list[str]:
    """Return the keys of the state dict under which entries are by the parameters' indices."""
    return [section for section in (*_SECTIONS, _SHAPES) if section in tree]


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
    if not entry:
        del left[section][index]
        return
    rest = {key: value for key, value in left[section][index].items() if key != entry[0]}
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
