"""What each rank does with OLMo-core: saving with its function, and resuming with its own what we made."""

from pathlib import Path
from typing import Any

import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state

from tests.bad_input.live import Net
from tests.torch_dcp import ranks


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
