"""Runs of Neuron's trainers continue on plain torch: every layout that is carried, in every form."""

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
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
    write_nxdt,
    write_old_optimum,
    write_optimum,
    write_pickled_optimum,
)
from tests.migrate.written_by_dcp import by_name, by_number, write_tiered
from tests.migrate.written_by_torch_xla import write_fsdp, write_trainer, write_xm_save

JOBS = {
    "apart": Job(Model(heads=4, kv_heads=4, head_dim=4), tp=2, pp=2),
    "copies": Job(Model(heads=8, head_dim=4), tp=4, qkv="linear", copies=2),
    "fused copies": Job(Model(heads=8, head_dim=4), tp=4, pp=2, qkv="fused", copies=2),
    "nothing fused": Job(Model(heads=8, kv_heads=8), tp=2, pp=2, fused_mlp=False),
    "copies, gate and up apart": Job(Model(heads=8), tp=4, pp=2, fused_mlp=False, qkv="linear", copies=2),
    "fused copies, gate and up apart": Job(Model(heads=8), tp=4, pp=2, fused_mlp=False, qkv="fused", copies=2),
}


@pytest.fixture(scope="module")
def runs() -> Callable[[str], OldRun]:
    """Returns the run of a job, which is trained once."""
    return cache(lambda name: old_run(JOBS[name]))


Runs = Callable[[str], OldRun]


def migrated(folder: Path, source: Path, run: OldRun, **options: Any) -> Converted:
    """To ``run/step_3``; with config.json, where nothing of it is beside the checkpoint."""
    terms: dict[str, Any] = {"to": "tag", "names": "hf"}
    if not source.name.startswith("checkpoint-"):
        terms["config"] = write_config(folder / "config", run.job.model.config)
    return convert(source, folder / "run" / "step_3", **terms, **options)


class Continued(NamedTuple):
    """A run of a trainer that goes on: its writer, its job, who wrote it by what the conversion says, what is left of
    the content, and options."""

    write: Callable[[Path, OldRun], Path]
    job: str
    writer: str
    content: dict[str, Any]
    options: Callable[[OldRun], dict[str, Any]] = lambda run: {}


def _of_torch(folder: Path, run: OldRun) -> Path:
    """A directory of torch DCP, also of torch-xla's SPMD: here one that a migration made."""
    convert(write_tiered(folder / "job", by_name(run), STEPS), folder / "dcp", names="hf", to="dcp")
    return folder / "dcp"


IN_XSER: dict[str, Any] = {"dp": 2, "masters": True, "dtype": torch.bfloat16, "xser": True}
BY_NXDT = ("neuronx-distributed-training", {"global_step": STEPS})
BY_OPTIMUM = ("optimum-neuron", {"trainer_state": {"global_step": STEPS, "epoch": 0.5, "log_history": []}})
BY_TORCH = ("torch.save or torch-xla", {"epoch": 7})
TIERED = ("SageMaker's tiered storage", {"step": STEPS})
CONTINUED: dict[str, Continued] = {
    "nxdt, dp 3": Continued(partial(write_nxdt, dp=3), "apart", *BY_NXDT),
    "nxdt, plain": Continued(partial(write_nxdt, zero1=False), "copies", *BY_NXDT),
    "optimum, plain": Continued(partial(write_optimum, zero1=False), "apart", *BY_OPTIMUM),
    "optimum, masters": Continued(partial(write_optimum, dp=2, masters=True), "fused copies", *BY_OPTIMUM),
    "optimum, xser": Continued(partial(write_optimum, **IN_XSER), "apart", *BY_OPTIMUM),
    "optimum 0.1": Continued(partial(write_pickled_optimum, dp=2), "nothing fused", *BY_OPTIMUM),
    "optimum 0.1, copies": Continued(partial(write_pickled_optimum, dp=2), "copies, gate and up apart", *BY_OPTIMUM),
    "optimum 0.1, fused": Continued(
        partial(write_pickled_optimum, dp=2), "fused copies, gate and up apart", *BY_OPTIMUM
    ),
    "optimum 0.0": Continued(
        write_old_optimum, "nothing fused", "optimum-neuron before 0.0.22", {"trainer_state": {"global_step": STEPS}}
    ),
    "nxd 0.3": Continued(
        lambda folder, run: write_legacy(folder / "old" / "last", run),
        "apart",
        "neuronx-distributed 0.1 to 0.5",
        {"epoch": 7},
        lambda run: {"saved_param_names": names_by_group(run)},
    ),
    "fsdp": Continued(lambda folder, run: write_fsdp(folder / "old", run), "apart", *BY_TORCH),
    "fsdp, rows": Continued(lambda folder, run: write_fsdp(folder / "old", run, rows=True), "apart", *BY_TORCH),
    "trainer": Continued(write_trainer, "apart", BY_TORCH[0], {"trainer_state": {"global_step": STEPS}}),
    "xm.save": Continued(lambda folder, run: write_xm_save(folder / "old" / "a.pth", run), "apart", *BY_TORCH),
    "tiered": Continued(lambda folder, run: write_tiered(folder / "job", by_name(run), STEPS), "apart", *TIERED),
    "tiered by ray": Continued(
        lambda folder, run: write_tiered(folder / "job", by_number(run), STEPS, by_ray=True), "apart", *TIERED
    ),
    "dcp": Continued(_of_torch, "apart", "torch DCP", {"step": STEPS}),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_the_next_steps_are_those_of_the_old_run(tmp_path: Path, runs: Runs, name: str) -> None:
    """Model, optimizer and scheduler of a migrated tag: the losses of the next two steps are equal to the last bit."""
    case = CONTINUED[name]
    run = runs(case.job)
    done = migrated(tmp_path, case.write(tmp_path, run), run, **case.options(run))
    assert (case.writer, STEPS) == (done.writer, done.step)
    model = model_of(run.job, seed=5)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    content = load_checkpoint(tmp_path / "run", "step_3", model, optimizer, scheduler)
    assert case.content == {key: content[key] for key in case.content}
    assert run.next_losses == train(model, optimizer, scheduler, range(STEPS, STEPS + 2))


def test_torchtitan_begins_anew_with_the_model_alone(tmp_path: Path, runs: Runs) -> None:
    """Of step 0 it takes nothing but the model: neither steps nor learning rates of the old run are there."""
    place = write_optimum(tmp_path, runs("fused copies"))
    done = convert(place, tmp_path / "checkpoint", to="torchtitan", optimizer=False)
    assert (str(tmp_path / "checkpoint" / "step-0"), STEPS) == (done.target, done.step)
    names = from_dcp(tmp_path / "checkpoint" / "step-0").keys()
    assert {"norm", "tok_embeddings", "lm_head", "layers"} == {name.partition(".")[0] for name in names}


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


def test_what_the_model_alone_leaves_out_is_named(tmp_path: Path, runs: Runs) -> None:
    """All that is there: optimizer, scheduler and content, and what no form carries."""
    place = write_optimum(tmp_path, runs("apart"))
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
def test_schedulers_that_are_no_list_stay_in_the_content(tmp_path: Path, runs: Runs, schedulers: Any) -> None:
    """Lightning keeps a list; a script that put something else there finds it where it was."""
    place = write_nxdt(tmp_path, runs("apart"))
    content = torch.load(place / "user_content.pt")
    torch.save({**content, "lr_schedulers": schedulers}, place / "user_content.pt")
    migrated(tmp_path, place, runs("apart"))
    assert schedulers == load_checkpoint(tmp_path / "run", "step_3")["lr_schedulers"]


def test_the_command_says_what_it_found(tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Who wrote it, at which step, and what is left out; a dry run writes nothing."""
    from nxd_ckpt.cli.main import main

    source = write_optimum(tmp_path, runs("apart"))
    assert 0 == main(["convert", str(source), str(tmp_path / "out"), "--names=hf", "--to=tag", "--dry-run", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ("optimum-neuron", "tag", STEPS) == (found["writer"], found["form"], found["step"])
    assert ["training_args.bin (a pickled object of transformers)"] == found["left_out"]
    assert not (tmp_path / "out").exists()
    assert 0 == main(["convert", str(source), str(tmp_path / "out"), "--to", "hf", "--optimizer"])
    assert "optimum-neuron, step 3, read by mapping optimum-neuron" in capsys.readouterr().out


def test_metadata_of_0_2_0_say_nothing_of_adapters(tmp_path: Path, runs: Runs) -> None:
    """v0.2.0, ``transformations_utils.py``: its specs have no ``peft_type``."""
    run = runs("apart")
    place = write_optimum(tmp_path, run)
    for path in place.glob("shards/mp_metadata_*"):
        content = json.loads(path.read_text())
        for module in content["model_weight_transformation_specs"]:
            for _, spec in module["specs"]:
                del spec["peft_type"]
        path.write_text(json.dumps(content))
    assert "optimum-neuron" == migrated(tmp_path, place, run).writer


def test_an_optimizer_beside_the_shards_is_named(tmp_path: Path) -> None:
    """optimum-neuron 0.2.0 to 0.4.5 on one rank or data parallel: shards of the model alone, and optimizer.pt."""
    run = old_run(Job(Model(layers=1)))
    place = write_optimum(tmp_path, run)
    shutil.rmtree(place / "shards" / "optim")
    torch.save({"state": {}, "param_groups": []}, place / "optimizer.pt")
    done = convert(place, tmp_path / "out", to="hf")
    assert "the optimizer in optimizer.pt, of a run without tensor and pipeline parallelism" in done.left_out


def test_flat_parameters_are_those_of_the_model(tmp_path: Path, runs: Runs) -> None:
    """All of a layer in one run of elements, whose rows ranks cut anywhere."""
    run = runs("apart")
    convert(write_fsdp(tmp_path / "old", run, flatten=True), tmp_path / "dcp", names="hf", to="dcp")
    found = from_dcp(tmp_path / "dcp")
    for name, weight in run.weights.items():
        assert torch.equal(weight, found[f"model.{name}"])
        assert all(torch.equal(held[name], found[f"optim.state.{name}.{kind}"]) for kind, held in run.moments.items())


def test_an_optimizer_that_lies_beside_no_model_is_missed(tmp_path: Path, runs: Runs) -> None:
    """Of transformers' Trainer with FSDP; what is left out is named."""
    place = write_trainer(tmp_path / "old", runs("apart"))
    done = convert(place, tmp_path / "run" / "step_3", names="hf", to="tag", dry_run=True)
    assert "the ranks' state of random numbers (rng_state*.pth)" in done.left_out
    (place / "rank1-of-3-optimizer.pt").unlink()
    with pytest.raises(PartNotFound, match=r"no optimizer is beside rank1-of-3-pytorch_model\.bin"):
        convert(place, tmp_path / "run" / "step_4", names="hf", to="tag")


def test_one_of_several_steps_is_named(tmp_path: Path, runs: Runs) -> None:
    """By the directory of any rank in it; also to Hugging Face, whose files another part of the program writes."""
    run = runs("apart")
    for step in (STEPS, STEPS + 1):
        place = write_tiered(tmp_path / "job", by_name(run), step)
    with pytest.raises(CheckpointNotFound, match=r"several checkpoints, expected one: .*rank_0/step_3, .*/step_4"):
        convert(place, tmp_path / "hf", to="hf")
    convert(place / "rank_1" / "step_3", tmp_path / "hf", to="hf")
    assert [] == differences(run.weights, weights(tmp_path / "hf"))
