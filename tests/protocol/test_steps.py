"""Steps: an int names a tag, and the tags of a directory are known by the numbers in their names."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import (
    Checkpointer,
    Tier,
    Topology,
    close_checkpointers,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.errors import CheckpointNotFound, InvalidArgument, InvalidTag
from nxd_ckpt.storage.base import DirEntry
from nxd_ckpt.storage.local import LocalStorage
from tests.protocol.job import Job
from tests.protocol.states import PATIENCE, visible_tags

WORLD = 2


def state(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor([value])}


def test_a_step_is_a_tag(tmp_path: Path) -> None:
    """A save names its tag by the step, and loads and removals know it by the number alone."""
    with Checkpointer(tmp_path) as saver:
        for step in (100, 200):
            saver.save(step, state(step))
        model: dict[str, torch.Tensor] = {}
        saver.load(100, model)
        assert (["step_100", "step_200"], state(100)) == (visible_tags(tmp_path), model)
        assert saver.remove(100)
    assert ["step_200"] == visible_tags(tmp_path)


@pytest.mark.parametrize("step", [-1, True], ids=repr)
def test_what_is_no_step_is_refused(tmp_path: Path, step: int) -> None:
    """No tag comes of it."""
    with Checkpointer(tmp_path) as saver, pytest.raises(InvalidTag, match="or an int from 0, found"):
        saver.save(step, state(1))
    assert [] == visible_tags(tmp_path)


def test_a_number_is_the_step_of_any_name(tmp_path: Path) -> None:
    """With any prefix, also in open_checkpoint; a tag of that very name comes first, then the newest of the step."""
    with Checkpointer(tmp_path) as saver:
        for value, tag in enumerate(["iter_0007", "ep1-step7", "8", "step_8"]):
            saver.save(tag, state(value))
        assert [7, 8] == saver.all_steps()
    assert ["ep1-step7", "8"] == [open_checkpoint(tmp_path, step).tag for step in (7, 8)]
    with pytest.raises(CheckpointNotFound, match=r"no tag '9' \(the nearest: '8', 'step_8'\); it holds"):
        open_checkpoint(tmp_path, 9)


def test_steps_are_in_the_order_of_the_saves(tmp_path: Path) -> None:
    """The last of them is the latest step; what has no number in its name is none."""
    with Checkpointer(tmp_path) as saver:
        assert ([], None) == (saver.all_steps(), saver.latest_step())
        for tag in (300, 100, 200, "final", 100):
            saver.save(tag, state(1))
        assert ([300, 200, 100], 100) == (saver.all_steps(), saver.latest_step())


def test_steps_of_all_tiers_count(tmp_path: Path) -> None:
    """Those that only a lower tier has, too, each once."""
    tiers = [Tier(tmp_path / "near", keep=1), Tier(tmp_path / "far")]
    with Checkpointer(tiers=tiers) as saver:
        for step in (1, 2):
            saver.save(step, state(step), metrics={"loss": step})
            saver.wait(tier=1)
        assert ["step_2"] == visible_tags(tmp_path / "near")
        assert ([1, 2], 1) == (saver.all_steps(), saver.best_step("loss"))


def test_the_best_step_has_the_best_metric(tmp_path: Path) -> None:
    """The lowest or the highest; of equal ones the newest. A save without it, or with NaN, is not the best."""
    losses = {1: 3.0, 2: 1.0, 3: math.nan, 4: 1.0, 5: 2.5}
    with Checkpointer(tmp_path) as saver:
        for step, loss in losses.items():
            saver.save(step, state(step), metrics={"loss": loss})
        saver.save(6, state(6))
        assert (4, 1) == (saver.best_step("loss"), saver.best_step("loss", "max"))
        with pytest.raises(InvalidArgument, match=r"no tag has the metric 'los' \(did you mean 'loss'\?\)"):
            saver.best_step("los")
        saver.save("final", state(7), metrics={"accuracy": 0.9})
        with pytest.raises(InvalidArgument, match="'accuracy' is that of tags without a step in their names, final: "):
            saver.best_step("accuracy")


def test_no_save_with_a_metric_has_no_best_step(tmp_path: Path) -> None:
    """Nor has a directory without tags."""
    with Checkpointer(tmp_path) as saver:
        assert None is saver.best_step("loss")
        saver.save(1, state(1))
        assert None is saver.best_step("loss")
        saver.save(2, state(2), metrics={"loss": math.nan})
        assert None is saver.best_step("loss")


def damage(tag: Path) -> None:
    file = next((tag / "model").iterdir())
    file.write_bytes(file.read_bytes()[:-100])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "is saved after" in record.getMessage()]


def test_a_run_that_goes_back_is_warned_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The latest tag is the newest save, whatever its step."""
    with Checkpointer(tmp_path) as saver, caplog.at_level(logging.WARNING, "nxd_ckpt"):
        for step in (300, 200, 250, 100):
            saver.save(step, state(step))
    assert "step_100" == open_checkpoint(tmp_path).tag
    assert 1 == len(warnings(caplog))
    assert "'step_200' is saved after 'step_300'. A load without a tag takes the newest save" in warnings(caplog)[0]


def test_a_new_run_in_an_old_directory_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be another run, by mistake. The same step again, other names and a new epoch are no steps back."""
    with Checkpointer(tmp_path) as saver:
        saver.save(300, state(300))
    with caplog.at_level(logging.WARNING, "nxd_ckpt"):
        for tags in (["step_300", "final_1", "ep1-step300", "ep2-step10", "step_300"], ["step_200"]):
            assert [] == warnings(caplog)
            with Checkpointer(tmp_path) as saver:
                for tag in tags:
                    saver.save(tag, state(1))
    assert 1 == len(warnings(caplog))


def test_a_run_that_was_led_back_is_not_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It loaded an older tag, by its step or since the latest is damaged, and follows that: so it is meant to be."""
    with Checkpointer(tmp_path) as saver, caplog.at_level(logging.WARNING, "nxd_ckpt"):
        for step in (100, 200, 300):
            saver.save(step, state(step))
        damage(tmp_path / "step_300")
        assert 200 == saver.load_latest(state(0), fallback=True)
        saver.save(250, state(250))
        saver.load(100, state(0))
        saver.save(150, state(150))
        assert [] == warnings(caplog)
        saver.save(140, state(140))
        assert 1 == len(warnings(caplog))
    caplog.clear()
    load_checkpoint(tmp_path, 100, state(0))
    save_checkpoint(tmp_path, "step_110", state(110))
    close_checkpointers()
    with Checkpointer(tmp_path) as saver:
        saver.load(100, state(0))
        saver.save(105, state(105))
    assert [] == warnings(caplog)


def test_a_run_begins_at_the_default(tmp_path: Path) -> None:
    """Without any tag nothing is loaded, and content is left alone; wrong options are refused all the same."""
    model, content = state(1), {"kept": True}
    saver = Checkpointer(tmp_path / "absent")
    for mistake in ({"verify": "read"}, {"fallback": True, "verify": False}):
        with pytest.raises(InvalidArgument, match="verify"):
            saver.load_latest(model, **mistake)
    assert [0, -1] == [saver.load_latest(model, user_content=content), saver.load_latest(model, default=-1)]
    assert (state(1), {"kept": True}) == (model, content)


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("run/step_1", ", but it is itself a tag: load_checkpoint("),
        ("run/step_1/model", ", but it is a part of the tag {path}/run/step_1: name that"),
        (".", ", but it is none itself, but it holds 'run': it holds tags: nxd-ckpt list {path}/run"),
        ("rum", "; did you mean {path}/run?"),
        ("weights", ", but it is a model in Hugging Face's form"),
        ("logs", ""),
    ],
)
def test_a_run_that_begins_beside_its_checkpoints_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, what: str
) -> None:
    """A path a level too high or too low, a typo, and weights of others: the warning says what the directory is."""
    save_checkpoint(tmp_path / "run", "step_1", state(1))
    close_checkpointers()
    for folder, file in (("weights", "config.json"), ("weights", "model.safetensors"), ("logs", "events.txt")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / file).write_bytes(b"")
    with Checkpointer(tmp_path / place) as saver:
        assert 0 == saver.load_latest(state(0))
    [warning] = [record.getMessage() for record in caplog.records]
    assert f"there is no checkpoint: the run begins at step 0{what.format(path=tmp_path)}" in warning
    assert (not what) == warning.endswith("step 0")


@pytest.mark.parametrize(
    ("tag", "content", "expected"),
    [
        (300, None, 300),
        ("epoch_2", {"steps": 640}, 2),
        ("final", {"steps": 300, "lr": 0.1}, 300),
        ("final", {"step": 7}, 7),
    ],
)
def test_a_run_goes_on_at_its_step(tmp_path: Path, tag: Any, content: Any, expected: int) -> None:
    """The number in the name, else that in the user content, which comes along."""
    with Checkpointer(tmp_path) as saver:
        saver.save(1, state(1))
        saver.save(tag, state(2), user_content=content)
        model, filled = state(0), dict[str, Any]()
        assert expected == saver.load_latest(model, user_content=filled)
        assert (state(2), content or {}) == (model, filled)


def test_user_content_that_is_no_dict_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot fill the dict: a warning says how to get it."""
    with Checkpointer(tmp_path) as saver:
        saver.save(1, state(1), user_content=[1, 2])
        filled: dict[str, Any] = {}
        assert 1 == saver.load_latest(state(0), user_content=filled)
    assert {} == filled
    assert "user_content= fills a dict, but a list was saved" in caplog.text


def test_a_tag_that_tells_no_step_is_refused(tmp_path: Path) -> None:
    """What to do instead is said."""
    with Checkpointer(tmp_path) as saver:
        saver.save("final", state(1), user_content=["no", "dict"])
        with pytest.raises(InvalidArgument, match="no number in its name, and no 'steps' or 'step' in its"):
            saver.load_latest(state(0))


def test_a_number_is_digits_for_neuronx_distributed(tmp_path: Path) -> None:
    """Tags that its functions, and ours of that name, call 300 load by that number."""
    save_checkpoint(tmp_path, 300, state(3))
    close_checkpointers()
    model: dict[str, torch.Tensor] = {}
    with Checkpointer(tmp_path) as saver:
        assert (["300"], 300) == (visible_tags(tmp_path), saver.load_latest(model))
    assert state(3) == model
    load_checkpoint(tmp_path, 300, model)


class Stale(LocalStorage):
    """A directory in which a host does not see ``hidden`` yet, as on NFS."""

    hidden = ""

    def list(self, key: str = "") -> list[DirEntry]:
        return [entry for entry in super().list(key) if entry.name != self.hidden]


def as_all_see_it(rank: int, path: Path) -> list[Any]:
    """Save two steps, of which rank 1 does not see the second any more."""
    topology = Topology(tp=WORLD, rank=rank)
    storage = Stale(path)
    with Checkpointer("", storage=storage, topology=topology, timeout=PATIENCE) as saver:
        begins = saver.load_latest(state(0))
        for step, loss in ((1, 0.5), (2, 0.1)):
            saver.save(step, {"weight": torch.tensor([10.0 * rank + step])}, metrics={"loss": loss}, async_save=True)
        storage.hidden = "step_2" if rank else ""
        questions = saver.all_steps(), saver.latest_step(), saver.best_step("loss")
        model: dict[str, Any] = {}
        return [begins, *questions, saver.load_latest(model), model["weight"].item() - 10 * rank]


def test_all_ranks_get_the_same_answers(tmp_path: Path) -> None:
    """Saves in flight included, and whatever a rank sees at that moment: rank 0 looks for all."""
    outcomes = Job(WORLD, as_all_see_it, tmp_path, group=True).values()
    assert [[0, [1, 2], 2, 2, 2, 2.0]] * WORLD == outcomes


def only_one_finds_it(rank: int, path: Path) -> int:
    """Rank 0 looks in a directory with a tag, rank 1 in one without."""
    storage = Stale(path)
    storage.hidden = "step_5" if rank else ""
    return Checkpointer("", storage=storage, topology=Topology(dp=WORLD, rank=rank)).load_latest(state(0))


def test_no_rank_begins_while_another_resumes(tmp_path: Path) -> None:
    """A rank that does not see the tag in a listing yet loads it all the same."""
    with Checkpointer(tmp_path) as saver:
        saver.save(5, state(5))
    assert [5] * WORLD == Job(WORLD, only_one_finds_it, tmp_path, group=True).values()
