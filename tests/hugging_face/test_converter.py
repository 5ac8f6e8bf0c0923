"""``tools/checkpoint_converter.py``: NxD's flags, and what comes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from nxd_ckpt import Topology, load_checkpoint, open_checkpoint
from tests.docs.markdown import REPOSITORY
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, local_state, save_job, weights, write_as_nxd, write_config

pytestmark = [pytest.mark.plain, pytest.mark.once]

JOB = Job(Model(heads=8), tp=4, pp=2, qkv="linear", copies=2)
HEADS = ("--kv_size_multiplier", "2", "--hw_backend", "trn1")


def converter(source: Path, target: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the tool as users do."""
    tool = str(REPOSITORY / "tools" / "checkpoint_converter.py")
    places = ["--input_dir", str(source), "--output_dir", str(target)]
    return subprocess.run([sys.executable, tool, *places, *flags], capture_output=True, text=True, check=False)


def loaded(tag: Path, at: Topology) -> State:
    state: State = {}
    load_checkpoint(tag.parent, tag.name, model=state, topology=at)
    return state


def test_a_full_state_becomes_a_tag_and_comes_back(tmp_path: Path) -> None:
    """``False`` is false, and ``--input_dir`` may be the directory ``model`` of a tag, as with NxD's."""
    state, tag = JOB.model.state(), tmp_path / "run" / "step_0"
    config = write_config(tmp_path / "hf", JOB.model.config)
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    sizes = ["--tp_size", "4", "--pp_size", "2", "--n_layers", "2"]
    booleans = ["--qkv_linear", "True", "--fuse_qkv", "False", "--load_xser", "False", "--save_xser", "True"]
    done = converter(tmp_path / "hf", tag, "--convert_from_full_state", *sizes, *booleans, *HEADS)
    assert (0, "") == (done.returncode, done.stderr)
    assert (tag / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors").is_dir()
    for at in map(Topology(tp=4, pp=2).at, range(8)):
        assert [] == differences(local_state(JOB, state, at), loaded(tag, at))
    done = converter(
        tag / "model", tmp_path / "out", "--convert_to_full_state", "--config", str(config), "--load_xser", "1", *HEADS
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert [] == differences(state, weights(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["ours", "NxD's"])
def test_plain_files_become_xser_files_and_back(tmp_path: Path, kind: str) -> None:
    """On the same sizes; what ranks load stays."""
    state = JOB.model.state()
    source = (save_job if kind == "ours" else write_as_nxd)(tmp_path / "run", JOB, state)
    xser, plain = tmp_path / "xser" / "step_1", tmp_path / "plain" / "step_1"
    assert 0 == converter(source, xser, "--convert_to_xser").returncode
    assert 0 == converter(xser, plain, "--convert_from_xser").returncode
    for at in map(Topology(tp=4, pp=2).at, range(8)):
        expected = local_state(JOB, state, at)
        assert ([], []) == (differences(expected, loaded(xser, at)), differences(expected, loaded(plain, at)))
    kinds = [open_checkpoint(tag.parent).manifest for tag in (xser, plain)]
    assert [True, False] == [manifest is not None and manifest.parts.use_xser for manifest in kinds]


@pytest.mark.parametrize(
    ("flags", "code", "complaint"),
    [
        (["--convert_to_xser"], 1, "input_dir"),
        ([], 2, "one of the arguments"),
        (["--convert_to_xser", "--convert_from_xser"], 2, "not allowed with"),
        (["--convert_to_xser", "--load_xser", "maybe"], 2, "expected True or False, found 'maybe'"),
        (["--convert_from_full_state", "--virtual_pp_size", "2"], 2, "only 1 is supported"),
        (["--convert_from_full_state", "--model_style", "megatron"], 2, "only hf is supported"),
    ],
)
def test_what_it_cannot_do_it_says(tmp_path: Path, flags: list[str], code: int, complaint: str) -> None:
    """In one line, with an exit code, and nothing is written."""
    done = converter(tmp_path / "nowhere", tmp_path / "out", *flags)
    assert code == done.returncode
    assert complaint in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
