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
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # the "xla" backend of torch.distributed
import torch_xla.runtime as xr
from llama import Config, Llama
from llama_training import (
    BETAS,
    Bytes,
    Log,
    find_checkpoint,
    learning_rate_factor,
    parameter_groups,
    parse_arguments,
)
from parallel_layers import TensorParallel, restore_partition_attributes
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
    model = Llama(config, TensorParallel(topology.tp_rank, tp, tp_groups))
    model = model.to(getattr(torch, args.dtype)).to(torch_xla.device())
    model.tie_embeddings()
    restore_partition_attributes(model)
    optimizer = make_optimizer(model, dp_groups, args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.steps))
    # Dropout: the ranks of one tensor-parallel group draw the same numbers, those of another replica others.
    xm.set_rng_state(args.seed + topology.dp_rank)

    log = Log(args.log_file)
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
    """AdamW on fp32 master weights, sharded over the data-parallel ranks."""
    return ZeroRedundancyOptimizer(
        parameter_groups(model),
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
        betas=BETAS,
    )


if __name__ == "__main__":
    main()
