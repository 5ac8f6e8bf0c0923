"""ZeRO-1 shards are copies of weights: whatever of model and optimizer is left out, the next step keeps what is loaded,
and what stays."""

from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import load_checkpoint, save_checkpoint
from nxd_ckpt.errors import OptimizerMismatch
from tests.filters.named import Named
from tests.live.doubles import ShardedOptimizer

SAVED = {"a.weight": 1.0, "b.weight": 2.0}
LIVE = dict.fromkeys(SAVED, 77.0)


def sharded(model: torch.nn.Module, **options: Any) -> Any:
    """ZeRO-1 of one rank, whose steps put its shards into the weights as they are."""
    return ShardedOptimizer(list(model.parameters()), lr=0.0, weight_decay=0.0, **options)


def after_a_step(model: Any, optimizer: Any) -> dict[str, float]:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {name: parameter.item() for name, parameter in model.state_dict().items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tag with master weights."""
    directory = tmp_path_factory.mktemp("run")
    model = Named(SAVED)
    save_checkpoint(directory, "t", model, sharded(model, save_master_weights=True), durable=False)
    nxd_ckpt.close_checkpointers()
    return directory


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ignore_keys": ["model/a.weight"]}, {**SAVED, "a.weight": 77.0}),
        ({"ignore_keys": ["model/*"]}, LIVE),
        ({"ignore_keys": ["*/a.weight", "optim/b.weight/master_weights"]}, {**SAVED, "a.weight": 77.0}),
        ({"ignore_keys": ["optim/*"]}, SAVED),
        ({"ignore_keys": ["model/b.weight"], "load_weights_only": True}, {**SAVED, "b.weight": 77.0}),
    ],
)
def test_the_next_step_keeps_what_was_loaded_and_what_was_left_out(
    run: Path, options: dict[str, Any], expected: dict[str, float]
) -> None:
    """Saved master weights of a weight that is left out are no longer its copies: they are left out as well."""
    model = Named(LIVE)
    optimizer = sharded(model, save_master_weights=True)
    load_checkpoint(run, "t", model, optimizer, **options)
    assert expected == model.held()
    assert expected == after_a_step(model, optimizer)


def test_shards_follow_tied_weights_by_any_of_their_names(tmp_path: Path) -> None:
    """The tag may hold another of the names than the one that the optimizer's parameter goes by."""
    save_checkpoint(tmp_path, "t", {"b.weight": torch.tensor([2.0])}, durable=False)
    model = Named({"a.weight": 77.0, "b.weight": 77.0})
    model.get_submodule("b").register_parameter("weight", model.named["a.weight"])
    optimizer = sharded(model)
    load_checkpoint(tmp_path, "t", model, optimizer, load_weights_only=True)
    assert {"a.weight": 2.0, "b.weight": 2.0} == after_a_step(model, optimizer)


@pytest.mark.parametrize("options", [{"load_weights_only": True}, {"ignore_keys": ["optim/*/master_weights"]}])
def test_shards_of_parameters_without_names_follow_the_weights(run: Path, options: dict[str, Any]) -> None:
    """A state dict does not tell which of the optimizer's parameters its tensors are."""
    model = Named(LIVE)
    optimizer = sharded(model)
    load_checkpoint(run, "t", dict(model.state_dict()), optimizer, **options)
    assert SAVED == after_a_step(model, optimizer)


def test_weights_without_names_cannot_be_left_out(run: Path) -> None:
    """Which of the shards are copies of them is not known; nothing is changed."""
    model = Named(LIVE)
    optimizer = sharded(model)
    with pytest.raises(OptimizerMismatch, match=r"they decide whose weights are left out; pass .* param_names="):
        load_checkpoint(run, "t", dict(model.state_dict()), optimizer, ignore_keys=["model/a.weight"])
    assert LIVE == after_a_step(model, optimizer)
