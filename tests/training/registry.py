"""Training objects that a resume must not change. A case is one line: what makes a model, an optimizer, a scheduler."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler as lr

from tests.training import imitations

Tensor = torch.Tensor
Model = nn.Module


class Mixed(Model):
    """Convolution, normalisation, a tied and a frozen weight, buffers of several kinds."""

    def __init__(self, place: Callable[[Tensor], Tensor] = Tensor.contiguous, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.kernel = nn.Parameter(place(torch.randn(6, 3, 3, 3, dtype=dtype)))
        self.head = nn.Parameter(place(torch.randn(6, 6, dtype=dtype)))
        self.tied = self.head
        self.frozen = nn.Parameter(place(torch.randn(5, 6, dtype=dtype)), requires_grad=False)
        self.scalar = nn.Parameter(torch.ones((), dtype=dtype))
        self.norm = nn.BatchNorm2d(6, dtype=dtype)
        self.scale: Tensor
        self.register_buffer("scale", place(torch.ones(4, 6, dtype=dtype)))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, batch: int = 4) -> Tensor:
        images = torch.randn(batch, 3, 6, 6, dtype=self.head.dtype)
        features = self.norm(nn.functional.conv2d(images, self.kernel)).mean((2, 3))
        out = features @ self.head.T @ self.tied * self.scale.clone()
        self.scale.mul_(0.99)
        return (out @ self.frozen.T * self.scalar).square().mean()


def _sliced(value: Tensor) -> Tensor:
    around = torch.zeros([size + 2 for size in value.shape], dtype=value.dtype)
    inner = around[tuple(slice(1, -1) for _ in value.shape)]
    inner.copy_(value)
    return inner


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "channels_last": lambda value: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value,
    "transposed": lambda value: value.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda value: value[:, :1].expand_as(value).clone(),
    "sliced": _sliced,
    "sliced, transposed": lambda value: _sliced(value.transpose(0, 1)).transpose(0, 1),
}

DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def _groups(model: Model) -> list[dict[str, Any]]:
    wide = [one for one in model.parameters() if one.dim() > 1]
    return [{"params": wide}, {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0}]


def _tensor_rate(params: Any) -> torch.optim.Optimizer:
    betas = (torch.tensor(0.9), torch.tensor(0.95))
    return torch.optim.AdamW(params, lr=torch.tensor(0.01), betas=betas, foreach=False)


def _unused_and_own(params: Any) -> torch.optim.Optimizer:
    groups = [{"params": list(params), "name": "all", "lr_scale": 0.5, "shape": torch.Size([2]), "tags": ("a", None)}]
    return torch.optim.AdamW(groups)


OWN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Lion": imitations.Lion,
    "Muon": imitations.Muon,
    "Shampoo": imitations.Shampoo,
    "SOAP": imitations.Soap,
    "GaLore": imitations.GaLore,
    "8 bits": imitations.EightBit,
    "factored": imitations.Factored,
    "schedule-free": imitations.ScheduleFree,
    "Lookahead": lambda params: imitations.Lookahead(torch.optim.AdamW(params)),
    "chained": imitations.Chained,
    "chained, in a list": imitations.ChainedInList,
    "no optimizer of torch's": imitations.NoOptimizer,  # type: ignore[dict-item]
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
    "tensors as options": _tensor_rate,
    "own options": _unused_and_own,
    "maximize": partial(torch.optim.AdamW, maximize=True, lr=1e-4),
    "decoupled": partial(torch.optim.NAdam, decoupled_weight_decay=True),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer: lr.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: lr.StepLR(optimizer, 2, 0.8),
    "MultiStepLR": lambda optimizer: lr.MultiStepLR(optimizer, [1, 2, 4], 0.5),
    "ConstantLR": lambda optimizer: lr.ConstantLR(optimizer, total_iters=4),
    "LinearLR": lambda optimizer: lr.LinearLR(optimizer, total_iters=4),
    "ExponentialLR": lambda optimizer: lr.ExponentialLR(optimizer, 0.8),
    "PolynomialLR": lambda optimizer: lr.PolynomialLR(optimizer, 9),
    "CosineAnnealingLR": lambda optimizer: lr.CosineAnnealingLR(optimizer, 9),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 2),
    "OneCycleLR": lambda optimizer: lr.OneCycleLR(optimizer, max_lr=0.3, total_steps=9),
    "CyclicLR": lambda optimizer: lr.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "ReduceLROnPlateau": lambda optimizer: lr.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    "SequentialLR": lambda optimizer: lr.SequentialLR(
        optimizer, [lr.LinearLR(optimizer, total_iters=3), lr.CosineAnnealingLR(optimizer, 9)], [3]
    ),
    "ChainedScheduler": lambda optimizer: lr.ChainedScheduler(
        [lr.ConstantLR(optimizer, total_iters=3), lr.ExponentialLR(optimizer, 0.8)]
    ),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=4),
}


class Inner(Model):
    """Another model that makes a loss of a batch of 4 rows of 6."""

    def __init__(self, *layers: Model) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self) -> Tensor:
        out = self.layers(torch.randn(4, 6))
        loss: Tensor = (out[0] if isinstance(out, tuple) else out).square().mean()
        return loss


class Words(Model):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=True)

    def forward(self) -> Tensor:
        loss: Tensor = self.words(torch.randint(9, (5,))).square().mean()
        return loss


class Complex(Model):
    """Complex numbers, beside a parameter without elements and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self) -> Tensor:
        loss: Tensor = (torch.randn(4, 6).to(torch.complex64) @ self.turn).abs().square().mean() + self.nothing.sum()
        return loss


class Lazy(Inner):
    """Gets its shapes from a first batch."""

    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        self()


class ExponentialAverage(Model):
    """A model beside the average of its weights, as one model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner(nn.Linear(6, 6))
        self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)

    def forward(self) -> Tensor:
        self.average.update_parameters(self.model)
        loss: Tensor = self.model()
        return loss


class Counting(Model):
    """Extra state with a tuple, of which the loss depends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "sizes": (1, torch.Size([2]))}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def forward(self) -> Tensor:
        self.seen += 1
        return self.weight.square().sum() * self.seen


def _old_weight_norm() -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Inner(nn.utils.weight_norm(nn.Linear(6, 6)))


def _scripted() -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Inner(torch.jit.script(nn.Linear(6, 6)))


MODELS: dict[str, Callable[[], Model]] = {
    "sparse gradients": Words,
    "complex": Complex,
    "lazy": Lazy,
    "average": ExponentialAverage,
    "extra state": Counting,
    "LSTM": lambda: Inner(nn.LSTM(6, 3, 2)),
    "attention": lambda: Inner(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5)),
    "dropout": lambda: Inner(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)),
    "spectral norm": lambda: Inner(parametrizations.spectral_norm(nn.Linear(6, 6))),
    "weight norm": lambda: Inner(parametrizations.weight_norm(nn.Linear(6, 6))),
    "old weight norm": _old_weight_norm,
    "orthogonal": lambda: Inner(parametrizations.orthogonal(nn.Linear(6, 6))),
    "scripted": _scripted,
    "compiled": lambda: torch.compile(Inner(nn.Linear(6, 6)), backend="eager"),  # type: ignore[dict-item, return-value]
    "BatchNorm without running means": lambda: Inner(nn.BatchNorm1d(6, track_running_stats=False)),
    "observer": lambda: Inner(nn.Linear(6, 6), torch.ao.quantization.HistogramObserver()),
    "fake quantisation": lambda: Inner(nn.Linear(6, 6), torch.ao.quantization.FakeQuantize()),
}


@dataclass(frozen=True)
class Case:
    """What makes each of the objects; the optimizer takes parameters, the scheduler the optimizer."""

    model: Callable[[], Model] = Mixed
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    scheduler: Callable[[Any], Any] | None = None
    groups: Callable[[Model], Any] = Model.parameters
    soak: bool = False
    """Left to ``make soak``."""

    def make(self) -> tuple[Any, ...]:
        model = self.model()
        optimizer = self.optimizer(self.groups(model))
        return (model, optimizer) if self.scheduler is None else (model, optimizer, self.scheduler(optimizer))


def step(model: Model, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        result: Tensor = model()
        result.backward()
        return result

    loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
    if scheduler is not None:
        scheduler.step(*[1.0] if isinstance(scheduler, lr.ReduceLROnPlateau) else [])
    return loss.item()


def _ways(name: str) -> list[dict[str, bool]]:
    return [{"foreach": False}, {"foreach": True}, *([{"fused": True}] if name in FUSED else [])]


def _name(*parts: Any) -> str:
    return ", ".join(next(iter(part)) if isinstance(part, dict) and any(part.values()) else str(part) for part in parts)


CASES: dict[str, Case] = {
    **{
        _name(name, *[key for key, on in way.items() if on], layout): Case(
            partial(Mixed, place), partial(optimizer, **way), soak=name not in ("AdamW", "SGD") or "fused" not in way
        )
        for name, optimizer in OPTIMIZERS.items()
        for way in _ways(name)
        for layout, place in LAYOUTS.items()
    },
    **{name: Case(optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()},
    **{name: Case(optimizer=optimizer) for name, optimizer in OWN.items()},
    **{name: Case(scheduler=scheduler) for name, scheduler in SCHEDULERS.items()},
    **{name: Case(partial(Mixed, dtype=dtype)) for name, dtype in DTYPES.items()},
    **{name: Case(model) for name, model in MODELS.items() if name != "sparse gradients"},
    "sparse gradients": Case(Words, torch.optim.SparseAdam),
    "two groups": Case(groups=_groups, scheduler=SCHEDULERS["OneCycleLR"]),
    "float32 clones": Case(partial(Mixed, dtype=torch.bfloat16), imitations.WithMasters),
    "named parameters": Case(groups=Model.named_parameters),
}
