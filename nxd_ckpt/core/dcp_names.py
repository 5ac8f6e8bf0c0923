"""The names of torch DCP for a tag's tensors and values, and back: one place for both directions. Pure.

DCP keeps a nested state dict flat, keys joined by dots, and beside each name the path of keys that it came from. Model
and optimizer are in it as ``torch.distributed.checkpoint.state_dict`` gives them (``get_model_state_dict``,
``get_optimizer_state_dict``), each under a key, as OLMo-core has them:

=========================  =====================================  ===================================================
of a tag                   DCP                                    with flattened optimizer states
=========================  =====================================  ===================================================
model/embed.weight         model.embed.weight                     model.embed.weight
optim/embed.weight/step    optim.state.embed.weight.step          optim.state.embed.weight.step
param group 0's lr         optim.param_groups.0.lr                optim.param_groups.embed.weight.lr, one a parameter
names in param group 0     optim.param_groups.0.params            that each has options
=========================  =====================================  ===================================================
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from operator import eq
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.entries import checked
from nxd_ckpt.errors import InvalidArgument, KeyMismatch, MalformedFile

PARAMS = "params"
MASTER_WEIGHTS = "master_weights"
SCHEDULER, USER_CONTENT = "scheduler", "user_content"
"""Keys of a state dict under which these parts of a tag are."""

_STATE, _GROUPS = "state", "param_groups"
_EXTRA_STATE = "_extra_state"
"""What names of a module's extra state end in, which may be a dict."""

Path = tuple[Any, ...]
"""The keys that lead to an entry in the nested state dict."""


@dataclass(frozen=True)
class DcpEntry:
    """The flat name of something in a state dict, and the keys that lead to it."""

    name: str
    path: Path

    @staticmethod
    def at(path: Path) -> DcpEntry:
        return DcpEntry(".".join(map(str, path)), path)


class DcpPart(Enum):
    """What an entry is of: the model, a parameter's state in the optimizer, an option of its param groups, ..."""

    MODEL = auto()
    STATE = auto()
    OPTION = auto()
    SCHEDULER = auto()
    CONTENT = auto()


@dataclass(frozen=True)
class DcpNames:
    """Under which keys model, optimizer and user content are; "" where they are the state dict itself.

    ``flat_optimizer`` is how ``get_optimizer_state_dict`` names states with ``flatten_optimizer_state_dict``. It and
    ``content`` matter for what is written only.
    """

    model: str = "model"
    optim: str = "optim"
    flat_optimizer: bool = False
    content: str = USER_CONTENT

    def __post_init__(self) -> None:
        if self.model == self.optim:
            raise InvalidArgument(f"model_key and optim_key must differ, found {self.model!r} for both")

    def to_json(self) -> bytes:
        """As a document of a tag that DCP wrote: docs/format.md."""
        return json.dumps({"format_version": 1, "kind": "dcp_names", **asdict(self)}).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> DcpNames:
        """Raises MalformedFile, naming ``where``, for what :meth:`to_json` did not write."""
        fields = document.small(data, where)
        try:
            if (fields.pop("format_version"), fields.pop("kind")) != (1, "dcp_names"):
                raise ValueError("another kind or format_version")
            model, optim, content = (checked(str, fields[key]) for key in ("model", "optim", "content"))
            return DcpNames(model, optim, checked(bool, fields["flat_optimizer"]), content)
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedFile(f"{where}: not the names of torch DCP that this version knows ({error})") from error

    def entry(self, path: Path) -> DcpEntry:
        """What DCP calls what a tag has at ``("model", "embed.weight")``, ``("optim", "embed.weight", "exp_avg")``."""
        part, *keys = path
        if part == "model":
            return DcpEntry.at((*_head(self.model), *keys))
        state = (".".join(map(str, (_STATE, *keys))),) if self.flat_optimizer else (_STATE, *keys)
        return DcpEntry.at((*_head(self.optim), *state))

    def group_entries(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[DcpEntry, Any]]:
        """What DCP keeps of param groups, whose "params" are names."""
        head = _head(self.optim)
        if not self.flat_optimizer:
            return [
                (DcpEntry.at((*head, _GROUPS, number, option)), value)
                for number, group in enumerate(groups)
                for option, value in group.items()
            ]
        return [
            (DcpEntry.at((*head, f"{_GROUPS}.{parameter}.{option}")), value)
            for group in groups
            for parameter in group[PARAMS]
            for option, value in group.items()
            if option != PARAMS
        ]

    def part_of(self, name: str, path: Path | None, is_tensor: bool) -> DcpPart:
        """Which part of a tag DCP's ``name`` is, to which the keys ``path`` lead, if that is known.

        Where the model is the state dict itself, it is the tensors in that, and extra state; what is below a key of its
        own (``train_state.step``) is user content, also where it is a tensor.
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
        of_extra_state = any(str(key).endswith(_EXTRA_STATE) for key in path or ())
        of_model = is_tensor if path is None else of_extra_state or (is_tensor and len(path) == 1)
        return DcpPart.MODEL if of_model else DcpPart.CONTENT

    def tag_name(self, name: str, part: DcpPart) -> str:
        """What a tag calls a tensor of the model, or of the optimizer's state."""
        if part is DcpPart.MODEL:
            return f"model/{self.model_name(name)}"
        return "/".join(("optim", *(self.state_key(name) or ())))

    def model_name(self, name: str) -> str | None:
        """What DCP's ``name``, not one of the optimizer's, is in the model; None for what is not there."""
        return _after(self.model, name) if self.model else name

    def model_path(self, path: Path) -> Path:
        """(name in the model, keys below it) of the keys that lead to it: only extra state has any below."""
        keys = path[len(_head(self.model)) :]
        ends = (number for number, key in enumerate(keys, 1) if str(key).endswith(_EXTRA_STATE))
        end = next(ends, len(keys))
        return (".".join(map(str, keys[:end])), *keys[end:])

    def state_key(self, name: str) -> tuple[str, str] | None:
        """(parameter, key) of an optimizer's state that DCP's ``name`` is; None for anything else."""
        rest = self._of_optimizer(_STATE, name)
        parameter, _, key = (rest or "").rpartition(".")
        return (parameter, key) if parameter else None

    def option_key(self, name: str) -> tuple[str, str] | None:
        """(number of the param group, or a parameter, option) that DCP's ``name`` is; None for anything else."""
        rest = self._of_optimizer(_GROUPS, name)
        owner, _, option = (rest or "").rpartition(".")
        return (owner, option) if owner else None

    def _of_optimizer(self, section: str, name: str) -> str | None:
        return _after(".".join((*_head(self.optim), section)), name)


def groups_of(
    options: Iterable[tuple[str, str, Any]], parameters: Sequence[str], same: Callable[[Any, Any], bool] = eq
) -> list[dict[str, Any]]:
    """Param groups, "params" being names, of (owner, option, value) as :meth:`DcpNames.option_key` has the first two.

    Flattened, each parameter has options of its own: those that are the ``same`` are a group. ``parameters`` are all
    that have state; without any options they are one group.

    Raises:
        KeyMismatch: parameters with state are in no group, or in two.
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
            f"the optimizer has these parameters in no param group, or in several: {', '.join(wrong[:5])}; each "
            "must be in one"
        )
    return groups


class _Node(dict[Any, Any]):
    """A container that paths lead through, and no value."""


def nested(entries: Iterable[tuple[Path, Any]]) -> Any:
    """The state dict that these paths lead through, or what is in it: keys that count from 0 on are a list's.

    Raises KeyMismatch where two paths are the same, or one ends in the middle of another.
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
    counts = [type(key) is int and key == number for number, key in enumerate(settled)]
    return list(settled.values()) if counts and all(counts) else settled


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
    return (key,) if key else ()


def _after(prefix: str, name: str) -> str | None:
    return name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else None
