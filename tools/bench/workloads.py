"""The state that is saved and loaded: three workloads, and ones of very many tiny tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

GIB = 2**30
KIB = 2**10


@dataclass
class State:
    """Live state in the two forms that contestants take.

    Attributes:
        tensors: every tensor of it by name, live: what a contestant without a notion of modules saves and loads.
        model, optimizer: the same as a module and its optimizer; or the tensors as a dict, and None.
        device: where the tensors are (an optimizer's step counts are on the CPU all the same).
    """

    tensors: dict[str, torch.Tensor]
    model: Any
    optimizer: torch.optim.Optimizer | None
    device: torch.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def local(self) -> dict[str, torch.Tensor]:
        """The tensors as they lie in this rank's memory: of a DTensor its shard."""
        return {name: _local(tensor) for name, tensor in self.tensors.items()}

    def host(self) -> dict[str, torch.Tensor]:
        """The tensors on the host: themselves, or copies by one grouped transfer."""
        if self.device.type == "cpu":
            return self.tensors
        on_device = {name: tensor for name, tensor in self.tensors.items() if tensor.device.type == "xla"}
        return {**self.tensors, **dict(zip(on_device, fetch(on_device.values()), strict=True))}

    @torch.no_grad()
    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the live tensors."""
        for name, live in self.tensors.items():
            live.copy_(values[name])

    def settle(self) -> None:
        """Return once the device has done all that it was told."""
        if self.device.type == "xla":
            import torch_xla

            torch_xla.sync(wait=True)

    @torch.no_grad()
    def forget(self) -> None:
        """Zero the live tensors, so that only a load can bring them back."""
        for live in self.local.values():
            if live.device.type == "cpu":
                live.zero_()
            else:  # an upload; `zero_` would be a graph
                live.copy_(torch.zeros(live.shape, dtype=live.dtype))

    def fingerprint(self) -> int:
        """A number that other values have not, but for ones that are the same in another order within a tensor."""
        return hash(tuple(_sum(_local(tensor)) for tensor in self.host().values()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum(tensor: torch.Tensor) -> int:
    """Of the bits, as integers: whole 64-bit ones, where they are, take a tenth of the time."""
    kind = torch.int64 if tensor.nbytes % 8 == 0 and tensor.nbytes else torch.int32
    return int(tensor.detach().contiguous().view(-1).view(kind).sum())


def fetch(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """XLA tensors on the host, by torch-xla's grouped transfer."""
    import torch_xla

    fetched: list[torch.Tensor] = torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in tensors])
    return fetched


class Block(nn.Module):
    """One layer of a GPT; only its parameters matter here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Gpt(nn.Module):
    """A GPT's parameters."""

    def __init__(self, width: int, layers: int, vocabulary: int, positions: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)


def build(name: str, device: torch.device, scale: float = 1.0, mesh: DeviceMesh | None = None) -> State:
    """The workload ``name`` at about ``scale`` of its bytes; with ``mesh``, sharded over it as FSDP2 does."""
    torch.manual_seed(0)
    state = WORKLOADS[name](device, scale)
    return state if mesh is None else _sharded(state, mesh)


def _sharded(state: State, mesh: DeviceMesh) -> State:
    if state.optimizer is None:
        tensors: dict[str, torch.Tensor] = {
            name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in state.tensors.items()
        }
        return State(tensors, tensors, None, state.device)
    for block in state.model.blocks:
        fully_shard(block, mesh=mesh)
    return _trained(fully_shard(state.model, mesh=mesh), state.device)


def _flat(count: int, nbytes: int, device: torch.device) -> State:
    """``count`` fp32 tensors of ``nbytes`` each."""
    tensors = {f"layer_{i}.weight": torch.rand(max(nbytes // 4, 1)).to(device) for i in range(count)}
    return State(tensors, tensors, None, device)


def _few(scale: float, device: torch.device) -> State:
    """24 tensors of 43 MiB; fewer, not smaller, at a smaller scale: allocators treat large ones differently."""
    count = max(round(24 * scale), 2)
    return _flat(count, round(GIB * scale / count), device)


def _gpt(scale: float) -> Gpt:
    """170 million parameters; fewer layers and tokens at a smaller scale, and only for tests also narrower."""
    width = 768 if scale > 1 / 26 else 32
    return Gpt(width, layers=max(round(13 * scale), 1), vocabulary=max(round(50304 * scale), 8))


def _trained(model: nn.Module, device: torch.device) -> State:
    """A module and its AdamW after one step, without gradients."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {
        index: {"step": torch.tensor(1.0), "exp_avg": _like(each), "exp_avg_sq": _like(each)}
        for index, each in enumerate(model.parameters())
    }
    # As a resume does it, not by a step: on a device that would compile one for nothing.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    tensors = {f"model.{name}": each.detach() for name, each in model.named_parameters()}
    for name, each in model.named_parameters():
        tensors |= {f"optim.{name}.{key}": value for key, value in optimizer.state[each].items()}
    return State(tensors, model, optimizer, device)


def _like(parameter: nn.Parameter) -> torch.Tensor:
    """A moment of ``parameter``, sharded as that is."""
    moment = torch.rand(parameter.shape)
    if isinstance(parameter, DTensor):
        return distribute_tensor(moment, parameter.device_mesh, parameter.placements)
    return moment


def _tiny_module(device: torch.device, count: int) -> State:
    """A module of many parameters of 8 numbers; with AdamW's moments and step counts, ``count`` tensors."""
    return _trained(nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(max(count // 4, 1))), device)


def _tiny(count: int) -> dict[str, Callable[[torch.device, float], State]]:
    return {
        f"{count // 1000}k tiny": lambda device, scale: _flat(max(round(count * scale), 1), 32, device),
        f"{count // 1000}k tiny, module": lambda device, scale: _tiny_module(device, round(count * scale)),
    }


WORKLOADS: dict[str, Callable[[torch.device, float], State]] = {
    "W1": lambda device, scale: _few(scale, device),
    "W2": lambda device, scale: _flat(max(round(2000 * scale), 2), 512 * KIB, device),
    "W3": lambda device, scale: _trained(_gpt(scale), device),
    **_tiny(25_000),
    **_tiny(50_000),
    **_tiny(100_000),
}
