"""Mappings: those that the package ships, a user's own, what is wrong with one, and what does not fit it."""

import json
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt.errors import InvalidArgument, ShapeMismatch
from nxd_ckpt.hugging_face.hf_slice import hf_slices
from nxd_ckpt.hugging_face.mapping import load_mapping
from nxd_ckpt.hugging_face.mappings import find_mapping, shipped_mappings
from nxd_ckpt.hugging_face.sizes import Sizes
from tests.hugging_face.reference import Model

RULE = {"nxd": "block.{layer}.w", "hf": "h.{layer}.w", "dim": 0}


def document(**changes: Any) -> dict[str, Any]:
    return {"format_version": 1, "name": "mine", "rules": [RULE], **changes}


def with_rule(**changes: Any) -> dict[str, Any]:
    return document(rules=[{key: value for key, value in {**RULE, **changes}.items() if value is not None}])


def test_config_json_chooses_among_the_shipped_ones() -> None:
    """By its model_type; Granite is mapped as Llama."""
    expected = {kind: kind for kind in ("llama", "qwen2", "qwen3", "mixtral", "gpt_neox")} | {"granite": "llama"}
    assert expected == {kind: find_mapping(None, {"model_type": kind}).name for kind in expected}


def test_a_model_without_a_mapping_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"'bert' .*llama, .*mistral, mixtral, .*qwen2, qwen3.*mapping="):
        find_mapping(None, {"model_type": "bert"})


def test_a_users_file_is_a_mapping(tmp_path: Path) -> None:
    """By its path, or as a document: with sizes under keys of its own."""
    mine = document(config={"layer": "depth"}, tied={"head": "embed"}, ignored=["mask"])
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(mine))
    mapping = find_mapping(path, {})
    assert find_mapping(mine, {}) == mapping
    sizes = Sizes({"depth": 2}, keys=mapping.keys)
    assert ["h.0.w", "h.1.w"] == mapping.required(sizes)
    (match,) = mapping.matches(["block.1.w", "mask"])
    assert ["h.1.w"] == [one.name for one in hf_slices(match, (4, 2), sizes)]


def test_a_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxd_ckpt.hugging_face.mappings.MAPPING", 10)
    (tmp_path / "mine.json").write_text(json.dumps(document()))
    with pytest.raises(InvalidArgument, match=r"^mapping \S+mine\.json has \d+ bytes: at most 10 are allowed"):
        find_mapping(tmp_path / "mine.json", {})


def test_an_unknown_name_or_path_is_refused(tmp_path: Path) -> None:
    """The error lists the shipped ones, or says that a file is no JSON."""
    with pytest.raises(InvalidArgument, match=r"neither one of .*gpt_neox, .*llama, .* nor the path"):
        find_mapping("lama", {})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"broken\.json: not JSON"):
        find_mapping(tmp_path / "broken.json", {})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([], "expected a JSON object"),
        (document(format_version=2), "format_version 2, expected 1"),
        (document(rules="all"), "'rules' is 'all'"),
        (document(name=None), "'name' is None"),
        (document(extra=1), "unknown \\['extra'\\]"),
        (document(config={"depth": "n_layer"}), "config names \\['depth'\\]"),
        (document(ignored=[1]), "ignored: expected strings"),
        (with_rule(nxd=None), "'nxd' is missing"),
        (with_rule(hf=[]), "names no tensor"),
        (with_rule(dim=True), "'dim' is True"),
        (with_rule(dim=-1), "dim must be a dimension"),
        (with_rule(dim=None, hf=["h.{layer}.a", "h.{layer}.b"]), "need dim"),
        (with_rule(dim=None, rows="vocab"), "need dim"),
        (with_rule(rows="vocab", hf=["h.{layer}.a", "h.{layer}.b"]), "rows is only for a rule with a single tensor"),
        (with_rule(rows="words"), "rows must be one of"),
        (with_rule(heads="value"), "heads must be 'query' or 'kv'"),
        (with_rule(heads=["query", "kv"]), "one entry for each of 1 tensors"),
        (with_rule(hf="h.w"), "must have the placeholders \\['layer'\\]"),
        (with_rule(stacked="expert", dim=1), "must have the placeholders \\['expert', 'layer'\\]"),
        (with_rule(stacked="expert", dim=0, hf="h.{layer}.{expert}.w"), "not the stacked one"),
        (with_rule(nxd="b.{block}.w", hf="h.{block}.w"), "must be one of the sizes"),
    ],
)
def test_a_malformed_document_is_refused(given: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        load_mapping(given, "mine.json")


def test_a_variant_is_one_of_the_options_of_an_import() -> None:
    """Of others nobody could ask for it."""
    assert "fuse_qkv" == load_mapping(with_rule(variant="fuse_qkv"), "mine").rules[0].variant
    with pytest.raises(InvalidArgument, match=r"variant must be one of .*qkv_linear.*found 'mine'"):
        load_mapping(with_rule(variant="mine"), "mine")


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
