"""``tools/checkpoint_converter.py``: NxD's flags, and what comes of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Topology, load_checkpoint, open_checkpoint
from nxd_ckpt.cli.main import main as nxd_ckpt_main
from tests.docs.markdown import REPOSITORY
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import (
    differences,
    local_state,
    ranks_of,
    save_job,
    weights,
    write_as_nxd,
    write_config,
    write_model,
)
from tests.support.processes import run_file
from tools.checkpoint_converter import main

JOB = Job(Model(heads=8), tp=4, pp=2, qkv="linear", copies=2)
HEADS = ("--kv_size_multiplier", "2", "--hw_backend", "trn1")


def convert(source: Path, target: Path, *flags: str) -> int:
    """The same without a process of its own; the exit code."""
    return main(["--input_dir", str(source), "--output_dir", str(target), *flags])


def loaded(tag: Path, at: Topology) -> State:
    state: State = {}
    load_checkpoint(tag.parent, tag.name, model=state, topology=at)
    return state


def test_a_full_state_becomes_a_tag_and_comes_back(tmp_path: Path) -> None:
    """``False`` is false, and ``--input_dir`` may be the directory ``model`` of a tag, as with NxD's."""
    state, tag = write_model(tmp_path / "hf", JOB.model), tmp_path / "run" / "step_0"
    config = tmp_path / "hf" / "config.json"
    sizes = ["--tp_size", "4", "--pp_size", "2", "--n_layers", "2"]
    booleans = ["--qkv_linear", "True", "--fuse_qkv", "False", "--load_xser", "False", "--save_xser", "True"]
    places = ["--input_dir", tmp_path / "hf", "--output_dir", tag]
    tool = REPOSITORY / "tools" / "checkpoint_converter.py"
    done = run_file(tool, *places, "--convert_from_full_state", *sizes, *booleans, *HEADS)
    assert (0, "") == (done.returncode, done.stderr)
    assert (tag / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors").is_dir()
    for at in ranks_of(JOB):
        assert [] == differences(local_state(JOB, state, at), loaded(tag, at))
    back = ["--convert_to_full_state", "--config", str(config), "--load_xser", "1", *HEADS]
    assert 0 == convert(tag / "model", tmp_path / "out", *back)
    assert [] == differences(state, weights(tmp_path / "out"))


def test_an_interleaved_pipelines_chunks_are_found(tmp_path: Path) -> None:
    """Five layers in four chunks, of which the last has two; each rank's file holds every second chunk."""
    job, tag = Job(Model(layers=5)), tmp_path / "run" / "step_0"
    state, config = write_model(tmp_path / "hf", job.model), tmp_path / "hf" / "config.json"
    sizes = ["--pp_size", "2", "--virtual_pp_size", "2"]
    assert 0 == convert(tmp_path / "hf", tag, "--convert_from_full_state", *sizes)
    held = job.rank(state)
    layers = [{int(name.split(".")[2]) for name in names if ".layers." in name} for names in _stages(tag)]
    ends = [{name for name in names if ".layers." not in name} for names in _stages(tag)]
    assert [{0, 2}, {1, 3, 4}] == layers
    assert [{"model.embed_tokens.weight"}, {"model.norm.weight", "lm_head.weight"}] == ends
    found = loaded(tag, Topology(pp=2)) | loaded(tag, Topology(pp=2, pp_rank=1))
    assert [] == differences(held, found)
    assert 0 == convert(tag, tmp_path / "out", "--convert_to_full_state", "--config", str(config), *sizes)
    assert [] == differences(state, weights(tmp_path / "out"))


def _stages(tag: Path) -> list[State]:
    """What NxD's file of each pipeline rank holds."""
    return [torch.load(tag / "model" / f"dp_rank_00_tp_rank_00_pp_rank_{rank:02d}.pt") for rank in range(2)]


MEGATRON = (
    ("model.embed_tokens", "language_model.embedding.word_embeddings"),
    ("model.norm", "language_model.encoder.final_layernorm"),
    ("model.layers", "language_model.encoder.layers"),
    ("self_attn.qkv_proj", "self_attention.query_key_value"),
    ("self_attn.o_proj", "self_attention.dense"),
    ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
    ("lm_head", "language_model.output_layer"),
)


def as_megatron(held: State) -> State:
    """What a rank holds under the names of a Megatron-style model, k and v in one tensor."""
    found = dict(held)
    for name in [name for name in held if name.endswith(".weight_k")]:
        at = name.removesuffix(".qkv_proj.weight_k").replace("self_attn", "self_attention")
        key, value = found.pop(name), found.pop(name.replace("weight_k", "weight_v"))
        found[f"{at}.key_value.weight"] = torch.cat([key, value])
        found[f"{at}.query.weight"] = found.pop(name.replace("weight_k", "weight_q"))
    renamed: State = {}
    for name, tensor in found.items():
        for ours, theirs in MEGATRON:
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


def as_it_is(held: State) -> State:
    return held


COALESCED = Job(Model(kv_heads=4), tp=2, pp=2, qkv="coalesced")
WITH_PADDING = Job(Model(heads=6, intermediate=16), tp=8, qkv="linear", copies=4, padded_heads=8)
STYLE = ("--model_style", "megatron", "--qkv_linear")
PADDED = ("--kv_size_multiplier", "4", "--pad_attn_heads", "True")


@pytest.mark.parametrize(
    ("job", "flags", "qkv", "held_as"),
    [
        pytest.param(COALESCED, (*STYLE, "False"), (), as_megatron, id="one tensor"),
        pytest.param(Job(Model(), tp=2, pp=2, qkv="linear"), (*STYLE, "True"), (), as_megatron, id="k and v in one"),
        pytest.param(WITH_PADDING, PADDED, ("--qkv_linear",), as_it_is, id="padded heads"),
    ],
)
def test_a_llama_is_converted_there_and_back(
    tmp_path: Path, job: Job, flags: tuple[str, ...], qkv: tuple[str, ...], held_as: Callable[[State], State]
) -> None:
    """With the names of a Megatron-style model; and with six query heads on eight ranks, of which two are padding."""
    state, tag = write_model(tmp_path / "hf", job.model), tmp_path / "run" / "step_0"
    sizes = ["--tp_size", str(job.tp), "--pp_size", str(job.pp)]
    assert 0 == convert(tmp_path / "hf", tag, "--convert_from_full_state", *sizes, *flags, *qkv)
    for at in ranks_of(job):
        assert [] == differences(held_as(local_state(job, state, at)), loaded(tag, at))
    config = str(tmp_path / "hf" / "config.json")
    assert 0 == convert(tag, tmp_path / "out", "--convert_to_full_state", "--config", config, *flags)
    assert [] == differences(state, weights(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["ours", "NxD's"])
@pytest.mark.one_in(2)
def test_plain_files_become_xser_files_and_back(tmp_path: Path, kind: str) -> None:
    """On the same sizes; what ranks load stays."""
    state = JOB.model.state()
    source = (save_job if kind == "ours" else write_as_nxd)(tmp_path / "run", JOB, state)
    xser, plain = tmp_path / "xser" / "step_1", tmp_path / "plain" / "step_1"
    assert 0 == convert(source, xser, "--convert_to_xser")
    assert 0 == convert(xser, plain, "--convert_from_xser")
    for at in ranks_of(JOB):
        expected = local_state(JOB, state, at)
        assert ([], []) == (differences(expected, loaded(xser, at)), differences(expected, loaded(plain, at)))
    kinds = [open_checkpoint(tag.parent).manifest for tag in (xser, plain)]
    assert [True, False] == [manifest is not None and manifest.parts.use_xser for manifest in kinds]


def test_an_existing_output_is_replaced_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the flag that the refusal names; NxD's tool of ZeRO-1 optimizers, which replaces them unasked, has it too."""
    source = save_job(tmp_path / "run", JOB, JOB.model.state())
    config = write_config(tmp_path / "hf", JOB.model.config)
    for mode in (["--convert_to_xser"], ["--convert_to_full_state", "--config", str(config), *HEADS]):
        out = tmp_path / mode[0] / "step_1"
        assert [0, 1] == [convert(source, out, *mode), convert(source, out, *mode)]
        assert "pass --overwrite" in capsys.readouterr().err
        assert 0 == convert(source, out, *mode, "--overwrite")
    with pytest.raises(SystemExit):
        nxd_ckpt_main(["convert", "--help"])
    assert "--overwrite" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_yaml_file_of_nxd_training_tells_sizes(tmp_path: Path, family: str) -> None:
    """Over those of config.json, or without one."""
    model = Model(family)
    sizes = {"num_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "hidden_size": 8, "vocab_size": 24}
    experts = {"moe": {"num_experts": 4}} if family == "mixtral" else {}
    yaml = tmp_path / "training.yaml"
    yaml.write_text(json.dumps({"name": "job", "model": {**sizes, **experts}}))  # which is YAML
    tag = save_job(tmp_path / "run", Job(model, tp=2), model.state())
    wrong = write_config(tmp_path / "hf", {**model.config, "num_hidden_layers": 7})
    for number, config in enumerate([[], ["--config", str(wrong)]]):
        out = tmp_path / f"out{number}"
        assert 0 == convert(tag, out, "--convert_to_full_state", "--nxdt_yaml_config", str(yaml), *config)
        assert [] == differences(model.state(), weights(out))


def test_a_model_of_the_hub_is_found_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here from the cache of huggingface_hub; what is not there is named."""
    cached = tmp_path / "hub" / "models--me--llama"
    snapshot = cached / "snapshots" / "abc"
    write_model(snapshot, JOB.model)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    tag = tmp_path / "run" / "step_0"
    words = ["--convert_from_full_state", "--output_dir", str(tag), "--hf_model_name"]
    assert 1 == main([*words, "me/mistral"])
    assert "--hf_model_name me/mistral: " in capsys.readouterr().err
    assert 0 == main([*words, "me/llama"])
    assert [] == differences(Job(JOB.model).rank(JOB.model.state()), loaded(tag, Topology()))


@pytest.mark.parametrize(
    ("flags", "code", "complaint"),
    [
        (["--convert_to_xser", "--hf_model_name", "me/llama"], 2, "one of the two"),
        (["--convert_to_full_state", "--i_tp_round_factor", "256"], 2, "pads the experts of DBRX"),
        (["--convert_to_xser"], 1, "nowhere does not exist"),
        ([], 2, "one of the arguments"),
        (["--convert_to_xser", "--convert_from_xser"], 2, "not allowed with"),
        (["--convert_to_xser", "--load_xser", "maybe"], 2, "expected True or False, found 'maybe'"),
        (["--convert_from_full_state", "--model_style", "nemo"], 2, "invalid choice"),
    ],
)
def test_what_it_cannot_do_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, complaint: str
) -> None:
    """In one line, with an exit code, and nothing is written."""
    try:
        found: object = convert(tmp_path / "nowhere", tmp_path / "out", *flags)
    except SystemExit as stopped:  # what is no usage of it
        found = stopped.code
    assert code == found
    assert complaint in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_an_order_that_nxds_converter_misreads_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For trn2 with copies of key-value heads; of others nothing is said."""
    write_model(tmp_path / "hf", Model(heads=8))
    for hardware, copies in (("trn1", "2"), ("trn2", "1"), ("trn2", "2")):
        flags = ["--tp_size", "2", "--qkv_linear", "True", "--kv_size_multiplier", copies, "--hw_backend", hardware]
        assert 0 == convert(tmp_path / "hf", tmp_path / hardware / copies, "--convert_from_full_state", *flags)
        said = "NxD's own converter takes them for other heads" in capsys.readouterr().err
        assert said == ((hardware, copies) == ("trn2", "2"))
