"""Runs of Neuron's trainers continue on plain torch: every layout that is carried, in every form."""

import ast
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import LlamaConfig, LlamaForCausalLM

from nxd_ckpt import convert, load_checkpoint, save_checkpoint
from nxd_ckpt.conversion.result import Converted
from nxd_ckpt.errors import CheckpointNotFound, PartNotFound
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, weights, write_config
from tests.migrate.dcp_directory import from_dcp
from tests.migrate.old_run import STEPS, OldRun, model_of, old_run, optimizer_of, scheduler_of, train
from tests.migrate.written import (
    names_by_group,
    write_legacy,
    write_nxd,
    write_nxdt,
    write_old_optimum,
    write_optimum,
    write_pickled_optimum,
)
from tests.migrate.written_by_dcp import by_name, by_number, write_tiered
from tests.migrate.written_by_torch_xla import write_fsdp, write_trainer, write_xm_save

JOBS = {
    "q k v apart": Job(Model(heads=4, kv_heads=4, head_dim=4), tp=2, pp=2),
    "copies of heads": Job(Model(heads=8, head_dim=4), tp=4, qkv="linear", copies=2),
    "fused copies": Job(Model(heads=8, head_dim=4), tp=4, pp=2, qkv="fused", copies=2),
}
WRITERS: dict[str, Callable[..., Path]] = {"nxdt": write_nxdt, "optimum": write_optimum}


@pytest.fixture(scope="module")
def runs() -> dict[str, OldRun]:
    return {name: old_run(job) for name, job in JOBS.items()}


def migrated(source: Path, target: Path, run: OldRun, **options: Any) -> Converted:
    """With config.json, where nothing of it is beside the checkpoint."""
    terms: dict[str, Any] = {"to": "hf", "names": "hf"}
    if not source.name.startswith("checkpoint-"):
        terms["config"] = write_config(source.parent.parent / "config", run.job.model.config)
    return convert(source, target, **{**terms, **options})


@pytest.mark.parametrize(
    ("writer", "name", "options"),
    [
        ("nxdt", "q k v apart", {"dp": 3}),
        ("nxdt", "copies of heads", {"zero1": False}),
        ("optimum", "q k v apart", {"zero1": False}),
        ("optimum", "fused copies", {"dp": 2, "masters": True}),
        ("optimum", "q k v apart", {"dp": 2, "masters": True, "dtype": torch.bfloat16, "xser": True}),
    ],
)
def test_the_next_steps_are_those_of_the_old_run(
    tmp_path: Path, runs: dict[str, OldRun], writer: str, name: str, options: dict[str, Any]
) -> None:
    """Model, optimizer and scheduler of a migrated tag: the losses of the next two steps are equal to the last bit."""
    run = runs[name]
    done = migrated(WRITERS[writer](tmp_path, run, **options), tmp_path / "run" / "step_3", run, to="tag")
    assert STEPS == done.step
    model = model_of(run.job, seed=5)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    content = load_checkpoint(tmp_path / "run", "step_3", model, optimizer, scheduler)
    assert STEPS == (content if writer == "nxdt" else content["trainer_state"])["global_step"]
    assert run.next_losses == train(model, optimizer, scheduler, range(STEPS, STEPS + 2))


def test_transformers_and_its_optimizer_have_the_state(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """The form hf: from_pretrained's weights, and the optimizer's files under the same names."""
    run = runs["fused copies"]
    done = convert(write_optimum(tmp_path, run, dp=2), tmp_path / "hf", to="hf", optimizer=True)
    assert ("training_args.bin (a pickled object of transformers)", "scheduler", "user content") == done.left_out
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf", torch_dtype=torch.float32)
    assert all(torch.equal(run.weights[name], tensor) for name, tensor in model.state_dict().items())
    moments = load_file(tmp_path / "hf" / "optimizer.safetensors")
    assert {f"{name}/{kind}" for kind, held in run.moments.items() for name in held} == moments.keys()
    assert all(torch.equal(run.moments[key.split("/")[1]][key.split("/")[0]], one) for key, one in moments.items())


def test_transformers_gets_bfloat16_weights_and_their_masters(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """The form hf of an xser tag: the model as it was trained, its master weights in float32 beside it."""
    run = runs["q k v apart"]
    source = write_nxdt(tmp_path, run, masters=True, dtype=torch.bfloat16, xser=True)
    migrated(source, tmp_path / "hf", run, optimizer=True)
    model, masters = (load_file(tmp_path / "hf" / f"{file}.safetensors") for file in ("model", "optimizer"))
    assert dict.fromkeys(run.weights, torch.bfloat16) == {name: tensor.dtype for name, tensor in model.items()}
    for name, weight in run.weights.items():
        assert torch.equal(weight.bfloat16(), model[name])
        assert torch.equal(weight, masters[f"{name}/master_weights"])


def test_torch_dcp_has_the_state(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """The form dcp: whole tensors under Hugging Face's names, steps as tensors, scheduler and Lightning's dict."""
    run = runs["copies of heads"]
    migrated(write_nxdt(tmp_path, run, dp=2), tmp_path / "dcp", run, to="dcp")
    found = from_dcp(tmp_path / "dcp")
    assert all(torch.equal(tensor, found[f"model.{name}"]) for name, tensor in run.weights.items())
    for kind, held in run.moments.items():
        assert all(torch.equal(tensor, found[f"optim.state.{name}.{kind}"]) for name, tensor in held.items())
    assert torch.equal(torch.tensor(3.0), found["optim.state.lm_head.weight.step"])
    assert STEPS == found["scheduler.last_epoch"] == found["user_content.global_step"]


def test_torchtitan_has_the_state(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """The form torchtitan: its names and its order of rows, for weights and moments; its counters."""
    run = runs["fused copies"]
    done = convert(write_optimum(tmp_path, run, dp=2), tmp_path / "checkpoint", to="torchtitan")
    assert str(tmp_path / "checkpoint" / f"step-{STEPS}") == done.target
    found = from_dcp(tmp_path / "checkpoint" / f"step-{STEPS}")
    for hf, weight in run.weights.items():
        titan = titan_name(hf)
        assert torch.equal(titan_rows(hf, weight, run.job.model), found[titan]), hf
        for kind, held in run.moments.items():
            assert torch.equal(titan_rows(hf, held[hf], run.job.model), found[f"optimizer.state.{titan}.{kind}"]), hf
        assert torch.equal(torch.tensor(3.0), found[f"optimizer.state.{titan}.step"])
        assert run.lr == found[f"optimizer.param_groups.{titan}.lr"]
    for layer, kind in product(range(run.job.model.layers), run.moments):
        at = f"optimizer.state.layers.{layer}.attention.qkv_linear"
        parts = (found[f"{at}.{part}.weight.{kind}"] for part in ("wq", "wk", "wv"))
        q, k, v = (part.unflatten(0, (-1, run.job.model.head_dim)) for part in parts)
        together = torch.cat([q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]], 1).flatten(0, 2)
        assert torch.equal(together, found[f"{at}.wqkv.weight.{kind}"])
    assert STEPS == found["train_state.step"] == found["lr_scheduler.last_epoch"]


def test_torchtitan_begins_anew_with_the_model_alone(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """Of step 0 it takes nothing but the model: neither steps nor learning rates of the old run are there."""
    place = write_optimum(tmp_path, runs["fused copies"])
    done = convert(place, tmp_path / "checkpoint", to="torchtitan", optimizer=False)
    assert (str(tmp_path / "checkpoint" / "step-0"), STEPS) == (done.target, done.step)
    names = {titan_name(hf) for hf in runs["fused copies"].weights}
    assert names == from_dcp(tmp_path / "checkpoint" / "step-0").keys()


def test_what_is_tied_has_both_names_for_torch_dcp(tmp_path: Path) -> None:
    """It loads all names of a live module, and those that transformers ties are in no file of Hugging Face's."""
    job = Job(Model(layers=1))
    config = {**job.model.config, "tie_word_embeddings": True}
    model, fresh = (LlamaForCausalLM(LlamaConfig(**config)) for _ in range(2))
    save_checkpoint(tmp_path / "run", "step_1", model)
    options: dict[str, Any] = {"config": write_config(tmp_path / "config", config), "optimizer": False}
    convert(tmp_path / "run" / "step_1", tmp_path / "dcp", names="hf", to="dcp", **options)
    state = {"model": fresh.state_dict()}
    assert "lm_head.weight" in state["model"]
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert [] == differences(dict(model.state_dict()), state["model"])
    convert(tmp_path / "run" / "step_1", tmp_path / "checkpoint", to="torchtitan", **options)
    found = from_dcp(tmp_path / "checkpoint" / "step-0")
    assert torch.equal(model.lm_head.weight, found["lm_head.weight"])


@cache
def titan_table() -> dict[str, str]:
    """TorchTitan's own table of names. Read, not imported: its models need a GPU's compiler."""
    spec = find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("torchtitan is not installed: see the Makefile")
    path = Path(spec.submodule_search_locations[0]) / "models" / "llama3" / "state_dict_adapter.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.from_hf_map":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    raise AssertionError(f"{path} has no table of names")


def titan_name(hf: str) -> str:
    number = re.search(r"\d+", hf)
    name = titan_table()[re.sub(r"\d+", "{}", hf, count=1)]
    return name.format(number[0]) if number else name


def titan_rows(hf: str, tensor: torch.Tensor, model: Model) -> torch.Tensor:
    """Rows of q and k: the two halves of a head become pairs of neighbours."""
    if ".q_proj." not in hf and ".k_proj." not in hf:
        return tensor
    return tensor.view(-1, 2, model.head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def test_what_the_model_alone_leaves_out_is_named(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """All that is there: optimizer, scheduler and content, and what no form carries."""
    place = write_optimum(tmp_path, runs["q k v apart"])
    for rank in (0, 1):
        (place / f"rng_state_{rank}.pth").write_bytes(b"a pickle of generators")
    done = convert(place, tmp_path / "out", names="hf", to="tag", optimizer=False, dry_run=True)
    assert (
        "training_args.bin (a pickled object of transformers)",
        "the ranks' state of random numbers (rng_state*.pth)",
        "optimizer",
        "scheduler",
        "user content",
    ) == done.left_out
    (place / "scheduler.pt").unlink()
    done = convert(place, tmp_path / "out", names="hf", to="tag", dry_run=True)
    assert "the scheduler, whose scheduler.pt is missing" in done.left_out


@pytest.mark.parametrize("schedulers", [{"last_epoch": 3}, None])
def test_schedulers_that_are_no_list_stay_in_the_content(
    tmp_path: Path, runs: dict[str, OldRun], schedulers: Any
) -> None:
    """Lightning keeps a list; a script that put something else there finds it where it was."""
    place = write_nxdt(tmp_path, runs["q k v apart"])
    content = torch.load(place / "user_content.pt")
    torch.save({**content, "lr_schedulers": schedulers}, place / "user_content.pt")
    migrated(place, tmp_path / "run" / "step_3", runs["q k v apart"], to="tag")
    assert schedulers == load_checkpoint(tmp_path / "run", "step_3")["lr_schedulers"]


def test_the_command_says_what_it_found(
    tmp_path: Path, runs: dict[str, OldRun], capsys: pytest.CaptureFixture[str]
) -> None:
    """Who wrote it, at which step, and what is left out; a dry run writes nothing."""
    from nxd_ckpt.cli.main import main

    source = write_optimum(tmp_path, runs["q k v apart"])
    assert 0 == main(["convert", str(source), str(tmp_path / "out"), "--names=hf", "--to=tag", "--dry-run", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ("optimum-neuron", "tag", STEPS) == (found["writer"], found["form"], found["step"])
    assert ["training_args.bin (a pickled object of transformers)"] == found["left_out"]
    assert not (tmp_path / "out").exists()
    assert 0 == main(["convert", str(source), str(tmp_path / "out"), "--to", "hf", "--optimizer"])
    assert "optimum-neuron, step 3, read by mapping optimum-neuron" in capsys.readouterr().out


def test_a_checkpoint_from_before_tags_continues(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """NxD 0.3's directories of ranks, each with a script's dict: all of it is carried."""
    run = runs["q k v apart"]
    place = write_legacy(tmp_path / "old" / "last", run)
    done = migrated(place, tmp_path / "run" / "step_3", run, to="tag", saved_param_names=names_by_group(run))
    assert ("neuronx-distributed 0.1 to 0.5", STEPS) == (done.writer, done.step)
    model = model_of(run.job, seed=5)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    assert 7 == load_checkpoint(tmp_path / "run", "step_3", model, optimizer, scheduler)["epoch"]
    assert run.next_losses == train(model, optimizer, scheduler, range(STEPS, STEPS + 2))


def test_a_run_of_the_first_optimum_neuron_continues(tmp_path: Path) -> None:
    """NxD's files of ranks, which say how each parameter is cut; nothing is fused."""
    run = old_run(Job(Model(heads=4, kv_heads=4, head_dim=4), tp=2, pp=2, fused_mlp=False))
    done = convert(write_old_optimum(tmp_path, run), tmp_path / "run" / "step_3", names="hf", to="tag")
    assert ("optimum-neuron before 0.0.22", STEPS) == (done.writer, done.step)
    continues(tmp_path / "run", run, {"trainer_state": {"global_step": STEPS}})


@pytest.mark.parametrize("qkv", ["separate", "linear", "fused"])
def test_a_run_of_which_optimum_neuron_pickled_the_metadata_continues(tmp_path: Path, qkv: str) -> None:
    """Gate and up are apart; q, k and v too, or in one layer that keeps copies of key-value heads."""
    job = Job(Model(heads=8, kv_heads=8), tp=2, pp=2, fused_mlp=False)
    if qkv != "separate":
        job = Job(Model(heads=8), tp=4, pp=2, fused_mlp=False, qkv=qkv, copies=2)
    run = old_run(job)
    done = convert(write_pickled_optimum(tmp_path, run, dp=2), tmp_path / "run" / "step_3", names="hf", to="tag")
    assert ("optimum-neuron", STEPS) == (done.writer, done.step)
    continues(tmp_path / "run", run, {"trainer_state": {"global_step": STEPS, "epoch": 0.5, "log_history": []}})


def test_metadata_of_0_2_0_say_nothing_of_adapters(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """v0.2.0, ``transformations_utils.py``: its specs have no ``peft_type``."""
    run = runs["q k v apart"]
    place = write_optimum(tmp_path, run)
    for path in place.glob("shards/mp_metadata_*"):
        content = json.loads(path.read_text())
        for module in content["model_weight_transformation_specs"]:
            for _, spec in module["specs"]:
                del spec["peft_type"]
        path.write_text(json.dumps(content))
    assert "optimum-neuron" == migrated(place, tmp_path / "out", run).writer


def test_an_optimizer_beside_the_shards_is_named(tmp_path: Path) -> None:
    """optimum-neuron 0.2.0 to 0.4.5 on one rank or data parallel: shards of the model alone, and optimizer.pt."""
    run = old_run(Job(Model(layers=1)))
    place = write_optimum(tmp_path, run)
    shutil.rmtree(place / "shards" / "optim")
    torch.save({"state": {}, "param_groups": []}, place / "optimizer.pt")
    done = convert(place, tmp_path / "out", to="hf")
    assert "the optimizer in optimizer.pt, of a run without tensor and pipeline parallelism" in done.left_out


def test_a_tag_of_nxd_continues_with_the_names_given(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """A plain tag says neither which model it is nor the order of its optimizer: both are asked for."""
    run = runs["q k v apart"]
    tag = write_nxd(tmp_path / "nxd" / "step_3", run)
    migrated(tag, tmp_path / "run" / "step_3", run, to="tag", saved_param_names=names_by_group(run))
    model = model_of(run.job, seed=5)
    optimizer = optimizer_of(model)
    load_checkpoint(tmp_path / "run", "step_3", model, optimizer)
    assert run.next_losses[:1] == train(model, optimizer, None, range(STEPS, STEPS + 1))


@pytest.mark.parametrize("rows", [False, True])
def test_a_run_of_torch_xlas_fsdp_continues(tmp_path: Path, runs: dict[str, OldRun], rows: bool) -> None:
    """A file of each rank, each with a part of every parameter: model, optimizer, scheduler and the script's dict."""
    run = runs["q k v apart"]
    done = convert(write_fsdp(tmp_path / "old", run, rows=rows), tmp_path / "run" / "step_3", names="hf", to="tag")
    assert ("torch.save or torch-xla", STEPS) == (done.writer, done.step)
    continues(tmp_path / "run", run, {"epoch": 7})


def test_a_run_of_transformers_trainer_with_fsdp_continues(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """Two files of each rank, and the model as a whole beside them, which is no layout of its own then."""
    run = runs["q k v apart"]
    place = write_trainer(tmp_path / "old", run)
    done = convert(place, tmp_path / "run" / "step_3", names="hf", to="tag")
    assert ("torch.save or torch-xla", STEPS) == (done.writer, done.step)
    assert "the ranks' state of random numbers (rng_state*.pth)" in done.left_out
    continues(tmp_path / "run", run, {"trainer_state": {"global_step": STEPS}})
    (place / "rank1-of-3-optimizer.pt").unlink()
    with pytest.raises(PartNotFound, match=r"no optimizer is beside rank1-of-3-pytorch_model\.bin"):
        convert(place, tmp_path / "run" / "step_4", names="hf", to="tag")


def continues(directory: Path, run: OldRun, content: dict[str, Any]) -> None:
    """The tag step_3 there makes the old run's next steps."""
    model = model_of(run.job, seed=5)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    assert content == load_checkpoint(directory, "step_3", model, optimizer, scheduler)
    assert run.next_losses == train(model, optimizer, scheduler, range(STEPS, STEPS + 2))


def test_flat_parameters_are_those_of_the_model(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """All of a layer in one run of elements, whose rows ranks cut anywhere: for torch DCP and for TorchTitan."""
    run = runs["q k v apart"]
    place = write_fsdp(tmp_path / "old", run, flatten=True)
    config = write_config(tmp_path / "config", run.job.model.config)
    convert(place, tmp_path / "dcp", names="hf", to="dcp")
    convert(place, tmp_path / "checkpoint", to="torchtitan", config=config)
    found, titan = from_dcp(tmp_path / "dcp"), from_dcp(tmp_path / "checkpoint" / "step-3")
    for name, weight in run.weights.items():
        assert torch.equal(weight, found[f"model.{name}"])
        for kind, held in run.moments.items():
            assert torch.equal(held[name], found[f"optim.state.{name}.{kind}"])
            rows = titan_rows(name, held[name], run.job.model)
            assert torch.equal(rows, titan[f"optimizer.state.{titan_name(name)}.{kind}"])


def test_one_file_of_xm_save_continues(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """Named itself, or the only one in its directory."""
    run = runs["q k v apart"]
    path = write_xm_save(tmp_path / "old" / "step.pth", run)
    write_xm_save(tmp_path / "old" / "other.pth", run)
    done = convert(path, tmp_path / "run" / "step_3", names="hf", to="tag")
    assert (str(path), "torch.save or torch-xla", STEPS) == (done.source, done.writer, done.step)
    continues(tmp_path / "run", run, {"epoch": 7})
    (tmp_path / "old" / "other.pth").unlink()
    convert(path.parent, tmp_path / "hf", to="hf")
    assert [] == differences(run.weights, weights(tmp_path / "hf"))


@pytest.mark.parametrize(("state", "by_ray"), [(by_name, False), (by_number, True)])
def test_a_run_with_sagemakers_tiered_storage_continues(
    tmp_path: Path, runs: dict[str, OldRun], state: Callable[[OldRun], dict[Any, Any]], by_ray: bool
) -> None:
    """A directory of each rank and step, the optimizer by names or by numbers, in a file system as in S3."""
    run = runs["q k v apart"]
    place = write_tiered(tmp_path / "job", state(run), STEPS, by_ray=by_ray)
    done = convert(place, tmp_path / "run" / "step_3", names="hf", to="tag")
    assert ("SageMaker's tiered storage", STEPS) == (done.writer, done.step)
    continues(tmp_path / "run", run, {"step": STEPS})


def test_one_of_several_steps_is_named(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """By the directory of any rank in it; also to Hugging Face, whose files another part of the program writes."""
    run = runs["q k v apart"]
    for step in (STEPS, STEPS + 1):
        place = write_tiered(tmp_path / "job", by_name(run), step)
    with pytest.raises(CheckpointNotFound, match=r"several checkpoints, expected one: .*rank_0/step_3, .*/step_4"):
        convert(place, tmp_path / "hf", to="hf")
    convert(place / "rank_1" / "step_3", tmp_path / "hf", to="hf")
    assert [] == differences(run.weights, weights(tmp_path / "hf"))


def test_what_torch_dcp_wrote_continues(tmp_path: Path, runs: dict[str, OldRun]) -> None:
    """Its own directories, of torch-xla's SPMD among them: here one that a migration made."""
    run = runs["q k v apart"]
    convert(write_tiered(tmp_path / "job", by_name(run), STEPS), tmp_path / "dcp", names="hf", to="dcp")
    done = convert(tmp_path / "dcp", tmp_path / "run" / "step_3", names="hf", to="tag")
    assert "torch DCP" == done.writer
    continues(tmp_path / "run", run, {"step": STEPS})
