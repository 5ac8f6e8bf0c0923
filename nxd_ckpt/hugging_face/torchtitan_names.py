"""TorchTitan's names for the tensors of a Hugging Face model, and where its tensors are laid out otherwise. Pure.

TorchTitan's Llama rotates neighbouring elements of a head (0 and 1, 2 and 3, ...), that of transformers elements half a
head apart (0 and n/2, 1 and n/2 + 1, ...). So the rows of q and k have another order; in the other families they have
the same. The experts of a layer, apart in Hugging Face's files, are stacked in three tensors. GPT-OSS has them stacked
in both, with the last two dimensions swapped.

Layers with experts have a buffer that balances their load, for which most families have nothing in Hugging Face's
files; TorchTitan begins with zeros.

Source: the modules and ``state_dict_adapter`` of ``torchtitan.models`` 0.3.0 and 0.2.2. In 0.3.0 the adapter of GPT-OSS
calls the experts otherwise than its module; these are the module's names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nxd_ckpt.core.name_patterns import Pattern
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.hugging_face.packing import Packed
from nxd_ckpt.options.conversion import Release

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
_BIASED = {
    hf.replace(".weight", f".{kind}"): titan.replace(".weight", f".{kind}")
    for hf, titan in _COMMON.items()
    for kind in ("weight", "bias")
    if ".mlp." not in hf and (kind == "weight" or ".self_attn." in hf)
}
_GPT_OSS = {
    "self_attn.sinks": "attention.sinks",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.router.bias": "moe.router.gate.bias",
    "mlp.experts.gate_up_proj": "moe.routed_experts.inner_experts.mlp1_weight_EGD",
    "mlp.experts.gate_up_proj_bias": "moe.routed_experts.inner_experts.mlp1_bias_EG",
    "mlp.experts.down_proj": "moe.routed_experts.inner_experts.mlp2_weight_EDF",
    "mlp.experts.down_proj_bias": "moe.routed_experts.inner_experts.mlp2_bias_ED",
}
_SINKS = {f"model.layers.{{layer}}.{hf}": f"layers.{{layer}}.{titan}" for hf, titan in _GPT_OSS.items()}
_FAMILIES: Mapping[str, Mapping[str, str]] = {
    "llama": _COMMON,
    "qwen3": _COMMON | _NORMS,
    "qwen3_moe": _COMMON | _NORMS | _ROUTED,
    "deepseek_v3": _DENSE | _LATENT | _ROUTED | _SHARED,
    "gpt_oss": _BIASED | _SINKS,
}
_GROUPED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_PAIRED = {"llama": (".wq.weight", ".wk.weight")}
_SWAPPED = {"gpt_oss": (".mlp1_weight", ".mlp2_weight")}
_ROUTER, _BALANCE = "moe.router.gate.weight", "moe.expert_bias_E"

_ADAMW = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}

def _in_0_2_2(name: str) -> str:
    for new, old in ((".qkv_linear.", "."), (".routed_experts.inner_experts.", ".experts."), ("lm_head.", "output.")):
        name = name.replace(new, old)
    return re.sub(r"_[A-Z]+$", "", name)


class TorchTitanNames:
    """The names of a ``release`` of TorchTitan for the model of a config.json.

    Raises UnsupportedState if TorchTitan does not have the model, or its names are not known here.
    """

    def __init__(self, config: Mapping[str, Any], release: Release = "0.3") -> None:
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
        self._is_old = release == "0.2.2"
        names = _FAMILIES[self._family].items()
        self._patterns = {Pattern(hf): Pattern(self._released(titan)) for hf, titan in names}

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

    def has_pairs(self, name: str) -> bool:
        """Return whether the rows of this tensor lie in pairs."""
        return name.endswith(_PAIRED.get(self._family, ()))

    def is_swapped(self, name: str) -> bool:
        """Return whether the last two dimensions of this tensor are swapped."""
        return any(part in name for part in _SWAPPED.get(self._family, ()))

    def balance(self, name: str) -> str | None:
        """Return the buffer that balances the load of the experts of the router ``name``; None for other tensors.

        It has a number of float32 for each expert.
        """
        return self._released(name.replace(_ROUTER, _BALANCE)) if name.endswith(_ROUTER) else None

    def group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a param group as TorchTitan looks for it: with all options of AdamW, and with `fused` parameters."""
        defaults = _ADAMW | {"initial_lr": group["lr"]} if {"lr", "betas"} <= group.keys() else {}
        names = group["params"]
        return {**defaults, **group, "params": [*names, *(name for name, _ in self.fused(names))]}

    def fused(self, names: Collection[str]) -> list[tuple[str, tuple[str, str, str]]]:
        """Return the parameters that hold q, k and v together, with those that do alone.

        0.3 has these in its modules, unless its config says otherwise, so its optimizer too; state dicts of the model
        have them apart.
        """
        queries = [name for name in names if ".qkv_linear.wq." in name]
        parts = [(q, q.replace(".wq.", ".wk."), q.replace(".wq.", ".wv.")) for q in queries]
        return [(q.replace(".wq.", ".wqkv."), (q, k, v)) for q, k, v in parts if k in names and v in names]

    def scheduler(self, step: int, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of its scheduler after ``step`` steps of an optimizer with these param groups.

        Raises UnsupportedState if the release has a single param group, but ``groups`` differ.
        """
        if not self._is_old:
            return {"last_epoch": step}
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        wrong = sorted(key for other in options for key in other if other[key] != options[0].get(key))
        if wrong:
            raise UnsupportedState(
                f"TorchTitan 0.2.2 has a single param group, but those of this optimizer differ in {wrong[0]}; pass "
                "torchtitan_release=0.3, or model_only= to begin at step 0"
            )
        first = options[0] if options else {}
        rates = {"base_lrs": [first.get("initial_lr")], "_last_lr": [first.get("lr")]}
        counts = {"last_epoch": step, "_step_count": step + 1}
        return {**counts, **rates, "_is_initial": False, "_get_lr_called_within_step": False}

    def _released(self, name: str) -> str:
        return _in_0_2_2(name) if self._is_old else name
