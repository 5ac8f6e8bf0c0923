"""Optimizers whose ``state_dict()`` has a form of its own: not torch's ``state`` by index beside ``param_groups``.

Several optimizers in one, wrappers with full-precision weights, and classes that are no ``torch.optim.Optimizer``. What
``state_dict()`` returns is kept as it is, as state of the optimizer as a whole, and a load gives it to the optimizer's
own ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import torch

from nxd_ckpt.core.mesh import Placed
from nxd_ckpt.errors import OptimizerMismatch, UnsupportedState
from nxd_ckpt.formats.optimizer_trees import OWN_FORM
from nxd_ckpt.formats.state import OptimizerForm
from nxd_ckpt.formats.tensors import Path, form_of, iter_tensors, map_tensors
from nxd_ckpt.live.dtensor import is_dtensor, like, placed_of
from nxd_ckpt.live.frozen import LiveState
from nxd_ckpt.live.load_hooks import has_own_state_dict
from nxd_ckpt.live.optimizer_state import (
    AtOnce,
    Keeps,
    LeafSource,
    OptimizerAdapter,
    describe_path,
    flat_parameters,
    keeps_nothing,
    materialise,
)
from nxd_ckpt.live.parameters import own_stride
from nxd_ckpt.live.state_names import if_known
from nxd_ckpt.surroundings import as_called

_ON_MESH = "on_mesh"
"""Key beside it: the paths of its DTensors."""

_NAME = f"optim/state/{OWN_FORM}"


def own_form_of(optimizer: Any) -> Any:
    """Return the optimizer's state dict if it has a form of its own; None if it has torch's."""
    if not has_own_state_dict(optimizer):
        return None
    state = optimizer.state_dict()
    return None if _is_torchs(state) else state


def is_own_form(saved: Mapping[str, Any]) -> bool:
    """Return whether a saved state dict is that of an optimizer with a form of its own."""
    return any(OWN_FORM in group for group in saved["param_groups"])


def _is_torchs(state: Any) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)


class OwnFormOptimizer(OptimizerAdapter):
    """The OptimizerAdapter of an optimizer with a state dict ``state`` of a form of its own."""

    kind = "plain"

    def __init__(self, optimizer: Any, state: Any, names: list[str]) -> None:
        """Raise UnsupportedState for an optimizer that no load could give its state."""
        if not callable(getattr(optimizer, "load_state_dict", None)):
            raise UnsupportedState(
                f"optimizer: {type(optimizer).__name__} has state_dict() and no load_state_dict(), so no load could "
                "give it back; write one"
            )
        self._optimizer = optimizer
        self._state = state
        self._models: dict[Path, torch.Tensor] = {}
        """A live DTensor of equal placement for each DTensor that is loaded, by its path."""
        self.parameter_names: list[str] | None = if_known(names)
        self.stepping: Any = optimizer if hasattr(optimizer, "param_groups") else None

    @property
    def _groups(self) -> Sequence[dict[str, Any]]:
        return getattr(self._optimizer, "param_groups", [])

    def form(self) -> OptimizerForm:
        raise OptimizerMismatch(
            f"optimizer: only {type(self._optimizer).__name__} knows its state_dict(), of a form of its own: load "
            "it on the sizes that it was saved on, with its parameters in the same order"
        )

    def entries(self) -> Iterator[str]:
        yield _NAME

    def live_state(self) -> LiveState:
        on_mesh = [path for path, tensor in iter_tensors(self._state, torch.Tensor) if is_dtensor(tensor)]
        numbers = iter(range(sum(len(group["params"]) for group in self._groups)))
        groups = [
            {**_numbers_in(group), OWN_FORM: True, "params": [next(numbers) for _ in group["params"]]}
            for group in self._groups
        ]
        state = {OWN_FORM: self._state, **({_ON_MESH: on_mesh} if on_mesh else {})}
        return LiveState(
            {"state": state, "param_groups": groups},
            lambda path, tensor: describe_path(path, tensor, None),
            self.parameter_names,
            lambda _, tensor: own_stride(tensor, None),
        )

    @property
    def passes_user_code(self) -> bool:
        return True

    def validate(self, saved: Mapping[str, Any]) -> None:
        if not is_own_form(saved) and saved.get("state", {}).get(OWN_FORM) is None:
            raise OptimizerMismatch(
                "optimizer: the checkpoint holds a state dict in torch's form, that of the live "
                f"{type(self._optimizer).__name__} has a form of its own; build the optimizer as when it was saved"
            )

    def placed(self, saved: Mapping[str, Any], plain: Collection[str] = ()) -> dict[Path, Placed]:
        self._models = self._models_for(saved)
        return {path: placed_of(_NAME, model) for path, model in self._models.items()}

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        if OWN_FORM not in saved["state"]:
            return
        loaded = materialise(saved["state"][OWN_FORM], AtOnce(read), torch.device("cpu"))
        at = {id(tensor): path for path, tensor in iter_tensors(loaded, torch.Tensor)}

        def as_live(tensor: torch.Tensor) -> torch.Tensor:
            model = self._models.get(("state", OWN_FORM, *at[id(tensor)]))
            return tensor if model is None else like(tensor, model)

        with as_called():
            self._optimizer.load_state_dict(_with_tuples(map_tensors(loaded, as_live, torch.Tensor)))
        for parameter, _ in flat_parameters(self._groups):
            parameter.grad = None

    def _models_for(self, saved: Mapping[str, Any]) -> dict[Path, torch.Tensor]:
        """Return a live DTensor of equal placement for each DTensor that was saved, by its path.

        Raises OptimizerMismatch if there is none.
        """
        live = dict(iter_tensors(self._state, torch.Tensor))
        by_shape: dict[tuple[int, ...], torch.Tensor] = {}
        for parameter, _ in flat_parameters(self._groups):
            if is_dtensor(parameter):
                by_shape.setdefault(tuple(parameter.shape), parameter)
        models: dict[Path, torch.Tensor] = {}
        for path in map(tuple, saved["state"].get(_ON_MESH, ())):
            shape = form_of(reduce(getitem, path, saved["state"][OWN_FORM]))[1]
            own = live.get(path)
            model = own if own is not None and is_dtensor(own) and tuple(own.shape) == shape else by_shape.get(shape)
            if model is None:
                raise OptimizerMismatch(
                    f"{_NAME}/{'/'.join(map(str, path))} is a DTensor of shape {shape}, and neither the live "
                    "state_dict() of the optimizer nor its parameters have one like it: take a step before the load"
                )
            at: Path = ("state", OWN_FORM, *path)
            models[at] = model
        return models


def _numbers_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that readers of a tag may show."""
    return {key: value for key, value in group.items() if type(value) in (bool, int, float, str)}


def _with_tuples(tree: Any) -> Any:
    """Return the state dict with ``betas`` as tuples, which files of NxD's form have as lists."""
    if type(tree) in (list, tuple):
        return type(tree)(map(_with_tuples, tree))
    if type(tree) is not dict:
        return tree
    return {key: tuple(value) if key == "betas" else _with_tuples(value) for key, value in tree.items()}
