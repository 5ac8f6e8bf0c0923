"""A job that trains a Hugging Face model on from its directory. Run on every rank of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import nxd_ckpt
from nxd_ckpt import Topology
from nxd_ckpt.live import torch_xla as device
from tests.hugging_face.layers import place
from tests.hugging_face.reference import Job, State
from tests.hugging_face.sharded import CausalLM
from tests.reshard.ranks import Pipeline
from tests.training.model import zero1

STEPS, BATCH, LENGTH = 3, 4, 8
# With so large an eps a gradient that is too large, as one that was added up once too often, makes a difference.
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}


@dataclass(frozen=True)
class Run:
    """``source`` is the Hugging Face directory, ``runs`` where the job saves: "loaded", and "trained" after its steps.

    The model is built on the ``device``: "cpu", from where it is moved before the load, "meta", from where it is moved
    after, or "xla". ``tied``: its head is the embedding. ``zero1``: with torch-xla's optimizer, as more than one
    data-parallel rank needs. ``options`` are those of the save after training.
    """

    job: Job
    source: str
    runs: str
    dp: int = 1
    device: str = "cpu"
    tied: bool = False
    zero1: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    storage_options: dict[str, Any] | None = None

    def topology(self, rank: int) -> Topology:
        return Topology(dp=self.dp, tp=self.job.tp, pp=self.job.pp, ep=self.job.ep, rank=rank)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: of its own batch, and None where it is not of the last stage.

    ``loaded`` and ``trained`` are the logits of step 0's tokens, ``weights`` what it held after training.
    ``compiled`` counts the graphs that its load compiled.
    """

    loaded: torch.Tensor | None
    trained: torch.Tensor | None
    losses: list[float]
    weights: State
    compiled: int


def tokens_of(step: int) -> torch.Tensor:
    """The whole batch: (sequences, length)."""
    return torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def train_on(rank: int, run: Run) -> Outcome:
    """Load, save, train, save again."""
    import torch_xla

    at = run.topology(rank)
    with torch.device(run.device):
        module = CausalLM(run.job, at)
    if run.device == "cpu":
        place(module, torch_xla.device())
    if run.tied:
        module.tie()
    model = Pipeline(module) if at.pp > 1 else module
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
    if run.device == "meta":
        place(module, torch_xla.device())
    nxd_ckpt.save_checkpoint(run.runs, "loaded", model, topology=at, timeout=600.0)

    optimizer = _optimizer(run, at, module)
    logits, losses = [], []
    for step in range(STEPS):
        computed, loss = _forward(module, at, step)
        loss.backward()
        _finish_gradients(at, module)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch_xla.sync()
        logits.append(computed.detach().cpu())
        losses.append(float(loss.detach().cpu()))
    nxd_ckpt.save_checkpoint(run.runs, "trained", model, optimizer, topology=at, timeout=600.0, **run.options)
    trained, _ = _forward(module, at, 0)
    weights = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    nxd_ckpt.finalize_checkpoint()
    nxd_ckpt.close_checkpointers()
    if at.pp_rank < at.pp - 1:
        return Outcome(None, None, [], weights, compiled)
    return Outcome(logits[0], trained.detach().cpu(), losses, weights, compiled)


def _forward(module: CausalLM, at: Topology, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and mean loss of this rank's sequences; on other stages than the last, what passes gradients on."""
    import torch_xla

    tokens = tokens_of(step).chunk(at.dp)[at.dp_rank].to(torch_xla.device())
    logits = module(tokens)
    if at.pp_rank < at.pp - 1:
        return logits, logits.sum()
    return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _finish_gradients(at: Topology, module: CausalLM) -> None:
    """Experts got the sum over the batches of the ranks that share them out; all else takes the mean."""
    for parameter in module.parameters():
        if parameter.grad is not None and getattr(parameter, "expert_model_parallel", False):
            parameter.grad /= at.ep


def _optimizer(run: Run, at: Topology, module: CausalLM) -> Any:
    parameters = list(module.parameters())
    if not run.zero1:
        return torch.optim.AdamW(parameters, **ADAMW)
    settings = {**ADAMW, "grad_clipping": False, "save_master_weights": True, "pin_layout": False}
    return zero1(parameters, at, settings)
