"""The training of a rank of the self-test: a small model, sharded in each way that is used on the device."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

_PATIENCE = timedelta(seconds=120)


class Unusable(Exception):
    """Nothing can be tested on this device, or with these ranks."""


class Failed(Exception):
    """A check that found something wrong; says what."""


class Left(Failed):
    """Another rank has ended the check, or is gone: its result says why."""


@dataclass
class Device:
    """The device of this rank, and its way to the others.

    ``communicates``: a process group takes its tensors. Where none does, gradients are made up.
    """

    name: str
    torch_device: torch.device
    communicates: bool
    check: str = ""
    meetings: int = 0

    @property
    def is_xla(self) -> bool:
        return self.name == "xla"

    def begin(self, check: str) -> None:
        """Begin a check: its meetings have names of their own."""
        self.check, self.meetings = check, 0

    def gathered(self, value: Any) -> list[Any]:
        """Return each rank's value, by rank. Raises Left if another rank has ended the check, or is gone."""
        self.meetings += 1
        self._tell(str(self.meetings), value)
        return self._hear(str(self.meetings))

    def gathered_at_end(self, value: Any) -> list[Any]:
        """Return each rank's value at the end of the check, however it ended."""
        self._tell("end", value)
        return self._hear("end")

    def leave(self) -> None:
        """Part from the others: rank 0, whose process holds the store in which they meet, goes last."""
        self.begin("farewell")
        self._tell("end", None)
        if dist.get_rank() == 0:
            self._hear("end")

    # Through the store: collectives of ranks that have left a check and of those that have not would be mixed up.
    def _key(self, meeting: str, rank: int) -> str:
        return f"selftest/{self.check}/{meeting}/{rank}"

    def _tell(self, meeting: str, value: Any) -> None:
        _store().set(self._key(meeting, dist.get_rank()), pickle.dumps(value))

    def _hear(self, meeting: str) -> list[Any]:
        store, values, deadline = _store(), [], time.monotonic() + _PATIENCE.total_seconds()
        for rank in range(dist.get_world_size()):
            key = self._key(meeting, rank)
            while not store.check([key]):
                ended = store.check([self._key("end", rank)]) and not store.check([key])
                if ended or time.monotonic() > deadline:
                    raise Left(f"rank {rank} {'ended it before' if ended else 'does not answer'}")
                time.sleep(0.01)
            values.append(pickle.loads(store.get(key)))
        return values

    def mesh(self, name: str | None = None) -> DeviceMesh:
        return init_device_mesh(torch.device(name or self.name).type, (dist.get_world_size(),))


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def join(name: str | None, emulated: bool) -> Device:
    """Find the device, and join the other ranks. Raises Unusable if there is no such device, or too few of them."""
    name = name or _default_device()
    if name == "xla":
        return _join_xla(emulated)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if name == "cpu" else _numbered(name, rank)
    backends = dict(getattr(dist.Backend, "default_device_backend_map", {}))
    backend = None if name == "cpu" else backends.get(name)
    dist.init_process_group("cpu:gloo" + (f",{name}:{backend}" if backend else ""), timeout=_PATIENCE)
    return Device(name, device, name == "cpu" or backend is not None)


def _default_device() -> str:
    if find_spec("torch_xla") is not None and find_spec("libneuronxla") is not None:
        return "xla"
    accelerator = getattr(torch, "accelerator", None)
    current = accelerator.current_accelerator() if accelerator is not None and accelerator.is_available() else None
    return "cpu" if current is None else str(current.type)


def _numbered(name: str, rank: int) -> torch.device:
    module = getattr(torch, name, None)
    if module is None or not hasattr(module, "device_count"):
        raise Unusable(f"device {name}: torch {torch.__version__} does not know it; is its package installed?")
    count = module.device_count() if module.is_available() else 0
    if count == 0:
        raise Unusable(f"device {name}: torch {torch.__version__} knows it and finds none on this host")
    if name == "cuda" and count < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        raise Unusable(f"device cuda: found {count}, each rank of this host needs one: pass --ranks {count}")
    device = torch.device(name, rank % count)
    if hasattr(module, "set_device"):
        module.set_device(device)
    return device


def _join_xla(emulated: bool) -> Device:
    os.environ.setdefault("PJRT_DEVICE", "CPU" if emulated else "NEURON")
    if emulated:
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        os.environ.setdefault("NXD_CKPT_EMULATION_PORT", str(int(os.environ["MASTER_PORT"]) + 2))
        from nxd_ckpt.emulation.install import install

        install()
    import torch_xla
    import torch_xla.distributed.xla_backend

    try:
        device = torch_xla.device()
    except RuntimeError as error:
        raise Unusable(f"device xla: torch_xla finds none: {error}") from error
    dist.init_process_group("xla", timeout=_PATIENCE)
    return Device("xla", device, True)


class Net(nn.Module):
    """Two layers, whose sizes 2, 4 and 8 ranks divide; 16 inputs, 16 outputs."""

    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.up, self.down = linear(16, 32), linear(32, 16)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(batch)))
        return out


class _GatheredLinear(nn.Linear):
    """A layer whose sharded parameters are gathered in its forward pass, as SimpleFSDP does."""

    def forward(self, batch: Tensor) -> Tensor:
        return nn.functional.linear(batch, _gathered(self.weight), _gathered(self.bias))


def _gathered(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    whole = parameter.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial("avg")])


def part_of(part: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the tensor of which each rank has a part, cut along its first dimension."""
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)


def _net(layout: str, device: Device, name: str) -> Net:
    model = Net(_GatheredLinear if layout == "simple_fsdp" else nn.Linear).to(name)
    if layout == "fsdp2":
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=device.mesh(name))
        fully_shard(model, mesh=device.mesh(name))
    elif layout == "tp":
        # All ranks have the same numbers: nothing is sent, which not every device can.
        silent: dict[str, Any] = {} if device.communicates else {"src_data_rank": None}
        parallelize_module(model, device.mesh(name), {"up": ColwiseParallel(), "down": RowwiseParallel()}, **silent)
    elif layout == "simple_fsdp":
        mesh = device.mesh(name)
        for layer in (model.up, model.down):
            for key, parameter in list(layer.named_parameters()):
                part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
                setattr(layer, key, nn.Parameter(part_of(part, mesh)))
    return model


def make(layout: str, device: Device, name: str | None = None) -> tuple[Any, Any]:
    """Return a model and its optimizer, on the device or on that called ``name``."""
    torch.manual_seed(0)
    model = _net(layout, device, name or str(device.torch_device))
    if not device.is_xla or name == "cpu":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    everyone = [list(range(dist.get_world_size()))]
    return model, ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        sharding_groups=everyone,
        pin_layout=False,
        save_master_weights=True,
        lr=0.01,
    )


def step(model: nn.Module, optimizer: Any, device: Device) -> float:
    """Make one step of training, and return its loss; 0 where gradients are made up."""
    optimizer.zero_grad()
    loss = torch.zeros(())
    if device.communicates:
        loss = model(torch.randn(8, 16).to(next(model.parameters()).device)).square().mean()
        loss.backward()
    else:
        factor = torch.rand(()).item()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, factor)
    optimizer.step()
    if device.is_xla:
        import torch_xla

        torch_xla.sync()
    return loss.item()
