"""Content of another form than its name tells: found before anything changes, whatever wrote the tag."""

from __future__ import annotations

import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import close_checkpointers, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import CheckpointError, IncompatibleState, MalformedFile
from nxd_ckpt.verify import verify_checkpoint
from tests.tag.equality import difference

pytestmark = [pytest.mark.plain, pytest.mark.once]

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
