"""Small random models of transformers, family by family, and the jobs that they are imported for."""

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 8}, {"tp": 2, "qkv": "coalesced"}),
    "llama-gqa": ("LlamaConfig", {"num_key_value_heads": 2}, {"tp": 4, "qkv": "linear", "copies": 2, "pp": 2}),
    "llama-gqa-fused": (
        "LlamaConfig", {"num_key_value_heads": 2}, {"tp": 4, "qkv": "fused", "copies": 2, "hardware": "trn2"}
    ),
    "llama-biases": (
        "LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}, {"tp": 2, "pp": 2}
    ),
    "llama-tied": ("LlamaConfig", {"num_key_value_heads": 2, "tie_word_embeddings": True}, {"tp": 2}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 4, "sliding_window": 8}, {"tp": 2, "qkv": "linear"}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}, {"tp": 4, "qkv": "linear", "copies": 2, "pp": 2}),
    "qwen2-tied": ("Qwen2Config", {"num_key_value_heads": 4, "tie_word_embeddings": True}, {"tp": 2}),
    "qwen3": (
        "Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8},
        {"tp": 4, "qkv": "fused", "copies": 2, "hardware": "trn2"},
    ),
    "qwen3-biases": ("Qwen3Config", {"num_key_value_heads": 4, "head_dim": 8, "attention_bias": True}, {"tp": 2}),
    "mixtral": (
        "MixtralConfig", {"num_key_value_heads": 4, "num_local_experts": 4}, {"tp": 2, "ep": 2, "qkv": "linear"}
    ),
    "gpt-neox": ("GPTNeoXConfig", {}, {"tp": 2, "pp": 2}),
}

GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

ROUTED: dict[str, Any] = {
    **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "granite": ("GraniteConfig", {"num_key_value_heads": 2, "attention_bias": True}, {"tp": 2, "pp": 2}),
    "gemma2": ("Gemma2Config", GROUPED, {"tp": 2, "pp": 2, "split_gate_up": True}),
    "gemma2-untied": ("Gemma2Config", {**GROUPED, "tie_word_embeddings": False}, {"tp": 2, "qkv_linear": True}),
    "gemma3": (
        "Gemma3TextConfig", {**GROUPED, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"tp": 4, "pp": 2, "fuse_qkv": True, "kv_size_multiplier": 2},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "coalesce_qkv": True},
    ),
    "qwen3-moe-dense-layers": (
        "Qwen3MoeConfig",
        {
            **GROUPED, **EXPERTS, "num_experts": 4, "num_hidden_layers": 4, "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
        {"tp": 2, "pp": 2, "split_gate_up": True},
    ),
    "deepseek-v3": ("DeepseekV3Config", {**ROUTED, **LATENT}, {"dp": 2, "tp": 2, "pp": 2, "ep": 2}),
    "deepseek-v3-whole-queries": (
        "DeepseekV3Config", {**ROUTED, **LATENT, "q_lora_rank": None, "attention_bias": True}, {"tp": 4}
    ),
    "glm4-moe": (
        "Glm4MoeConfig", {**GROUPED, **ROUTED, "use_qk_norm": True, "attention_bias": True},
        {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "qkv_linear": True},
    ),
    "glm4-moe-plain": ("Glm4MoeConfig", {**GROUPED, **ROUTED}, {"tp": 2, "coalesce_qkv": True}),
    "gemma": ("GemmaConfig", GROUPED, {"tp": 2, "pp": 2}),
    "llama4": (
        "Llama4TextConfig",
        {
            **GROUPED, "num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 16,
        },
        {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "fuse_qkv": True},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **GROUPED, **EXPERTS, "num_experts": 4, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [1], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        {"dp": 2, "tp": 2, "pp": 2, "ep": 2},
    ),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 2}, {"tp": 4, "pp": 2, "fuse_qkv": True, "kv_size_multiplier": 2}),
    "phi3": (
        "Phi3Config",
        {
            "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 2.0]},
        },
        {"tp": 4, "pp": 2, "qkv_linear": True, "kv_size_multiplier": 2},
    ),
    "phi3-single-layer": ("Phi3Config", {"num_key_value_heads": 4, "pad_token_id": 0}, {"tp": 2, "coalesce_qkv": True}),
    "gpt2": ("GPT2Config", {}, {"tp": 2, "pp": 2}),
    "gpt2-linear": ("GPT2Config", {}, {"tp": 2, "mapping": "gpt2_linear"}),
    "gpt-oss": (
        "GptOssConfig", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "fuse_qkv": True},
    ),
    "dbrx": (
        "DbrxConfig",
        {
            "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32, "attn_config": {"kv_n_heads": 2},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
        {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "qkv_linear": True},
    ),
}

OF_TORCHTITAN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    name: (kind, {"num_attention_heads": 4, "num_key_value_heads": 2, **changes}, {"tp": 2, "pp": 2, **how})
    for name, kind, changes, how in (
        ("llama", "LlamaConfig", {"intermediate_size": 96}, {"qkv_linear": True}),
        ("qwen3", "Qwen3Config", {"head_dim": 16}, {"split_gate_up": True}),
        ("qwen3_moe", "Qwen3MoeConfig", {**EXPERTS, "head_dim": 16, "num_experts": 4}, {"dp": 2, "ep": 2}),
        ("deepseek_v3", "DeepseekV3Config", {**ROUTED, **LATENT, "num_key_value_heads": 4}, {"dp": 2, "ep": 2}),
        (
            "gpt_oss", "GptOssConfig",
            {
                "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 24,
                "num_local_experts": 4, "num_experts_per_tok": 2,
            },
            {"dp": 2, "ep": 2, "fuse_qkv": True},
        ),
    )
}
"""The sizes of `tests.migrate.titan_models`."""


def random_model(name: str) -> Any:
    """Of a case's config, everything in files random: also biases and norms, which start as zeros and ones."""
    kind, changes, _ = {**CASES, **FAMILIES, **OF_TORCHTITAN}[name]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**SIZES, **changes}))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor) / 10)
    return model
