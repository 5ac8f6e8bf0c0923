"""An optimizer over tensors that are not the model's: their values are state."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import load_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import DtypeMismatch, OptimizerMismatch
from tests.training.imitations import WithMasters
from tests.training.registry import Inner, step


def _made(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Inner(torch.nn.Linear(6, 3))
    return model, WithMasters(model.parameters())


def _equal(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("names", [None, [["layers.0.weight", "layers.0.bias"]]], ids=["unnamed", "named"])
def test_clones_come_back_with_the_model(tmp_path: Path, names: Any) -> None:
    """With and without names, of a module and of its state dict, on which the optimizer's state does not depend."""
    model, optimizer = _made(0)
    step(model, optimizer)
    for saved, passed in (("module", model), ("dict", model.state_dict())):
        save_checkpoint(tmp_path, saved, passed, optimizer, param_names=names)
        other, other_optimizer = _made(1)
        load_checkpoint(tmp_path, saved, other, other_optimizer, param_names=names)
        assert _equal(optimizer.masters, other_optimizer.masters)
    close_checkpointers()


def test_parameters_of_the_model_are_saved_once(tmp_path: Path) -> None:
    """A module's, those of its state dict, and those of an optimizer that is saved alone."""
    model, _ = _made(0)
    plain = torch.optim.AdamW(model.parameters())
    for tag, passed in (("module", model), ("dict", model.state_dict()), ("alone", None)):
        save_checkpoint(tmp_path, tag, passed, plain)
        saved = torch.load(tmp_path / tag / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
        assert {} == saved["state"]
    close_checkpointers()


def test_clones_without_saved_values_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of theirs was saved beside another model: the load says so, and the next step would overwrite it."""
    model, optimizer = _made(0)
    save_checkpoint(tmp_path, "alone", None, optimizer)
    save_checkpoint(tmp_path, "model", model)
    other, other_optimizer = _made(1)
    load_checkpoint(tmp_path, "model", other)
    with caplog.at_level(logging.WARNING, "nxd_ckpt"):
        load_checkpoint(tmp_path, "alone", None, other_optimizer)
    assert [] == caplog.messages
    save_checkpoint(
        tmp_path, "both", model, torch.optim.AdamW(optimizer.masters, lr=0.01), ignore_keys=["optim/*value"]
    )
    with caplog.at_level(logging.WARNING, "nxd_ckpt"):
        load_checkpoint(tmp_path, "both", other, other_optimizer)
    (message,) = caplog.messages
    assert "does not hold the values of its parameters #0, #1, which are not the model's" in message
    close_checkpointers()


def test_what_cannot_take_the_values_is_refused(tmp_path: Path) -> None:
    """An optimizer over the model's own parameters, and clones of another dtype; nothing changes."""
    model, optimizer = _made(0)
    save_checkpoint(tmp_path, "t", model, optimizer)
    other, other_optimizer = _made(1)
    before = other.layers[0].weight.detach().clone()
    with pytest.raises(OptimizerMismatch, match=r"its parameter was not the model's when it was saved"):
        load_checkpoint(tmp_path, "t", other, torch.optim.AdamW(other.parameters()))
    halves = torch.optim.AdamW([one.detach().half() for one in other_optimizer.masters])
    with pytest.raises(DtypeMismatch, match=r"optim/#0/nxd_ckpt_value: saved as float32, the live one is float16"):
        load_checkpoint(tmp_path, "t", other, halves)
    assert torch.equal(before, other.layers[0].weight)
    close_checkpointers()
