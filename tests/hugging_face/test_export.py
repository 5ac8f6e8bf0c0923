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

JOBS = {
    "Llama, one rank": Job(Model()),
    "Llama, q k v apart": Job(Model(kv_heads=4, bias=True), tp=4, pp=2),
    "Llama, copies on trn1": Job(Model(heads=8), tp=4, qkv="linear", copies=2),
    "Llama, copies on trn2": Job(Model(heads=8), tp=4, qkv="fused", copies=2, hardware="trn2"),
    "Llama, coalesced": Job(Model(kv_heads=4), tp=2, qkv="coalesced", fused_mlp=False),
    "Llama, padded vocabulary": Job(Model(vocab=21), tp=2, padded_vocab=24),
    "Mixtral": Job(Model("mixtral"), tp=2, qkv="linear"),
    "Mixtral, expert parallel": Job(Model("mixtral"), tp=2, pp=2, ep=2, fused_mlp=False),
    "GPT-NeoX": Job(Model("gpt_neox"), tp=2, pp=2),
}


@pytest.mark.parametrize(("name", "use_xser"), [(name, number % 2 == 0) for number, name in enumerate(JOBS)])
@pytest.mark.one_in(3)
def test_every_job_exports_its_model(tmp_path: Path, name: str, use_xser: bool) -> None:
    """Any way to keep heads and experts, any sizes, both kinds of files; several weight files and their index."""
    job = JOBS[name]
    state = job.model.state()
    tag = save_job(tmp_path / "run", job, state, use_xser=use_xser)
    export(tag, tmp_path / "out", job, size_per_shard="1kB")
    assert [] == differences(state, weights(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


@given(job=jobs(), converted=st.booleans())
@settings(max_examples=15)
def test_any_job_is_exported(tmp_path_factory: pytest.TempPathFactory, job: Job, converted: bool) -> None:
    """Random sizes, numbers of heads and copies, written as NxD writes them or its converter, in windows that cut
    through tensors."""
    directory, state = tmp_path_factory.mktemp("any"), job.model.state()
    job = replace(job, converted=converted)
    with pytest.MonkeyPatch.context() as patch:
        use_small_waves(patch, 64)
        export(write_as_nxd(directory / "run", job, state), directory / "out", job, size_per_shard="500B")
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


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    """As save_pretrained does: without the head, under the name that files keep."""
    job = Job(Model(), tp=2, pp=2)
    state = job.model.state()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    tag = save_job(tmp_path / "run", job, state)
    config = write_config(tmp_path / "config", {**job.model.config, "tie_word_embeddings": True})
    convert(tag, tmp_path / "out", to="hf", config=config)
    assert [] == differences({n: t for n, t in state.items() if n != "lm_head.weight"}, weights(tmp_path / "out"))
