"""Models on a device that torch knows by its registration alone, as ``neuron`` is: staged with events, loaded back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from nxd_ckpt import Checkpointer
from tests.device import neuron_device
from tests.mesh import jobs
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.skipif(
    not neuron_device.can_be_built(),
    reason="NO DEVICE BUT THE CPU IS TESTED: g++, which builds one that stands for neuron, is not installed",
)

MIB = 2**20


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks that have the device. They are of no use to other tests: torch keeps what was registered."""
    assert request.config.cache is not None
    library = neuron_device.built(request.config.cache.mkdir("neuron_device"))
    with RankPool(nproc=2) as pool:
        pool.run(register, library)
        yield pool


def register(rank: int, library: Path) -> None:
    neuron_device.register(library)


def trained(device: str, seed: int, steps: int) -> tuple[jobs.Net, torch.optim.AdamW]:
    """A model of FSDP2. Its gradients are made up: no process group takes tensors of the device."""
    model = jobs.net(seed=seed).to(device)
    model.head.weight = model.embed.weight  # as on XLA, moving it made another parameter of each name
    jobs.sharded(model, init_device_mesh(device, (dist.get_world_size(),)))
    optimizer = jobs.adamw(model)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What this rank holds."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{entry}": value for entry, value in optimizer.state[parameter].items()}
    return {name: jobs.local(tensor).detach() for name, tensor in found.items()}


def on_host(live: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in live.items()}


def save_and_change(rank: int, directory: Path) -> tuple[dict[str, int], bool, dict[str, Tensor]]:
    """An async save, after which everything is changed at once: what it waited for, whether the stream was idle when
    it returned, and what was to be saved."""
    model, optimizer = trained("neuron", seed=0, steps=1)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("step_1", model, optimizer)
        train(model, optimizer, steps=1)
        live = tensors(model, optimizer)
        expected, before = on_host(live), neuron_device.counts()
        pending = checkpointer.save("step_2", model, optimizer, async_save=True)
        idle, after = torch.accelerator.current_stream().query(), neuron_device.counts()
        for tensor in live.values():
            tensor.add_(1)
        pending.wait()
    return {name: after[name] - before[name] for name in after}, idle, expected


def load(rank: int, directory: Path, device: str, fresh: bool) -> tuple[set[str], dict[str, Tensor]]:
    """Into a job that has state of its optimizer, or none yet: where parameters and moments are, and their values."""
    model, optimizer = trained(device, seed=1, steps=0 if fresh else 3)
    with Checkpointer(directory) as checkpointer:
        checkpointer.load("step_2", model, optimizer)
    live = tensors(model, optimizer)
    devices = {tensor.device.type for name, tensor in live.items() if not name.endswith("/step")}
    return devices, on_host(live)


def test_fsdp2_on_a_device_is_saved_as_it_was_and_loads_on_any(ranks: RankPool, tmp_path: Path) -> None:
    """All copies are under way at once, one event is waited for, and what changes after the save is in no file."""
    outcomes = ranks.run(save_and_change, tmp_path)
    expected = [values for *_, values in outcomes]
    for waits, idle, values in outcomes:
        copies = waits.pop("copies that did not block")
        # At most: replicated tensors are written by one of the ranks, and torch keeps counts of steps on the host.
        assert 0 < copies <= sum(not name.endswith("/step") for name in values)
        assert {"events": 1, "streams": 0, "devices": 0} == waits
        assert idle
    for device, fresh in (("neuron", True), ("neuron", False), ("cpu", True)):
        for (devices, found), values in zip(ranks.run(load, tmp_path, device, fresh), expected, strict=True):
            assert {device} == devices
            assert values.keys() == found.keys()
            assert [] == [name for name in values if not torch.equal(values[name], found[name])]


def save_and_load_dict(rank: int, directory: Path, has_events: bool) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Tensors of all kinds, of which two are larger than the staging memory: what they were, what comes back of them,
    and how many copies did not block."""
    base = torch.arange(3 * MIB, dtype=torch.float32).reshape(1024, -1)
    state = {
        "large": base.to("neuron"),
        "transposed": base.to("neuron").t(),
        "every second": torch.arange(10).to("neuron")[::2],
        "bfloat16": torch.randn(5).bfloat16().to("neuron"),
        "scalar": torch.tensor(True).to("neuron"),
        "empty": torch.empty(0, 3).to("neuron"),
        "on the host": torch.ones(3),
    }
    torch.ops.test_device.set_has_events(has_events)
    before = neuron_device.counts()["copies that did not block"]
    try:
        with Checkpointer(directory, memory_cap=5 * MIB) as checkpointer:
            checkpointer.save("step_1", state)
            found: dict[str, Any] = {}
            checkpointer.load("step_1", found)
    finally:
        torch.ops.test_device.set_has_events(True)
    return on_host(state), found, neuron_device.counts()["copies that did not block"] - before


@pytest.mark.parametrize("has_events", [True, False])
def test_any_tensor_of_a_device_is_saved(ranks: RankPool, tmp_path: Path, has_events: bool) -> None:
    """Views, and tensors that are staged part by part. From a device without events each copy is waited for."""
    outcomes = ranks.run(save_and_load_dict, tmp_path, has_events)
    for expected, found, _ in outcomes:
        assert list(expected) == list(found)
        assert [] == [name for name in expected if not torch.equal(expected[name], found[name])]
    assert has_events == any(copies > 0 for *_, copies in outcomes)
