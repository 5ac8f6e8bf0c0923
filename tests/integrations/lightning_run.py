"""A small Lightning module with dropout, its data, and runs of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl  # the smaller of Lightning's two packages
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from nxd_ckpt.integrations.lightning import CheckpointIO, ExactResume

BATCHES = 2


class Module(pl.LightningModule):  # type: ignore[misc]
    """Learns under dropout; remembers its losses."""

    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer"])
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer_class = optimizer
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_class(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class ResumableLoader:
    """Batches in an order of its own, from where it stopped."""

    def __init__(self) -> None:
        self._at = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._at %= BATCHES
        while self._at < BATCHES:
            self._at += 1
            yield torch.full((2, 4), float(self._at)).sin()

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def shuffled() -> Any:
    torch.manual_seed(7)
    rows: Any = torch.randn(BATCHES * 2, 4)
    return torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)


def every_epoch(directory: Any, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=str(directory), **{"save_top_k": -1, "save_last": True, **options})


def fit(
    checkpoints: ModelCheckpoint,
    *,
    epochs: int = 3,
    ckpt_path: Any = None,
    io: Any = None,
    seed: int = 1,
    loader: Any = None,
    callbacks: Any = None,
    optimizer: Any = torch.optim.AdamW,
    kind: type[Module] = Module,
    **options: Any,
) -> Module:
    """A run of a new trainer; by default of as many epochs, and resumed exactly."""
    data = shuffled() if loader is None else loader
    torch.manual_seed(seed)
    module = kind(optimizer)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[CheckpointIO(durable=False) if io is None else io],
        callbacks=[checkpoints, *([ExactResume()] if callbacks is None else callbacks)],
        default_root_dir=Path("/nonexistent"),
        **options,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


def weights(module: Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in module.parameters()]
