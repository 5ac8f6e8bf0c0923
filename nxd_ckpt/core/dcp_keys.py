"""Under which keys of a state dict that torch DCP saves or loads the model and the optimizer are. Pure.

The optimizer is what torch's ``get_optimizer_state_dict`` gives: beside ``param_groups`` a ``state`` whose keys are
parameters' names. The model is what has tensors of these names. An ``optimizer.state_dict()``, whose keys are numbers,
belongs to no names and stays what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nxd_ckpt.core.dcp_names import DcpNames, DcpPart, Path

_STATE, _GROUPS = "state", "param_groups"
_USUAL = ("model", "", "model_state_dict", "model_state")
"""Keys of the model where nothing shows which it is; "" where there are tensors in the state dict itself."""


class DcpItem(NamedTuple):
    """An entry of a state dict by its flat ``name``; ``path`` are the keys to it, ``nbytes`` is None for a value."""

    name: str
    path: Path
    nbytes: int | None


def names_of(items: Sequence[DcpItem], most_beside: int) -> DcpNames:
    """The keys of model and optimizer.

    Tensors of neither, if they have more than ``most_beside`` bytes, are a part of the model, by their whole names.
    """
    keys = {item.name for item in items}
    optimizers = _optimizer_states(items)
    optim, trained = next(iter(optimizers.items())) if len(optimizers) == 1 else (_unused("optim", keys), set())
    tensors = [item for item in items if item.nbytes is not None]
    model = _model_key(tensors, optim, trained)
    names = DcpNames(_unused("model", keys) if model is None else model, optim)
    beside = sum(item.nbytes or 0 for item in tensors if names.part_of(item.name, item.path, True) is DcpPart.CONTENT)
    return DcpNames("", optim, is_whole_state=True) if beside > most_beside else names


def _optimizer_states(items: Iterable[DcpItem]) -> dict[str, set[str]]:
    """By the key of each optimizer: the names of the parameters that have state, or options of their own."""
    parameters: dict[str, dict[str, set[str]]] = {_STATE: {}, _GROUPS: {}}
    for item in items:
        path = list(map(str, item.path))
        for depth, key in enumerate(path):
            section, _, rest = key.partition(".")
            below = path[depth + 1 :]
            if section in parameters and (rest or len(below) > 1):
                parameter = rest.rpartition(".")[0] if rest else ".".join(below[:-1])
                parameters[section].setdefault(".".join(path[:depth]), set()).add(parameter)
                break
    trained_by_key = {}
    for key, owners in parameters[_GROUPS].items():
        trained = parameters[_STATE].get(key, set()) | {owner for owner in owners if not owner.isdecimal()}
        if trained and not any(parameter.isdecimal() for parameter in trained):
            trained_by_key[key] = trained
    return trained_by_key


def _model_key(tensors: Sequence[DcpItem], optim: str, trained: set[str]) -> str | None:
    hits: Counter[str] = Counter()
    for item in tensors:
        for depth in range(len(item.path)):
            if ".".join(map(str, item.path[depth:])) in trained:
                hits[".".join(map(str, item.path[:depth]))] += 1
    beside = optim.rpartition(".")[0]

    def rank(key: str) -> tuple[int, bool, bool, bool]:
        above, _, last = key.rpartition(".")
        return hits[key], above == beside, last in _USUAL, "model" in last

    if hits:
        return max(hits, key=rank)
    first = dict.fromkeys(str(item.path[0]) if len(item.path) > 1 else "" for item in tensors)
    return next((key for key in _USUAL if key in first), None)


def _unused(key: str, names: Iterable[str]) -> str:
    """The key, or one like it, that no name begins with."""
    while any(name == key or name.startswith(f"{key}.") for name in names):
        key += "_"
    return key
