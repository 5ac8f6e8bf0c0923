"""Content of another form than its name tells: found before anything changes, whatever wrote the tag."""

import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from nxd_ckpt import close_checkpointers, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import CheckpointError, IncompatibleState, MalformedFile, UnsupportedState
from nxd_ckpt.verify import verify_checkpoint
from tests.tag.equality import difference

NAME = "dp_rank_00_tp_rank_00_pp_rank_00.pt"


class Counting(torch.nn.Linear):
    """A module with extra state, a dict."""

    scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def live() -> tuple[Any, Any, Any]:
    """A model, its optimizer after a step, and a scheduler."""
    model = Counting(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def as_of_nxd(path: Path, tag: str, time: float) -> None:
    """Take what tells of us out of a tag."""
    shutil.rmtree(path / tag / "index")
    (path / tag / "manifest.json").unlink()
    (path / tag / "done").write_text("1")
    os.utime(path / tag / "done", (time, time))


GROUP = {"lr": 0.1, "betas": (0.9, 0.9), "params": [0, 1]}
FORMS: list[tuple[str, Any, bool]] = [
    ("scheduler.pt", 5, True),
    ("scheduler.pt", None, True),
    ("scheduler.pt", torch.ones(2), True),
    ("scheduler.pt", [5], True),
    ("scheduler.pt", {"last_epoch": 1}, False),
    ("scheduler.pt", {"lr_lambdas": 5}, False),
    (f"optim/{NAME}", {"state": {}, "param_groups": [{}]}, True),
    (f"optim/{NAME}", {"state": {0: 5}, "param_groups": [GROUP]}, True),
    (f"model/{NAME}", {"weight": 5, "bias": torch.ones(2), "_extra_state": {"scale": 1.0}}, False),
    (f"model/{NAME}", {"weight": torch.ones(2, 2), "bias": torch.ones(2), "_extra_state": 5}, False),
]
"""A file of a tag, what is in it, and whether that is wrong for any live object."""


@pytest.mark.parametrize(("file", "content", "for_all"), FORMS, ids=str)
def test_a_wrong_form_changes_nothing_and_an_older_tag_is_taken(
    tmp_path: Path, file: str, content: Any, for_all: bool
) -> None:
    """``fallback=True`` takes it, and ``verify`` says what no live object would take."""
    objects = live()
    for time, tag in enumerate(("older", "newer"), start=10**9):
        save_checkpoint(tmp_path, tag, *objects)
        as_of_nxd(tmp_path, tag, time)
    torch.save(content, tmp_path / "newer" / file)
    model, optimizer, scheduler = objects
    saved = deepcopy([one.state_dict() for one in objects])
    with torch.no_grad():
        model.weight.fill_(7.0)
    optimizer.param_groups[0]["lr"], scheduler.last_epoch = 0.5, 9
    before, attributes = deepcopy([one.state_dict() for one in objects]), dict(vars(scheduler))
    with pytest.raises(MalformedFile):
        load_checkpoint(tmp_path, "newer", *objects)
    assert None is difference(before, [one.state_dict() for one in objects])
    assert attributes == vars(scheduler)
    assert bool(verify_checkpoint(tmp_path, "newer").problems) is for_all
    load_checkpoint(tmp_path, None, *objects, fallback=True)
    assert None is difference(saved, [one.state_dict() for one in objects])
    close_checkpointers()


def test_a_scheduler_of_another_class_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """Of our own tag, which is as it was saved: the error names the live class."""
    model, optimizer, scheduler = live()
    save_checkpoint(tmp_path, "t", model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10))
    with torch.no_grad():
        model.weight.fill_(7.0)
    with pytest.raises(IncompatibleState, match="the live LambdaLR does not take the state"):
        load_checkpoint(tmp_path, "t", model, optimizer, scheduler)
    assert bool((model.weight == 7.0).all())
    close_checkpointers()


rates = torch.optim.lr_scheduler


def _in_turn(*makers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda optimizer: rates.SequentialLR(
        optimizer, [make(optimizer) for make in makers], [2, 4][1 - len(makers) :]
    )


def _step(optimizer: Any) -> Any:
    return rates.StepLR(optimizer, 3)


def _decay(optimizer: Any) -> Any:
    return rates.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize(
    ("saved", "other", "match"),
    [
        (
            rates.PolynomialLR,
            lambda one: rates.MultiStepLR(one, [2]),
            "the live MultiStepLR.*it has 'milestones', 'gamma' .*save 'total_iters', 'power'",
        ),
        (_step, _decay, "the live ExponentialLR .*it has 'gamma' .*save 'step_size', 'gamma'"),
        (_decay, _step, "the live StepLR .*it has 'step_size', 'gamma' .*save 'gamma'"),
        (
            _in_turn(_step, _decay),
            _in_turn(_step, rates.LinearLR),
            "the live LinearLR .*it has 'start_factor'.*save 'gamma'",
        ),
        (
            _in_turn(_step, _decay),
            _in_turn(_step, _decay, _decay),
            "the live SequentialLR .*3 schedulers inside.* and 2",
        ),
    ],
)
def test_a_scheduler_with_other_options_is_refused(tmp_path: Path, saved: Any, other: Any, match: str) -> None:
    """torch's would take the state, and go on by the options that it was made with."""
    model, optimizer, _ = live()
    save_checkpoint(tmp_path, "t", model, optimizer, saved(optimizer))
    with torch.no_grad():
        model.weight.fill_(7.0)
    scheduler = other(optimizer)
    before = deepcopy(scheduler.state_dict())
    with pytest.raises(IncompatibleState, match=match):
        load_checkpoint(tmp_path, "t", model, optimizer, scheduler)
    assert None is difference(before, scheduler.state_dict())
    assert bool((model.weight == 7.0).all())
    load_checkpoint(tmp_path, "t", model, optimizer, saved(optimizer))
    close_checkpointers()


def test_a_scheduler_whose_state_is_a_tuple_comes_back(tmp_path: Path) -> None:
    """It was taken for a list of schedulers, and a load refused what a save had taken."""

    class Own:
        count = 3

        def state_dict(self) -> tuple[int]:
            return (self.count,)

        def load_state_dict(self, state: tuple[int]) -> None:
            (self.count,) = state

    model, optimizer, _ = live()
    saved, scheduler = Own(), Own()
    saved.count = 5
    save_checkpoint(tmp_path, "t", model, optimizer, saved)
    load_checkpoint(tmp_path, "t", model, optimizer, scheduler)
    assert 5 == scheduler.count
    close_checkpointers()


def test_live_state_without_memory_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """State of an optimizer on the meta device can take no value."""
    model, optimizer, _ = live()
    save_checkpoint(tmp_path, "t", model, optimizer)
    state = optimizer.state[model.weight]
    state["exp_avg"] = state["exp_avg"].to("meta")
    with torch.no_grad():
        model.weight.fill_(7.0)
    with pytest.raises(UnsupportedState, match="optim/weight/exp_avg is on the meta device"):
        load_checkpoint(tmp_path, "t", model, optimizer)
    assert bool((model.weight == 7.0).all())
    close_checkpointers()


@pytest.mark.parametrize("saved", [True, False])
def test_a_scaler_that_is_disabled_on_one_side_is_refused_before_anything_changes(tmp_path: Path, saved: bool) -> None:
    """A disabled one keeps no state: torch drops what was saved, or refuses when the model is loaded already."""
    model, optimizer, _ = live()
    parts = {"model": model, "optimizer": optimizer}
    save_checkpoint(tmp_path, "t", state={**parts, "scaler": GradScaler("cpu", enabled=saved)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(CheckpointError, match="GradScaler does not take"):
        load_checkpoint(tmp_path, "t", state={**parts, "scaler": GradScaler("cpu", enabled=not saved)})
    assert not any(parameter.any() for parameter in model.parameters())
    scaler = GradScaler("cpu", enabled=saved, init_scale=2.0)
    load_checkpoint(tmp_path, "t", state={**parts, "scaler": scaler})
    assert (2.0**16 if saved else 1.0) == scaler.get_scale()
    close_checkpointers()


def test_code_of_others_that_refuses_its_state_is_an_error_of_ours(tmp_path: Path) -> None:
    """A scheduler of one's own, or extra state: the error says that the rest was overwritten."""

    class Own:
        def state_dict(self) -> dict[str, int]:
            return {"count": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("other")

    model, optimizer, _ = live()
    save_checkpoint(tmp_path, "t", model, optimizer, Own())
    with pytest.raises(CheckpointError, match=r"the live Own does not take .*partly"):
        load_checkpoint(tmp_path, "t", model, optimizer, Own())
    vars(model)["set_extra_state"] = lambda state: state["other"]
    with pytest.raises(CheckpointError, match=r"_extra_state: set_extra_state\(\) does not take .*partly"):
        load_checkpoint(tmp_path, "t", model)
    close_checkpointers()


def test_a_resume_that_asks_for_too_little_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names what was saved and is not asked for. Who loads a model alone, or leaves it out, hears nothing."""
    model, optimizer, scheduler = live()
    save_checkpoint(tmp_path, "t", model, optimizer, scheduler, rank_content={"seed": 1}, durable=False)
    both = ["scheduler", "rank_content"]
    expected: list[tuple[dict[str, Any], str]] = [
        ({}, "passed for scheduler and rank_content,"),
        ({"rank_content": {}}, "passed for scheduler,"),
        ({"ignore_keys": ["scheduler"]}, "passed for rank_content,"),
        ({"ignore_keys": both}, ""),
        ({"scheduler": scheduler, "rank_content": {}}, ""),
    ]
    for options, warning in expected:
        caplog.clear()
        load_checkpoint(tmp_path, "t", model, optimizer, **options)
        assert warning in caplog.text
        assert bool(warning) == ("is not loaded" in caplog.text), options
    caplog.clear()
    load_checkpoint(tmp_path, "t", model)
    assert "is not loaded" not in caplog.text
