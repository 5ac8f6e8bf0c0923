"""What ``load_checkpoint`` refuses: naming what is wrong and what to do, with nothing changed in memory or on disk."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import (
    close_checkpointers,
    errors,
    has_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from tests.bad_input.live import Job, Net, files_below, jobs, topologies
from tests.bad_input.refused import TAGS
from tests.interop.saving import save_as_every_rank


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``whole`` (everything), ``model``, ``optimizer``: tags of one process; ``zero1``: of two ZeRO-1 ranks."""
    directory = tmp_path_factory.mktemp("kept") / "ckpt"
    ranks = jobs(2, zero1=True, seed=1)
    save_as_every_rank(directory, "zero1", topologies(ranks), lambda rank: ranks[rank].parts)
    [job] = jobs(seed=1)
    parts: dict[str, dict[str, Any]] = {
        "model": {"model": job.model},
        "optimizer": {"optimizer": job.optimizer},
        "whole": {**job.parts, "user_content": "all"},
    }
    for tag in parts:
        save_checkpoint(directory, tag, **parts[tag])
    close_checkpointers()
    return directory


def refuse(directory: Path, tag: Any, error: type[Exception], match: str, job: Job, **arguments: Any) -> None:
    """A load raises, and nothing live and no file is changed."""
    before, below = job.picture(), files_below(directory.parent)
    with pytest.raises(error, match=match):
        load_checkpoint(directory, tag, **{**job.parts, "topology": job.topology, **arguments})
    assert before == job.picture()
    assert below == files_below(directory.parent)


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_must_be_a_plain_visible_name(kept: Path, tag: Any) -> None:
    """A load looks nowhere but below its directory."""
    refuse(kept, tag, errors.InvalidTag, "tag", *jobs())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """It is named, not created, and holds no checkpoint."""
    refuse(tmp_path / "absent", None, errors.CheckpointNotFound, "absent does not exist", *jobs())
    assert not has_checkpoint(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        open_checkpoint(tmp_path / "absent")


def test_a_directory_without_a_complete_tag_is_refused(kept: Path, tmp_path: Path) -> None:
    """The message lists what is there, and what is wrong with it; so does one that asks for a tag."""
    refuse(tmp_path, None, errors.CheckpointNotFound, "no complete checkpoint; it is empty", *jobs())
    shutil.copytree(kept / "whole", tmp_path / "ckpt" / "step_1")
    os.remove(tmp_path / "ckpt" / "step_1" / "done")
    for name in ("notes", ".nxd_ckpt"):
        (tmp_path / "ckpt" / name).mkdir()
    there = r"'notes' \(not a checkpoint\), 'step_1' \(no done marker: incomplete\)"
    refuse(tmp_path / "ckpt", None, errors.CheckpointNotFound, f"no complete checkpoint; it holds {there}", *jobs())
    refuse(tmp_path / "ckpt", "step_1", errors.CheckpointNotFound, f"step_1 is incomplete.*{there}", *jobs())
    match = rf"no tag 'step_2' \(the nearest: 'step_1'\); it holds {there}"
    refuse(tmp_path / "ckpt", "step_2", errors.CheckpointNotFound, match, *jobs())
    assert not has_checkpoint(tmp_path / "ckpt")


def test_brackets_in_the_directory_s_name_are_nothing_special(tmp_path: Path) -> None:
    """``[ ]``, which upstream takes for a pattern and never finds, saves and loads, and so does a name with spaces."""
    for name in ("run[1]", "*?", "two words"):
        [job], [again] = jobs(seed=1), jobs(seed=2)
        save_checkpoint(tmp_path / name, "step[1]", **job.parts)
        assert has_checkpoint(tmp_path / name)
        load_checkpoint(tmp_path / name, **again.parts)
        assert job.saved_picture()["model"] == again.saved_picture()["model"]


@pytest.mark.parametrize(
    ("tag", "match"),
    [
        ("optimizer", r"saved without model; it holds optimizer.*model=None"),
        ("model", r"saved without optimizer; it holds model.*optimizer=None"),
    ],
)
def test_parts_that_were_not_saved(kept: Path, tag: str, match: str) -> None:
    """Asking for one names it, what the tag holds, and the way to load that."""
    refuse(kept, tag, errors.PartNotFound, match, *jobs())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("part", ["scheduler", "rank_content"])
def test_a_part_that_is_new_in_the_job(kept: Path, part: str, ranks: int) -> None:
    """On all ranks of any sizes the same error, with the way to resume; or ``ignore_keys`` leaves it out by name."""
    for job in jobs(ranks):
        new = job.scheduler if part == "scheduler" else {"seed": 1}
        match = rf"saved without {part}; it holds model\. Load it with {part}=None, the first time if it is new in this"
        refuse(kept, "model", errors.PartNotFound, match, job, **{"optimizer": None, "scheduler": None, part: new})
        given: dict[str, Any] = {"topology": job.topology, part: new, "ignore_keys": [part]}
        load_checkpoint(kept, "model", job.model, **given)
    assert part == "scheduler" or {"seed": 1} == new


def test_the_nearest_steps_are_offered(kept: Path, tmp_path: Path) -> None:
    """Not the most similar name, which may be that of any step; the same for a number as for a name."""
    for step in (10, 60, 70, 500):
        shutil.copytree(kept / "model", tmp_path / "ckpt" / f"step_{step}")
    near = r"(\(the nearest: 'step_60', 'step_70'\); it holds)"
    refuse(tmp_path / "ckpt", "step_55", errors.CheckpointNotFound, f"no tag 'step_55' {near}", *jobs())
    refuse(tmp_path / "ckpt", 55, errors.CheckpointNotFound, f"no tag '55' {near}", *jobs())
    refuse(tmp_path / "ckpt", "stp_60", errors.CheckpointNotFound, r"'stp_60' \(did you mean 'step_60'\?\)", *jobs())


def test_a_scheduler_goes_by_the_order_of_groups(kept: Path) -> None:
    """Parameters are found by name in other groups, too; what a scheduler keeps for each group is not."""
    [job], [saved] = jobs(), jobs(seed=1)
    trained = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
    job.optimizer = torch.optim.AdamW([{"params": trained[:1]}, {"params": trained[1:]}])
    refuse(kept, "whole", errors.OptimizerMismatch, "scheduler=None", job)
    load_checkpoint(kept, "whole", job.model, job.optimizer)
    assert saved.saved_picture()["optimizer"]["state"] == job.saved_picture()["optimizer"]["state"]


@pytest.mark.parametrize("tag", ["whole", "model"])
def test_another_shape_is_named(kept: Path, tag: str) -> None:
    """The parameter, the shape that was saved and the one that is live; also where only a later one differs."""
    match = (
        r"model/up.weight: saved with shape \(4, 3\), the live one has \(5, 3\); build the layer with the sizes of the "
        r"save .such as in_features and out_features of nn.Linear., or keep what the live one has, untrained, with "
        r"ignore_keys=\['\*/up.weight', '\*/up.bias', '\*/down.weight'\]. 3 tensors have other shapes: up.weight"
    )
    refuse(kept, tag, errors.ShapeMismatch, match, *jobs(net=lambda: Net(5)), optimizer=None, scheduler=None)


class Renamed(Net):
    """A net with a parameter that was not saved, and without one that was."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = self.down
        del self.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.up(x).relu()) * self.scale
        return out


def test_names_that_differ_are_listed(kept: Path) -> None:
    [job] = jobs(net=Renamed)
    match = r"missing.*'down_proj.weight' \(did you mean 'down.weight'\?\); unexpected.*'down.weight'.*strict=False"
    refuse(kept, "whole", errors.KeyMismatch, match, job, optimizer=None, scheduler=None)


def test_rank_content_fills_a_dict(tmp_path: Path) -> None:
    """What was saved as something else is not squeezed into it; the message says how to read it."""
    [job] = jobs()
    save_checkpoint(tmp_path / "ckpt", "one", model=job.model, rank_content=[1, 2])
    match = r"rank 0 saved a list; read it with open_checkpoint"
    before = job.picture()
    with pytest.raises(errors.IncompatibleState, match=match):
        load_checkpoint(tmp_path / "ckpt", "one", job.model, rank_content=job.rank_content)
    assert before == job.picture()
    assert [1, 2] == open_checkpoint(tmp_path / "ckpt").rank_content(0)
