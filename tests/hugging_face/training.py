"""A job that trains a Hugging Face model on from its directory. Run on every rank of a pool."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import nxd_ckpt
from nxd_ckpt import Topology
from nxd_ckpt.live import torch_xla as device
from tests.hugging_face.layers import place
from tests.hugging_face.reference import Job, State
from tests.hugging_face.sharded import CausalLM

STEPS, BATCH, LENGTH = 3, 4, 8
# With so large an eps a gradient that is too large, as one that was added up once too often, makes a difference.
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}


@dataclass(frozen=True)
class Run:
    """``source`` is the Hugging Face directory, ``runs`` where the job saves: "loaded" and, later, "trained"."""

    job: Job
    source: str
    runs: str
    storage_options: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw.

    ``loaded`` and ``trained`` are the logits of step 0's tokens, ``weights`` what it held after training.
    ``compiled`` counts the graphs that its load compiled.
    """

    loaded: torch.Tensor
    trained: torch.Tensor
    losses: list[float]
    weights: State
    compiled: int


def tokens_of(step: int) -> torch.Tensor:
    """The whole batch: (sequences, length)."""
    return torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def train_on(rank: int, run: Run) -> Outcome:
    """Load, save, train, save again."""
    import torch_xla

    at = Topology(tp=run.job.tp, rank=rank)
    model = CausalLM(run.job, at)
    place(model, torch_xla.device())
    model.tie()
    torch_xla.sync(wait=True)  # what was begun before the load does not count
    before = device.compile_count()
    nxd_ckpt.load_checkpoint(
        run.source,
        model=model,
        kv_size_multiplier=run.job.copies,
        hardware=run.job.hardware,
        topology=at,
        storage_options=run.storage_options,
        timeout=600.0,
    )
    compiled = device.compile_count() - before
    nxd_ckpt.save_checkpoint(run.runs, "loaded", model, topology=at, timeout=600.0)

    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    logits, losses = [], []
    for step in range(STEPS):
        computed, loss = _forward(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch_xla.sync()
        logits.append(computed.detach().cpu())
        losses.append(float(loss.detach().cpu()))
    options: dict[str, Any] = {"async_save": True, "use_xser": True}
    nxd_ckpt.save_checkpoint(run.runs, "trained", model, optimizer, topology=at, timeout=600.0, **options)
    trained, _ = _forward(model, 0)
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    nxd_ckpt.finalize_checkpoint()
    nxd_ckpt.close_checkpointers()
    return Outcome(logits[0], trained.detach().cpu(), losses, weights, compiled)


def _forward(model: CausalLM, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and mean loss."""
    import torch_xla

    tokens = tokens_of(step).to(torch_xla.device())
    logits = model(tokens)
    return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
