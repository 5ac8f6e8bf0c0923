"""Stand-ins on plain torch for NxD's LoRA: ``LoraConfig``, ``LoraModel`` and the wrappers around it.

As in neuronx-distributed 0.18: wrapped layers are called ``base_layer``, parameters are named without the wrapper's own
"module.", ``state_dict()`` takes no heed of its arguments, and ``load_state_dict()`` takes the base's names. Adapters
are made after the base was moved to its device, and are moved by themselves, so no parameter of theirs has attributes
that say how it is cut; those of the base have.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from tests.lora.layers import ColumnParallelLinear, GQAQKVColumnParallelLinear, RowParallelLinear

_FIELDS = (
    *("bias", "init_lora_weights", "lora_alpha", "lora_dropout", "lora_rank", "use_rslora", "target_modules"),
    *("modules_to_save", "save_lora_base", "merge_lora", "save_lora_config_adapter"),
)


@dataclass
class LoraConfig:
    """The options that matter to a checkpoint."""

    lora_rank: int = 2
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    bias: str = "none"
    use_rslora: bool = False
    init_lora_weights: str = "default"
    target_modules: list[str] | None = None
    modules_to_save: list[str] | None = None
    merge_lora: bool = False
    save_lora_base: bool = False
    save_lora_config_adapter: bool = False
    merge_sharded_lora: bool = True
    lora_save_dir: str = "lora_adapter"

    def selected_fields_to_save(self) -> dict[str, Any]:
        return {**{key: value for key, value in asdict(self).items() if key in _FIELDS}, "r": self.lora_rank}


class _Cut(nn.Module):
    """A layer without bias of which this rank has a part."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight)


class _CutQKV(nn.Module):
    """Three weights, cut by rows."""

    def __init__(self, base: GQAQKVColumnParallelLinear, rank: int) -> None:
        super().__init__()
        for name in ("weight_q", "weight_k", "weight_v"):
            self.register_parameter(name, nn.Parameter(torch.zeros(len(getattr(base, name)), rank)))


class LoraLayer(nn.Module):
    """What stands in the place of a target layer."""

    def __init__(self, base: nn.Module, config: LoraConfig) -> None:
        super().__init__()
        self.base_layer, self.merged, rank = base, False, config.lora_rank
        self.scaling = config.lora_alpha / (math.sqrt(rank) if config.use_rslora else rank)
        self.lora_dropout = nn.Identity()
        if isinstance(base, GQAQKVColumnParallelLinear):
            self.lora_A: nn.Module = nn.Linear(base.weight_q.shape[1], rank, bias=False)
            self.lora_B: nn.Module = _CutQKV(base, rank)
            return
        assert isinstance(base.weight, torch.Tensor)
        rows, columns = base.weight.shape
        if isinstance(base, RowParallelLinear):
            self.lora_A, self.lora_B = _Cut(rank, columns), nn.Linear(rank, rows, bias=False)
        elif isinstance(base, ColumnParallelLinear):
            self.lora_A, self.lora_B = nn.Linear(columns, rank, bias=False), _Cut(rows, rank)
        else:
            self.lora_A, self.lora_B = nn.Linear(columns, rank, bias=False), nn.Linear(rank, rows, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(hidden)
        return out if self.merged else out + self.lora_B(self.lora_A(hidden)) * self.scaling

    def add(self, sign: int) -> None:
        weight, b, a = (layer.get_parameter("weight").data for layer in (self.base_layer, self.lora_B, self.lora_A))
        weight += sign * self.scaling * (b @ a)
        self.merged = sign > 0


class LoraModel(nn.Module):
    """A base model with adapters."""

    def __init__(self, module: nn.Module, config: LoraConfig) -> None:
        super().__init__()
        self.module, self.lora_config, self.is_lora_merged = module, config, False
        targets = config.target_modules or []
        for name in [name for name, _ in module.named_modules()]:
            if any(name == target or name.endswith(f".{target}") for target in targets):
                parent, _, last = name.rpartition(".")
                layer = LoraLayer(module.get_submodule(name), config)
                setattr(module.get_submodule(parent), last, layer)
        for name, parameter in module.named_parameters():
            trained = "lora_" in name or any(key in name for key in config.modules_to_save or ())
            parameter.requires_grad = trained or (config.bias == "all" and "bias" in name)

    def forward(self, *args: Any, **options: Any) -> Any:
        self.unmerge_lora()
        return self.module(*args, **options)

    def get_base_model(self) -> nn.Module:
        return self.module

    def merge_lora(self) -> None:
        if not self.is_lora_merged:
            self._add(1)

    def unmerge_lora(self) -> None:
        if self.is_lora_merged:
            self._add(-1)

    def _add(self, sign: int) -> None:
        for layer in self.module.modules():
            if isinstance(layer, LoraLayer):
                layer.add(sign)
        self.is_lora_merged = sign > 0

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.module.named_parameters(*args, **options)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("gathers adapters on the device, and writes adapter_config.json")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = False, assign: bool = False) -> Any:
        raise AssertionError("a load writes to the parameters themselves")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class NxDModel(nn.Module):
    """What NxD's trainer returns for a model: the model behind an attribute."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.nxd_config = module, {"pipeline_parallel_size": 1}

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.module.named_parameters(*args, **options)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.state_dict(*args, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class LightningModule(nn.Module):
    """NxD's Lightning module: its ``state_dict()`` takes no arguments at all."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.nxd_config: dict[str, Any] = {}
        self.model = model

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters(*args, **options)

    def state_dict(self) -> Any:  # type: ignore[override]
        return self.model.state_dict()
