"""A small job of accelerate's, and what each rank of a group does with it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration

from nxd_ckpt.integrations.accelerate import Accelerator
from nxd_ckpt.live.dtensor import is_dtensor
from tests.support.refusals import refusal


class Background(Accelerator):
    """Saves in the background."""

    async_save = True
    checkpoint_options: ClassVar[dict[str, Any]] = {"durable": False}


class AnyWorldSize(Background):
    """Allows another world size."""

    any_world_size = True


class Normed(AnyWorldSize):
    """Trains a model with statistics of each rank's data."""


class Job:
    """A model under dropout, with what trains it. Each rank has dropout of its own."""

    def __init__(
        self, directory: Path | str, kind: Any = Background, optimizer: Any = torch.optim.AdamW, **options: Any
    ):
        torch.manual_seed(1)
        project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = kind(cpu=True, project_config=project, **options)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        if kind is Normed:  # whose statistics DDP gives to all ranks before each step
            model.append(torch.nn.BatchNorm1d(1))
        made = optimizer(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, made, schedule)
        torch.manual_seed(2 + self.accelerator.process_index)

    def run(self, steps: int) -> list[float]:
        """The losses; a checkpoint after each step."""
        losses = []
        for _ in range(steps):
            losses.append(self.step())
            self.accelerator.save_state()
        self.accelerator.end_training()
        return losses

    def step(self) -> float:
        """The loss of one step."""
        loss = self.model(torch.randn(2, 4)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss)

    def resume(self) -> int:
        """Load the latest checkpoint; how many steps it has."""
        self.accelerator.load_state()
        done = int(self.accelerator._latest().rpartition("_")[2]) + 1
        self.accelerator.project_configuration.iteration = done
        return done


def fsdp2(**options: Any) -> dict[str, Any]:
    """Keywords of an accelerator that shards its models."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **options)
    return {"fsdp_plugin": plugin}


@contextmanager
def fresh() -> Iterator[None]:
    """Within, accelerate begins anew, and takes CPU ranks for those of a device: it shards on devices alone."""
    AcceleratorState._reset_state(reset_partial_state=True)
    begin = AcceleratorState.__init__

    def on_a_device(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        if fsdp_plugin is not None:
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_NEURON
        begin(self, *args, fsdp_plugin=fsdp_plugin, **options)

    keep_group = mock.patch.object(PartialState, "destroy_process_group")  # end_training() would end the pool's
    own_environment = mock.patch.dict(os.environ)  # where accelerate notes what was asked for
    with keep_group, own_environment, mock.patch.object(AcceleratorState, "__init__", on_a_device):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def whole(rank: int, directory: Path, sharded: bool) -> list[float]:
    """The losses of a run of four steps that nothing interrupts."""
    with fresh():
        return Job(directory, **(fsdp2() if sharded else {})).run(4)


def resumed(rank: int, directory: Path, sharded: bool, own: bool = False) -> list[float]:
    """Those of its last two steps, in a run that was stopped before them; ``own``: and was saved by accelerate."""
    with fresh():
        Job(directory, accelerate.Accelerator if own else Background, **(fsdp2() if sharded else {})).run(2)
    with fresh():
        job = Job(directory, **(fsdp2() if sharded else {}))
        assert 2 == job.resume()
        return job.run(2)


def refused(rank: int, directory: Path) -> list[str]:
    """What is said to the first FSDP, and to a registered object that has FSDP2's shards."""
    said = []
    for sharded in (False, True):
        with fresh():
            job = Job(directory, **(fsdp2() if sharded else {}))
            if sharded:
                job.accelerator.register_for_checkpointing(job.model)
            else:
                job.accelerator.state.distributed_type = DistributedType.FSDP
                job.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
            said.append(refusal(job.accelerator.save_state))
    return said


def main_process_alone(rank: int, directory: Path) -> str:
    """What is said to the main process that saves alone. Then all ranks save."""
    said = ""
    with fresh():
        job = Job(directory)
        if job.accelerator.is_main_process:
            said = refusal(job.accelerator.save_state)
        job.accelerator.wait_for_everyone()
        job.accelerator.save_state()
        job.accelerator.end_training()
    return said


def whole_state(model: Any, optimizer: Any) -> list[list[float]]:
    """The parameters and what the optimizer has for each, on all ranks the same."""
    found = [tensor for each in model.parameters() for tensor in (each, *optimizer.state.get(each, {}).values())]
    return [(each.full_tensor() if is_dtensor(each) else each).flatten().tolist() for each in found]


def saved(rank: int, directory: Path, sharded: bool) -> list[list[float]]:
    """The whole state after two steps, which are saved."""
    with fresh():
        job = Job(directory, AnyWorldSize if sharded else Normed, **(fsdp2() if sharded else {}))
        job.run(2)
        return whole_state(job.model, job.optimizer)


def taken_over(rank: int, directory: Path, sharded: bool, allowed: bool) -> list[list[float]]:
    """The whole state that is loaded, by one that allows another world size or not. It then goes on for a step."""
    with fresh():
        job = Job(directory, AnyWorldSize if sharded else Normed, **(fsdp2() if sharded else {}))
        job.accelerator.any_world_size = allowed
        job.resume()
        loaded = whole_state(job.model, job.optimizer)
        job.run(1)
        assert loaded != whole_state(job.model, job.optimizer)
        return loaded
