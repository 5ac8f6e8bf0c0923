"""NxD that saves over a tag of ours is noticed: the tag is then read as what NxD wrote."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import load_checkpoint, open_checkpoint
from nxd_ckpt.errors import CorruptCheckpoint
from tests.golden.checkpoints import Saved, saved
from tests.interop.saving import save_as_every_rank
from tests.tag.equality import difference

FORMS = ["a_dp2_zero1_pt", "b_dp2_zero1_xser"]


def save_doubled(golden_one: Saved, directory: Path) -> None:
    """A tag of ours with the golden states, every model tensor doubled: the same names, shapes and dtypes."""

    def doubled(rank: int) -> dict[str, Any]:
        held = golden_one.held("step_3", rank)
        model = {name: tensor + tensor for name, tensor in held["model"].items()}
        return {"model": model, "optimizer": held["optimizer"], "user_content": "ours"}

    use_xser = golden_one.config["use_xser"]
    save_as_every_rank(directory, "step_3", golden_one.topologies, doubled, use_xser=use_xser)


def save_over(golden_one: Saved, directory: Path, *, finished: bool) -> None:
    """What NxD does to an existing tag: its files replace ours, in place; ``done`` is written anew at the end."""
    kept = shutil.ignore_patterns() if finished else shutil.ignore_patterns("done")
    shutil.copytree(
        golden_one.directory / "step_3",
        directory / "step_3",
        copy_function=shutil.copyfile,
        dirs_exist_ok=True,
        ignore=kept,
    )
    if finished:
        later = (directory / "step_3" / "done").stat().st_mtime + 60
        os.utime(directory / "step_3" / "done", (later, later))


@pytest.mark.parametrize("name", FORMS)
def test_a_tag_that_nxd_saved_over_is_read_as_nxd_s(
    golden: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The index of the old files is set aside with a warning, and every rank loads the new ones."""
    golden_one = saved(golden, name)
    save_doubled(golden_one, tmp_path)
    assert open_checkpoint(tmp_path, "step_3").manifest is not None
    save_over(golden_one, tmp_path, finished=True)
    for rank, topology in enumerate(golden_one.topologies):
        caplog.clear()
        loaded: dict[str, Any] = {"model": {}, "optimizer": {}, "scheduler": {}}
        with caplog.at_level(logging.WARNING, "nxd_ckpt"):
            content = load_checkpoint(tmp_path, **loaded, topology=topology)
        held = golden_one.held("step_3", rank)
        assert "another program saved over it" in caplog.text
        assert None is difference({key: held[key] for key in loaded}, loaded)
        assert None is difference(held["user_content"], content)


@pytest.mark.parametrize("name", FORMS)
def test_a_save_over_ours_that_was_interrupted_is_refused(golden: Path, tmp_path: Path, name: str) -> None:
    """With ``done`` still ours the files are a mixture that no marker vouches for: nothing of it loads."""
    golden_one = saved(golden, name)
    save_doubled(golden_one, tmp_path)
    save_over(golden_one, tmp_path, finished=False)
    model: dict[str, Any] = {}
    with pytest.raises(CorruptCheckpoint, match=r"truncated or replaced|its bytes changed"):
        load_checkpoint(tmp_path, model=model, topology=golden_one.topologies[0])
    assert {} == model


def test_a_tag_that_was_copied_is_still_ours(golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Copying changes the times of the markers, not the files: no warning, and the digests count."""
    golden_one = saved(golden, "a_dp2_zero1_pt")
    save_doubled(golden_one, tmp_path / "one")
    shutil.copytree(tmp_path / "one" / "step_3", tmp_path / "two" / "step_3", copy_function=shutil.copyfile)
    with caplog.at_level(logging.WARNING, "nxd_ckpt"):
        content = load_checkpoint(tmp_path / "two", model={}, topology=golden_one.topologies[0])
    assert ("ours", "") == (content, caplog.text)
    assert open_checkpoint(tmp_path / "two").manifest is not None
