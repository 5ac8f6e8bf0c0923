"""What NxD's converter writes, ``model/`` and nothing beside it: taken by its name, as by NxD, and never chosen."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import convert, has_checkpoint, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import CheckpointNotFound
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.golden.checkpoints import saved
from tests.tag.equality import difference

TAG = "pretrained_weight"
FIRST = "dp_rank_00_tp_rank_00_pp_rank_00.pt"


@pytest.fixture
def directory(golden: Path, tmp_path: Path) -> Path:
    source = saved(golden, "c_dp2_tp2_zero1_xser").directory
    shutil.copytree(source / "step_3" / "model", tmp_path / TAG / "model")
    return tmp_path


def test_it_loads_by_its_name(golden: Path, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every rank gets what it held, and one warning tells what is missing."""
    golden_one = saved(golden, "c_dp2_tp2_zero1_xser")
    for rank, topology in enumerate(golden_one.topologies):
        model: dict[str, Any] = {}
        load_checkpoint(directory, TAG, model, topology=topology)
        assert None is difference(golden_one.held("step_3", rank)["model"], model)
    assert len(golden_one.topologies) == sum(f"{TAG} has no 'done' marker" in text for text in caplog.messages)


def test_it_is_opened_verified_and_converted_by_its_name(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert open_checkpoint(directory, TAG).topology.tp == 2
    assert () == verify_checkpoint(directory, TAG).problems
    assert main(["inspect", str(directory / TAG)]) == 0
    assert main(["verify", str(directory / TAG)]) == 0
    assert main(["list", str(directory)]) == 0
    assert f"{TAG!r} (without markers: taken only by its name)" in capsys.readouterr().out
    convert(directory / TAG, directory / "plain", to="tag", use_xser=False, durable=False)
    assert not open_checkpoint(directory, "plain").parts.use_xser


def test_it_is_never_chosen(directory: Path) -> None:
    """Where no tag is named there is none, or the marked one; nor is it removed with old ones."""
    assert not has_checkpoint(directory)
    with pytest.raises(CheckpointNotFound, match=rf"no complete checkpoint.*{TAG}' \(without markers"):
        load_checkpoint(directory, model={})
    save_checkpoint(directory, "step_1", {}, user_content=1, num_kept_ckpts=1, durable=False)
    assert load_checkpoint(directory, model={}) == 1
    assert (directory / TAG / "model" / FIRST).is_file()


@pytest.mark.parametrize("change", ["begun", "a rank is missing", "its file is missing", "indexed"])
def test_remains_of_a_save_are_refused(directory: Path, change: str) -> None:
    """Marks of a save that began, or files that are missing."""
    tag = directory / TAG
    if change == "begun":
        (tag / "checkpoint").write_text("1")
    elif change == "indexed":
        (tag / "index").mkdir()
    else:
        (tag / "model" / FIRST).unlink()
        if change == "a rank is missing":
            shutil.rmtree(tag / "model" / f"{FIRST}.tensors")
    with pytest.raises(CheckpointNotFound):
        load_checkpoint(directory, TAG, {})
