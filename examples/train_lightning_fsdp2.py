"""Train a Lightning module under FSDP2, checkpointed by nxd_ckpt without gathering, and go on from the last checkpoint.

::

    torchrun --nproc_per_node 2 examples/train_lightning_fsdp2.py --directory checkpoints --epochs 2
    torchrun --nproc_per_node 4 examples/train_lightning_fsdp2.py --directory checkpoints --epochs 4   # goes on
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

from nxd_ckpt.integrations.lightning import CheckpointIO
from nxd_ckpt.integrations.lightning_sharded import ModelParallelStrategy


class Regression(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch + 1} loss {self.trainer.callback_metrics['loss']:.4f}", flush=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True
    )
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[CheckpointIO(async_save=True)],
        callbacks=[ModelCheckpoint(args.directory, save_top_k=2, monitor="loss", save_last=True)],
    )
    trainer.fit(Regression(), data, ckpt_path="last")


if __name__ == "__main__":
    main()
