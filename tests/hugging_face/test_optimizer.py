"""Exports with the optimizer: its state under Hugging Face's names, cut as the weights that it belongs to."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, convert
from nxd_ckpt.errors import (
    CheckpointError,
    IncompatibleState,
    KeyMismatch,
    OptimizerMismatch,
    PartNotFound,
    UnsupportedState,
)
from nxd_ckpt.layouts.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.storage.local import LocalStorage
from tests.hugging_face import saved
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, save_job, use_small_waves, weights, write_as_nxd, write_config
from tests.hugging_face.trained import document, expected_document, expected_tensors, save_trained, tensors
from tests.interop.saving import save_as_every_rank

COPIES = Job(Model(heads=8), tp=4, qkv="linear", copies=2)
APART = Job(Model(kv_heads=4, bias=True), tp=2, pp=2)
FUSED = Job(Model(heads=8), tp=4, pp=2, qkv="fused", copies=2, hardware="trn2")
MIXTRAL = Job(Model("mixtral"), tp=2, pp=2, ep=2, qkv="linear")

export = partial(saved.export, optimizer=True)


@pytest.mark.parametrize(
    ("job", "dp", "zero1", "use_xser"),
    [
        pytest.param(Job(Model()), 1, False, False, id="Llama, one rank"),
        pytest.param(APART, 3, True, False, id="Llama, q k v apart"),
        pytest.param(COPIES, 3, True, True, id="Llama, copies on trn1"),
        pytest.param(FUSED, 2, False, True, id="Llama, copies on trn2"),
        pytest.param(Job(Model(vocab=21), tp=2, padded_vocab=24), 2, True, False, id="Llama, padded vocabulary"),
        pytest.param(MIXTRAL, 4, True, True, id="Mixtral, expert parallel"),
        pytest.param(Job(Model("gpt_neox"), tp=2, pp=2), 2, False, False, id="GPT-NeoX"),
    ],
)
@pytest.mark.one_in(2)
def test_every_job_exports_its_optimizer(tmp_path: Path, job: Job, dp: int, zero1: bool, use_xser: bool) -> None:
    """Any sizes, ZeRO-1 or not, both kinds of files: moments, master weights, steps and param groups."""
    tag = save_trained(tmp_path / "run", job, dp=dp, zero1=zero1, use_xser=use_xser)
    export(tag, tmp_path / "out", job, size_per_shard="1kB")
    assert [] == differences(expected_tensors(job, masters=zero1), tensors(tmp_path / "out"))
    assert expected_document(job) == document(tmp_path / "out")
    assert [] == differences(job.model.state(), weights(tmp_path / "out"))


def test_its_files_are_never_taken_for_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file each, in windows that cut through tensors: an index says which is the model's."""
    use_small_waves(monkeypatch, 1024)
    tag = save_trained(tmp_path / "run", COPIES, dp=2, zero1=True)
    export(tag, tmp_path / "out", COPIES, dtype="bfloat16")
    names = ["config.json", "model.safetensors", "model.safetensors.index.json", "optimizer.json"]
    assert [*names, "optimizer.safetensors"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [] == differences(expected_tensors(COPIES, masters=True), tensors(tmp_path / "out"))
    assert sorted(COPIES.model.state()) == HuggingFaceDirectory(LocalStorage(tmp_path / "out")).names
    assert {torch.bfloat16} == {tensor.dtype for tensor in weights(tmp_path / "out").values()}


@pytest.mark.parametrize(("size", "lost"), [("5GB", ""), ("2KB", ".index.json")])
def test_its_lost_file_is_missed(tmp_path: Path, size: str, lost: str) -> None:
    """An optimizer that never made a step has none."""
    job = Job(Model())
    export(save_trained(tmp_path / "run", job, dp=1, zero1=False), tmp_path / "out", job, size_per_shard=size)
    (tmp_path / "out" / f"optimizer.safetensors{lost}").unlink()
    with pytest.raises(PartNotFound, match=rf"optimizer\.safetensors{lost}"):
        convert(tmp_path / "out", tmp_path / "back" / "step_1", to="tag", names="own")


def test_names_may_be_given(tmp_path: Path) -> None:
    """Where a tag does not say whose state it is, as NxD's do not; master weights need them as well."""
    job = Job(Model(), tp=2)
    tag = save_trained(tmp_path / "run", job, dp=2, zero1=True, names=False)
    for options in ({}, {"optimizer": False, "master_weights": True}):
        with pytest.raises(OptimizerMismatch, match=r"does not name the parameters.*saved_param_names="):
            export(tag, tmp_path / "out", job, **options)
    held = list(job.rank(job.model.state()))
    names = [[[name for name in held if ("norm" in name) == norm] for norm in (False, True)]]
    export(tag, tmp_path / "out", job, saved_param_names=names)
    assert [] == differences(expected_tensors(job, masters=True), tensors(tmp_path / "out"))
    wrong = [[[name.replace("norm", "gone") for name in group] for group in names[0]]]
    with pytest.raises(KeyMismatch, match=r"has state of model\.layers\.0\.input_layergone\.weight"):
        export(tag, tmp_path / "other", job, saved_param_names=wrong)


def test_tied_embeddings_have_one_state(tmp_path: Path) -> None:
    """That of the tensor that files keep; the other one is in no file."""
    job = Job(Model())
    state = {**job.model.state(), "lm_head.weight": job.model.state()["model.embed_tokens.weight"]}
    held = job.rank(state)
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    entries = {index: {"step": 1, "exp_avg": held[name] * 2} for index, name in enumerate(names)}
    optimizer = {"state": entries, "param_groups": [{"lr": torch.tensor(0.5), "params": [0, 1]}]}
    what = {"model": held, "optimizer": optimizer, "param_names": [names]}
    save_as_every_rank(tmp_path / "run", "step_1", [Topology()], lambda rank: what, durable=False)
    config = write_config(tmp_path / "config", {**job.model.config, "tie_word_embeddings": True})
    done = convert(tmp_path / "run" / "step_1", tmp_path / "out", to="hf", config=config, optimizer=True)
    assert {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()} == done.files
    assert [] == differences({name: one for name, one in state.items() if name != names[1]}, weights(tmp_path / "out"))
    expected = {f"{names[0]}/exp_avg": held[names[0]] * 2}
    assert [] == differences(expected, tensors(tmp_path / "out"))
    found = document(tmp_path / "out")
    assert [{"lr": 0.5, "params": names[:1]}] == found["param_groups"]
    assert {names[0]: {"step": 1}} == found["state"]


def test_a_tag_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    job = Job(Model())
    with pytest.raises(PartNotFound, match="was saved without an optimizer"):
        export(save_job(tmp_path / "run", job, job.model.state()), tmp_path / "out", job)
    with pytest.raises(PartNotFound, match="was saved without an optimizer"):
        export(write_as_nxd(tmp_path / "nxd", job, job.model.state()), tmp_path / "out", job)


@pytest.mark.parametrize(
    ("damage", "kind", "complaint"),
    [
        (lambda entry: entry.update(row=torch.ones(3)), OptimizerMismatch, r"row: saved with shape \(3,\)"),
        (lambda entry: entry.update(a=[torch.ones(2)] * 2), UnsupportedState, r"/a: .* is neither state shaped like"),
        (dict.clear, IncompatibleState, "saved no exp_avg for 'model.norm.weight', but others did"),
    ],
)
def test_state_that_cannot_be_exported(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], kind: type[CheckpointError], complaint: str
) -> None:
    job = Job(Model(), tp=2)
    topologies = [Topology(tp=2, rank=rank) for rank in range(2)]

    def what(rank: int) -> dict[str, Any]:
        model = job.rank(job.model.state(), rank)
        entry: dict[str, Any] = {"step": 1, "exp_avg": model["model.norm.weight"]}
        if rank == 1 or damage is not dict.clear:
            damage(entry)
        optimizer = {"state": {0: entry}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        return {"model": model, "optimizer": optimizer, "param_names": [["model.norm.weight"]]}

    save_as_every_rank(tmp_path / "run", "step_1", topologies, what, durable=False)
    with pytest.raises(kind, match=complaint):
        export(tmp_path / "run" / "step_1", tmp_path / "out", job)
    assert not (tmp_path / "out").exists()
