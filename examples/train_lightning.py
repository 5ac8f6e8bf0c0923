"""Train a small Lightning module, checkpointed by nxd_ckpt, and go on from the last checkpoint.

::

    python examples/train_lightning.py --directory checkpoints --epochs 2
    python examples/train_lightning.py --directory checkpoints --epochs 4      # goes on from epoch 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from nxd_ckpt.integrations.lightning import CheckpointIO, ExactResume


class Regression(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch + 1} loss {self.trainer.callback_metrics['loss']:.4f}")

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
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[CheckpointIO(async_save=True)],
        callbacks=[ModelCheckpoint(args.directory, save_top_k=2, monitor="loss", save_last=True), ExactResume()],
    )
    trainer.fit(Regression(), data, ckpt_path="last")


if __name__ == "__main__":
    main()
