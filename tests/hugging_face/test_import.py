"""Imports: a Hugging Face directory becomes the tag of a job of any sizes, bit for bit, and comes back from it."""

import json
import re
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
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
from nxd_ckpt.output import image_writer
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.hugging_face.jobs import jobs
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, local_state, ranks_of, write_config, write_files, write_model

JOBS = {
    "Llama, one rank": Job(Model()),
    "Llama, q k v apart": Job(Model(kv_heads=4, bias=True), tp=4, pp=2),
    "Llama, copies on trn1": Job(Model(heads=8), tp=4, qkv="linear", copies=2),
    "Llama, copies on trn2": Job(Model(heads=8, bias=True), tp=4, pp=2, qkv="fused", copies=2, hardware="trn2"),
    "Llama, padded heads": Job(Model(heads=6, intermediate=16), tp=8, qkv="linear", copies=4, padded_heads=8),
    "Llama, pairs of padded heads": Job(Model(heads=12, intermediate=16), tp=8, qkv="fused", copies=4, padded_heads=16),
    "Llama, coalesced": Job(Model(kv_heads=4), tp=2, qkv="coalesced", fused_mlp=False),
    "Llama, padded vocabulary": Job(Model(vocab=21), tp=2, padded_vocab=22),
    "Mixtral": Job(Model("mixtral"), tp=2, qkv="linear"),
    "Mixtral, expert parallel": Job(Model("mixtral"), tp=2, pp=2, ep=2, fused_mlp=False),
    "GPT-NeoX": Job(Model("gpt_neox"), tp=2, pp=2),
}


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


@pytest.mark.parametrize(("name", "use_xser"), [(name, number % 2 == 0) for number, name in enumerate(JOBS)])
@pytest.mark.one_in(3)
def test_every_rank_loads_what_a_conversion_by_hand_gives_it(tmp_path: Path, name: str, use_xser: bool) -> None:
    """Any way to keep heads and experts, any sizes, both kinds of files; and the whole tag is verified."""
    job, tag = JOBS[name], tmp_path / "run" / "step_0"
    state = write_model(tmp_path / "hf", job.model)
    bring(tmp_path / "hf", tag, job, use_xser=use_xser)
    for at in ranks_of(job):
        assert [] == differences(local_state(job, state, at), loaded(tag, at)), at
    assert () == verify_checkpoint(tag.parent).problems


@given(job=jobs())
@settings(max_examples=15)
def test_any_job_is_imported(tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    """Random sizes, numbers of heads and copies."""
    path = tmp_path_factory.mktemp("any")
    state = write_model(path / "hf", job.model)
    bring(path / "hf", path / "run" / "step_0", job)
    for at in ranks_of(job):
        assert [] == differences(local_state(job, state, at), loaded(path / "run" / "step_0", at))


def test_neuronx_distributed_reads_the_files(tmp_path: Path) -> None:
    """They have NxD's names and hold what torch.load gives: a state dict of plain tensors."""
    job, tag = JOBS["Mixtral, expert parallel"], tmp_path / "run" / "step_0"
    state = write_model(tmp_path / "hf", job.model)
    bring(tmp_path / "hf", tag, job)
    assert "1" == (tag / "checkpoint").read_text()
    at = Topology(dp=2, tp=2, pp=2, ep=2, dp_rank=1, tp_rank=1, pp_rank=1)
    held = torch.load(tag / "model" / "dp_rank_00_ep_rank_01_tp_rank_01_pp_rank_01.pt")
    assert [] == differences(local_state(job, state, at), held)


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_is_cast_to(tmp_path: Path, dtype: str) -> None:
    """As torch casts it."""
    job, tag = Job(Model(), tp=2), tmp_path / "run" / "step_0"
    state = {name: one / 3 for name, one in job.model.state().items()}
    write_files(tmp_path / "hf", job.model.config, state)
    bring(tmp_path / "hf", tag, job, dtype=dtype)
    for at in ranks_of(job):
        expected = {name: one.to(getattr(torch, dtype)) for name, one in local_state(job, state, at).items()}
        assert [] == differences(expected, loaded(tag, at))


def test_stages_can_be_chosen(tmp_path: Path) -> None:
    """Every name on the stage that lists it."""
    job, tag = Job(Model(), pp=2), tmp_path / "run" / "step_0"
    state = job.rank(write_model(tmp_path / "hf", job.model))
    first = [name for name in state if ".layers." in name or "embed" in name]
    bring(tmp_path / "hf", tag, job, stages=[first, [name for name in state if name not in first]])
    assert sorted(first) == sorted(loaded(tag, Topology(pp=2)))


STATE: dict[str, torch.Tensor | None] = {**Model().state()}
SECOND_LAYER = [name for name in STATE if ".layers.1." in name]
ENDS = ["model.embed_tokens.weight", "lm_head.weight"]
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "complaint"),
    [
        ({SECOND_LAYER[-1]: None}, {}, KeyMismatch, rf"tensors are missing: {re.escape(SECOND_LAYER[-1])}"),
        (dict.fromkeys(SECOND_LAYER), {}, KeyMismatch, r"missing: model\.layers\.1\..* and 1 more, which"),
        (
            {"model.layers.0.self_attn.q_norm.weight": torch.ones(2)},
            {},
            KeyMismatch,
            r"no rule for model\.layers\.0\.self_attn\.q_norm.*closest.*_proj",
        ),
        (
            {UP: Model().state()[UP].bfloat16()},
            {},
            DtypeMismatch,
            r"gate_up_proj\.weight is made of .* bfloat16 and fl",
        ),
        ({}, {"num_key_value_heads": 4}, ShapeMismatch, r"k_proj\.weight has shape \(4, 8\), expected \(8, 8\)"),
        (
            {},
            {"attention_bias": True},
            KeyMismatch,
            r"/hf: .* lacks .*\.0\..*q_proj\.bias.*\(attention_bias True\)",
        ),
        (
            Model(mlp_bias=True).state(),
            {},
            KeyMismatch,
            r"/hf: .* holds .*layers\.0\.mlp\.\w+_proj\.bias.*\(no mlp_bias, so False\)",
        ),
        (
            dict.fromkeys(ENDS),
            {"tie_word_embeddings": True},
            KeyMismatch,
            r"tensors are missing: model\.embed_tokens\.weight",
        ),
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


def test_tensors_larger_than_a_wave_need_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused and transposed, in waves that cut through them: memory does not grow with the model."""
    monkeypatch.setattr(image_writer, "WAVE", 8 * 2**20)
    state = {name: torch.randn(1024, 1500) for name in ("a.weight", "b.weight")}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    rule = {"nxd": "both.weight", "hf": ["a.weight", "b.weight"], "dim": 1, "transposed": True}
    mapping = {"format_version": 1, "name": "mine", "rules": [rule]}
    convert(tmp_path / "hf", tmp_path / "run" / "step_0", to="tag", names="nxd", tp=2, mapping=mapping, durable=False)
    for tp_rank in range(2):
        parts = [state[name].T.chunk(2, dim=1)[tp_rank] for name in ("a.weight", "b.weight")]
        found = loaded(tmp_path / "run" / "step_0", Topology(tp=2, tp_rank=tp_rank))
        assert [] == differences({"both.weight": torch.cat(parts, dim=1)}, found)


def test_other_models_need_a_mapping_file(tmp_path: Path) -> None:
    """Of the user's; the first of rules without a variant is taken where several map a tensor."""
    document = {
        "format_version": 1,
        "name": "mine",
        "rules": [
            {"nxd": "both.weight", "hf": ["a.weight", "b.weight"], "dim": 0},
            {"nxd": "a.weight", "hf": "a.weight"},
        ],
    }
    state = {"a.weight": torch.arange(4.0).reshape(2, 2), "b.weight": torch.arange(4.0, 8.0).reshape(2, 2)}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    mapping = tmp_path / "mine.json"
    mapping.write_text(json.dumps(document))
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


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "checkpoint.pt"])
def test_a_single_file_is_imported_too(tmp_path: Path, name: str) -> None:
    """Safetensors, a state dict by torch.save, or one below "model" with other things beside it."""
    job, tag = Job(Model(), tp=2), tmp_path / "run" / "step_0"
    state = write_model(tmp_path / "hf", job.model)
    if name == "checkpoint.pt":
        torch.save({"model": state, "step": 3}, tmp_path / name)
    elif name == "pytorch_model.bin":
        torch.save(state, tmp_path / name)
    else:
        (tmp_path / "hf" / name).rename(tmp_path / name)
    bring(tmp_path / name, tag, job, config=tmp_path / "hf")
    for at in ranks_of(job):
        assert [] == differences(local_state(job, state, at), loaded(tag, at))


def test_a_file_without_a_state_dict_is_refused(tmp_path: Path) -> None:
    """And code in it is not run."""
    config = write_config(tmp_path / "hf", Model().config)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(MalformedFile, match=r"list\.pt: expected a state dict"):
        bring(tmp_path / "list.pt", tmp_path / "run" / "step_0", Job(Model()), config=config)
    torch.save({"model": Path}, tmp_path / "code.pt")
    with pytest.raises(UnsafePickle):
        bring(tmp_path / "code.pt", tmp_path / "run" / "step_0", Job(Model()), config=config)


@pytest.mark.usefixtures("forked_workers")
def test_several_processes_and_stores(tmp_path: Path) -> None:
    """Each process writes a share of the ranks; directory and tag may be in a store."""
    job = Job(Model(), tp=2, pp=2)
    state = write_model(tmp_path / "hf", job.model)
    bring(tmp_path / "hf", tmp_path / "run" / "step_0", job, num_workers=2)
    for at in ranks_of(job):
        assert [] == differences(local_state(job, state, at), loaded(tmp_path / "run" / "step_0", at))
    url = f"memory://{uuid.uuid4().hex}"
    for path in (tmp_path / "hf").iterdir():
        fsspec.filesystem("memory").pipe_file(f"{url}/hf/{path.name}", path.read_bytes())
    convert(f"{url}/hf", f"{url}/run/step_0", to="tag", names="nxd", tp=2, pp=2)
    for at in ranks_of(job):
        found: State = {}
        load_checkpoint(f"{url}/run", "step_0", model=found, topology=at)
        assert [] == differences(local_state(job, state, at), found)
