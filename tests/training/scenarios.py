"""What the ranks of a training test do. Each function runs on every rank of a pool."""

import os
from dataclasses import replace
from typing import Any

import torch

import nxd_ckpt
from nxd_ckpt.live import torch_xla as device
from tests.training.model import Setup, Trainer


def save(rank: int, directory: str, tag: str, trainer: Trainer, setup: Setup, **options: Any) -> None:
    nxd_ckpt.save_checkpoint(
        directory,
        tag,
        trainer.model,
        trainer.optimizer,
        trainer.scheduler,
        {"step": trainer.step_number},
        topology=trainer.topology,
        timeout=600.0,
        **{**dict(setup.options), **options},
    )


def load(directory: str, tag: str | None, trainer: Trainer, **options: Any) -> Any:
    content = nxd_ckpt.load_checkpoint(
        directory,
        tag,
        trainer.model,
        trainer.optimizer,
        trainer.scheduler,
        topology=trainer.topology,
        timeout=600.0,
        **options,
    )
    trainer.step_number = content["step"]
    return content


def resume_equals_uninterrupted(rank: int, directory: str, setup: Setup, seed: int) -> list[str]:
    """Train, save, train on; then from other values: load, compare, train on. What differs, in words."""
    trainer = Trainer(rank, setup)
    trainer.train(2)
    wanted = trainer.state()
    random_state: dict[str, Any] = nxd_ckpt.capture_random_state()
    save(rank, directory, "step_2", trainer, setup, rank_content=random_state)
    expected_losses = trainer.train(3)
    expected = trainer.state()
    nxd_ckpt.finalize_checkpoint()

    resumed = Trainer(rank, replace(setup, seed=seed))
    resumed.train(1)
    restored: dict[str, Any] = {}
    load(directory, None, resumed, rank_content=restored)
    nxd_ckpt.restore_random_state(restored)
    problems = differences("loaded", wanted, resumed.state())
    losses = resumed.train(3)
    if losses != expected_losses:
        problems.append(f"losses after the resume: {losses}, uninterrupted: {expected_losses}")
    problems += differences("after training on", expected, resumed.state())
    nxd_ckpt.close_checkpointers()
    return problems


def resume_from_a_store(rank: int, url: str, environment: dict[str, str], setup: Setup, seed: int) -> list[str]:
    """:func:`resume_equals_uninterrupted` in a store whose place and credentials come from the environment."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        return resume_equals_uninterrupted(rank, url, setup, seed)
    finally:
        os.environ.clear()
        os.environ.update(before)


def filtered_from_a_store(rank: int, url: str, environment: dict[str, str], setup: Setup, work_dir: str) -> list[str]:
    """Load under another name and without a few things, with ``pre_download`` and without. What differs, in words."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        saved = Trainer(rank, setup)
        saved.train(1)
        save(rank, url, "step_2", saved, setup)
        problems = []
        for options in ({}, {"pre_download": True, "work_dir": work_dir}):
            live = Trainer(rank, replace(setup, seed=99))
            live.train(1)
            expected = _mixed(saved, live)
            odd: Any = live.model._parameters.pop("odd")
            live.model.register_parameter("renamed", odd)
            load(url, None, live, key_mapping={"renamed": "odd"}, ignore_keys=LEFT_OUT, **options)
            odd = live.model._parameters.pop("renamed")
            live.model.odd = odd
            problems += differences(f"loaded with {options}", expected, in_order(live.state()))
            live.train(1)
        nxd_ckpt.close_checkpointers()
        return problems
    finally:
        os.environ.clear()
        os.environ.update(before)


LEFT_OUT = ["model/down", "optim/up/exp_avg", "optim/param_groups", "scheduler"]


def _mixed(saved: Trainer, live: Trainer) -> Any:
    """The state of ``saved``, but for what :data:`LEFT_OUT` says, which is that of ``live``."""
    state, own = in_order(saved.state()), in_order(live.state())
    names = [name for name, parameter in live.model.named_parameters() if parameter.requires_grad]
    up, down = names.index("up"), names.index("down")
    state["model"]["down"] = own["model"]["down"]
    state["optimizer"]["base_state"][up]["exp_avg"] = own["optimizer"]["base_state"][up]["exp_avg"]
    state["optimizer"]["param_groups"], state["scheduler"] = own["optimizer"]["param_groups"], own["scheduler"]
    for shards in (state["shards"], state["optimizer"]["sharded_master_weights"]):
        shards[down] = own["shards"][down]
    return state


def in_order(state: dict[str, Any]) -> dict[str, Any]:
    """The same with names and states in alphabetical order: how they came together says nothing."""
    base = {index: dict(sorted(entries.items())) for index, entries in state["optimizer"]["base_state"].items()}
    optimizer = {**state["optimizer"], "base_state": base}
    return {**state, "model": dict(sorted(state["model"].items())), "optimizer": optimizer}


def compile_counts(rank: int, directory: str, setup: Setup) -> list[int]:
    """torch-xla's compile counter: before and after a second save, and before and after a load between steps."""
    trainer = Trainer(rank, setup)
    trainer.train(2)
    save(rank, directory, "step_2", trainer, setup, async_save=True)
    trainer.train(1)
    before = device.compile_count()
    save(rank, directory, "step_3", trainer, setup, async_save=True)
    after_save = device.compile_count()
    trainer.train(1)
    nxd_ckpt.finalize_checkpoint()
    before_load = device.compile_count()
    load(directory, "step_2", trainer)
    after_load = device.compile_count()
    trainer.train(1)
    after_step = device.compile_count()
    nxd_ckpt.close_checkpointers()
    return [before, after_save, before_load, after_load, after_step]


def compile_counts_of_new_objects(rank: int, directory: str, setup: Setup) -> list[int]:
    """torch-xla's compile counter after a load into new objects, as a new process has them, and after the next step."""
    trainer = Trainer(rank, setup)
    trainer.train(2)
    save(rank, directory, "step_2", trainer, setup)
    trainer.train(1)
    resumed = Trainer(rank, setup)
    load(directory, "step_2", resumed)
    after_load = device.compile_count()
    resumed.train(1)
    after_step = device.compile_count()
    nxd_ckpt.close_checkpointers()
    return [after_load, after_step]


def snapshot_is_of_the_call(rank: int, directory: str, setup: Setup) -> list[str]:
    """Overwrite everything right after an async save; what is saved is the state at the call."""
    trainer = Trainer(rank, setup)
    trainer.train(2)
    wanted = trainer.state()
    save(rank, directory, "step_2", trainer, setup, async_save=True)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.data.copy_(torch.full(parameter.shape, 7.0).to(parameter.dtype))
    trainer.train(2)
    nxd_ckpt.finalize_checkpoint()
    resumed = Trainer(rank, setup)
    load(directory, "step_2", resumed)
    nxd_ckpt.close_checkpointers()
    return differences("loaded", wanted, resumed.state())


def differences(where: str, expected: Any, actual: Any, path: str = "") -> list[str]:
    """Every leaf that is not equal to the last bit, in words."""
    if isinstance(expected, torch.Tensor):
        same = (
            isinstance(actual, torch.Tensor)
            and expected.dtype == actual.dtype
            and expected.shape == actual.shape
            and torch.equal(expected, actual)
        )
        return [] if same else [f"{where}: {path}: expected {expected}, found {actual}"]
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or list(expected) != list(actual):
            return [f"{where}: {path}: expected keys {list(expected)}, found {list(actual) if actual else actual}"]
        return [p for key in expected for p in differences(where, expected[key], actual[key], f"{path}/{key}")]
    if isinstance(expected, (list, tuple)):
        if type(expected) is not type(actual) or len(expected) != len(actual):
            return [f"{where}: {path}: expected {expected}, found {actual}"]
        pairs = enumerate(zip(expected, actual, strict=True))
        return [p for i, (a, b) in pairs for p in differences(where, a, b, f"{path}/{i}")]
    return [] if expected == actual else [f"{where}: {path}: expected {expected}, found {actual}"]
