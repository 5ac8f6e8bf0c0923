"""Train a small model with accelerate, checkpointed by nxd_ckpt, and go on from the last checkpoint.

::

    python examples/train_accelerate.py --directory run --steps 2
    python examples/train_accelerate.py --directory run --steps 4      # goes on from step 2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from accelerate.utils import ProjectConfiguration

from nxd_ckpt.integrations.accelerate import Accelerator  # in place of accelerate.Accelerator


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="run")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    project = ProjectConfiguration(args.directory, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if os.path.isdir(os.path.join(args.directory, "checkpoints")):
        accelerator.load_state()
        project.iteration = int(optimizer.state_dict()["state"][0]["step"])
    for step in range(project.iteration + 1, args.steps + 1):
        x = torch.randn(16, 8).to(accelerator.device)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        if accelerator.is_main_process:  # accelerator.print says nothing on a single XLA device
            print(f"step {step} loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
