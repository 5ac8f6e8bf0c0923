"""A Checkpointer that nobody holds any more: a notebook's cell that runs twice, a training that is tried again."""

import gc
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, close_checkpointers, save_checkpoint
from nxd_ckpt.errors import DirectoryInUse, SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, failing
from tests.protocol.hooks import Gate
from tests.protocol.job import Job
from tests.protocol.states import visible_tags

STATE = {"weight": torch.ones(3)}


def fails_after(path: Path, steps: int) -> None:
    """A training that ends by an exception, and closes nothing."""
    saver = Checkpointer(path, every=1, num_kept_ckpts=2)
    first = saver.load_latest({})
    for step in range(first + 1, first + steps + 1):
        saver.save(step, STATE, async_save=True)
    raise RuntimeError("out of memory")


def test_a_training_is_tried_again(tmp_path: Path) -> None:
    """In the same process, also after its directory was removed; the last save of the first try is not lost."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            fails_after(tmp_path / "run", 2)
    Checkpointer(tmp_path / "run").save(5, STATE)
    assert ["step_3", "step_4", "step_5"] == visible_tags(tmp_path / "run")
    gc.collect()
    subprocess.run(["rm", "-rf", tmp_path / "run"], check=True)  # the handle's end removes files at the same time
    with pytest.raises(RuntimeError, match="out of memory"):
        fails_after(tmp_path / "run", 1)
    close_checkpointers()
    assert ["step_1"] == visible_tags(tmp_path / "run")


def test_a_save_in_flight_ends_first(tmp_path: Path) -> None:
    """The next one takes the directory after it."""
    gate = Gate()
    pending = Checkpointer("", storage=HookedStorage(LocalStorage(tmp_path), gate)).save("one", STATE, async_save=True)
    gc.collect()
    assert not pending.done()
    gate.open.set()
    with Checkpointer(tmp_path) as saver:
        saver.save("two", STATE)
    assert pending.done()
    assert ["one", "two"] == visible_tags(tmp_path)


def test_one_that_is_still_held_says_what_to_do(tmp_path: Path) -> None:
    """As when an exception's traceback holds it; what the message advises works."""
    held = Checkpointer(tmp_path)
    held.save("one", STATE)
    with pytest.raises(DirectoryInUse, match=r"nxd_ckpt\.close_checkpointers\(\) closes all of this process"):
        Checkpointer(tmp_path).save("two", STATE)
    close_checkpointers()
    with Checkpointer(tmp_path) as other:
        other.save("two", STATE)
    held.save("three", STATE)
    held.close()
    assert ["one", "two", "three"] == visible_tags(tmp_path)


def test_a_directory_of_the_functions_that_was_removed(tmp_path: Path) -> None:
    """The message says what to do in the same process, and that works."""
    path = tmp_path / "run"
    save_checkpoint(path, "one", STATE)
    shutil.rmtree(path)
    with pytest.raises(SaveFailed, match=r"or call nxd_ckpt\.close_checkpointers\(\)"):
        save_checkpoint(path, "one", STATE)
    close_checkpointers()
    save_checkpoint(path, "one", STATE)
    close_checkpointers()
    assert ["one"] == visible_tags(path)


def test_closing_raises_the_failure_of_one_that_nobody_holds(tmp_path: Path) -> None:
    """Nobody else would."""
    hook = failing("close", "*/model/*", OSError(28, "No space left on device"))
    Checkpointer("", storage=HookedStorage(LocalStorage(tmp_path), hook)).save("one", STATE, async_save=True)
    with pytest.raises(SaveFailed, match="No space left on device"):
        close_checkpointers()
    close_checkpointers()


def tried_again(rank: int, path: Path) -> list[str]:
    """Two ranks; the second try meets the saves of the first."""
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of memory"):
            fails_after(path, 2)
    close_checkpointers()
    return visible_tags(path)


def test_ranks_try_again(tmp_path: Path) -> None:
    """Each goes on from the last save before."""
    outcomes = Job(2, tried_again, tmp_path, group=True).values()
    assert [["step_5", "step_6"]] * 2 == list(outcomes)
