"""The shipped mappings: their orders of heads, and what does not fit them. What they map is imported and exported."""

import pytest

from nxd_ckpt.core.heads import Heads
from nxd_ckpt.errors import InvalidArgument, KeyMismatch, ShapeMismatch
from nxd_ckpt.hugging_face.hf_slice import hf_slices
from nxd_ckpt.hugging_face.mappings import shipped_mappings
from nxd_ckpt.hugging_face.sizes import Sizes
from tests.hugging_face.reference import Model


def test_the_orders_of_heads_are_nxds() -> None:
    """64 heads, 16 of k and v, kept 4 times: as in NxD's own converter."""
    first = [run.hf for run in Heads(64, 16, 1, 4, "trn1").runs("query")][:17]
    assert [*range(0, 64, 4), 1] == first
    assert [(0, 0, 16), (16, 0, 16), (32, 0, 16), (48, 0, 16)] == Heads(64, 16, 1, 4, "trn1").runs("kv")
    assert [(0, 0, 64)] == Heads(64, 16, 1, 4, "trn2").runs("query")
    assert [0, 0, 0, 0, 1] == [run.hf for run in Heads(64, 16, 1, 4, "trn2").runs("kv")][:5]


def test_names_without_a_rule_are_listed_with_the_closest_ones() -> None:
    """And names that Hugging Face computes are passed over."""
    ignored = "model.layers.0.self_attn.rotary_emb.inv_freq"
    with pytest.raises(KeyMismatch) as caught:
        shipped_mappings()["llama"].matches([ignored, "model.layers.3.mlp.gate_up.weight", "adapter"])
    message = str(caught.value)
    assert "'model.layers.3.mlp.gate_up.weight' (closest rules: " in message
    assert "model.layers.{layer}.mlp.gate_up_proj.weight" in message
    assert "'adapter'" in message
    assert ignored not in message


@pytest.mark.parametrize(
    ("change", "name", "shape", "complaint"),
    [
        ({"num_key_value_heads": 3}, "model.layers.0.self_attn.qkv_proj.weight_q", (8, 8), "4 query heads cannot"),
        ({}, "model.layers.0.self_attn.qkv_proj.weight_k", (8, 8), "8 elements along dimension 0"),
        ({}, "model.layers.0.mlp.gate_up_proj.weight", (7, 8), "7 elements along dimension 0"),
        ({}, "model.embed_tokens.weight", (20, 8), "should have 24 rows"),
        ({"num_attention_heads": None}, "model.layers.0.self_attn.o_proj.weight", (8, 8), "num_attention_heads"),
        ({"num_attention_heads": "4"}, "model.layers.0.self_attn.o_proj.weight", (8, 8), "positive integer"),
        ({}, "model.layers.0.self_attn.o_proj.weight", (8,), "at least 2 dimensions"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    change: dict[str, object], name: str, shape: tuple[int, ...], complaint: str
) -> None:
    """The error names the tensor or the key of config.json, and what was found."""
    (match,) = shipped_mappings()["llama"].matches([name])
    with pytest.raises((ShapeMismatch, InvalidArgument), match=complaint):
        hf_slices(match, shape, Sizes({**Model().config, **change}))


def test_experts_must_be_as_many_as_config_says() -> None:
    """A stacked tensor of another number of experts is another model's."""
    name = "model.layers.0.mlp.expert_mlps.mlp_op.down_proj.weight"
    (match,) = shipped_mappings()["mixtral"].matches([name])
    with pytest.raises(ShapeMismatch, match="its first size is 4"):
        hf_slices(match, (8, 12, 8), Sizes(Model("mixtral").config))
