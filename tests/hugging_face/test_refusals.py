"""What an export refuses, with the reason, leaving everything as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Partition, Topology, convert
from nxd_ckpt.errors import (
    CheckpointError,
    IncompatibleState,
    InvalidArgument,
    KeyMismatch,
    MalformedFile,
    PartNotFound,
    ShapeMismatch,
    TopologyMismatch,
)
from tests.conversion.tags import contents
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import differences, save_job, weights, write_as_nxd, write_config
from tests.interop.saving import save_as_every_rank

JOB = Job(Model(heads=8), tp=4, qkv="linear", copies=2)

HEADS, HEADS_6 = ({"num_attention_heads": heads, "head_dim": 2} for heads in (9, 6))


@pytest.fixture(scope="module")
def tag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of :data:`JOB`. Nothing changes it."""
    return save_job(tmp_path_factory.mktemp("refused") / "run", JOB, JOB.model.state())


def refused(directory: Path, tag: Path, kind: type[CheckpointError], complaint: str, **options: Any) -> None:
    """The export of the tag raises, and makes nothing."""
    config = write_config(directory / "config", {**JOB.model.config, **options.pop("changes", {})})
    before = contents(tag.parent)
    how: dict[str, Any] = {"config": config, "kv_size_multiplier": 2, **options}
    with pytest.raises(kind, match=complaint):
        convert(tag, directory / "out" / "model", to="hf", **how)
    assert before == contents(tag.parent)
    assert not (directory / "out").exists()


@pytest.mark.parametrize(
    ("kind", "complaint", "options"),
    [
        (TopologyMismatch, "copies of a key-value head in .*weight_k differ, .*'trn2'", {"hardware": "trn2"}),
        (ShapeMismatch, "weight_k.*kv_size_multiplier=1", {"kv_size_multiplier": 1}),
        (InvalidArgument, "8 query heads cannot be divided", {"kv_size_multiplier": 3}),
        (InvalidArgument, "hardware must be one of trn1, trn2", {"hardware": "inf2"}),
        (InvalidArgument, "9 query heads, padded to 12, cannot be", {"changes": HEADS, "pad_attn_heads": True}),
        (InvalidArgument, "not supported for trn2", {"changes": HEADS_6, "pad_attn_heads": True, "hardware": "trn2"}),
        (KeyMismatch, "lacks model.layers.2", {"changes": {"num_hidden_layers": 3}}),
        (ShapeMismatch, "should have 100 rows|24 elements", {"changes": {"vocab_size": 100}}),
        (IncompatibleState, "ties lm_head.weight to model.embed_tokens", {"changes": {"tie_word_embeddings": True}}),
        (KeyMismatch, r"lacks .*\.bias.*\(mlp_bias True\)", {"changes": {"mlp_bias": True}}),
        (InvalidArgument, "no mapping for model_type 'opt'", {"changes": {"model_type": "opt"}}),
        (KeyMismatch, "no rule for", {"mapping": "gpt_neox", "kv_size_multiplier": 1}),
        (InvalidArgument, "gpt_neox' has no rule with heads", {"mapping": "gpt_neox", "kv_size_multiplier": 2}),
        (InvalidArgument, "has no vocab_size", {"config": None, "mapping": "llama"}),
        (InvalidArgument, "dtype must be one of", {"dtype": "int8"}),
        (InvalidArgument, "size_per_shard must be a size with its unit", {"size_per_shard": "5 apples"}),
        (InvalidArgument, "size_per_shard must be a size with its unit", {"size_per_shard": 0}),
        (InvalidArgument, "expected config.json", {"config": "/nowhere"}),
        (InvalidArgument, "expected a directory with a tokenizer", {"tokenizer": "/nowhere"}),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, tag: Path, kind: type[CheckpointError], complaint: str, options: dict[str, Any]
) -> None:
    """Before anything is written; the error names tensor, argument or key."""
    refused(tmp_path, tag, kind, complaint, **options)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    tag = save_job(tmp_path / "run", JOB, JOB.model.state())
    with pytest.raises(MalformedFile, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        convert(tag, tmp_path / "out", to="hf", config=tmp_path / "config.json")


def test_a_tag_without_a_model_is_refused(tmp_path: Path) -> None:
    tag = write_as_nxd(tmp_path / "run", JOB, JOB.model.state())
    (tag / "optim").mkdir()
    for path in (tag / "model").iterdir():
        path.rename(tag / "optim" / path.name)
    (tag / "model").rmdir()
    with pytest.raises((PartNotFound, MalformedFile)):
        convert(tag, tmp_path / "out", to="hf", mapping="llama")


def test_two_tensors_for_one(tmp_path: Path) -> None:
    """A tag with q_proj both alone and fused: the mapping cannot tell which is meant."""
    job = Job(Model())
    state = {**job.rank(job.model.state()), **Job(Model(), qkv="fused").rank(job.model.state())}
    path = tmp_path / "run" / "step_1" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    (path.parents[1] / "done").write_text("1")
    config = write_config(tmp_path / "config", job.model.config)
    with pytest.raises(IncompatibleState, match=r"would come from .* and from"):
        convert(path.parents[1], tmp_path / "out", to="hf", config=config)


def test_whole_copies_beside_cuts_are_told_what_to_do(tmp_path: Path) -> None:
    """Each rank has all of one layer's feed-forward part: the tag that the message leads to is exported."""
    model, cuts = Model(), dict[str, Partition]()
    whole, config = model.state(), write_config(tmp_path, model.config)
    for name, dim in (("up_proj", 0), ("gate_proj", 0), ("down_proj", 1)):
        cuts |= {each: Partition(dim, num_partitions=2) for each in whole if name in each and "layers.1." in each}

    def what(rank: int) -> dict[str, Any]:
        cut = {name: whole[name].chunk(2, one.partition_dim or 0)[rank] for name, one in cuts.items()}
        return {"model": {**whole, **cut}}

    save_as_every_rank(tmp_path / "run", "step_1", [Topology(tp=2, rank=rank) for rank in range(2)], what)
    tag = tmp_path / "run" / "step_1"
    with pytest.raises(ShapeMismatch, match=r"a whole copy of this tensor.*convert\(..., to='tag', tp=1, partitions="):
        convert(tag, tmp_path / "hf", to="hf", config=config)
    convert(tag, tmp_path / "whole" / "step_1", to="tag", tp=1, partitions=cuts, durable=False)
    convert(tmp_path / "whole" / "step_1", tmp_path / "hf", to="hf", config=config, durable=False)
    assert [] == differences(whole, weights(tmp_path / "hf"))
