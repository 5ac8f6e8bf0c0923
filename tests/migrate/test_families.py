"""Which form takes which family, tried: the table of docs/convert.md, from tags of jobs of several ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import convert, load_checkpoint
from nxd_ckpt.errors import CheckpointError, InvalidArgument, UnsupportedState
from nxd_ckpt.hugging_face.mappings import shipped_mappings
from tests.docs.markdown import DOCS, tables
from tests.hugging_face.families import CASES, FAMILIES, OF_TORCHTITAN, random_model
from tests.hugging_face.reference import State
from tests.hugging_face.saved import differences, weights, write_config
from tests.migrate.dcp_directory import from_dcp

_ROWS = tables(DOCS / "convert.md")["Families"]
TABLE = {name: forms for names, *forms in _ROWS for name in re.findall(r"`(\w+)`", names)}
NAMES = {
    "llama": "llama", "mistral": "mistral", "granite": "granite", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3-moe-dense-layers", "deepseek_v3": "deepseek_v3", "glm4_moe": "glm4-moe",
    "llama4_text": "llama4", "qwen3_next": "qwen3-next", "olmo2": "olmo2", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "gpt2": "gpt2", "mixtral": "mixtral", "dbrx": "dbrx",
    "gpt_oss": "gpt_oss", "gpt_neox": "gpt-neox",
}


def test_the_table_has_every_family() -> None:
    """By what config.json calls models of the shipped mappings; those asked for by name have no such name."""
    chosen = {name for mapping in shipped_mappings().values() for name in mapping.model_types}
    assert TABLE.keys() == NAMES.keys() == chosen


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, r"has Hugging Face's form already: copy it, or choose another form"),
        ({"to": "dcp", "kv_size_multiplier": 1}, r"not a job's checkpoint: leave out kv_size_multiplier="),
        ({"to": "dcp", "config": "wider"}, r"embed_tokens.* be \(64, 40\)"),
        ({"to": "dcp", "config": "tied"}, r"config\.json ties lm_head\.weight to .* different values for them"),
        ({"to": "dcp", "mapping": "mixtral"}, r"mapping 'mixtral' has no rule for .*mlp\."),
    ],
)
def test_a_hugging_face_directory_that_does_not_fit_is_refused(
    tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    """Nothing is written; and names in files are for such a directory alone."""
    model = random_model("llama")
    model.save_pretrained(tmp_path / "hf")
    write_config(tmp_path / "wider", {**model.config.to_dict(), "hidden_size": 40})
    write_config(tmp_path / "tied", {**model.config.to_dict(), "tie_word_embeddings": True})
    if "config" in options:
        options = {**options, "config": tmp_path / options["config"]}
    with pytest.raises(CheckpointError, match=complaint):
        convert(tmp_path / "hf", tmp_path / "out" / "m", **{"to": "hf", "names": "hf", **options})
    convert(tmp_path / "hf", tmp_path / "run" / "s", to="tag", names="nxd")
    terms: dict[str, Any] = {"names": "hf", "config": tmp_path / "hf", "prefix": "language_model."}
    with pytest.raises(InvalidArgument, match=r"was written by nxd_ckpt: leave out prefix= and key_mapping="):
        convert(tmp_path / "run" / "s", tmp_path / "out" / "m", to="tag", **terms)
    assert not (tmp_path / "out" / "m").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, ""),
        ({"num_hidden_layers": 3}, r"x\.pth: tensors are missing: model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\..* should be below 1; pass the model's own"),
        ({"n_routed_experts": 2}, r"experts\.2\..* should be below 2; pass the model's own"),
        ({"num_attention_heads": 8}, r"o_proj\.weight has shape .* by config\.json"),
        ({"tie_word_embeddings": True}, r"config\.json ties lm_head\.weight to .* different values"),
    ],
)
def test_names_of_a_script_are_those_of_config_json(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    """A checkpoint without a mapping of its own becomes what the Hugging Face directory becomes, or is refused."""
    model = random_model("deepseek_v3")
    torch.save(model.state_dict(), tmp_path / "x.pth")
    model.save_pretrained(tmp_path / "hf")
    write_config(tmp_path / "config", {**model.config.to_dict(), **changes})
    if changes:
        for form in ("torchtitan", "hf"):
            with pytest.raises(CheckpointError, match=complaint):
                convert(tmp_path / "x.pth", tmp_path / "out", names="hf", to=form, config=tmp_path / "config")
        assert not (tmp_path / "out").exists()
        return
    convert(tmp_path / "x.pth", tmp_path / "own", to="torchtitan", config=tmp_path / "config")
    convert(tmp_path / "hf", tmp_path / "direct", to="torchtitan")
    found = [from_dcp(tmp_path / place / "step-0") for place in ("own", "direct")]
    assert [] == differences(*found)


@pytest.mark.parametrize("model_type", NAMES)
@pytest.mark.one_in(4)
def test_a_family_goes_where_the_table_says(tmp_path: Path, model_type: str) -> None:
    """To torch DCP and a tag of one rank bit for bit; to TorchTitan, or refused before anything is written.

    From a tag of a job, and the same from the Hugging Face directory itself.
    """
    name = NAMES[model_type]
    how: dict[str, Any] = {"tp": 2} if name in CASES else {**FAMILIES, **OF_TORCHTITAN}[name][2]
    random_model(name).save_pretrained(tmp_path / "hf")
    files = weights(tmp_path / "hf")
    source = tmp_path / "run" / "step_1"
    convert(tmp_path / "hf", source, to="tag", names="nxd", **how)
    options: dict[str, Any] = {"config": tmp_path / "hf"}
    if "kv_size_multiplier" in how:
        options |= {"kv_size_multiplier": how["kv_size_multiplier"], "hardware": "trn1"}
    forms, of_torchtitan = TABLE[model_type]
    assert "yes" == forms
    convert(source, tmp_path / "dcp", names="hf", to="dcp", **options)
    found = from_dcp(tmp_path / "dcp")
    assert [] == differences(files, {name: found[f"model.{name}"] for name in files})
    convert(tmp_path / "hf", tmp_path / "direct", names="hf", to="dcp")
    assert [] == differences(found, from_dcp(tmp_path / "direct"))
    convert(source, tmp_path / "plain" / "step_1", names="hf", to="tag", **options)
    fresh: State = {}
    load_checkpoint(tmp_path / "plain", model=fresh)
    assert [] == differences(files, fresh)
    for release in ("0.3", "0.2.2"):
        target, titan = tmp_path / release, {**options, "to": "torchtitan", "torchtitan_release": release}
        if of_torchtitan == "yes":
            convert(source, target, **titan)
            moved = from_dcp(target / "step-0")
            assert any(torch.equal(files["model.norm.weight"], each) for each in moved.values())
            convert(tmp_path / "hf", tmp_path / "direct" / release, **{**titan, "config": None})
            assert [] == differences(moved, from_dcp(tmp_path / "direct" / release / "step-0"))
            continue
        with pytest.raises(UnsupportedState, match=f"names of model_type '{model_type}' are not known"):
            convert(source, target, **titan)
        assert not target.exists()
