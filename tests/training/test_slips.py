"""What a person passes by mistake is refused by name, before anything changes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, load_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import IncompatibleState, InvalidArgument, KeyMismatch, OptimizerMismatch, UnsupportedState
from tests.live.doubles import ShardedOptimizer

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
CLASSES: dict[str, dict[str, Any]] = {
    "SGD": SGD, "AdamW": {}, "Adam": {}, "NAdam": {}, "Adamax": {}, "RMSprop": {}, "Adagrad": {}, "Adadelta": {},
    "ASGD": {}, "Rprop": {}, "RAdam": {},
}  # fmt: skip
ALIKE = [{"Adam", "AdamW"}, {"AdamW", "RAdam"}, {"Adam", "RAdam"}]
"""Whose state the other one can go on with, at least in one direction."""


def made(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, name)
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **CLASSES[name])
    return optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()


def held(optimizer: torch.optim.Optimizer) -> str:
    return str(optimizer.state_dict())


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


@pytest.mark.parametrize("saved", CLASSES)
def test_another_class_of_optimizer_is_refused(tmp_path: Path, model: torch.nn.Module, saved: str) -> None:
    """Before anything changes; the same class loads."""
    optimizer = made(saved, model)
    step(model, optimizer)
    save_checkpoint(tmp_path, "t", model, optimizer)
    weights = copy.deepcopy(model.state_dict())
    for live in CLASSES:
        other = made(live, model)
        before = held(other)
        if live == saved:
            load_checkpoint(tmp_path, "t", model, other)
            step(copy.deepcopy(model), other)
        elif {live, saved} not in ALIKE:
            with pytest.raises(OptimizerMismatch, match="another class of optimizer saved it"):
                load_checkpoint(tmp_path, "t", model, other)
            assert before == held(other)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_options_of_another_release_load(tmp_path: Path, model: torch.nn.Module) -> None:
    """torch adds options, schedulers add theirs, and users add their own."""
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    optimizer.param_groups[0].update(initial_lr=0.1, name="all")
    save_checkpoint(tmp_path, "t", model, optimizer)
    other = torch.optim.AdamW(model.parameters())
    load_checkpoint(tmp_path, "t", model, other)
    assert ("all", True) == (other.param_groups[0]["name"], "decoupled_weight_decay" in other.param_groups[0])


def groups(model: torch.nn.Module, **options: Any) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [{"params": [named["weight"]]}, {"params": [named["bias"]], **options}]


@pytest.mark.parametrize("option", ["weight_decay", "lr"])
def test_one_group_does_not_undo_what_two_say(tmp_path: Path, model: torch.nn.Module, option: str) -> None:
    """No weight decay of biases, say. Groups with equal options load, and the live options can be kept."""
    saved: dict[str, Any] = {option: 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **saved)
    step(model, optimizer)
    save_checkpoint(tmp_path, "t", model, optimizer)
    other = torch.optim.AdamW(groups(model, **{option: 0.0}), **saved)
    with pytest.raises(OptimizerMismatch, match=rf"were one group .* {option} \(0\.1 and 0\.0\)"):
        load_checkpoint(tmp_path, "t", model, other)
    load_checkpoint(tmp_path, "t", model, other, ignore_keys=["optim/param_groups"])
    assert [0.1, 0.0] == [group[option] for group in other.param_groups]
    equal = torch.optim.AdamW(groups(model), **saved)
    load_checkpoint(tmp_path, "t", model, equal)
    assert 2 == len(equal.state)


def test_what_is_in_the_wrong_place_is_refused(tmp_path: Path, model: torch.nn.Module) -> None:
    """Live objects in a dict or a list, classes, and optimizer and model exchanged, of a save and of a load."""
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    save_checkpoint(tmp_path, "good", model, optimizer)
    wrong: list[tuple[Any, Any, str]] = [
        ({"model": model, "optimizer": optimizer}, None, r"model\['optimizer'\] is a SGD, expected a torch"),
        ([model, model], None, "found a list; pass several by name"),
        (torch.nn.Linear, None, "found the class Linear itself"),
        (optimizer, None, r"model= is an optimizer \(SGD\): pass it as optimizer="),
        (model.parameters(), None, "found a generator"),
        (model, model, r"optimizer= is a model \(Linear\): pass it as model="),
        (model, [optimizer], "found a list; pass several by name"),
        (model, torch.optim.SGD, "found the class SGD itself"),
        (model, {"a": optimizer, "b": {}}, "optimizer= is a dict of live objects, but 'b' is a dict"),
    ]
    for one, other, match in wrong:
        with pytest.raises(InvalidArgument, match=match):
            save_checkpoint(tmp_path, "t", one, other)
        close_checkpointers()
        with pytest.raises(InvalidArgument, match=match):
            load_checkpoint(tmp_path, "good", one, other)
    assert not (tmp_path / "t").exists()


def test_objects_of_other_arguments_are_refused(tmp_path: Path, model: torch.nn.Module) -> None:
    """By the first save, by a load, and by load_latest in an empty directory, which a run that begins calls."""
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(model, optimizer)
    save_checkpoint(tmp_path / "good", "t", model, optimizer, scheduler)
    for argument, wrong, match in (
        ("model", scheduler, r"^model= is a scheduler \(StepLR\): pass it as scheduler="),
        ("model", optimizer.state_dict(), r"^model= is an optimizer's state dict: pass it as optimizer="),
        ("model", torch.amp.GradScaler("cpu"), r"^model= must be .* found a GradScaler"),  # type: ignore[attr-defined]
        ("optimizer", scheduler, r"^optimizer= is a scheduler \(StepLR\): pass it as scheduler="),
        ("optimizer", model, r"^optimizer= is a model \(Linear\): pass it as model="),
        ("scheduler", optimizer, r"^scheduler= is an optimizer \(SGD\): pass it as optimizer="),
        ("scheduler", optimizer.state_dict(), r"^scheduler= is an optimizer's state dict: pass it as optimizer="),
        ("scheduler", model, r"^scheduler= is a model \(Linear\): pass it as model="),
        ("scheduler", torch.nn.Linear, r"^scheduler= must be .*, found <class"),
        ("scheduler", [scheduler, 3], r"^scheduler= must be .*, found \["),
        ("scheduler", 0.1, r"^scheduler= must be .*, found 0.1"),
    ):
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, argument: wrong}
        with pytest.raises(InvalidArgument, match=match):
            save_checkpoint(tmp_path / "run", "t", **objects)
        with pytest.raises(InvalidArgument, match=match):
            load_checkpoint(tmp_path / "good", "t", **objects)
        with pytest.raises(InvalidArgument, match=match):
            Checkpointer(tmp_path / "run").load_latest(**objects)
    with pytest.raises(UnsupportedState, match=r"scheduler= has the state of a model.*no load"):
        save_checkpoint(tmp_path / "run", "t", model, scheduler=model.state_dict())
    with pytest.raises(UnsupportedState, match=r"param_groups must be a list.*no load"):
        save_checkpoint(tmp_path / "run", "t", model, model.state_dict())
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_another_model_is_told(
    tmp_path: Path, model: torch.nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """Once; it is no error, since an optimizer of clones looks the same."""
    other = torch.nn.Linear(3, 2)
    with Checkpointer(tmp_path) as checkpointer:
        for number in range(2):
            checkpointer.save(number, model, torch.optim.SGD(other.parameters()))
        assert 1 == caplog.text.count("none of its 2 parameters is one of the model's")
        caplog.clear()
        checkpointer.save(3, model, torch.optim.SGD(model.parameters()))
        checkpointer.save(4, model.state_dict(), torch.optim.SGD(model.parameters()))
        checkpointer.save(5, None, torch.optim.SGD(model.parameters()))
        checkpointer.save(6, model, ShardedOptimizer(list(model.parameters()), lr=0.1))
    assert "none of its" not in caplog.text


def schedulers(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, list[Any]]:
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    return optimizer, [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3),
    ]


def test_several_schedulers_are_saved_as_a_list(tmp_path: Path, model: torch.nn.Module) -> None:
    """SWALR among them; another number of them is refused."""
    optimizer, live = schedulers(model)
    for _ in range(2):
        step(model, optimizer)
        for one in live:
            one.step()
    save_checkpoint(tmp_path, "t", model, optimizer, live)
    other, fresh = schedulers(model)
    with pytest.raises(IncompatibleState, match="holds a list of 2, the live one is one scheduler"):
        load_checkpoint(tmp_path, "t", model, other, fresh[0])
    load_checkpoint(tmp_path, "t", model, other, fresh)
    assert [one.last_epoch for one in live] == [one.last_epoch for one in fresh]
    for one, its in ((optimizer, live), (other, fresh)):
        step(model, one)
        for scheduler in its:
            scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in other.param_groups]


def _grown(groups: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model with one more layer, whose parameters may be a param group of their own."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    if groups == 1:
        return model, torch.optim.AdamW(model.parameters(), lr=0.5)
    parts = [{"params": list(layer.parameters()), "weight_decay": 0.0} for layer in model]
    return model, torch.optim.AdamW(parts, lr=0.5)


@pytest.mark.parametrize("groups", [1, 2])
def test_added_parameters_start_anew(tmp_path: Path, groups: int, caplog: pytest.LogCaptureFixture) -> None:
    """With ``strict=False``, and with a warning; the others go on. By default they are refused."""
    small = torch.nn.Sequential(torch.nn.Linear(3, 3))
    saved = torch.optim.AdamW(small.parameters(), lr=0.25)
    small(torch.ones(1, 3)).sum().backward()
    saved.step()
    save_checkpoint(tmp_path, "t", small, saved)
    model, optimizer = _grown(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises((OptimizerMismatch, KeyMismatch)):
        load_checkpoint(tmp_path, "t", model, optimizer)
    load_checkpoint(tmp_path, "t", model, optimizer, strict=False)
    close_checkpointers()
    old, new = model.get_parameter("0.weight"), model.get_parameter("1.weight")
    assert torch.equal(saved.state[small.get_parameter("0.weight")]["exp_avg"], optimizer.state[old]["exp_avg"])
    assert not optimizer.state.get(new)
    assert ([0.25] if groups == 1 else [0.25, 0.5]) == [group["lr"] for group in optimizer.param_groups]
    assert "has no optimizer state of 1.weight, 1.bias: they start fresh" in caplog.text
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_state_of_removed_parameters_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ``strict=False``, and with a warning."""
    model, optimizer = _grown(2)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, "t", model, optimizer)
    small = torch.nn.Sequential(torch.nn.Linear(3, 3))
    live = torch.optim.AdamW(small.parameters())
    with pytest.raises((OptimizerMismatch, KeyMismatch)):
        load_checkpoint(tmp_path, "t", small, live)
    load_checkpoint(tmp_path, "t", small, live, strict=False)
    close_checkpointers()
    states = optimizer.state[model.get_parameter("0.bias")], live.state[small.get_parameter("0.bias")]
    assert torch.equal(*(state["exp_avg"] for state in states))
    assert "the optimizer state of 1.weight, 1.bias is left out" in caplog.text
