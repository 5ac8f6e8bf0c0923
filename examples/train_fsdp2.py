"""Train a small model with FSDP2 x tensor parallelism on CPUs, save it, and go on from the latest checkpoint.

::

    torchrun --nproc_per_node 4 examples/train_fsdp2.py --tp 2 --steps 4
    torchrun --nproc_per_node 2 examples/train_fsdp2.py --steps 8      # another mesh: goes on from step 4
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nxd_ckpt import Checkpointer

VOCAB, HIDDEN = 64, 32


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.up, self.down = torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return found


def build(tp: int) -> torch.nn.Module:
    """The model on a mesh of all ranks; parameters are DTensors from here on."""
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, HIDDEN), Block(), Block(), torch.nn.Linear(HIDDEN, VOCAB))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("fsdp", "tp"))
    for block in (model[1], model[2]):
        if tp > 1:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default="checkpoints-fsdp2")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build(arguments.tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after fully_shard: that replaces parameters
    tokens = torch.arange(16).reshape(2, 8) * 7 % VOCAB  # the same on all ranks: losses do not depend on the mesh
    with Checkpointer(arguments.directory) as checkpointer:
        first = checkpointer.load_latest(model, optimizer, fallback=True)
        for step in range(first, arguments.steps):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
            checkpointer.save(
                f"step_{step + 1}",
                model,
                optimizer,
                async_save=True,
                num_kept_ckpts=2,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
