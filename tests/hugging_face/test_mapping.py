"""The shipped mappings, against a conversion by hand: every rank of random jobs, in both directions, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.heads import Heads
from nxd_ckpt.errors import InvalidArgument, KeyMismatch, ShapeMismatch, TopologyMismatch
from nxd_ckpt.hugging_face.hf_slice import HfSlice, hf_slices, partition_of, whole_shape
from nxd_ckpt.hugging_face.mapping import Match, ModelMapping
from nxd_ckpt.hugging_face.mappings import shipped_mappings
from nxd_ckpt.hugging_face.sizes import Sizes
from tests.hugging_face.jobs import jobs
from tests.hugging_face.reference import Job, Model, State


def sizes_of(job: Job) -> Sizes:
    return Sizes(job.model.config, job.copies, job.hardware)


def matches_of(job: Job) -> list[Match]:
    return mapping_of(job.model).matches(job.rank(job.model.state()))


def mapping_of(model: Model) -> ModelMapping:
    return shipped_mappings()[model.family]


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.offset, box.size, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def as_it_lies(tensor: torch.Tensor, match: Match) -> torch.Tensor:
    """A Hugging Face tensor as boxes of it are counted."""
    tensor = tensor.transpose(-1, -2) if match.rule.transposed else tensor
    return tensor if match.rule.stacked is None else tensor[None]


def whole_from(state: State, match: Match, job: Job) -> tuple[torch.Tensor, list[HfSlice]]:
    """NxD's whole tensor put together from Hugging Face's; padding is zero."""
    sizes = sizes_of(job)
    shapes = [tuple(state[name].shape) for name in match.rule.names(match.numbers, sizes)]
    whole = torch.zeros(whole_shape(match, shapes, sizes, multiple=job.tp))
    found = hf_slices(match, tuple(whole.shape), sizes)
    for one in found:
        for piece in one.pieces:
            view(whole, piece.box).copy_(view(as_it_lies(state[one.name], match), piece.local))
    return whole, found


@given(jobs())
def test_every_rank_holds_what_a_conversion_by_hand_gives_it(job: Job) -> None:
    """From Hugging Face's tensors to each rank's, heads in order, copies and padding included."""
    state, sizes = job.model.state(), sizes_of(job)
    for match in matches_of(job):
        whole, _ = whole_from(state, match, job)
        partition = partition_of(match, tuple(whole.shape), sizes, job.tp)
        for tp_rank in range(job.tp):
            for ep_rank in range(job.ep):
                expected = job.rank(state, tp_rank, ep_rank)[match.name]
                pieces = partition.pieces(tuple(expected.shape), tp_rank, job.tp, ep_rank)
                assert pieces is not None
                found = torch.full_like(expected, -1)
                for piece in pieces:
                    view(found, piece.local).copy_(view(whole, piece.box))
                assert torch.equal(expected, found), (match.name, tp_rank, ep_rank)


@given(jobs())
def test_there_and_back_gives_the_same_tensors(job: Job) -> None:
    """Hugging Face to NxD to Hugging Face: every tensor, each element written once."""
    state, back = job.model.state(), dict[str, torch.Tensor]()
    for match in matches_of(job):
        whole, found = whole_from(state, match, job)
        for one in found:
            assert one.name not in back
            assert tuple(state[one.name].shape) == one.shape
            tensor = torch.zeros(one.shape)
            assert tensor.numel() == sum(piece.local.numel for piece in one.once)
            for piece in one.once:
                view(as_it_lies(tensor, match), piece.local).copy_(view(whole, piece.box))
            back[one.name] = tensor
    assert sorted(state) == sorted(back)
    assert [] == [name for name in state if not torch.equal(state[name], back[name])]
    assert sorted(state) == sorted({*mapping_of(job.model).required(sizes_of(job)), *(n for n in state if "bias" in n)})


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


def test_a_tensor_that_ranks_cannot_share_is_refused() -> None:
    """Two heads of k over four ranks need kv_size_multiplier=2."""
    (match,) = shipped_mappings()["llama"].matches(["model.layers.0.self_attn.qkv_proj.weight_k"])
    sizes = Sizes(Model(head_dim=1).config)
    with pytest.raises(TopologyMismatch, match=r"2 heads of .*k_proj.*kv_size_multiplier"):
        partition_of(match, (2, 4), sizes, tp=4)


def test_experts_must_be_as_many_as_config_says() -> None:
    """A stacked tensor of another number of experts is another model's."""
    name = "model.layers.0.mlp.expert_mlps.mlp_op.down_proj.weight"
    (match,) = shipped_mappings()["mixtral"].matches([name])
    with pytest.raises(ShapeMismatch, match="its first size is 4"):
        hf_slices(match, (8, 12, 8), Sizes(Model("mixtral").config))


def test_tied_tensors_are_not_required() -> None:
    """With tied embeddings files leave out the head."""
    model = Model()
    mapping = mapping_of(model)
    assert "lm_head.weight" in mapping.required(Sizes(model.config))
    assert "lm_head.weight" not in mapping.required(Sizes({**model.config, "tie_word_embeddings": True}))
