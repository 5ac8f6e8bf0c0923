"""A torch DCP directory with a model and an optimizer in it, as a tag that a single rank saved.

``torch.distributed.checkpoint.save`` writes such directories, and so does OLMo-core's ``save_model_and_optim_state``.
What belongs neither to the model nor to the optimizer is user content, except for what is under "scheduler".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.core.dcp_names import MASTER_WEIGHTS, PARAMS, SCHEDULER, USER_CONTENT, DcpNames, Path, groups_of, nested
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import KeyMismatch, PartNotFound
from nxd_ckpt.formats.tensors import by_digest
from nxd_ckpt.layout.dcp_tensors import DcpTensors
from nxd_ckpt.layout.files import TagFiles
from nxd_ckpt.layout.state_dicts import reading
from nxd_ckpt.storage.base import Storage


class DcpDirectory:
    """See TagLayout. The directory ``folder`` of ``storage``; raises as DcpTensors."""

    def __init__(self, storage: Storage, folder: str, names: DcpNames) -> None:
        self.files = TagFiles(storage, folder)
        self._held = DcpTensors(self.files)
        self._model: dict[str, dict[Path, str]] = {}  # entries by name in the model, and by the keys below that
        self._states: dict[str, dict[str, str]] = {}  # entries by parameter and key
        self._options: list[tuple[str, str, str]] = []  # owner, option, entry
        self._scheduler: list[str] = []
        self._content: list[str] = []
        for name in self._held.names:
            self._sort_in(name, names)

    def _sort_in(self, name: str, names: DcpNames) -> None:
        state, option, parameter = names.state_key(name), names.option_key(name), names.model_name(name)
        if state is not None:
            self._states.setdefault(state[0], {})[state[1]] = name
        elif option is not None:
            self._options.append((*option, name))
        elif name.partition(".")[0] in (SCHEDULER, USER_CONTENT):
            (self._scheduler if name.startswith(SCHEDULER) else self._content).append(name)
        elif parameter is None:
            self._content.append(name)
        else:
            parameter, *below = names.model_path(self._held.path(name))
            if names.model or below or self._held.form(name) is not None:
                self._model.setdefault(parameter, {})[tuple(below)] = name
            else:
                self._content.append(name)

    def topology(self) -> Topology:
        return Topology()

    def parts(self) -> Parts:
        return Parts(
            model=bool(self._model),
            optimizer="zero1_full" if self._states or self._options else None,
            scheduler=bool(self._scheduler),
            user_content=bool(self._content),
            master_weights=any(MASTER_WEIGHTS in keys for keys in self._states.values()),
        )

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        entries = (
            ((parameter, *below), self._held.entry(name))
            for parameter, held in self._model.items()
            for below, name in held.items()
        )
        return dict(nested(entries))

    @reading
    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        states: dict[int, dict[str, Any]] = {}
        masters: dict[int, Any] = {}
        names = self.optimizer_names(at)
        for index, parameter in enumerate(names):
            entries = {key: self._held.entry(name) for key, name in self._states.get(parameter, {}).items()}
            if MASTER_WEIGHTS in entries:
                masters[index] = entries.pop(MASTER_WEIGHTS)
            if entries:
                states[index] = entries
        tree: dict[str, Any] = {
            "state": {},
            "param_groups": _numbered(self._groups),
            "base_state": states,
            "shape_info": {index: torch.Size(self._shape(parameter)) for index, parameter in enumerate(names)},
        }
        return tree | ({"sharded_master_weights": masters} if masters else {})

    @reading
    def optimizer_names(self, at: Coordinates) -> list[str]:
        return [name for group in self._groups for name in group[PARAMS]]

    @reading
    def scheduler(self) -> Any:
        if not self._scheduler:
            raise PartNotFound(f"{self._held.where} has nothing under {SCHEDULER!r}")
        return self._nested(self._scheduler)[SCHEDULER]

    @reading
    def user_content(self) -> Any:
        content = self._nested(self._content)
        saved = content.pop(USER_CONTENT, {})
        if content and isinstance(saved, dict):
            return {**content, **saved}
        return {**content, USER_CONTENT: saved} if content else saved

    def _nested(self, names: Sequence[str]) -> Any:
        return nested((self._held.path(name), self._held.entry(name)) for name in names)

    @cached_property
    def _groups(self) -> list[dict[str, Any]]:
        options = ((owner, option, self._held.entry(name)) for owner, option, name in self._options)
        try:
            return groups_of(options, list(self._states), lambda one, other: by_digest(one) == by_digest(other))
        except KeyMismatch as error:
            raise KeyMismatch(f"{self._held.where}: {error}") from None

    def _shape(self, parameter: str) -> tuple[int, ...]:
        """The whole shape of a parameter: as the model has it, else as its largest entry."""
        for names in (self._model.get(parameter, {}).values(), self._states.get(parameter, {}).values()):
            forms = [form for form in map(self._held.form, names) if form is not None]
            if forms:
                return max((form.shape for form in forms), key=len)
        return ()


def _numbered(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups with the indices of their parameters in place of names."""
    numbered, begin = [], 0
    for group in groups:
        end = begin + len(group[PARAMS])
        numbered.append({**group, PARAMS: list(range(begin, end))})
        begin = end
    return numbered
