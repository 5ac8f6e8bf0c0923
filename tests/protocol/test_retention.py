"""Which tags there are after a save: order, overwriting, and how many are kept."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nxd_ckpt import (
    Checkpointer,
    Last,
    Tier,
    close_checkpointers,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.errors import CorruptCheckpoint, DirectoryInUse, InvalidArgument, SaveFailed
from nxd_ckpt.prune import pin_checkpoint
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, failing
from nxd_ckpt.verify import verify_checkpoint
from tests.protocol.states import visible_tags
from tests.support.damage import flip


def save_all(path: Path, tags: list[str], num_kept_ckpts: int | None) -> list[list[str]]:
    """Save each tag, with its position as the value; what is visible after each."""
    visible = []
    with Checkpointer(path) as saver:
        for value, tag in enumerate(tags):
            saver.save(tag, {"weight": torch.tensor([value])}, num_kept_ckpts=num_kept_ckpts)
            visible.append(visible_tags(path))
    return visible


def value_of(path: Path, tag: str | None = None) -> int:
    model: dict[str, torch.Tensor] = {}
    load_checkpoint(path, tag, model)
    return int(model["weight"])


def test_a_checkpointer_has_a_default(tmp_path: Path) -> None:
    """It is for the saves without a rule of their own."""
    with Checkpointer(tmp_path, num_kept_ckpts=1) as saver:
        for step in range(3):
            saver.save(step, {"weight": torch.ones(1)})
        saver.save(3, {"weight": torch.ones(1)}, retain=2)
    assert ["step_2", "step_3"] == visible_tags(tmp_path)
    with pytest.raises(InvalidArgument, match="pass one of them"):
        Checkpointer(tiers=[Tier(tmp_path, keep=1)], retain=[Last(1)])


def test_an_overwritten_tag_is_the_newest(tmp_path: Path) -> None:
    """Saving over a tag replaces it, counts once, and makes it the latest."""
    assert ["b", "a"] == save_all(tmp_path, ["a", "b", "a"], 2)[-1]
    assert (2, 2, 1) == (value_of(tmp_path), value_of(tmp_path, "a"), value_of(tmp_path, "b"))


def test_what_is_no_checkpoint_is_never_removed(tmp_path: Path) -> None:
    """Logs, a directory that only looks like a tag, and a tag that another program is writing, stay."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "checkpoint").write_text("my notes")
    (tmp_path / "mine" / "done").write_text("yes")
    (tmp_path / "under_way" / "model").mkdir(parents=True)
    (tmp_path / "under_way" / "checkpoint").write_text("1")
    (tmp_path / "notes.txt").write_text("x")
    before = sorted(path for path in tmp_path.rglob("*"))
    save_all(tmp_path, ["a", "b", "c"], 1)
    assert before == [path for path in before if path.exists()]
    assert {"c", "mine", "under_way"} == set(visible_tags(tmp_path))


def test_a_failed_save_removes_nothing(tmp_path: Path) -> None:
    """Retention comes after the new tag is visible and durable, not before."""
    hook = failing("rename", "*-2 -> b", OSError(errno.EIO, "Input/output error"))
    saver = Checkpointer(tmp_path, storage=HookedStorage(LocalStorage(tmp_path), hook))
    saver.save("a", {"weight": torch.tensor([1])}, num_kept_ckpts=1)
    pending = saver.save("b", {"weight": torch.tensor([2])}, num_kept_ckpts=1, async_save=True)
    with pytest.raises(SaveFailed, match="Input/output error"):
        pending.wait()
    saver.close()
    assert ["a"] == visible_tags(tmp_path)
    assert 1 == value_of(tmp_path)


def test_one_tag_is_removed_also_where_this_job_saves(tmp_path: Path) -> None:
    """After the save that is under way; pinned ones stay, and what is no checkpoint."""
    for value, tag in enumerate("abc"):
        save_checkpoint(tmp_path, tag, {"weight": torch.tensor([value])}, async_save=True)
    pin_checkpoint(tmp_path, "a")
    (tmp_path / "other").mkdir()
    assert [False, False, True, False] == [bool(remove_checkpoint(tmp_path, tag)) for tag in ("a", "other", "c", "c")]
    close_checkpointers()
    assert remove_checkpoint(tmp_path, "b")  # nobody saves there now
    assert ["a"] == visible_tags(tmp_path)
    with Checkpointer(tmp_path) as saver:
        saver.save("d", {"weight": torch.tensor([3])})
        with pytest.raises(DirectoryInUse):
            remove_checkpoint(tmp_path, "a")


def _load_and_fall_back(path: Path, checkpointer: Checkpointer) -> None:
    assert 1 == checkpointer.load_latest({}, fallback=True)


def _load_the_one_before_by_hand(path: Path, checkpointer: Checkpointer) -> None:
    with pytest.raises(CorruptCheckpoint):
        load_checkpoint(path, None, {})
    load_checkpoint(path, "step_1", {})


def _verify(path: Path, checkpointer: Checkpointer) -> None:
    assert verify_checkpoint(path).problems


@pytest.mark.parametrize("find_out", [_load_and_fall_back, _load_the_one_before_by_hand, _verify])
def test_a_tag_that_this_process_found_damaged_does_not_count(
    tmp_path: Path, find_out: Callable[[Path, Checkpointer], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It stays, as does the good one that the run went on from, until the tag is saved again."""
    save_all(tmp_path, ["step_0", "step_1", "step_2"], None)
    file = next((tmp_path / "step_2" / "model").iterdir())
    flip(file, file.read_bytes().index(torch.tensor([2]).numpy().tobytes()))
    model = {"weight": torch.tensor([3])}
    with Checkpointer(tmp_path) as checkpointer:
        find_out(tmp_path, checkpointer)
        checkpointer.save(3, model, num_kept_ckpts=2)
        assert ["step_1", "step_2", "step_3"] == visible_tags(tmp_path)
        assert "keeps an older one in its place" in caplog.text

        checkpointer.save(2, model, num_kept_ckpts=2)
        checkpointer.save(4, model, num_kept_ckpts=2)
        assert ["step_2", "step_4"] == visible_tags(tmp_path)
