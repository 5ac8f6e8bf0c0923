"""What cannot be converted is refused with the reason, before anything is written; the input stays as it is."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology, convert, load_checkpoint
from nxd_ckpt.errors import (
    CheckpointNotFound,
    DirectoryInUse,
    IncompatibleState,
    InvalidArgument,
    InvalidTag,
    MalformedFile,
    OptimizerMismatch,
    PartNotFound,
)
from nxd_ckpt.options.conversion import Form
from tests.conversion.tags import contents, save_example
from tests.golden.checkpoints import saved
from tests.interop.saving import save_as_every_rank

RANK_1 = "optim/dp_rank_01_tp_rank_00_pp_rank_00.pt"


@pytest.fixture
def foreign(golden: Path, tmp_path: Path) -> Path:
    """A copy of a tag that NxD saved on two data-parallel ranks."""
    return shutil.copytree(saved(golden, "a_dp2_zero1_pt").directory / "step_3", tmp_path / "input" / "step_3")


def refused(error: type[Exception], complaint: str, source: Path, target: Path, **options: Any) -> None:
    """Verify that the conversion raises this, and leaves neither a change nor a trace."""
    options = options or {"optimizer_form": "zero1", "dp": 3}
    existed, before = target.exists(), contents(source)
    with pytest.raises(error, match=complaint):
        convert(source, target, to="tag", **options)
    assert before == contents(source)
    assert existed == target.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"optimizer_form": "zero1_full", "dp": 2}, "leave it out"),
        ({"optim_only": True}, "optim_only is for optimizer_form"),
        ({"optimizer_form": "zero1", "optim_only": True, "tp": 2}, "no size but dp"),
        ({"optimizer_form": "zero1", "dp": 0}, "at least 1"),
        ({"optimizer_form": "zero1_full", "num_workers": 0}, "num_workers"),
        ({"size_per_shard": "1GB"}, r"size_per_shard= means nothing for to='tag'.*; it is for to='files'"),
        ({"names": "nxd", "optimizer": True}, "optimizer= means nothing for to='tag' with names='nxd'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    """Of forms, sizes, names and workers."""
    source = save_example(tmp_path / "input", 2)
    with pytest.raises(InvalidArgument, match=complaint):
        convert(source, tmp_path / "out", to="tag", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("offsets", [True, False], ids=["offsets kept", "offsets dropped"])
@pytest.mark.parametrize("model", [True, False], ids=["with its model", "alone"])
def test_an_expert_optimizer_that_nxds_converter_unsharded(
    golden: Path, tmp_path: Path, offsets: bool, model: bool
) -> None:
    """It takes the experts of one rank for all: nothing that reads the file may take it for whole."""
    step = saved(golden, "i_dp4_ep2_zero1_pt").directory / "step_3"
    source = tmp_path / "input" / "step_3"
    (source / "optim").mkdir(parents=True)
    torch.save(_unsharded_by_nxd(step, offsets), source / "optim" / "full_tp_rank_00_pp_rank_00.pt")
    if model:
        shutil.copytree(step / "model", source / "model")
    complaint = "optim: an unsharded optimizer of an expert-parallel job, which .* writes wrongly"
    refused(MalformedFile, complaint, source, tmp_path / "out")
    for marker in ("checkpoint", "done"):
        (source / marker).write_text("1")
    with pytest.raises(MalformedFile, match=complaint):
        load_checkpoint(source.parent, source.name, optimizer={}, topology=Topology())


def _unsharded_by_nxd(step: Path, offsets: bool) -> dict[str, Any]:
    """What its converter makes of the files of all ranks: it puts shards one behind the other and cuts off the rest."""
    files = sorted((step / "optim").glob("*.pt"))
    ranks = [torch.load(file, weights_only=False) for file in files]
    full = dict(ranks[0])
    for index, shape in full["shape_info"].items():
        shards = [rank["base_state"][index] for rank in ranks]
        state = {name: torch.cat([shard[name] for shard in shards])[: shape[0]] for name in ("exp_avg", "exp_avg_sq")}
        full["base_state"] = {**full["base_state"], index: {"step": shards[0]["step"], **state}}
    return full if offsets else {key: value for key, value in full.items() if not key.startswith("ep_")}


@pytest.mark.parametrize("output", ["input/step_3", "input/step_3/converted", "input", "link/step_3"])
def test_an_output_that_touches_the_input(tmp_path: Path, output: str) -> None:
    """The same directory, one inside the other, or the same by a symbolic link, also with ``overwrite``."""
    source = save_example(tmp_path / "input", 2)
    (tmp_path / "link").symlink_to(tmp_path / "input")
    options = {"optimizer_form": "zero1_full", "overwrite": True}
    refused(InvalidArgument, "one is inside the other", source, tmp_path / output, **options)


@pytest.mark.parametrize("to", ["tag", "files", "dcp", "tar"])
@pytest.mark.parametrize("output", ["run/.nxd_ckpt/x", "run/step_3/../.nxd_ckpt/staging/x", "link/x"])
def test_an_output_among_what_is_kept_for_a_run(tmp_path: Path, output: str, to: Form) -> None:
    """It would be removed with that, or read as a part of it; also by a link."""
    source = save_example(tmp_path / "input", 2)
    hidden = save_example(tmp_path / "run", 2).parent / ".nxd_ckpt"
    hidden.mkdir(exist_ok=True)
    (tmp_path / "link").symlink_to(hidden)
    before = contents(tmp_path / "run")
    with pytest.raises(InvalidArgument, match=r"run/\.nxd_ckpt, which is nxd_ckpt's own"):
        convert(source, tmp_path / (output + ".tar" * (to == "tar")), to=to)
    assert before == contents(tmp_path / "run")


def test_an_output_that_exists_is_replaced_on_request_only(tmp_path: Path) -> None:
    """It is replaced only on request, and never if it is not a checkpoint; an empty directory may be there."""
    source = save_example(tmp_path / "input", 2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    (tmp_path / "empty").mkdir()

    refused(InvalidArgument, "overwrite=True", source, tmp_path / "mine", optimizer_form="zero1_full")
    full: dict[str, Any] = {"optimizer_form": "zero1_full", "overwrite": True}
    refused(InvalidArgument, "it is not replaced", source, tmp_path / "mine", **full)
    refused(InvalidArgument, "is a file", source, tmp_path / "file", optimizer_form="zero1_full", overwrite=True)
    refused(InvalidTag, "hidden", source, tmp_path / ".out", optimizer_form="zero1_full")
    convert(source, tmp_path / "empty", to="tag", optimizer_form="zero1_full")

    assert "keep" == (tmp_path / "mine" / "notes.txt").read_text()
    assert (tmp_path / "empty" / "done").exists()


def test_an_input_that_is_no_tag(foreign: Path, tmp_path: Path) -> None:
    """Nothing there, a directory inside of a tag, a save that was interrupted."""
    refused(CheckpointNotFound, "does not exist", tmp_path / "nowhere", tmp_path / "out")
    refused(CheckpointNotFound, "a part of the tag", foreign / "model", tmp_path / "out")
    (foreign / "done").unlink()
    refused(CheckpointNotFound, "interrupted", foreign, tmp_path / "out")


def test_an_input_without_a_zero1_optimizer_is_refused(golden: Path, tmp_path: Path) -> None:
    """A plain optimizer is the same for any number of ranks; a model alone has none."""
    plain = saved(golden, "g_dp2_tp2_nozero1_xser").directory / "step_3"
    save_as_every_rank(tmp_path / "model", "step_1", [Topology()], lambda rank: {"model": {"weight": torch.ones(2)}})
    refused(OptimizerMismatch, "plain optimizer", plain, tmp_path / "out", optimizer_form="zero1_full")
    refused(OptimizerMismatch, "no optimizer", tmp_path / "model" / "step_1", tmp_path / "out")
    save_as_every_rank(tmp_path / "neither", "step_1", [Topology()], lambda rank: {"user_content": 1})
    with pytest.raises(PartNotFound, match="neither"):
        convert(tmp_path / "neither" / "step_1", tmp_path / "out", to="tag", dp=2)


def test_an_input_that_is_unsharded_already(golden: Path, tmp_path: Path) -> None:
    """As NxD's converter refuses it."""
    source = golden / "k_convert" / "pt" / "full"
    refused(InvalidArgument, "unsharded already", source, tmp_path / "out", optimizer_form="zero1_full")


def test_ranks_files_that_are_missing(golden: Path, foreign: Path, tmp_path: Path) -> None:
    """In the middle, which their names tell, and at the end, which only the shards' rows do; ours by the manifest."""
    ours = save_example(tmp_path / "ours", 2)
    (ours / RANK_1).unlink()
    refused(PartNotFound, "dp_rank_01", ours, tmp_path / "out")
    (foreign / RANK_1).unlink()
    refused(IncompatibleState, "two saves", foreign, tmp_path / "out")
    four = shutil.copytree(saved(golden, "d_dp4_zero1_xser").directory / "step_3", tmp_path / "four" / "step_3")
    (four / RANK_1).unlink()
    refused(PartNotFound, "dp 1 tp 0 pp 0", four, tmp_path / "out")
    staged = shutil.copytree(saved(golden, "h_tp2_pp2_zero1_xser").directory / "step_3", tmp_path / "staged" / "step_3")
    for file in staged.glob("model/*pp_rank_01.pt"):
        file.unlink()
    refused(PartNotFound, "missing from one of them", staged, tmp_path / "out")


def test_files_of_two_saves_are_refused(golden: Path, foreign: Path, tmp_path: Path) -> None:
    """A rank's file of another step, of another number of ranks, or of another run: the shards do not fit together."""
    original = (foreign / RANK_1).read_bytes()

    tree = torch.load(foreign / RANK_1, weights_only=True)
    for entry in tree["base_state"].values():
        entry["step"] += 1
    torch.save(tree, foreign / RANK_1)
    refused(IncompatibleState, "step differed between the ranks", foreign, tmp_path / "out")

    (foreign / RANK_1).write_bytes(original)
    tree = torch.load(foreign / RANK_1, weights_only=True)
    rows, *rest = tree["shape_info"][1]
    tree["shape_info"][1] = [rows - 1, *rest]
    torch.save(tree, foreign / RANK_1)
    refused(IncompatibleState, f"'#1' with shape .{rows - 1}, .* others with .{rows}, ", foreign, tmp_path / "out")

    of_three = golden / "k_convert" / "pt" / "sharded_to_dp3" / "optim"
    (foreign / RANK_1).write_bytes((of_three / Path(RANK_1).name).read_bytes())
    refused(MalformedFile, "two saves", foreign, tmp_path / "out")

    (foreign / RANK_1).write_bytes(original)
    shutil.copy(of_three / "dp_rank_02_tp_rank_00_pp_rank_00.pt", foreign / "optim")
    refused(IncompatibleState, "two saves", foreign, tmp_path / "out")


def test_a_changed_byte_in_a_file_of_nxds(foreign: Path, tmp_path: Path) -> None:
    """In the model, which is only copied, as in the optimizer."""
    for part in ("model", "optim"):
        file = foreign / part / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
        original = file.read_bytes()
        tree = torch.load(file, weights_only=True)
        tensor = tree["embed.weight"] if part == "model" else tree["base_state"][1]["exp_avg"]
        at = original.index(tensor.contiguous().numpy().tobytes())
        file.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        refused(Exception, "CRC-32", foreign, tmp_path / "out")
        file.write_bytes(original)


def test_a_directory_that_a_live_job_saves_to(tmp_path: Path) -> None:
    """Two writers would not know of each other's tags."""
    source = save_example(tmp_path / "input", 2)
    with Checkpointer(tmp_path / "job") as job:
        job.save("step_1", {"weight": torch.ones(2)})
        refused(DirectoryInUse, "job", source, tmp_path / "job" / "out")


@pytest.mark.parametrize(
    ("form", "name"),
    [("files", "out.pt"), ("hf", "out.safetensors"), ("hf", "out.tar"), ("tag", "out.tgz"), ("dcp", "out.tar.zst")],
)
def test_a_directory_that_would_be_called_as_a_file_is_refused(tmp_path: Path, form: Form, name: str) -> None:
    """The user wants one file. A tag called ``x.ckpt``, as others call theirs, is made."""
    source = save_example(tmp_path / "input", 2)
    with pytest.raises(InvalidArgument, match=f"{name} is named as one file, but to='{form}' makes a directory"):
        convert(source, tmp_path / name, to=form)
    assert not (tmp_path / name).exists()
    convert(source, tmp_path / "out.ckpt", to="tag", durable=False)
    load_checkpoint(tmp_path, "out.ckpt", {})
