"""Train a small Llama on Python's standard library: tensor parallel, ZeRO-1, bf16, and checkpoints by nxd_ckpt.

A torch-xla script as one writes it for neuronx-distributed. On Trainium::

    torchrun --nproc_per_node 32 examples/train_llama.py --checkpoint_dir /fsx/llama --loading_step latest_if_exists

and on any machine, in CPU-XLA emulation (the script does not know)::

    export XLA_FLAGS=--xla_backend_optimization_level=0     # compiles six times faster
    python -m nxd_ckpt.emulation --nproc 4 examples/train_llama.py --checkpoint_dir /tmp/llama \\
        --loading_step latest_if_exists

Kill it at any moment and start it again with the same command: it goes on as if nothing had happened. To go on with
other sizes, start it with another ``--tensor_parallel_size`` or number of processes, a new ``--checkpoint_dir``, and
``--resume_from`` the old one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # the "xla" backend of torch.distributed
import torch_xla.runtime as xr
from llama import Config, Llama
from parallel_layers import TensorParallel
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

import nxd_ckpt

State = tuple[Llama, ZeroRedundancyOptimizer, torch.optim.lr_scheduler.LRScheduler]


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("xla")
    # With neuronx_distributed, parallel_state.initialize_model_parallel(tensor_model_parallel_size=...) makes these
    # groups, and nxd_ckpt reads them from there: `topology=` is for scripts without it.
    tp = args.tensor_parallel_size
    topology = nxd_ckpt.Topology(dp=xr.world_size() // tp, tp=tp, rank=xr.global_ordinal())
    tp_groups = [[dp_rank * tp + rank for rank in range(tp)] for dp_rank in range(topology.dp)]
    dp_groups = [[dp_rank * tp + rank for dp_rank in range(topology.dp)] for rank in range(tp)]

    torch.manual_seed(args.seed)
    config = Config(width=args.width, layers=args.layers, inner=args.inner, dropout=args.dropout)
    model = Llama(config, TensorParallel(topology.tp_rank, tp, tp_groups)).to(torch.bfloat16).to(torch_xla.device())
    model.finish_placement()
    optimizer = make_optimizer(model, dp_groups, args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.steps))
    # Dropout: the ranks of one tensor-parallel group draw the same numbers, those of another replica others.
    xm.set_rng_state(args.seed + topology.dp_rank)

    log = Log(args.log)
    state = model, optimizer, scheduler
    progress = {"step": 0, "data_position": 0}
    directory, tag = find_checkpoint(args)
    if tag is not None:
        progress = resume(directory, tag, state, topology)
    log.write(event="start", rank=topology.rank, pid=os.getpid(), step=progress["step"], resumed_from=tag)
    if directory != args.checkpoint_dir:
        # At once, on the new sizes: started again, the run finds a checkpoint in its own directory.
        save(args, state, topology, progress, log)

    data = Bytes(args.sequence_length)
    while progress["step"] < args.steps:
        model.train(progress["step"] < args.dropout_steps)
        position = progress["data_position"] + topology.dp_rank * args.batch_size
        inputs, targets = data.batch(position, args.batch_size)
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs.to(torch_xla.device()))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.to(torch_xla.device()).flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / topology.dp, groups=dp_groups, pin_layout=False)
        torch_xla.sync()

        progress["step"] += 1
        progress["data_position"] += topology.dp * args.batch_size
        if topology.rank == 0:
            log.write(event="step", step=progress["step"], loss=mean.item(), hex=mean.item().hex())
        if progress["step"] % args.save_every == 0:
            save(args, state, topology, progress, log)
    nxd_ckpt.finalize_checkpoint()


def find_checkpoint(args: argparse.Namespace) -> tuple[str, str | None]:
    """Where to resume from: the directory, and the tag that ``--loading_step`` asks for; no tag to start anew."""
    own, other = args.checkpoint_dir, args.resume_from
    directory = own if other is None or nxd_ckpt.has_checkpoint(own) else other
    if args.loading_step == "-1":
        return own, None
    if args.loading_step != "latest_if_exists":
        return directory, f"step_{args.loading_step}"
    if not nxd_ckpt.has_checkpoint(directory):
        return own, None
    return directory, nxd_ckpt.open_checkpoint(directory).tag


def resume(directory: str, tag: str, state: State, topology: nxd_ckpt.Topology) -> Any:
    """Load the tag, whatever sizes it was saved on, and return how far it had come."""
    # A rank's random state belongs to its place among the ranks: on other sizes, each goes on from its own seed.
    same_sizes = nxd_ckpt.open_checkpoint(directory, tag).topology.describe() == topology.describe()
    random_state: dict[str, Any] | None = {} if same_sizes else None
    progress = nxd_ckpt.load_checkpoint(directory, tag, *state, rank_content=random_state, topology=topology)
    if random_state is not None:
        nxd_ckpt.restore_random_state(random_state)
    return progress


def save(
    args: argparse.Namespace, state: State, topology: nxd_ckpt.Topology, progress: dict[str, int], log: Log
) -> None:
    """Save in the background: model, optimizer, scheduler, how far training came, and each rank's random state."""
    started = time.perf_counter()
    step = progress["step"]
    nxd_ckpt.save_checkpoint(
        args.checkpoint_dir,
        f"step_{step}",
        *state,
        user_content=progress,
        num_kept_ckpts=args.num_kept_ckpts,
        async_save=True,
        rank_content=nxd_ckpt.capture_random_state(),
        topology=topology,
    )
    if topology.rank == 0:
        log.write(event="save", step=step, tag=f"step_{step}", stall_seconds=time.perf_counter() - started)


def make_optimizer(model: Llama, dp_groups: list[list[int]], learning_rate: float) -> ZeroRedundancyOptimizer:
    """AdamW on fp32 master weights, sharded over the data-parallel ranks; no weight decay on norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return ZeroRedundancyOptimizer(
        groups,
        torch.optim.AdamW,
        sharding_groups=dp_groups,
        # torch-xla's gradient norm counts what every tensor-parallel rank holds whole (the RMSNorms) once for each of
        # them: clipped gradients would depend on their number.
        grad_clipping=False,
        save_master_weights=True,
        pin_layout=False,
        bucket_cap_mb_all_gather=64,
        bucket_cap_mb_reduce_scatter=64,
        lr=learning_rate,
        betas=(0.9, 0.95),
    )


def learning_rate_factor(step: int, steps: int, warmup: int = 5) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class Bytes:
    """The source files of Python's standard library as one long text; a token is a byte."""

    def __init__(self, length: int, limit: int = 2**21) -> None:
        self._length = length
        text = bytearray()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += file.read_bytes()
            if len(text) >= limit:
                break
        self._tokens = torch.frombuffer(text, dtype=torch.uint8).long()

    def batch(self, position: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows ``position`` to ``position + size``: inputs and, one byte on, targets, each (size, length)."""
        windows = (len(self._tokens) - 1) // self._length
        starts = [(index % windows) * self._length for index in range(position, position + size)]
        cut = torch.stack([self._tokens[start : start + self._length + 1] for start in starts])
        return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


class Log:
    """JSON lines, on stdout or appended to a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def write(self, **record: Any) -> None:
        line = json.dumps(record)
        if self._file is None:
            print(line, flush=True)
        else:
            with self._file.open("a") as file:
                file.write(line + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama on Python's standard library.")
    parser.add_argument("--checkpoint_dir", required=True, help="directory that all ranks share")
    parser.add_argument("--loading_step", default="-1", help="-1 starts anew, latest_if_exists resumes, or a step")
    parser.add_argument("--resume_from", help="directory to load from while checkpoint_dir holds no checkpoint")
    parser.add_argument("--save_every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--num_kept_ckpts", type=int, default=3, help="older checkpoints are deleted")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tensor_parallel_size", type=int, default=2)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--inner", type=int, default=352, help="width inside the MLPs")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dropout_steps", type=int, default=sys.maxsize, help="early dropout: none after these steps")
    parser.add_argument("--batch_size", type=int, default=4, help="sequences per step and data-parallel rank")
    parser.add_argument("--sequence_length", type=int, default=64, help="bytes")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="file to append JSON lines to; stdout by default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
