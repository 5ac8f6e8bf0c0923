"""Train a small Llama on Python's standard library: tensor parallel, ZeRO-1, bf16, and checkpoints by nxd_ckpt.

A torch-xla script as one writes it for neuronx-distributed. On Trainium::

    torchrun --nproc_per_node 32 examples/train_llama.py --checkpoint_dir /fsx/llama --loading_step latest_if_exists

and on any machine, in CPU-XLA emulation (the script does not know)::

    export XLA_FLAGS=--xla_backend_optimization_level=0     # compiles six times faster
    python -m nxd_ckpt.emulation --nproc 4 examples/train_llama.py --checkpoint_dir /tmp/llama \\
        --loading_step latest_if_exists

Kill it at any moment and start it again with the same command: it goes on as if nothing had happened.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
    config = Config(width=args.width, layers=args.layers, inner=args.width * 11 // 4, dropout=args.dropout)
    model = Llama(config, TensorParallel(topology.tp_rank, tp, tp_groups)).to(torch.bfloat16).to(torch_xla.device())
    model.finish_placement()
    optimizer = make_optimizer(model, dp_groups, tp_groups, args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.steps))
    # Dropout: the ranks of one tensor-parallel group draw the same numbers, those of another replica others.
    xm.set_rng_state(args.seed + topology.dp_rank)

    step, data_position = 0, 0
    content, resumed_from = resume(args, model, optimizer, scheduler, topology)
    if content is not None:
        step, data_position = content["step"], content["data_position"]

    log = Log(args.log)
    log.write(event="start", rank=topology.rank, pid=os.getpid(), step=step, resumed_from=resumed_from)
    data = Bytes(args.sequence_length)
    while step < args.steps:
        inputs, targets = data.batch(data_position + topology.dp_rank * args.batch_size, args.batch_size)
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs.to(torch_xla.device()))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.to(torch_xla.device()).flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / topology.dp, groups=dp_groups, pin_layout=False)
        torch_xla.sync()

        step += 1
        data_position += topology.dp * args.batch_size
        if topology.rank == 0:
            log.write(event="step", step=step, loss=mean.item(), hex=mean.item().hex())
        if step % args.save_every == 0:
            started = time.perf_counter()
            nxd_ckpt.save_checkpoint(
                args.checkpoint_dir,
                f"step_{step}",
                model,
                optimizer,
                scheduler,
                user_content={"step": step, "data_position": data_position},
                num_kept_ckpts=args.num_kept_ckpts,
                async_save=True,
                rank_content=nxd_ckpt.capture_random_state(),
                topology=topology,
            )
            if topology.rank == 0:
                log.write(event="save", step=step, tag=f"step_{step}", stall_seconds=time.perf_counter() - started)
    nxd_ckpt.finalize_checkpoint()


def resume(args: argparse.Namespace, model: Any, optimizer: Any, scheduler: Any, topology: nxd_ckpt.Topology) -> Any:
    """Load what ``--loading_step`` asks for: the user content and the tag's name, or None and None."""
    if args.loading_step == "-1":
        return None, None
    tag = None if args.loading_step == "latest_if_exists" else f"step_{args.loading_step}"
    if tag is None and not nxd_ckpt.has_checkpoint(args.checkpoint_dir):
        return None, None
    random_state: dict[str, Any] = {}
    content = nxd_ckpt.load_checkpoint(
        args.checkpoint_dir, tag, model, optimizer, scheduler, rank_content=random_state, topology=topology
    )
    nxd_ckpt.restore_random_state(random_state)
    return content, f"step_{content['step']}"


def make_optimizer(
    model: Llama, dp_groups: list[list[int]], tp_groups: list[list[int]], learning_rate: float
) -> ZeroRedundancyOptimizer:
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
        grad_norm_groups=tp_groups,
        grad_clipping=True,
        max_norm=1.0,
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
    parser.add_argument("--save_every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--num_kept_ckpts", type=int, default=3, help="older checkpoints are deleted")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tensor_parallel_size", type=int, default=2)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch_size", type=int, default=4, help="sequences per step and data-parallel rank")
    parser.add_argument("--sequence_length", type=int, default=64, help="bytes")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="file to append JSON lines to; stdout by default")
    return parser.parse_args()


if __name__ == "__main__":
    main()
