"""Runs of the small Lightning module under FSDP2, on each rank of a process group."""

import logging
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from examples.train_lightning_fsdp2 import main
from nxd_ckpt.integrations.lightning import CheckpointIO, ExactResume
from nxd_ckpt.integrations.lightning_sharded import ModelParallelStrategy
from nxd_ckpt.live.dtensor import local_of
from tests.integrations.lightning_run import Module, ResumableLoader, every_epoch, fit
from tests.support.refusals import refusal, refusals

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


def run(directory: Any, strategy: Any = ModelParallelStrategy, kind: Any = Sharded, **options: Any) -> Module:
    """On all ranks: a run of three epochs that keeps one checkpoint of them, and the last."""
    ranks = dist.get_world_size()
    made = strategy(data_parallel_size=ranks, tensor_parallel_size=1)
    return fit(every_epoch(directory, save_top_k=1), devices=ranks, strategy=made, kind=kind, **options)


def held(module: Module) -> list[list[float]]:
    """What this rank holds of the parameters."""
    return [local_of(parameter.detach()).flatten().tolist() for parameter in module.parameters()]


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


def in_the_middle(rank: int, directory: Path) -> str:
    """What is said to a run that goes on in the middle of an epoch."""
    ranks, said = dist.get_world_size(), list[str]()
    for path in (None, directory / "epoch=0-step=1.ckpt"):
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        with mock.patch.object(logging.getLogger("nxd_ckpt"), "warning", lambda text, *of: said.append(text)):
            checkpoints = every_epoch(directory, every_n_train_steps=1)
            loader = ResumableLoader()
            fit(checkpoints, epochs=1, ckpt_path=path, loader=loader, kind=Sharded, strategy=strategy, devices=ranks)
    return " ".join(said)


class AsTheTuner(pl.Callback):  # type: ignore[misc]
    """In the second epoch it saves under a hidden name, changes the model, and restores it."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch != 1:
            return
        path = trainer.strategy.broadcast(f"{trainer.checkpoint_callback.dirpath}/.lr_find_1.ckpt")
        trainer.save_checkpoint(path)
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.zero_()
        trainer.strategy.load_checkpoint(path)
        trainer.strategy.barrier()
        trainer.strategy.remove_checkpoint(path)


def tuned(rank: int, directory: Path) -> tuple[list[float], list[list[float]]]:
    """Losses and weights of a run in which the model was saved, changed and restored."""
    module = run(directory, callbacks=[ExactResume(), AsTheTuner()])
    return module.losses, held(module)


def loaded(rank: int, directory: Path, ckpt_path: Path) -> list[list[float]]:
    """The weights that another run saved, as they are loaded here; then they are saved."""
    module = run(directory, ckpt_path=ckpt_path, epochs=2, seed=2, callbacks=[])
    module.trainer.save_checkpoint(directory / "again.ckpt")
    module.trainer.save_checkpoint(directory / "weights.ckpt", weights_only=True)
    return held(module)


def refused(rank: int, directory: Path) -> list[str]:
    """Errors of two optimizers, a changed state and a CheckpointIO of another's."""
    cases: list[dict[str, Any]] = [
        {"kind": TwoOptimizers},
        {"callbacks": [Averages()]},
        {"io": pl.plugins.io.TorchCheckpointIO()},
    ]
    return refusals(partial(run, directory, epochs=1, **case) for case in cases)


def refused_to_go_on(directory: Path) -> tuple[list[list[float]], list[tuple[str, list[list[float]]]]]:
    """What this rank holds of a new model; then what is said to a resume with another precision, and with another
    optimizer, and what the rank holds after that."""
    made: list[Module] = []

    class Noted(Sharded):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer)
            made.append(self)

    run(directory, epochs=1)
    before, found = held(run(directory / "new", epochs=0, seed=5)), []
    for changed in ({"precision": "bf16-mixed"}, {"optimizer": torch.optim.SGD}):
        told = refusal(partial(run, directory, ckpt_path="last", seed=5, kind=Noted, **changed))
        found.append((told, held(made[-1])))
    return before, found


def of_two_saves(rank: int, directory: Path) -> tuple[str, bool]:
    """What is said to copies of which one sees an older checkpoint as the last; whether its model is a new one's."""
    options: dict[str, Any] = {"strategy": "ddp", "devices": dist.get_world_size()}
    fit(every_epoch(directory), epochs=2, **options)
    before, made = Module(), list[Module]()

    class Noted(Module):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer)
            self.load_state_dict(before.state_dict())
            made.append(self)

    path = directory / f"epoch={1 - rank}-step={2 - rank}.ckpt"
    said = refusal(partial(fit, every_epoch(directory), ckpt_path=path, kind=Noted, **options))
    return said, all(map(torch.equal, before.parameters(), made[0].parameters()))


def example(rank: int, directory: Path) -> None:
    """examples/train_lightning_fsdp2.py, twice."""
    for epochs in ("1", "2"):
        main(["--directory", str(directory), "--epochs", epochs])
