"""TorchTitan's own modules and adapters, of the release that is imported; run as ``python -m`` with a directory.

For each family in it, ``FAMILY/step-0`` is loaded strictly into TorchTitan's module, which must have the same tensors,
and ``FAMILY/step-3``, if it is there, into its optimizer and scheduler too. What they then have goes to files beside.
"""

import json
import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

LAYERS, VOCAB, HIDDEN, EXPERTS = 2, 64, 32, 4


def without_data_and_metrics() -> None:
    """0.2.2 imports these with every model, which need none of them."""
    absent = {
        "datasets": ["Dataset", "load_dataset"],
        "datasets.distributed": ["split_dataset_by_node"],
        "tensorboard": [],
        "torch.utils.tensorboard": ["SummaryWriter"],
        "tokenizers": ["AddedToken", "Tokenizer"],
        "einops": ["rearrange", "repeat"],
        "torchtitan.models.moe.kernels": ["generate_permute_indices"],
    }
    for name, attributes in absent.items():
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for attribute in attributes:
            setattr(module, attribute, None)
        sys.modules.setdefault(name, module)


def built_by_0_2_2(family: str) -> tuple[Any, Any]:
    """The module of a family, without memory, and its adapter."""
    without_data_and_metrics()
    moe = import_module("torchtitan.models.moe")
    package = import_module(f"torchtitan.models.{ {'llama': 'llama3', 'qwen3_moe': 'qwen3'}.get(family, family) }")
    common = {"dim": HIDDEN, "n_layers": LAYERS, "vocab_size": VOCAB, "max_seq_len": 64}
    heads = {"n_heads": 4, "n_kv_heads": 2}
    experts = {"moe_inter_dim": 24, "moe_args": moe.MoEArgs(num_experts=EXPERTS, num_shared_experts=0, top_k=2)}
    if family == "llama":
        arguments = package.model.args.TransformerModelArgs(**common, **heads, multiple_of=32)
        kind, adapter = package.Transformer, package.Llama3StateDictAdapter
    elif family.startswith("qwen3"):
        own = {"moe_enabled": True, **experts} if family == "qwen3_moe" else {}
        arguments = package.model.args.Qwen3ModelArgs(**common, **heads, head_dim=16, hidden_dim=48, **own)
        kind, adapter = package.Qwen3Model, package.Qwen3StateDictAdapter
    elif family == "deepseek_v3":
        experts["moe_args"].num_shared_experts = 1
        arguments = package.DeepSeekV3ModelArgs(
            **common, **experts, n_heads=4, inter_dim=48, n_dense_layers=1, q_lora_rank=16, kv_lora_rank=8,
            qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        )
        arguments.moe_impl = "standard"
        kind, adapter = package.DeepSeekV3Model, package.DeepSeekV3StateDictAdapter
    else:
        experts["moe_args"].gate_bias = True
        arguments = package.GptOssModelArgs(**common, **experts, head_dim=64, n_heads=64, n_kv_heads=8)
        kind, adapter = package.GptOssModel, package.GptOssStateDictAdapter
    with torch.device("meta"):
        return kind(arguments), adapter(arguments, None)


def built_by_0_3(family: str) -> tuple[Any, Any]:
    """The module of a family, without memory, and its adapter."""
    package = import_module(f"torchtitan.models.{ {'llama': 'llama3', 'qwen3_moe': 'qwen3'}.get(family, family) }")
    common = import_module("torchtitan.models.common")
    rotary: dict[str, Any] = {"max_seq_len": 64, "theta": 10000.0}
    sizes: dict[str, Any] = {"n_layers": LAYERS, "dim": HIDDEN, "attn_backend": "varlen"}
    standard = {"moe_comm_backend": "standard"}
    grouped = {**sizes, "n_heads": 4, "n_kv_heads": 2}
    if family == "llama":
        layers = package._build_llama3_layers(
            **grouped, hidden_dim=96, rope=common.ComplexRoPE.Config(dim=8, **rotary)
        )
        kind, adapter = package.Llama3Model, package.Llama3StateDictAdapter
    elif family == "qwen3":
        rope = common.CosSinRoPE.Config(dim=16, **rotary)
        layers = package._build_qwen3_layers(**grouped, head_dim=16, hidden_dim=48, rope=rope)
        kind, adapter = package.Qwen3Model, package.Qwen3StateDictAdapter
    elif family == "qwen3_moe":
        rope = common.CosSinRoPE.Config(dim=16, **rotary)
        layers = package._build_qwen3_moe_layers(
            **grouped, **standard, head_dim=16, moe_hidden_dim=24, num_experts=EXPERTS, top_k=2, rope=rope
        )
        kind, adapter = package.Qwen3Model, package.Qwen3StateDictAdapter
    elif family == "deepseek_v3":
        layers = package._build_dsv3_layers(
            **sizes, **standard, n_dense_layers=1, n_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8,
            qk_rope_head_dim=4, v_head_dim=6, mscale=0.7, dense_hidden_dim=48, moe_hidden_dim=24, num_experts=EXPERTS,
            num_shared_experts=1, router_top_k=2, non_blocking_capacity_factor=None, router_score_func="sigmoid",
            rope=common.ComplexRoPE.Config(dim=4, **rotary),
        )
        kind, adapter = package.DeepSeekV3Model, package.DeepSeekV3StateDictAdapter
    else:
        layers = package._build_gptoss_layers(
            **sizes, **standard, hidden_dim=24, num_experts=EXPERTS, top_k=2, load_balance_coeff=1e-3,
            rope=common.CosSinRoPE.Config(dim=64, **rotary),
        )
        kind, adapter = package.GptOssModel, package.GptOssStateDictAdapter
    config = kind.Config(
        vocab_size=VOCAB,
        dim=HIDDEN,
        tok_embeddings=common.Embedding.Config(num_embeddings=VOCAB, embedding_dim=HIDDEN),
        norm=common.RMSNorm.Config(normalized_shape=HIDDEN),
        lm_head=common.Linear.Config(in_features=HIDDEN, out_features=VOCAB),
        layers=layers,
    )
    with torch.device("meta"):
        return config.build(), adapter(config, None)


class TrainState:
    """As much of TorchTitan's trainer as it saves."""

    def __init__(self) -> None:
        self.step = self.ntokens_seen = -1

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def containers(model: torch.nn.Module, is_0_3: bool) -> tuple[Any, Any]:
    """AdamW and a decay of its learning rate, in the containers of this release."""
    optimizer = import_module("torchtitan.components.optimizer")
    if is_0_3:
        groups = [optimizer.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})]
        config = optimizer.OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        optimizers, schedulers = config.build(model_parts=[model]), optimizer.LRSchedulersContainer
    else:
        optimizers = optimizer.OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.1, "foreach": False})
        schedulers = import_module("torchtitan.components.lr_scheduler").LRSchedulersContainer
    return optimizers, schedulers(optimizers, partial(decay, 0.5))


def decay(factor: float, step: int) -> float:
    return factor**step


def check(place: Path, is_0_3: bool) -> None:
    """Load one family's checkpoints strictly, and write what TorchTitan then has."""
    model, adapter = (built_by_0_3 if is_0_3 else built_by_0_2_2)(place.name)
    state = {name: torch.full(tensor.shape, torch.nan) for name, tensor in model.state_dict().items()}
    there = FileSystemReader(place / "step-0").read_metadata().state_dict_metadata
    assert there.keys() == state.keys(), sorted(there.keys() ^ state.keys())
    load(state, checkpoint_id=place / "step-0", no_dist=True)
    for name, tensors in (("titan", state), ("hf", adapter.to_hf(state))):
        save_file({key: each.contiguous() for key, each in tensors.items()}, place / f"{name}.safetensors")
    if not (place / "step-3").exists():
        return
    model.to_empty(device="cpu").float()
    optimizers, schedulers = containers(model, is_0_3)
    train_state = TrainState()
    parts = {"optimizer": optimizers, "lr_scheduler": schedulers, "train_state": train_state}
    load({**state, **parts}, checkpoint_id=place / "step-3", no_dist=True)
    flat = {key: value for key, value in optimizers.state_dict().items() if isinstance(value, torch.Tensor)}
    save_file({key: each.clone() for key, each in flat.items()}, place / "optimizer.safetensors")
    rest = {**vars(train_state), "last_epoch": schedulers.schedulers[0].last_epoch}
    rest["lr"] = [group["lr"] for optimizer in optimizers.optimizers for group in optimizer.param_groups]
    schedulers.step()
    rest["next"] = schedulers.schedulers[0].get_last_lr()
    (place / "rest.json").write_text(json.dumps(rest))


if __name__ == "__main__":
    titan_is_0_3 = find_spec("torchtitan.models.common") is not None
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        check(folder, titan_is_0_3)
