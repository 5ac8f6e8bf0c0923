"""Runs of the small Lightning module under FSDP2, on each rank of a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from examples.train_lightning_fsdp2 import main
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.integrations.lightning import CheckpointIO, ExactResume
from nxd_ckpt.integrations.lightning_sharded import ModelParallelStrategy
from tests.integrations.killed import killed_at
from tests.integrations.lightning_run import Module, every_epoch, fit

RANKS = 2

LAUNCHED = {"TORCHELASTIC_RUN_ID": "1"}
"""What tells Lightning that torchrun started the ranks."""


class Sharded(Module):
    """Its layers' parameters are cut over all ranks, of which one has a single row."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class TwoOptimizers(Sharded):
    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return [self.optimizer_class(layer.parameters()) for layer in (self.net[0], self.net[2])]


class Averages(pl.Callback):  # type: ignore[misc]
    """Puts other weights into the checkpoint."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["net.0.bias"] = torch.zeros(8)


def run(directory: Any, *, strategy: Any = ModelParallelStrategy, kind: Any = Sharded, **options: Any) -> Module:
    """On all ranks: a run of three epochs that keeps one checkpoint of them, and the last."""
    ranks = dist.get_world_size()
    made = strategy(data_parallel_size=ranks, tensor_parallel_size=1)
    return fit(every_epoch(directory, save_top_k=1), kind=kind, strategy=made, devices=ranks, **options)


def held(module: Module) -> list[list[float]]:
    """What this rank holds of the parameters."""
    return [parameter.detach().to_local().flatten().tolist() for parameter in module.parameters()]


def whole(rank: int, directory: Path) -> tuple[list[float], list[list[float]]]:
    """Losses and weights of a run that nothing interrupts."""
    module = run(directory)
    return module.losses, held(module)


def resumed(rank: int, directory: Path) -> tuple[list[float], list[list[float]]]:
    """The same, of a run that went on after two epochs, which were saved in the background."""
    run(directory, epochs=2, io=CheckpointIO(async_save=True, durable=False))
    module = run(directory, ckpt_path="last", seed=2)
    return module.losses, held(module)


def continued(rank: int, directory: Path) -> tuple[list[float], list[list[float]]]:
    """The same, where the two epochs were saved by Lightning itself."""
    run(directory, epochs=2, strategy=pl.strategies.ModelParallelStrategy)
    module = run(directory, ckpt_path="last", seed=2)
    return module.losses, held(module)


def from_one_process(rank: int, directory: Path, ckpt_path: Path) -> list[list[float]]:
    """The weights that a run on one process saved, as they are loaded here; then they are saved."""
    module = run(directory, ckpt_path=ckpt_path, epochs=2, seed=2, callbacks=[])
    module.trainer.save_checkpoint(directory / "again.ckpt")
    module.trainer.save_checkpoint(directory / "weights.ckpt", weights_only=True)
    return held(module)


def refused(rank: int, directory: Path) -> list[str]:
    """What is said to two optimizers, a changed state, and a CheckpointIO of another's."""
    found = []
    cases: list[dict[str, Any]] = [
        {"kind": TwoOptimizers},
        {"callbacks": [Averages()]},
        {"io": pl.plugins.io.TorchCheckpointIO()},
    ]
    for case in cases:
        try:
            run(directory, epochs=1, **case)
        except CheckpointError as error:
            found.append(str(error))
    return found


def example(rank: int, directory: Path) -> None:
    """examples/train_lightning_fsdp2.py, twice."""
    for epochs in ("1", "2"):
        main(["--directory", str(directory), "--epochs", epochs])


def until_killed(rank: int, directory: Path, kill_at: int) -> None:
    """Two epochs, in which the first rank is killed before the change of that number."""
    if rank == 0:
        killed_at(kill_at)
    run(directory, epochs=2, io=CheckpointIO(async_save=True, durable=False))


def goes_on(rank: int, directory: Path) -> tuple[list[float], list[list[float]]]:
    """The rest of a run that was killed, from what is there."""
    module = run(directory, ckpt_path="last", callbacks=[ExactResume()])
    return module.losses, held(module)
