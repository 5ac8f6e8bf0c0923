"""What each rank does with OLMo-core: saving with its function, and resuming with its own what we made."""

from pathlib import Path
from typing import Any

import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state

from nxd_ckpt import Checkpointer
from tests.bad_input.live import Net
from tests.torch_dcp import ranks, writing


def job(lr: float) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(int(lr * 100))
    model = Net()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def saved(directory: Path, flat: bool) -> dict[str, Any]:
    """Train a step and save; what was saved."""
    model, optimizer = job(0.1)
    ranks.training(model, optimizer)
    save_model_and_optim_state(directory, model, optimizer, flatten_optimizer_state=flat)
    return ranks.picture(model, optimizer)


def resumed(directory: Path, flat: bool) -> dict[str, Any]:
    """What another job is after loading."""
    model, optimizer = job(0.5)
    load_model_and_optim_state(directory, model, optimizer, flatten_optimizer_state=flat)
    return ranks.picture(model, optimizer)


def saved_on_ranks(rank: int, directory: Path) -> dict[str, Any]:
    """Train under FSDP2, save with OLMo-core's function and with ours; what was saved."""
    model, optimizer = writing.fsdp2_job()
    save_model_and_optim_state(directory / "olmo", model, optimizer)
    with Checkpointer(directory / "ours", durable=False) as checkpointer:
        checkpointer.save("step_1", model, optimizer)
    return ranks.picture(model, optimizer)


def resumed_on_ranks(rank: int, directory: Path) -> list[dict[str, Any]]:
    """Other jobs under FSDP2: ours from what OLMo-core wrote, and OLMo-core from what became of our tag."""
    model, optimizer = writing.fsdp2_job(lr=9.0, seed=4)
    with Checkpointer(directory / "of_olmo") as checkpointer:
        checkpointer.load(None, model, optimizer)
    theirs, own = writing.fsdp2_job(lr=9.0, seed=5)
    load_model_and_optim_state(directory / "dcp", theirs, own)
    return [ranks.picture(model, optimizer), ranks.picture(theirs, own)]
