"""Train the small Llama of train_llama.py with FSDP2 and tensor parallelism, without torch-xla.

It takes the same options, and goes on from the other script's checkpoints as the other does from its own::

    torchrun --nproc_per_node 4 examples/train_llama_fsdp2.py --checkpoint_dir /tmp/llama-fsdp2 \\
        --resume_from /tmp/llama --loading_step latest_if_exists

Its parameters are the other script's fp32 master weights, and become these again there.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nxd_ckpt


class PlainLayers:
    """Layers that torch cuts afterwards."""

    def embedding(self, rows: int, columns: int) -> nn.Module:
        return nn.Embedding(rows, columns)

    def column_parallel(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=False)

    row_parallel = output = column_parallel


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    tp = args.tensor_parallel_size
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(args.seed)
    config = Config(width=args.width, layers=args.layers, inner=args.inner, dropout=args.dropout)
    model = shard(Llama(config, PlainLayers()), mesh, getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(parameter_groups(model), args.learning_rate, BETAS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.steps))
    log, data = Log(args.log_file), Bytes(args.sequence_length)

    def save() -> None:
        started = time.perf_counter()
        tag = f"step_{progress['step']}"
        keep = {"num_kept_ckpts": args.num_kept_ckpts, "async_save": True}
        nxd_ckpt.save_checkpoint(args.checkpoint_dir, tag, model, optimizer, scheduler, user_content=progress, **keep)
        if dist.get_rank() == 0:
            log.write(event="save", step=progress["step"], tag=tag, stall_seconds=time.perf_counter() - started)

    progress = {"step": 0, "data_position": 0}
    directory, tag = find_checkpoint(args)
    if tag is not None:
        progress = nxd_ckpt.load_checkpoint(directory, tag, model, optimizer, scheduler)
    log.write(event="start", rank=dist.get_rank(), pid=os.getpid(), step=progress["step"], resumed_from=tag)
    if directory != args.checkpoint_dir:
        save()
    while progress["step"] < args.steps:
        model.train(progress["step"] < args.dropout_steps)
        position = progress["data_position"] + mesh.get_local_rank("fsdp") * args.batch_size
        inputs, targets = data.batch(position, args.batch_size)
        loss = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = loss.detach() / mesh["fsdp"].size()
        dist.all_reduce(mean, group=mesh.get_group("fsdp"))

        progress["step"] += 1
        progress["data_position"] += mesh["fsdp"].size() * args.batch_size
        if dist.get_rank() == 0:
            log.write(event="step", step=progress["step"], loss=mean.item(), hex=mean.item().hex())
        if progress["step"] % args.save_every == 0:
            save()
    nxd_ckpt.finalize_checkpoint()
    dist.destroy_process_group()


def shard(model: Llama, mesh: DeviceMesh, dtype: torch.dtype) -> Llama:
    """Cut layers over the mesh: parameters are DTensors of fp32 from here on; forward and backward run in ``dtype``."""
    column, row = ColwiseParallel(), RowwiseParallel()
    plan = {f"attention.{name}": column for name in "qkv"} | {"attention.out": row}
    plan |= {"mlp.gate": column, "mlp.up": column, "mlp.down": row}
    # The rotary angles, which are fp32, are passed to layers as they are.
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        if mesh["tp"].size() > 1:
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["fsdp"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["fsdp"], mp_policy=policy)


if __name__ == "__main__":
    main()
