"""A resumed run is the uninterrupted one, whatever the order of elements in memory that its parameters have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt

pytestmark = [pytest.mark.plain, pytest.mark.once]

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}


def _sliced(value: torch.Tensor) -> torch.Tensor:
    around = torch.zeros([size + 2 for size in value.shape])
    inner = around[tuple(slice(1, -1) for _ in value.shape)]
    inner.copy_(value)
    return inner


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "channels_last": lambda value: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value,
    "transposed": lambda value: value.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda value: value[:, :1].expand_as(value).clone(),
    "sliced": _sliced,
    "sliced and transposed": lambda value: _sliced(value.transpose(0, 1)).transpose(0, 1),
}

CASES = [
    (name, way, layout)
    for name in OPTIMIZERS
    for way in (None, "foreach", "fused")
    if way != "fused" or name in FUSED
    for layout in LAYOUTS
]
QUICK = {(name, "fused", layout) for name in ("AdamW", "SGD") for layout in LAYOUTS} | set(CASES[::29])


class Net(torch.nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        placed = LAYOUTS[layout]
        self.kernel = torch.nn.Parameter(placed(torch.randn(5, 3, 3, 3)))
        self.head = torch.nn.Parameter(placed(torch.randn(7, 5)))
        self.scale: torch.Tensor
        self.register_buffer("scale", placed(torch.ones(4, 7)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(images, self.kernel).mean((2, 3)) @ self.head.T * self.scale


def _made(case: tuple[str, str | None, str]) -> tuple[Net, torch.optim.Optimizer]:
    name, way, layout = case
    kind, options = OPTIMIZERS[name]
    model = Net(layout)
    return model, kind(model.parameters(), **options, **({"foreach": False} if way is None else {way: True}))


def _train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6)).square().mean().backward()
        optimizer.step()


def _strides(model: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    entries = [optimizer.state[parameter].items() for parameter in model.parameters()]
    held = [(key, value.stride()) for own in entries for key, value in own if isinstance(value, torch.Tensor)]
    return [*held, *((name, value.stride()) for name, value in model.state_dict().items())]


def _named(case: tuple[str, str | None, str]) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.soak, id=_named(case)) for case in CASES]
)
def test_a_resumed_run_is_bit_equal(tmp_path: Path, case: tuple[str, str | None, str]) -> None:
    """Fresh objects take state of the strides that the saved one had, and go on for five steps as it does."""
    model, optimizer = _made(case)
    _train(model, optimizer, range(3))
    nxd_ckpt.save_checkpoint(tmp_path, "step_3", model, optimizer)
    resumed, resumed_optimizer = _made(case)
    nxd_ckpt.load_checkpoint(tmp_path, "step_3", resumed, resumed_optimizer)
    assert _strides(model, optimizer) == _strides(resumed, resumed_optimizer)
    for pair in ((model, optimizer), (resumed, resumed_optimizer)):
        _train(*pair, range(3, 8))
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_another_memory_format_is_that_of_the_live_parameter(tmp_path: Path) -> None:
    """Who changed the memory format between two runs gets moments in the order of the live parameters."""
    case = ("AdamW", "fused", "contiguous")
    model, optimizer = _made(case)
    _train(model, optimizer, range(2))
    nxd_ckpt.save_checkpoint(tmp_path, "step_2", model, optimizer)
    other, other_optimizer = _made(("AdamW", "fused", "channels_last"))
    nxd_ckpt.load_checkpoint(tmp_path, "step_2", other, other_optimizer)
    moment = other_optimizer.state[other.kernel]["exp_avg"]
    assert other.kernel.stride() == moment.stride()
    assert torch.equal(optimizer.state[model.kernel]["exp_avg"], moment)
