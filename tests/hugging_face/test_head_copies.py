"""Copies of key-value heads: in whose order they lie shows by reading them, and nothing wrong is exported."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt.core.heads import Hardware
from nxd_ckpt.errors import TopologyMismatch
from tests.hugging_face import saved
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, save_job, weights, write_as_nxd

TRN2 = Job(Model(heads=8), tp=4, qkv="fused", copies=2, hardware="trn2")
CONVERTED = replace(TRN2, converted=True)
BY_CONVERTER = "are in the order of NxD's converter for trn2"


def export(tag: Path, job: Job, **options: Any) -> State:
    """What is exported of the tag, with the job's config.json, copies and hardware."""
    saved.export(tag, tag.parents[1] / "out", job, **options)
    return weights(tag.parents[1] / "out")


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "model alone"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("qkv", ["linear", "fused"])
def test_files_of_nxds_converter_are_exported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, qkv: str, tp: int, marked: bool
) -> None:
    """For trn2 it interleaves the copies, which no layer does: the export has each head, and says what it took."""
    job = replace(CONVERTED, qkv=qkv, tp=tp)
    state, tag = job.model.state(), write_as_nxd(tmp_path / "run", job, job.model.state())
    if not marked:
        for marker in ("checkpoint", "done"):
            (tag / marker).unlink()
    assert [] == differences(state, export(tag, job))
    assert BY_CONVERTER in caplog.text


@pytest.mark.parametrize(
    ("job", "write", "equal_halves"),
    [
        pytest.param(TRN2, write_as_nxd, False, id="copies are neighbours, as NxD writes them"),
        pytest.param(TRN2, save_job, False, id="copies are neighbours, as a job saves them"),
        pytest.param(replace(TRN2, model=Model(kv_heads=4, heads=8), tp=2), write_as_nxd, True, id="both orders fit"),
        pytest.param(
            replace(CONVERTED, model=Model(kv_heads=1, heads=4), copies=4), write_as_nxd, False, id="one head"
        ),
    ],
)
def test_layers_are_believed_where_their_order_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, job: Job, write: Any, equal_halves: bool
) -> None:
    """On trn2 copies are neighbours; where two heads and two are equal, or there is one, either order explains them."""
    state = job.model.state()
    for name in [name for name in state if equal_halves and ("k_proj" in name or "v_proj" in name)]:
        state[name] = state[name][: len(state[name]) // 2].repeat(2, 1)
    assert [] == differences(state, export(write(tmp_path / "run", job, state), job))
    assert BY_CONVERTER not in caplog.text


@pytest.mark.parametrize("qkv", ["linear", "fused"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("saved", "asked"), [("trn1", "trn2"), ("trn2", "trn1")])
def test_another_hardware_is_refused(tmp_path: Path, saved: Hardware, asked: Hardware, qkv: str, tp: int) -> None:
    """Also where no two ranks hold the same: fused with q, or several heads on a rank."""
    job = replace(TRN2, hardware=saved, qkv=qkv, tp=tp)
    tag = save_job(tmp_path / "run", job, job.model.state())
    with pytest.raises(TopologyMismatch, match=rf"copies of a key-value head in .*qkv_proj.* hardware='{asked}'"):
        export(tag, job, hardware=asked)
    assert not (tmp_path / "out").exists()


def test_a_tag_with_an_optimizer_is_none_of_the_converters(tmp_path: Path) -> None:
    """A job saved it: interleaved copies are those of trn1, whose query heads lie otherwise."""
    tag = write_as_nxd(tmp_path / "run", CONVERTED, CONVERTED.model.state())
    (tag / "optim").mkdir()
    for path in (tag / "model").iterdir():
        torch.save({"state": {}, "param_groups": []}, tag / "optim" / path.name)
    with pytest.raises(TopologyMismatch, match="copies of a key-value head"):
        export(tag, CONVERTED)


def test_copies_that_are_equal_in_no_order_are_refused(tmp_path: Path) -> None:
    tag = write_as_nxd(tmp_path / "run", CONVERTED, CONVERTED.model.state())
    path = tag / "model" / "dp_rank_00_tp_rank_03_pp_rank_00.pt"
    held = torch.load(path)
    held["model.layers.1.self_attn.qkv_proj.weight_qkv"][-1, -1] += 1
    torch.save(held, path)
    complaint = r"copies of a key-value head in .* differ, so they lie neither as NxD's layers .* nor as its converter"
    with pytest.raises(TopologyMismatch, match=complaint):
        export(tag, CONVERTED)


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "nxd_ckpt")
