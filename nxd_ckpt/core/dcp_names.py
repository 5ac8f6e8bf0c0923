"""Torch DCP's names for a tag's tensors and values, in both directions. Pure.

DCP flattens a nested state dict to keys joined by dots, and keeps the path of keys for each name. Model and optimizer
are in the form of ``torch.distributed.checkpoint.state_dict`` (``get_model_state_dict``, ``get_optimizer_state_dict``),
each under a key, as in OLMo-core:

=========================  =====================================  ===================================================
of a tag                   DCP                                    with flattened optimizer states
=========================  =====================================  ===================================================
model/embed.weight         model.embed.weight                     model.embed.weight
optim/embed.weight/step    optim.state.embed.weight.step          optim.state.embed.weight.step
param group 0's lr         optim.param_groups.0.lr                optim.param_groups.embed.weight.lr, one a parameter
names in param group 0     optim.param_groups.0.params            that each has options
=========================  =====================================  ===================================================

The keys of a state dict are recognised by what is under them. The optimizer is what torch's
``get_optimizer_state_dict`` gives: beside ``param_groups`` a ``state`` whose keys are parameters' names. The model is
what has tensors of these names. An ``optimizer.state_dict()``, whose keys are numbers, belongs to no names and stays.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from functools import cached_property
from operator import eq
from typing import Any, NamedTuple

from nxd_ckpt.core import document
from nxd_ckpt.core.limits import checked, checked_name, integers
from nxd_ckpt.core.parameter_names import is_extra_state
from nxd_ckpt.errors import InvalidArgument, KeyMismatch, MalformedFile

PARAMS = "params"
MASTER_WEIGHTS = "master_weights"
SCHEDULER, USER_CONTENT = "scheduler", "user_content"
"""Keys of these parts of a tag in a state dict."""

_STATE, _GROUPS = "state", "param_groups"

Path = tuple[Any, ...]
"""Keys that lead to an entry of the nested state dict."""


@dataclass(frozen=True)
class DcpEntry:
    """An entry of a state dict, by the keys that lead to it."""

    path: Path

    @cached_property
    def name(self) -> str:
        """Its flat name."""
        return ".".join(map(str, self.path))


class DcpPart(Enum):
    """The part of a tag that an entry belongs to."""

    MODEL = auto()
    STATE = auto()
    OPTION = auto()
    SCHEDULER = auto()
    CONTENT = auto()


@dataclass(frozen=True)
class DcpNames:
    """Keys of model, optimizer and user content; "" for the state dict itself.

    ``flat_optimizer`` uses the names of ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict``. It and
    ``content`` apply to writing only. With ``is_whole_state`` every tensor outside the optimizer is a tensor of the
    model, by its whole name in the state dict; ``model`` is "" then.
    """

    model: str = "model"
    optim: str = "optim"
    flat_optimizer: bool = False
    content: str = USER_CONTENT
    is_whole_state: bool = False

    def __post_init__(self) -> None:
        if self.model == self.optim:
            raise InvalidArgument(f"model_key and optim_key must differ, found {self.model!r} for both")

    def to_json(self) -> bytes:
        """Return the document for a tag that DCP wrote (docs/format.md)."""
        fields = asdict(self)
        if not self.is_whole_state:
            del fields["is_whole_state"]
        return json.dumps({"format_version": 1, "kind": "dcp_names", **fields}).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> DcpNames:
        """Parse the document. Raises MalformedFile, naming ``where``, for anything else."""
        fields = document.small(data, where)
        try:
            if (fields.pop("format_version"), fields.pop("kind")) != (1, "dcp_names"):
                raise ValueError("another kind or format_version")
            model, optim, content = (checked(str, fields[key]) for key in ("model", "optim", "content"))
            is_whole = checked(bool, fields.get("is_whole_state", False))
            return DcpNames(model, optim, checked(bool, fields["flat_optimizer"]), content, is_whole)
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedFile(f"{where}: not a document of torch DCP names of this version ({error})") from error

    def entry(self, path: Path) -> DcpEntry:
        """Return DCP's entry for a path in a tag, such as ``("optim", "embed.weight", "exp_avg")``."""
        part, *keys = path
        if part == "model":
            return DcpEntry((*_head(self.model), *keys))
        state = (".".join(map(str, (_STATE, *keys[:2]))), *keys[2:]) if self.flat_optimizer else (_STATE, *keys)
        return DcpEntry((*_head(self.optim), *state))

    def group_entries(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[DcpEntry, Any]]:
        """Return DCP's entries for param groups, whose "params" are names."""
        head = _head(self.optim)
        if not self.flat_optimizer:
            return [
                (DcpEntry((*head, _GROUPS, number, option)), value)
                for number, group in enumerate(groups)
                for option, value in group.items()
            ]
        return [
            (DcpEntry((*head, f"{_GROUPS}.{parameter}.{option}")), value)
            for group in groups
            for parameter in group[PARAMS]
            for option, value in group.items()
            if option != PARAMS
        ]

    def part_of(self, name: str, path: Path | None, is_tensor: bool) -> DcpPart:
        """Return the part of a tag that DCP's ``name`` is; ``path`` is the keys that lead to it, if known.

        If the model is the state dict itself, it is all tensors at its top level, and extra state. Anything nested
        (``train_state.step``) is user content, even a tensor.
        """
        if self.state_key(name) is not None:
            return DcpPart.STATE
        if self.option_key(name) is not None:
            return DcpPart.OPTION
        root = name.partition(".")[0]
        if root in (SCHEDULER, USER_CONTENT):
            return DcpPart.SCHEDULER if root == SCHEDULER else DcpPart.CONTENT
        if self.model:
            return DcpPart.CONTENT if self.model_name(name) is None else DcpPart.MODEL
        of_extra_state = any(map(is_extra_state, path or ()))
        of_root = path is None or len(path) == 1 or self.is_whole_state
        of_model = of_extra_state or (is_tensor and of_root)
        return DcpPart.MODEL if of_model else DcpPart.CONTENT

    def tag_name(self, name: str, part: DcpPart) -> str:
        """Return a tag's name for a tensor of the model or of the optimizer's state."""
        if part is DcpPart.MODEL:
            return f"model/{self.model_name(name)}"
        return "/".join(("optim", *(self.state_key(name) or ())))

    def model_name(self, name: str) -> str | None:
        """Return the model's name for DCP's ``name``, which is not one of the optimizer.

        None if it is not the model's.
        """
        return _after(self.model, name) if self.model else name

    def model_path(self, path: Path) -> Path:
        """Return (name in the model, keys below it) for a path; only extra state has keys below."""
        keys = _below(self.model, path)
        ends = (number for number, key in enumerate(keys, 1) if is_extra_state(key))
        end = next(ends, len(keys))
        return (".".join(map(str, keys[:end])), *keys[end:])

    def state_key(self, name: str) -> tuple[str, str] | None:
        """Return (parameter, key) if DCP's ``name`` is an optimizer's state; None for anything else."""
        return self._of_optimizer(_STATE, name)

    def keys_of_state(self, parameter: str, path: Path) -> Path:
        """Return the keys in the state of a parameter, from those that lead to an entry of it.

        DCP's names do not tell where a parameter's name ends, and in flat form neither do the first keys.
        """
        above = ".".join((*_head(self.optim), _STATE, parameter))
        heads = (".".join(map(str, path[: number + 1])) for number in range(len(path)))
        number, head = next((number, head) for number, head in enumerate(heads) if f"{head}.".startswith(f"{above}."))
        return (*filter(None, head.removeprefix(above).split(".")), *path[number + 1 :])

    def option_key(self, name: str) -> tuple[str, str] | None:
        """Return (param group's number or parameter, option) if DCP's ``name`` is an option; None for anything else."""
        return self._of_optimizer(_GROUPS, name)

    def _of_optimizer(self, section: str, name: str) -> tuple[str, str] | None:
        owner, _, key = (_after(".".join((*_head(self.optim), section)), name) or "").rpartition(".")
        return (owner, key) if owner else None


def groups_of(
    options: Iterable[tuple[str, str, Any]], parameters: Sequence[str], same: Callable[[Any, Any], bool] = eq
) -> list[dict[str, Any]]:
    """Return param groups, with names as "params", from (owner, option, value), the first two from `option_key`.

    In flat form each parameter has its own options, and parameters whose options are the ``same`` form a group.
    ``parameters`` are all that have state; without any options they form one group.

    Raises:
        KeyMismatch: a parameter with state is in no group, or in several.
    """
    by_owner: dict[str, dict[str, Any]] = {}
    for owner, option, value in options:
        by_owner.setdefault(owner, {})[option] = value
    if all(owner.isdecimal() and PARAMS in values for owner, values in by_owner.items()):
        groups = [by_owner[owner] for owner in sorted(by_owner, key=int)]
    else:
        groups = _joined(by_owner, same)
    if not groups and parameters:
        groups = [{PARAMS: list(parameters)}]
    listed = Counter(name for group in groups for name in group[PARAMS])
    wrong = [name for name in {**listed, **dict.fromkeys(parameters)} if listed[name] != 1]
    if wrong:
        raise KeyMismatch(
            f"the optimizer has these parameters in no param group, or in several: {', '.join(wrong[:5])}; each must "
            "be in exactly one group"
        )
    return groups


class _Node(dict[Any, Any]):
    """An inner node of a nested state dict, as opposed to a dict that is a value."""


def nested(entries: Iterable[tuple[Path, Any]]) -> Any:
    """Return the nested state dict with these entries; keys 0, 1, 2, ... of one node, in any order, become a list.

    Raises KeyMismatch if two paths are equal, or one is the start of another.
    """
    root = _Node()
    for path, value in entries:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
            if not isinstance(node, _Node):
                raise KeyMismatch(f"{'.'.join(map(str, path))}: {key!r} is both a value and a dict")
        if path[-1] in node:
            raise KeyMismatch(f"{'.'.join(map(str, path))} appears twice")
        node[path[-1]] = value
    return _settled(root)


def _settled(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    settled = {key: _settled(child) for key, child in node.items()}
    places = range(len(settled))
    is_list = settled and {*map(type, settled)} == {int} and settled.keys() == {*places}
    return [settled[place] for place in places] if is_list else settled


def _joined(by_owner: Mapping[str, dict[str, Any]], same: Callable[[Any, Any], bool]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for parameter, options in by_owner.items():
        group = next((group for group in groups if same(_without_params(group), options)), None)
        if group is None:
            groups.append(group := {**options, PARAMS: []})
        group[PARAMS].append(parameter)
    return groups


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in group.items() if option != PARAMS}


def _head(key: str) -> tuple[str, ...]:
    """Return the keys that lead to ``key``: "app.model" is "model" under "app"."""
    return tuple(key.split(".")) if key else ()


def _below(key: str, path: Path) -> Path:
    """Return the rest of ``path`` after the keys that lead to ``key``."""
    for number in range(len(path)):
        if ".".join(map(str, path[:number])) == key:
            return path[number:]
    joined = ".".join(map(str, path))
    return (_after(key, joined) or joined,)


def _after(prefix: str, name: str) -> str | None:
    return name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else None


class DcpChunk(NamedTuple):
    """A chunk of a tensor, or a plain value: ``nbytes`` from byte ``start`` of ``file``, relative to the directory.

    ``path`` is the keys that lead to it in the state dict. ``dtype`` is torch's name, None for a value. The chunk has
    ``size`` and begins at ``offset`` in the tensor of ``shape``, all in elements.
    """

    path: tuple[str | int, ...]
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    file: str = ""
    start: int = 0
    nbytes: int = 0

    @property
    def name(self) -> str:
        """DCP's fully qualified name."""
        return ".".join(map(str, self.path))

    @staticmethod
    def from_json(fields: list[Any]) -> DcpChunk:
        """Parse a chunk's JSON, its fields in order. Raises TypeError or ValueError if they are invalid."""
        path, dtype, shape, offset, size, file, *place = fields
        shape, offset, size = (tuple(integers(numbers)) for numbers in (shape, offset, size))
        return DcpChunk(tuple(path), dtype, shape, offset, size, checked_name(file), *integers(place, 2))


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
