"""Filter of a save: the state without the names in ``ignore_keys``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from nxd_ckpt.core.filtering import unmatched
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.tensors import Path, iter_tensors
from nxd_ckpt.live.ignoring import RANDOM_STATE, Ignoring
from nxd_ckpt.live.random_state import is_random_state
from nxd_ckpt.live.save_state import SaveState
from nxd_ckpt.live.state import ModelState, State, StateTensor
from nxd_ckpt.live.state_names import PARAM_GROUPS, state_entries, without

logger = logging.getLogger("nxd_ckpt")


def leave_out(state: SaveState, ignoring: Ignoring, topology: Topology) -> SaveState:
    """Return ``state`` without ignored names; copies containers, no tensor.

    A glob that matches nothing is not an error: too much is saved, and nothing is lost. Rank 0 warns, if it has all
    names.

    Raises:
        InvalidArgument, KeyMismatch: a function did not return a list of the names that it received.
    """
    if not ignoring:
        return state
    names = list(_names(state))
    ignoring.choose(names)
    unmatched_globs = unmatched(ignoring.globs, names)
    if unmatched_globs and topology.rank == 0 and topology.pp == 1:
        logger.warning("ignore_keys= matches nothing that is saved with %s", listed(unmatched_globs, names))
    model, optimizer = state.model, state.optimizer
    covered = set(filter(ignoring.covers, ("model", "optim", "scheduler", "user_content", "rank_content")))
    model = None if model is None or "model" in covered else _model_without(model, ignoring)
    optimizer = None if "optim" in covered else optimizer
    if optimizer is not None:
        tree = without(optimizer.tree, state.optimizer_names or (), ignoring.ignores, ignoring.covers)
        optimizer = _within(optimizer, tree)
    return replace(
        state,
        model=model,
        optimizer=optimizer,
        optimizer_kind=None if optimizer is None else state.optimizer_kind,
        optimizer_names=None if optimizer is None else state.optimizer_names,
        scheduler=None if "scheduler" in covered else state.scheduler,
        user_content=None if "user_content" in covered else ignoring.pruned("user_content", state.user_content),
        rank_content=None if "rank_content" in covered else ignoring.pruned("rank_content", state.rank_content),
        left_out=sorted(ignoring.globs) or ["what a function chooses"],
    )


def _names(state: SaveState) -> Iterator[str]:
    """Yield all names that a glob may match, as in a load."""
    if state.model is not None:
        yield from (f"model/{name}" for name in state.model.tree)
    if state.optimizer is not None:
        yield PARAM_GROUPS
        yield from (name for _, name in state_entries(state.optimizer.tree, state.optimizer_names or ()))
    if state.scheduler is not None:
        yield "scheduler"
    for part, content in (("user_content", state.user_content), ("rank_content", state.rank_content)):
        if content is not None:
            yield part
            yield from (f"{part}/{key}" for key in (content if isinstance(content, dict) else ()))
    rank_content = state.rank_content
    if isinstance(rank_content, dict) and any(map(is_random_state, rank_content.values())):
        yield RANDOM_STATE


def _model_without(model: ModelState, ignoring: Ignoring) -> ModelState:
    tree = {name: value for name, value in model.tree.items() if not ignoring.ignores_model(name)}

    def specify() -> dict[str, Any]:
        return {name: spec for name, spec in model.parameters.items() if name in tree}

    return replace(model, tree=tree, describe=lambda: _described(model, tree), specify=specify)


def _within(state: State, tree: dict[str, Any]) -> State:
    return replace(state, tree=tree, describe=lambda: _described(state, tree))


def _described(state: State, tree: Mapping[str, Any]) -> dict[Path, StateTensor]:
    return {path: state.tensors[path] for path, _ in iter_tensors(tree, torch.Tensor)}
