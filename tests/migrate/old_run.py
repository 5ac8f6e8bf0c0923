"""A small real training whose checkpoints are then written as the Neuron trainers write them.

The model is transformers' own Llama, so that what comes back can be trained on by it. The run itself is on plain torch:
what is tested is that no bit of its state is lost, or in the wrong place, on the way through the ranks' files.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hugging_face.reference import Job, Model, State

STEPS = 3
GROUPS: tuple[dict[str, Any], ...] = ({"weight_decay": 0.1}, {"weight_decay": 0.0})
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6}


def model_of(job: Job, seed: int | None = None) -> LlamaForCausalLM:
    """The job's model, as transformers has it."""
    torch.manual_seed(0 if seed is None else seed)
    return LlamaForCausalLM(config_of(job.model))


def config_of(model: Model) -> LlamaConfig:
    return LlamaConfig(**{key: value for key, value in model.config.items() if key != "model_type"})


def is_decayed(name: str) -> bool:
    return "norm" not in name and "bias" not in name


def optimizer_of(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """With the two param groups that both trainers make."""
    named = list(model.named_parameters())
    groups = [
        {**options, "params": [parameter for name, parameter in named if is_decayed(name) == (number == 0)]}
        for number, options in enumerate(GROUPS)
    ]
    return torch.optim.AdamW(groups, **ADAMW)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _decreasing)


def _decreasing(step: int) -> float:
    return 1 / (1 + step)


def train(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR | None,
    steps: range,
) -> list[float]:
    """The loss of each of these steps."""
    losses = []
    for step in steps:
        tokens = torch.randint(0, model.config.vocab_size, (2, 6), generator=torch.Generator().manual_seed(step))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


@dataclass(frozen=True)
class OldRun:
    """The run after :data:`STEPS` steps: whole tensors by Hugging Face's names; the losses of the next two steps."""

    job: Job
    weights: State
    moments: dict[str, State]
    scheduler: dict[str, Any]
    lr: float
    next_losses: list[float]


def old_run(job: Job) -> OldRun:
    """Train, remember, train on."""
    model = model_of(job)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    train(model, optimizer, scheduler, range(STEPS))
    named = list(model.named_parameters())
    kinds = ("exp_avg", "exp_avg_sq")
    moments = {kind: {name: optimizer.state[one][kind].clone() for name, one in named} for kind in kinds}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lr, state = optimizer.param_groups[0]["lr"], dict(scheduler.state_dict())
    losses = train(model, optimizer, scheduler, range(STEPS, STEPS + 2))
    return OldRun(job, weights, moments, state, lr, losses)
