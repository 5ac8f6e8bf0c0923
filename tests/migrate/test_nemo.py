"""Runs of neuronx-nemo-megatron continue on plain torch."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nxd_ckpt import convert, load_checkpoint
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, IncompatibleState, KeyMismatch, MalformedFile
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, weights, write_config
from tests.migrate.layouts import untrained
from tests.migrate.old_run import STEPS, OldRun, model_of, old_run, optimizer_of, scheduler_of, train
from tests.migrate.written_by_nemo import NEMO_NAME, NemoJob, write_nemo


def tied(run: OldRun) -> OldRun:
    """The same, with the embedding as its head."""
    states = (run.weights, *run.moments.values())
    for state in states:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return run


def test_the_next_steps_are_those_of_the_old_run(tmp_path: Path) -> None:
    """Interleaved heads, pipeline stages, ZeRO-1 and its own xser: the losses of the next steps are equal."""
    run = old_run(Job(Model(heads=4, head_dim=4, kv_heads=2)))
    place = write_nemo(tmp_path / "checkpoints", run, NemoJob(pp=2, dp=3, xser=True))
    config = write_config(tmp_path / "config", run.job.model.config)
    done = convert(place, tmp_path / "run" / "step_3", names="hf", to="tag", config=config)
    assert ("neuronx-nemo-megatron", "nemo_llama", STEPS, ()) == (done.writer, done.mapping, done.step, done.left_out)
    model = model_of(run.job, seed=5)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    assert STEPS == load_checkpoint(tmp_path / "run", "step_3", model, optimizer, scheduler)["global_step"]
    assert run.next_losses == train(model, optimizer, scheduler, range(STEPS, STEPS + 2))


@pytest.mark.parametrize(
    "job",
    [
        NemoJob(tp=4),
        NemoJob(tp=2, fused=False, xser=True),
        NemoJob(tp=2, pp=2, virtual_pp=2, dp=2, tied=True),
        NemoJob(tp=1, pp=4, dp=2, xser=True, weightless=True),
    ],
    ids=["tp", "query and key_value", "virtual pipelines", "weights in the optimizer alone"],
)
def test_each_tensor_is_that_of_the_model(tmp_path: Path, job: NemoJob) -> None:
    """Weights and moments, bit for bit; of a checkpoint that any rank's file names."""
    run = untrained(Job(Model(layers=4, heads=8, kv_heads=4)))
    run = tied(run) if job.tied else run
    place = write_nemo(tmp_path / "checkpoints", run, job)
    config = write_config(tmp_path / "config", {**run.job.model.config, "tie_word_embeddings": job.tied})
    rank = sorted(path.name for path in place.iterdir())[-1]
    convert(place / rank / NEMO_NAME, tmp_path / "hf", to="hf", config=config, optimizer=True)
    left_out = {"lm_head.weight"} if job.tied else set()
    expected = {name: tensor for name, tensor in run.weights.items() if name not in left_out}
    assert [] == differences(expected, weights(tmp_path / "hf"))
    moments = load_file(tmp_path / "hf" / "optimizer.safetensors")
    assert all(torch.equal(run.moments["exp_avg"][name], moments[f"{name}/exp_avg"]) for name in expected)


def test_one_of_several_checkpoints_is_named(tmp_path: Path) -> None:
    """A run keeps several, and the last one under another name."""
    run = untrained(Job(Model()))
    place = write_nemo(tmp_path / "checkpoints", run, NemoJob(dp=2))
    last = NEMO_NAME.replace(".ckpt", "-last.ckpt")
    write_nemo(place, replace(run, weights={name: one + 1 for name, one in run.weights.items()}), NemoJob(dp=2), last)
    config = write_config(tmp_path / "config", run.job.model.config)
    with pytest.raises(CheckpointNotFound, match=r"several checkpoints, expected one: .*-last.ckpt, .*"):
        convert(place, tmp_path / "hf", to="hf", config=config)
    convert(place / "mp_rank_00" / last, tmp_path / "hf", to="hf", config=config)
    assert torch.equal(run.weights["lm_head.weight"] + 1, weights(tmp_path / "hf")["lm_head.weight"])


def test_an_optimizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = untrained(Job(Model()))
    place = write_nemo(tmp_path / "checkpoints", run, NemoJob(dp=2))
    for rank in place.iterdir():
        shutil.rmtree(rank / "optim")
    config = write_config(tmp_path / "config", run.job.model.config)
    done = convert(place, tmp_path / "run" / "step_3", names="hf", to="tag", config=config)
    assert ("the ZeRO-1 optimizer, whose files are missing",) == done.left_out


def _changed(path: Path, change: Callable[[Any], Any]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def _of_another_step(place: Path) -> None:
    def change(content: Any) -> None:
        for entries in content[0]["base_state"].values():
            entries["step"] += 1

    name = NEMO_NAME.replace(".ckpt", "-optimizer_states.ckpt")
    _changed(place / "tp_rank_01_pp_rank_001" / "optim" / "dp_rank_001" / name, change)


def _of_two_layouts(place: Path) -> None:
    shutil.copytree(place / "tp_rank_00_pp_rank_000", place / "mp_rank_00")


def _of_too_many_ranks(place: Path) -> None:
    for rank in place.iterdir():
        (rank / "optim" / "dp_rank_001").rename(rank / "optim" / f"dp_rank_{2**20}")


def _of_a_rank_twice(place: Path) -> None:
    optimizers = place / "tp_rank_00_pp_rank_000" / "optim"
    shutil.copytree(optimizers / "dp_rank_000", optimizers / "dp_rank_0000")


def _of_another_model(place: Path) -> None:
    def change(content: Any) -> None:
        state = content["state_dict"]
        content["state_dict"] = {name.replace("4h.weight", "4h_2.weight"): tensor for name, tensor in state.items()}

    _changed(place / "tp_rank_00_pp_rank_000" / NEMO_NAME, change)


@pytest.mark.parametrize(
    ("damage", "kind", "complaint"),
    [
        (_of_another_step, IncompatibleState, "step differed between the ranks .* files of two saves"),
        (_of_two_layouts, MalformedFile, "several directories of one rank, mp_rank_00, tp_rank_00_pp_rank_000"),
        (_of_too_many_ranks, MalformedFile, f"dp={2**20 + 1}, .* ranks; at most {2**20} are allowed"),
        (_of_a_rank_twice, MalformedFile, "optim has several directories of one rank, dp_rank_000, dp_rank_0000"),
        (_of_another_model, KeyMismatch, "no rule for 'language_model.encoder.layers.0.mlp.dense_h_to_4h_2.weight'"),
    ],
)
def test_what_contradicts_itself(
    tmp_path: Path, damage: Callable[[Path], None], kind: type[CheckpointError], complaint: str
) -> None:
    """Files of two saves or layouts, another model than a Llama: refused, and nothing is written."""
    run = untrained(Job(Model()))
    place = write_nemo(tmp_path / "checkpoints", run, NemoJob(pp=2, dp=2))
    damage(place)
    (tmp_path / "config.json").write_text(json.dumps(run.job.model.config))
    with pytest.raises(kind, match=complaint):
        convert(place, tmp_path / "out", to="hf", config=tmp_path / "config.json", optimizer=True)
    assert not (tmp_path / "out").exists()
