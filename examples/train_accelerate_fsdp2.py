"""Train a small model with accelerate and FSDP2, checkpointed by nxd_ckpt, and go on from the last checkpoint.

Each rank writes and reads its shards, and a run goes on on another number of ranks::

    torchrun --nproc_per_node 2 examples/train_accelerate_fsdp2.py --directory run --steps 2
    torchrun --nproc_per_node 4 examples/train_accelerate_fsdp2.py --directory run --steps 4      # goes on from step 2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration

from nxd_ckpt.integrations import accelerate  # its Accelerator takes the place of accelerate's


class Accelerator(accelerate.Accelerator):
    """Saves in the background, and loads what another number of ranks saved."""

    async_save = True
    any_world_size = True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="run")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    # accelerate shards on devices alone: here CPU ranks stand for them. Leave this line and cpu=True out on devices.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_NEURON
    project = ProjectConfiguration(args.directory, automatic_checkpoint_naming=True, total_limit=2)
    fsdp2 = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=True, project_config=project, fsdp_plugin=fsdp2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if os.path.isdir(os.path.join(args.directory, "checkpoints")):
        accelerator.load_state()
        project.iteration = int(optimizer.state_dict()["state"][0]["step"])
    for step in range(project.iteration + 1, args.steps + 1):
        # All ranks draw the same batch, and each takes its part of it.
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        x = x[accelerator.process_index :: accelerator.num_processes]
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        accelerator.print(f"step {step} loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
