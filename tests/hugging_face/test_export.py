"""Exports: whatever job saved the model, the directory holds Hugging Face's tensors, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_ckpt import convert
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.conversion import Dtype
from tests.hugging_face.jobs import jobs
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, export, save_job, use_small_waves, weights, write_as_nxd, write_config


@given(job=jobs(), writer=st.sampled_from(("NxD", "its converter", "ours", "ours with xser")))
@settings(max_examples=20)
def test_any_job_is_exported(tmp_path_factory: pytest.TempPathFactory, job: Job, writer: str) -> None:
    """Random sizes, numbers of heads and copies, whoever wrote them, in windows that cut through tensors."""
    directory, state = tmp_path_factory.mktemp("any"), job.model.state()
    if writer.startswith("ours"):
        tag = save_job(directory / "run", job, state, use_xser=writer == "ours with xser")
    else:
        tag = write_as_nxd(directory / "run", replace(job, converted=writer == "its converter"), state)
    with pytest.MonkeyPatch.context() as patch:
        use_small_waves(patch, 64)
        export(tag, directory / "out", job, size_per_shard="500B")
    assert [] == differences(state, weights(directory / "out"))


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_a_dtype_is_cast_to(tmp_path: Path, dtype: Dtype) -> None:
    """As torch casts it, and config.json says so."""
    job = Job(Model(), tp=2)
    state = {name: tensor / 3 for name, tensor in job.model.state().items()}
    tag = save_job(tmp_path / "run", job, state)
    config = write_config(tmp_path / "config", {**job.model.config, "torch_dtype": "float64"})
    convert(tag, tmp_path / "out", to="hf", config=config, dtype=dtype)
    wanted = getattr(torch, dtype)
    assert [] == differences({name: tensor.to(wanted) for name, tensor in state.items()}, weights(tmp_path / "out"))
    assert dtype == json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"]


def test_what_belongs_to_the_model_is_copied(tmp_path: Path) -> None:
    """config.json and generation_config.json, the tokenizer's files, and nothing else."""
    job = Job(Model())
    given_files = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt", "training.log")
    write_config(tmp_path / "hf", job.model.config)
    for name in given_files:
        (tmp_path / "hf" / name).write_text(name)
    tag = save_job(tmp_path / "run", job, job.model.state())
    convert(tag, tmp_path / "out", to="hf", config=tmp_path / "hf", tokenizer=tmp_path / "hf")
    found = {path.name: path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert json.loads(found.pop("config.json")) == job.model.config
    assert {name: name for name in given_files if name != "training.log"} == found


def test_all_that_is_not_weights_is_copied_with_the_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """From Hugging Face's cache, where files are links to blobs; other links out of the directory are not followed. The
    directory can be replaced then, unlike one with such files and no weights."""
    tag = save_job(tmp_path / "run", Job(Model()), Model().state())
    copied = [
        "LICENSE", "README.md", "additional_chat_templates/rag.jinja", "chat_template.jinja", "modeling_mine.py",
        "tekken.json", "tokenizer.json",
    ]  # fmt: skip
    not_copied = [
        "config.json", "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "quantize_config.json",
        "adapter_config.json", ".env", "run.log",
    ]  # fmt: skip
    blobs, snapshot = tmp_path / "models--me--mine" / "blobs", tmp_path / "models--me--mine" / "snapshots" / "main"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    for name in (*copied, *not_copied):
        (blobs / name.replace("/", "-")).write_text(name)
        (snapshot / name).symlink_to(blobs / name.replace("/", "-"))
    (tmp_path / "secret.txt").write_text("secret")
    (snapshot / "notes.txt").symlink_to(tmp_path / "secret.txt")
    config = write_config(tmp_path / "config", Model().config)
    options = ["--config", str(config), "--tokenizer", str(snapshot), "--json"]
    command = ["convert", "--to", "hf", str(tag), str(tmp_path / "out"), *options]
    assert 0 == main(command)
    assert {*copied, "config.json", "model.safetensors"} == json.loads(capsys.readouterr().out)["files"].keys()
    out = tmp_path / "out"
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and not path.is_symlink()}
    assert {*copied, "config.json", "model.safetensors"} == found
    assert copied == [(out / name).read_text() for name in copied]
    assert any("notes.txt" in each and "links lead out of it" in each for each in caplog.messages)

    assert 0 == main([*command, "--overwrite"])
    (out / "model.safetensors").unlink()
    with pytest.raises(InvalidArgument, match=r"holds .*which no Hugging Face model has"):
        convert(tag, out, to="hf", config=config, overwrite=True)


def test_a_dry_run_shows_what_does_not_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names without a rule with the closest rules, tensors that are missing; the exit code is 1."""
    job = Job(Model(heads=8), qkv="fused", copies=2, hardware="trn2")
    tag = save_job(tmp_path / "run", job, job.model.state())
    rule = {"nxd": "model.layers.{layer}.self_attn.qkv_proj.weight", "hf": "layers.{layer}.qkv"}
    mapping = {"format_version": 1, "name": "mine", "rules": [{**rule, "heads": "kv", "dim": 0}]}
    (tmp_path / "mine.json").write_text(json.dumps(mapping))
    files = ["--config", str(write_config(tmp_path, job.model.config)), "--mapping", str(tmp_path / "mine.json")]
    heads = ["--kv-size-multiplier", "2", "--hw-backend", "trn2"]
    assert 1 == main(["convert", "--to", "hf", "--dry-run", str(tag), str(tmp_path / "out"), *files, *heads])
    lines = capsys.readouterr().out.splitlines()
    closest = [line.split() for line in lines if line.startswith("  model.layers.0.self_attn.qkv_proj.weight_qkv")]
    assert [["model.layers.0.self_attn.qkv_proj.weight_qkv", rule["nxd"]]] == closest
    assert "missing, though every such model has them: layers.0.qkv, layers.1.qkv" == lines[-1]
