"""What the package's functions and objects are like to use: documented, typed, small, and fit to be passed around."""

import pickle
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import nxd_ckpt
from nxd_ckpt.errors import TagReplaced
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.golden.checkpoints import CONFIGURATIONS, saved


def test_a_pending_save_shows_its_caller_what_is_the_callers() -> None:
    """Waiting, and how it went, beside what every future has."""
    public = {name for name in dir(nxd_ckpt.PendingSave) if not name.startswith("_")}
    assert {"error", "nbytes", "staged", "tag", "timings", "wait", "wait_decided"} == public - {*dir(Future)}


@pytest.mark.parametrize("name", ["save", "load"])
def test_likely_names_lead_to_the_functions(name: str, tmp_path: Path) -> None:
    """Also after a save and a load: no package of that name takes their place."""
    nxd_ckpt.save_checkpoint(tmp_path, "one", {"w": torch.ones(1)})
    nxd_ckpt.load_checkpoint(tmp_path, None, {"w": torch.ones(1)})
    with pytest.raises(AttributeError, match=rf"did you mean {name}_checkpoint\(\)"):
        getattr(nxd_ckpt, name)


def test_a_pending_save_says_how_it_stands(tmp_path: Path) -> None:
    with nxd_ckpt.Checkpointer(tmp_path) as saver:
        pending = saver.save("t", {"w": torch.ones(1)})
    assert "<PendingSave 't': done>" == repr(pending)


def test_a_checkpointer_says_what_it_is(tmp_path: Path) -> None:
    """In its repr: the directory, whether it holds that, and the rank."""
    saver = nxd_ckpt.Checkpointer(tmp_path, topology=nxd_ckpt.Topology())
    for state, call in (("not open yet", saver.latest_step), ("open", saver.close), ("closed", saver.close)):
        assert f"<Checkpointer {str(tmp_path)!r}: {state}, rank 0 of 1>" == repr(saver)
        if state == "not open yet":
            saver.save("t", {"w": torch.ones(1)})
        else:
            call()


def test_what_completion_offers() -> None:
    public = [name for name in dir(nxd_ckpt) if not name.startswith("_")]
    assert sorted(name for name in nxd_ckpt.__all__ if not name.startswith("_")) == public


CALLS = """
import nxd_ckpt
for name in ("save", "load", "close", "wait", "something"):
    try:
        getattr(nxd_ckpt, name)
    except AttributeError as error:
        print(error)
"""


def test_calls_of_other_libraries_are_explained() -> None:
    """By the first use: once something was imported for a save, two of the names are folders of the package."""
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=600, check=True)
    save, load, close, wait, something = done.stdout.splitlines()
    assert "did you mean save_checkpoint()" in save
    assert "did you mean load_checkpoint()" in load
    assert "did you mean close_checkpointers()" in close
    assert "did you mean finalize_checkpoint()" in wait
    assert something.endswith("has no attribute 'something'")


def test_a_number_is_a_tag(tmp_path: Path) -> None:
    """An int names the same tag as its digits, wherever a tag is named."""
    nxd_ckpt.save_checkpoint(tmp_path, 300, {"w": torch.tensor([3.0])})
    state: dict[str, torch.Tensor] = {}
    nxd_ckpt.load_checkpoint(tmp_path, 300, state)
    assert {"w": torch.tensor([3.0])} == state
    assert ("300", "300") == (nxd_ckpt.open_checkpoint(tmp_path, 300).tag, verify_checkpoint(tmp_path, 300).tag)


def test_a_checkpoint_goes_to_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickled it opens the same tag, from any working directory, though there is a newer one."""
    nxd_ckpt.save_checkpoint(tmp_path / "run", "first", {"w": torch.tensor([1.0])})
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(nxd_ckpt.open_checkpoint("run"))
    nxd_ckpt.save_checkpoint(tmp_path / "run", "second", {"w": torch.tensor([2.0])})
    monkeypatch.chdir("/")

    checkpoint = pickle.loads(data)

    assert isinstance(checkpoint, nxd_ckpt.Checkpoint)
    assert ("first", [1.0]) == (checkpoint.tag, checkpoint.read("model/w").tolist())


def test_a_checkpoint_that_was_replaced_is_not_another_one(tmp_path: Path) -> None:
    """What is unpickled is the save that was pickled, or an error."""
    nxd_ckpt.save_checkpoint(tmp_path, "t", {"w": torch.tensor([1.0])})
    data = pickle.dumps(nxd_ckpt.open_checkpoint(tmp_path))
    nxd_ckpt.save_checkpoint(tmp_path, "t", {"w": torch.tensor([2.0])})
    with pytest.raises(TagReplaced, match="was replaced"):
        pickle.loads(data)


def test_a_checkpoint_says_where_it_is(tmp_path: Path, golden: Path) -> None:
    """Its repr names the tag and the sizes, and reads no file: it works when these are gone."""
    nxd_ckpt.save_checkpoint(tmp_path / "run", "t", {"w": torch.ones(1)})
    ours = nxd_ckpt.open_checkpoint(tmp_path / "run")
    theirs = nxd_ckpt.open_checkpoint(saved(golden, CONFIGURATIONS[0]).directory)
    shutil.rmtree(tmp_path / "run" / "t")
    assert f"<Checkpoint {tmp_path}/run/t, dp=1 tp=1 pp=1 ep=1>" == repr(ours)
    assert repr(theirs).endswith(", by another program>")
