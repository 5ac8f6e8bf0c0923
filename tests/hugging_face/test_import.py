"""Imports: a Hugging Face directory becomes the tag of a job of any sizes, bit for bit, and comes back from it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from nxd_ckpt import Topology, convert, load_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import (
    CheckpointError,
    DtypeMismatch,
    InvalidArgument,
    KeyMismatch,
    MalformedFile,
    ShapeMismatch,
    TopologyMismatch,
    UnsafePickle,
)
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.hugging_face.jobs import jobs
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, local_state, ranks_of, write_config, write_files, write_model


def bring(source: Path, tag: Path, job: Job, **options: Any) -> None:
    """Import it for the job."""
    how = {
        "qkv_linear": job.qkv in ("linear", "fused"),
        "fuse_qkv": job.qkv == "fused",
        "coalesce_qkv": job.qkv == "coalesced",
        "split_gate_up": not job.fused_mlp and job.model.family != "gpt_neox",
        "durable": False,
    }
    sizes = {"dp": job.ep, "tp": job.tp, "pp": job.pp, "ep": job.ep}
    convert(source, tag, to="tag", names="nxd", **{**how, **sizes, **heads_of(job), **options})


def heads_of(job: Job) -> dict[str, Any]:
    """How the job keeps them."""
    padded = {"pad_attn_heads": job.padded_heads is not None}
    return {"kv_size_multiplier": job.copies, "hardware": job.hardware, **padded}


def loaded(tag: Path, at: Topology) -> State:
    """What the rank loads."""
    state: State = {}
    load_checkpoint(tag.parent, tag.name, model=state, topology=at)
    return state


@given(job=jobs(), use_xser=st.booleans(), dtype=st.sampled_from([None, "float32", "bfloat16"]))
@settings(max_examples=15)
def test_any_job_is_imported(
    tmp_path_factory: pytest.TempPathFactory, job: Job, use_xser: bool, dtype: str | None
) -> None:
    """Random sizes, heads and copies: each rank has what a conversion by hand gives it, and the tag is verified."""
    path = tmp_path_factory.mktemp("any")
    state, tag = write_model(path / "hf", job.model), path / "run" / "step_0"
    bring(path / "hf", tag, job, use_xser=use_xser, dtype=dtype)
    wanted = getattr(torch, dtype or "float32")
    for at in ranks_of(job):
        expected = {name: one.to(wanted) for name, one in local_state(job, state, at).items()}
        assert [] == differences(expected, loaded(tag, at))
    assert () == verify_checkpoint(tag.parent).problems


@pytest.mark.parametrize("absent", ["lm_head.weight", "model.embed_tokens.weight"])
def test_both_of_two_tied_tensors_are_there_though_files_leave_one_out(tmp_path: Path, absent: str) -> None:
    """NxD's model has both, after a load of the directory too."""
    job, tag = Job(Model(), tp=2, pp=2), tmp_path / "run" / "step_0"
    state = job.model.state()
    (kept,) = {"lm_head.weight", "model.embed_tokens.weight"} - {absent}
    del state[absent]
    write_files(tmp_path / "hf", {**job.model.config, "tie_word_embeddings": True}, state)
    bring(tmp_path / "hf", tag, job)
    rows = state[kept].chunk(2)[0]
    for pp_rank, name in enumerate(("model.embed_tokens.weight", "lm_head.weight")):
        at = Topology(tp=2, pp=2, pp_rank=pp_rank)
        found = loaded(tag, at)
        assert torch.equal(rows, found[name])
        live = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
        load_checkpoint(tmp_path / "hf", model=live, topology=at, strict=False)
        assert [] == differences(found, live)


def test_stages_can_be_chosen(tmp_path: Path) -> None:
    job, tag = Job(Model(), pp=2), tmp_path / "run" / "step_0"
    state = job.rank(write_model(tmp_path / "hf", job.model))
    first = [name for name in state if ".layers." in name or "embed" in name]
    bring(tmp_path / "hf", tag, job, stages=[first, [name for name in state if name not in first]])
    assert sorted(first) == sorted(loaded(tag, Topology(pp=2)))


STATE: dict[str, torch.Tensor | None] = {**Model().state()}
SECOND_LAYER = [name for name in STATE if ".layers.1." in name]
ENDS = ["model.embed_tokens.weight", "lm_head.weight"]
UP, Q_NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"
BIASED = Model(mlp_bias=True).state()


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "complaint"),
    [
        ({SECOND_LAYER[-1]: None}, {}, KeyMismatch, rf"tensors are missing: {re.escape(SECOND_LAYER[-1])}"),
        (dict.fromkeys(SECOND_LAYER), {}, KeyMismatch, r"missing: model\.layers\.1\..* and 1 more, which"),
        ({Q_NORM: torch.ones(2)}, {}, KeyMismatch, rf"no rule for {re.escape(Q_NORM)}.*closest.*_proj"),
        ({UP: Model().state()[UP].bfloat16()}, {}, DtypeMismatch, r"gate_up_proj\.weight is made of .* bfloat16 and"),
        ({}, {"num_key_value_heads": 4}, ShapeMismatch, r"k_proj\.weight has shape \(4, 8\), expected \(8, 8\)"),
        ({}, {"attention_bias": True}, KeyMismatch, r"/hf: .* lacks .*\.0\..*q_proj\.bias.*\(attention_bias True\)"),
        (BIASED, {}, KeyMismatch, r"/hf: .* holds .*layers\.0\.mlp\.\w+_proj\.bias.*\(no mlp_bias, so False\)"),
        (dict.fromkeys(ENDS), {"tie_word_embeddings": True}, KeyMismatch, r"are missing: model\.embed_tokens\.weight"),
    ],
)
def test_files_that_contradict_their_config_are_refused(
    tmp_path: Path, tensors: State, config: dict[str, Any], kind: type[CheckpointError], complaint: str
) -> None:
    """Naming tensors and keys; nothing is there then, nor the directory that was to hold the tag."""
    state = {name: one for name, one in {**STATE, **tensors}.items() if one is not None}
    write_files(tmp_path / "hf", {**Model().config, **config}, state)
    with pytest.raises(kind, match=complaint):
        bring(tmp_path / "hf", tmp_path / "runs" / "run" / "step_0", Job(Model()))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "kind", "complaint"),
    [
        ({"dtype": "float8"}, InvalidArgument, r"dtype must be one of"),
        ({"dtype": "float16"}, DtypeMismatch, r"model/model\.norm\.weight.*become infinite"),
        ({"tp": 4}, TopologyMismatch, r"k_proj\.weight: the 2 heads of .* equally among 4 .*kv_size_multiplier"),
        ({"tp": 3}, TopologyMismatch, r"cannot be divided equally among 3 tensor-parallel ranks"),
        ({"pp": 3}, TopologyMismatch, r"3 pipeline stages for 2 repeated layers"),
        ({"pp": 2, "mapping": "gpt_neox"}, KeyMismatch, r"'gpt_neox' has no rule for lm_head\.weight"),
        ({"pp": 2, "stages": [[]]}, TopologyMismatch, r"lists 1 pipeline stages, but pp is 2"),
        ({"stages": [["lm_head.weight"]]}, KeyMismatch, r"stages= must list every NxD tensor"),
        ({"fuse_qkv": True, "coalesce_qkv": True}, InvalidArgument, r"pass one or the other"),
        ({"mapping": "gpt_neox", "qkv_linear": True}, InvalidArgument, r"has no rules for qkv_linear"),
        ({"mapping": "gpt_neox", "kv_size_multiplier": 2}, InvalidArgument, r"has no rule with heads"),
        ({"mapping": "gpt_neox", "hardware": "inf2"}, InvalidArgument, r"hardware must be one of trn1, trn2"),
        ({"config": "nowhere"}, InvalidArgument, r"expected config\.json"),
    ],
)
def test_options_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], kind: type[CheckpointError], complaint: str
) -> None:
    """Naming tensors and sizes; nothing is there then, nor the directory that was to hold the tag."""
    write_files(tmp_path / "hf", Model().config, {**Model().state(), "model.norm.weight": torch.full((8,), 1e30)})
    with pytest.raises(kind, match=complaint):
        bring(tmp_path / "hf", tmp_path / "runs" / "run" / "step_0", Job(Model()), **options)
    assert not (tmp_path / "runs").exists()


def test_a_mapping_says_nothing_of_options_of_another_model(tmp_path: Path) -> None:
    """Its names fit a model of a type that it does not know, which may read keys of config.json in its own way."""
    model = Model()
    state = model.state()
    write_files(tmp_path / "hf", {**model.config, "model_type": "seed_oss", "attention_bias": True}, state)
    bring(tmp_path / "hf", tmp_path / "run" / "step_0", Job(model), mapping="llama")
    assert [] == differences(Job(model).rank(state), loaded(tmp_path / "run" / "step_0", Topology()))


def test_other_models_need_a_mapping_file(tmp_path: Path) -> None:
    """Of the user's; the first of rules without a variant is taken where several map a tensor."""
    rules = [{"nxd": "both.weight", "hf": ["a.weight", "b.weight"], "dim": 0}, {"nxd": "a.weight", "hf": "a.weight"}]
    state = {"a.weight": torch.arange(4.0).reshape(2, 2), "b.weight": torch.arange(4.0, 8.0).reshape(2, 2)}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    mapping = tmp_path / "mine.json"
    mapping.write_text(json.dumps({"format_version": 1, "name": "mine", "rules": rules}))
    convert(tmp_path / "hf", tmp_path / "run" / "step_0", to="tag", names="nxd", tp=2, mapping=mapping, durable=False)
    found = loaded(tmp_path / "run" / "step_0", Topology(tp=2, tp_rank=1))
    assert [] == differences({"both.weight": torch.tensor([[2.0, 3.0], [6.0, 7.0]])}, found)


def test_a_dry_run_shows_what_does_not_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All names without a rule, with the closest rules, and all tensors that are missing; the exit code is 1."""
    state = {**Model().state(), "model.layers.0.mlp.gate.weight": torch.ones(2)}
    del state["model.layers.1.mlp.up_proj.weight"]
    write_files(tmp_path / "hf", Model().config, state)
    command = ["convert", "--to=tag", "--names=nxd", "--dry-run"]
    assert 1 == main([*command, str(tmp_path / "hf"), str(tmp_path / "run" / "step_0")])
    *tensors, _, header, unknown, missing = capsys.readouterr().out.splitlines()
    assert ["name", "closest", "rules"] == header.split()
    assert "model.layers.0.mlp.gate.weight" == unknown.split()[0]
    assert "model.layers.{layer}.mlp.gate_proj.weight" in unknown
    assert "missing, though every such model has them: model.layers.1.mlp.up_proj.weight" == missing
    whole = [line.split()[0] for line in tensors if "gate_up_proj" in line]
    assert ["model.layers.0.mlp.gate_up_proj.weight"] == whole


def test_a_file_without_a_state_dict_is_refused(tmp_path: Path) -> None:
    """And code in it is not run."""
    config = write_config(tmp_path / "hf", Model().config)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(MalformedFile, match=r"list\.pt: expected a state dict"):
        bring(tmp_path / "list.pt", tmp_path / "run" / "step_0", Job(Model()), config=config)
    torch.save({"model": Path}, tmp_path / "code.pt")
    with pytest.raises(UnsafePickle):
        bring(tmp_path / "code.pt", tmp_path / "run" / "step_0", Job(Model()), config=config)
