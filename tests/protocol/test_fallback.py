"""``load(fallback=True)``: from a latest tag that is damaged to the newest one that is not."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from nxd_ckpt import load_checkpoint
from nxd_ckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    PartNotFound,
    RanksDisagree,
    ShapeMismatch,
)
from nxd_ckpt.testing.storage import failing
from tests.protocol.job import Job, outcome_of
from tests.protocol.states import checkpointer, save, visible_tags, weights
from tests.support.damage import flip

FILE = "model/dp_rank_00_tp_rank_{:02d}_pp_rank_00.pt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three tags, of the values 1 to 3."""
    with checkpointer(tmp_path, 0, 1, durable=False) as saver:
        for value in (1, 2, 3):
            save(saver, f"step_{value}", value)
    return tmp_path


def damage(tag: Path, rank: int = 0) -> None:
    """Change a bit of a tensor."""
    file, value = tag / FILE.format(rank), int(tag.name.removeprefix("step_"))
    flip(file, file.read_bytes().index(weights(value, rank)["weight"].numpy().tobytes()))


def loaded(path: Path, tag: str | None = None, **options: Any) -> int:
    model: dict[str, torch.Tensor] = {}
    value = int(load_checkpoint(path, tag, model, fallback=True, **options)["value"])
    assert all(torch.equal(tensor, model[name]) for name, tensor in weights(value, 0).items())
    return value


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit": damage,
    "no index": lambda tag: shutil.rmtree(tag / "index"),
    "manifest": lambda tag: flip(tag / "manifest.json", 40),
    "missing": lambda tag: (tag / FILE.format(0)).unlink(),
    "cut off": lambda tag: (tag / FILE.format(0)).write_bytes((tag / FILE.format(0)).read_bytes()[:-7]),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_newest_good_tag_is_loaded(run: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the damage; a warning says which tag was passed over and why. Nothing is removed."""
    DAMAGES[kind](run / "step_3")
    with pytest.raises(CheckpointError, match="With fallback=True the newest undamaged checkpoint is loaded"):
        load_checkpoint(run, model={})
    assert 2 == loaded(run)
    assert f"{run}/step_2 was loaded, not the latest tag: 'step_3' is damaged (" in caplog.text
    assert 3 == len(visible_tags(run))
    with pytest.raises((CorruptCheckpoint, PartNotFound)):
        load_checkpoint(run, None, {})


@pytest.mark.parametrize("verify", [True, "reading"])
def test_several_may_be_damaged(run: Path, verify: Literal[True, "reading"]) -> None:
    """Until one proves, also where live state was overwritten before the damage was found."""
    damage(run / "step_3")
    damage(run / "step_2")
    assert 1 == loaded(run, verify=verify)
    damage(run / "step_1")
    with pytest.raises(CorruptCheckpoint, match=r"no complete tag is undamaged.*'step_3'.*'step_2'.*'step_1'"):
        loaded(run, verify=verify)


def test_a_dict_holds_nothing_of_a_tag_that_was_given_up(tmp_path: Path) -> None:
    """Its names were stored before the damage was found; the older tag has others."""
    with checkpointer(tmp_path, 0, 1, durable=False) as saver:
        saver.save("older", {"a": torch.zeros(3)})
        saver.save("newer", {"a": torch.ones(3), "b": torch.ones(3), "c": torch.full((4,), 7.0)})
    file = tmp_path / "newer" / FILE.format(0)
    flip(file, file.read_bytes().index(torch.full((4,), 7.0).numpy().tobytes()))
    model: dict[str, torch.Tensor] = {}
    load_checkpoint(tmp_path, None, model, fallback=True, verify="reading")
    assert {"a": [0.0] * 3} == {name: tensor.tolist() for name, tensor in model.items()}


def test_a_damaged_local_copy_costs_no_tag(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is downloaded anew, and the latest tag is loaded."""
    cache = tmp_path_factory.mktemp("cache")
    options: dict[str, Any] = {"pre_download": True, "work_dir": cache}
    assert 3 == loaded(run, **options)
    (copy,) = cache.rglob(Path(FILE.format(0)).name)
    content = weights(3, 0)["weight"].numpy().tobytes()
    flip(copy, copy.read_bytes().index(content))
    assert 3 == loaded(run, **options)


def test_an_undamaged_latest_tag_is_loaded(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a warning, and older ones may be what they are."""
    damage(run / "step_1")
    assert 3 == loaded(run)
    assert "not the latest" not in caplog.text


def test_a_named_tag_is_loaded_or_refused(run: Path) -> None:
    """Never another one."""
    damage(run / "step_3")
    with pytest.raises(CorruptCheckpoint, match="step_3"):
        loaded(run, "step_3")


def test_retention_says_nothing_of_a_load_before(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the damage from a load that changed live state, which is not its reader's."""
    monkeypatch.setattr("nxd_ckpt.tag.opened._SMALL", 0)  # small files are compared before anything changes
    damage(run / "step_3")
    with pytest.raises(CorruptCheckpoint, match="The live state is partly overwritten"):
        load_checkpoint(run, None, weights(0, 0), verify="reading")
    with checkpointer(run, 0, 1, durable=False, num_kept_ckpts=2) as saver:
        save(saver, "step_4", 4)
    assert ["step_2", "step_3", "step_4"] == visible_tags(run)
    assert "load another tag. Retention does not count this tag" in caplog.text


def test_a_model_that_does_not_fit_is_no_damage(run: Path) -> None:
    """An older tag is no answer to that."""
    with pytest.raises(ShapeMismatch):
        load_checkpoint(run, None, torch.nn.Linear(2, 2), fallback=True)
    with pytest.raises(PartNotFound):
        load_checkpoint(run, None, {}, {}, fallback=True)
    flip(run / "step_3" / "manifest.json", 40)
    with pytest.raises(ShapeMismatch, match="'step_2' is tried, because 'step_3' is damaged") as failure:
        load_checkpoint(run, None, torch.nn.Linear(2, 2), fallback=True)
    assert 1 == str(failure.value).count("is tried")


def saves_then_loads(rank: int, path: Path) -> list[Any]:
    """Two ranks save three times; rank 1's file of the last is damaged, and rank 0's of the one before."""
    with checkpointer(path, rank, 2) as saver:
        for value in (1, 2, 3):
            save(saver, f"step_{value}", value)
        if rank == 0:
            damage(path / "step_3", 1)
            damage(path / "step_2", 0)
        found: list[Any] = []
        for options in ({"fallback": True}, {"fallback": True, "verify": "reading"}):
            model: dict[str, torch.Tensor] = {}
            content = saver.load(None, model, **options)
            found.append((content["value"], torch.equal(weights(1, rank)["weight"], model["weight"])))
        found.append(type(outcome_of(lambda: saver.load(None, {}))))
        found.append(type(outcome_of(lambda: saver.load(None, {}, fallback=rank == 0))))
    broken = failing("read_ranges", "*/model/*", OSError(errno.EIO, "Input/output error"))
    with checkpointer(path, rank, 2, broken if rank == 1 else None) as reader:
        found.append(str(outcome_of(lambda: reader.load(None, {}, fallback=True))))
    return found


def test_all_ranks_load_the_same(tmp_path: Path) -> None:
    """Where only some ranks find damage, all pass over that tag; ranks that ask for different things are refused."""
    first, second = Job(2, saves_then_loads, tmp_path, group=True).values()
    assert [(1, True), (1, True)] == first[:2] == second[:2]
    assert all(issubclass(found[2], CorruptCheckpoint) for found in (first, second))
    assert [RanksDisagree, RanksDisagree] == [first[3], second[3]]
    # What is no damage is told to all, and nobody waits for the rank that met it.
    assert all("Input/output error" in found[4] for found in (first, second))
