"""TorchTitan's names for the tensors of a Hugging Face model, and its order of the rows of q and k. Pure.

TorchTitan's Llama rotates neighbouring elements of a head (0 and 1, 2 and 3, ...), that of transformers elements half a
head apart (0 and n/2, 1 and n/2 + 1, ...). So the rows of q and k have another order. Qwen 3 and DeepSeek-V3
are the same in both. The experts of a layer, apart in Hugging Face's files, are stacked in three tensors.

Source: ``torchtitan.models.*.state_dict_adapter`` of torchtitan 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.packing import Packed
from nxd_ckpt.core.pattern import Pattern
from nxd_ckpt.errors import UnsupportedState

_COMMON = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{layer}.self_attn.q_proj.weight": "layers.{layer}.attention.qkv_linear.wq.weight",
    "model.layers.{layer}.self_attn.k_proj.weight": "layers.{layer}.attention.qkv_linear.wk.weight",
    "model.layers.{layer}.self_attn.v_proj.weight": "layers.{layer}.attention.qkv_linear.wv.weight",
    "model.layers.{layer}.self_attn.o_proj.weight": "layers.{layer}.attention.wo.weight",
    "model.layers.{layer}.mlp.gate_proj.weight": "layers.{layer}.feed_forward.w1.weight",
    "model.layers.{layer}.mlp.up_proj.weight": "layers.{layer}.feed_forward.w3.weight",
    "model.layers.{layer}.mlp.down_proj.weight": "layers.{layer}.feed_forward.w2.weight",
    "model.layers.{layer}.input_layernorm.weight": "layers.{layer}.attention_norm.weight",
    "model.layers.{layer}.post_attention_layernorm.weight": "layers.{layer}.ffn_norm.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_NORMS = {
    f"model.layers.{{layer}}.self_attn.{name}.weight": f"layers.{{layer}}.attention.{name}.weight"
    for name in ("q_norm", "k_norm")
}
_DENSE = {hf: titan for hf, titan in _COMMON.items() if ".self_attn." not in hf}
_ROUTED = {
    "model.layers.{layer}.mlp.gate.weight": "layers.{layer}.moe.router.gate.weight",
    "model.layers.{layer}.mlp.experts.w1": "layers.{layer}.moe.routed_experts.inner_experts.w1_EFD",
    "model.layers.{layer}.mlp.experts.w3": "layers.{layer}.moe.routed_experts.inner_experts.w3_EFD",
    "model.layers.{layer}.mlp.experts.w2": "layers.{layer}.moe.routed_experts.inner_experts.w2_EDF",
}
_LATENT = {
    "model.layers.{layer}.self_attn.q_proj.weight": "layers.{layer}.attention.wq.weight",
    "model.layers.{layer}.self_attn.q_a_proj.weight": "layers.{layer}.attention.wq_a.weight",
    "model.layers.{layer}.self_attn.q_a_layernorm.weight": "layers.{layer}.attention.q_norm.weight",
    "model.layers.{layer}.self_attn.q_b_proj.weight": "layers.{layer}.attention.wq_b.weight",
    "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight": "layers.{layer}.attention.wkv_a.weight",
    "model.layers.{layer}.self_attn.kv_a_layernorm.weight": "layers.{layer}.attention.kv_norm.weight",
    "model.layers.{layer}.self_attn.kv_b_proj.weight": "layers.{layer}.attention.wkv_b.weight",
    "model.layers.{layer}.self_attn.o_proj.weight": "layers.{layer}.attention.wo.weight",
}
_SHARED = {
    "model.layers.{layer}.mlp.gate.e_score_correction_bias": "layers.{layer}.moe.expert_bias_E",
    "model.layers.{layer}.mlp.shared_experts.gate_proj.weight": "layers.{layer}.moe.shared_experts.w1.weight",
    "model.layers.{layer}.mlp.shared_experts.up_proj.weight": "layers.{layer}.moe.shared_experts.w3.weight",
    "model.layers.{layer}.mlp.shared_experts.down_proj.weight": "layers.{layer}.moe.shared_experts.w2.weight",
}
_FAMILIES: Mapping[str, Mapping[str, str]] = {
    "llama": _COMMON,
    "qwen3": _COMMON | _NORMS,
    "qwen3_moe": _COMMON | _NORMS | _ROUTED,
    "deepseek_v3": _DENSE | _LATENT | _ROUTED | _SHARED,
}
_GROUPED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_PAIRED = {"llama": ("attention.qkv_linear.wq.weight", "attention.qkv_linear.wk.weight")}


class TorchTitanNames:
    """TorchTitan's names for the model of a config.json.

    Raises UnsupportedState if TorchTitan does not have the model, or its names are not known here.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        model_type = config.get("model_type")
        if model_type is None:
            raise UnsupportedState(
                "the model type is not known, but TorchTitan's names depend on it; pass the model's config.json as "
                "config= (--config), or choose another form (hf, dcp or tag)"
            )
        if model_type not in _FAMILIES:
            raise UnsupportedState(
                f"TorchTitan's names of model_type {model_type!r} are not known, only those of {', '.join(_FAMILIES)}; "
                "choose another form (hf, dcp or tag)"
            )
        if config.get("rope_interleave") is False:
            raise UnsupportedState(
                f"config.json of {model_type!r} says rope_interleave=false, but TorchTitan's model rotates "
                "neighbouring elements of a head, so it would compute something else; choose another form (hf, dcp or "
                "tag)"
            )
        self._family = str(model_type)
        self._patterns = {Pattern(hf): Pattern(titan) for hf, titan in _FAMILIES[self._family].items()}

    @property
    def packed(self) -> tuple[Packed, ...]:
        """Tensors of all experts of a layer, as TorchTitan has them, and their parts by Hugging Face's names.

        Their own names stand between both: `name` translates them.
        """
        if _ROUTED.keys() - _FAMILIES[self._family].keys():
            return ()
        experts = "model.layers.{layer}.mlp.experts"
        parts = {f"{experts}.{titan}": f"{experts}.{{expert}}.{hf}.weight" for titan, hf in _GROUPED.items()}
        return tuple(Packed(Pattern(name), (Pattern(part),), (None,), stacked="expert") for name, part in parts.items())

    def name(self, hf: str) -> str:
        """Return TorchTitan's name. Raises UnsupportedState for a tensor that its model does not have."""
        for pattern, titan in self._patterns.items():
            numbers = pattern.match(hf)
            if numbers is not None:
                return titan.fill(numbers)
        raise UnsupportedState(f"TorchTitan's {self._family} has no tensor for {hf}; choose the form hf, dcp or tag")

    def has_pairs(self, titan: str) -> bool:
        """Return whether the rows of the tensor, or of a state shaped like it, lie in pairs."""
        return any(f".{name}" in titan for name in _PAIRED.get(self._family, ()))


class RowRun(NamedTuple):
    """``length`` rows of a matrix from ``first`` on, and their ``box`` in four dimensions.

    The dimensions are head, row in half a head, half, column.
    """

    first: int
    length: int
    box: Box


def rows_in_pairs(first: int, count: int, column: int, columns: int, head_dim: int) -> list[RowRun]:
    """Return the places of rows of q or k, which lie by halves of a head, where rows of a pair are neighbours."""
    half, runs = head_dim // 2, []
    while count:
        head, within = divmod(first, head_dim)
        side, row = divmod(within, half)
        length = min(count, half - row)
        runs.append(RowRun(first, length, Box((head, row, side, column), (1, length, 1, columns))))
        first, count = first + length, count - length
    return runs
