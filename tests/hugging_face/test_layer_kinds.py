"""Models whose layers differ by config.json: what contradicts it is refused, and multi-token prediction is left out."""

import json
import re
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nxd_ckpt import Topology, convert, load_checkpoint, save_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import CheckpointError, InvalidArgument, KeyMismatch, ShapeMismatch, TopologyMismatch
from nxd_ckpt.hugging_face.mapping import load_mapping
from nxd_ckpt.hugging_face.mappings import find_mapping, shipped_mappings
from nxd_ckpt.hugging_face.sizes import Sizes
from tests.hugging_face.families import CASES, FAMILIES, SIZES, random_model
from tests.hugging_face.saved import differences


def written(path: Path, name: str, **config: Any) -> Any:
    """The directory of a random model, whose config.json is then changed; the model."""
    model = random_model(name)
    model.save_pretrained(path)
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**document, **config}))
    return model


@pytest.mark.parametrize(
    ("name", "config", "kind", "complaint"),
    [
        ("qwen3-moe-dense-layers", {"mlp_only_layers": []}, KeyMismatch, r"layers\.1\.mlp.*decoder_sparse_step and ml"),
        ("qwen3-moe-dense-layers", {"mlp_only_layers": 1}, InvalidArgument, r"mlp_only_layers must be a list"),
        ("qwen3-moe-dense-layers", {"decoder_sparse_step": 0}, InvalidArgument, r"must be an integer of at least 1"),
        ("qwen3-moe-dense-layers", {"num_experts": 8}, KeyMismatch, r"missing: model\.layers\.3\.mlp\.experts\.4\."),
        ("qwen3-moe-dense-layers", {"num_experts": 3}, KeyMismatch, r"experts\.3\..* num_experts .*should be below 3;"),
        ("qwen3-moe-dense-layers", {"num_hidden_layers": 3}, KeyMismatch, r"layers\.3\.input_.*should be below 3;"),
        ("deepseek-v3", {"first_k_dense_replace": 2}, KeyMismatch, r"layers\.1\.mlp.*by first_k_dense_replace"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, InvalidArgument, r"must be an integer of at least 0, found -1"),
        ("deepseek-v3", {"q_lora_rank": None}, KeyMismatch, r"self_attn\.q_.*by q_lora_rank"),
        ("deepseek-v3", {"num_attention_heads": 7}, ShapeMismatch, r"48 elements cannot be 7 num_attention_heads"),
        ("glm4-moe", {"use_qk_norm": False}, KeyMismatch, r"_norm\.weight: by use_qk_norm"),
        ("llama4", {"moe_layers": [0]}, KeyMismatch, r"feed_forward\..*by interleave_moe_layer_step and moe_layers"),
        ("llama4", {"num_local_experts": 3}, ShapeMismatch, r"should hold 3 parts"),
        ("qwen3-next", {"layer_types": ["full_attention"] * 4}, KeyMismatch, r"linear_attn\..*and layer_types"),
        ("glm4-moe-plain", {"use_qk_norm": True}, KeyMismatch, r"missing: .*q_norm"),
        ("glm4-moe-plain", {"hidden_size": 40}, ShapeMismatch, r"embed_tokens\.weight has shape .* be \(64, 40\)"),
        ("deepseek-v3", {"n_shared_experts": 2}, ShapeMismatch, r"\(n_shared_experts \* moe_inter.* be \(48, 32\)"),
        ("gpt2", {"n_inner": 40}, ShapeMismatch, r"c_fc\.weight has shape \(32, 128\), .* be \(32, 40\)"),
    ],
)
def test_a_config_that_contradicts_the_files_is_refused(
    tmp_path: Path, name: str, config: dict[str, Any], kind: type[CheckpointError], complaint: str
) -> None:
    """In an import, by the name of the tensor and the keys that decide."""
    written(tmp_path / "hf", name, **config)
    with pytest.raises(kind, match=complaint):
        convert(tmp_path / "hf", tmp_path / "run" / "step_0", to="tag", names="nxd")
    assert not (tmp_path / "run" / "step_0").exists()


@pytest.mark.parametrize("name", sorted({kind: name for name, (kind, *_) in {**CASES, **FAMILIES}.items()}.values()))
def test_keys_for_biases_mean_what_they_mean_for_transformers(name: str) -> None:
    """Or nothing: if they change no tensor of its model, they are not looked at."""
    kind, changes, _ = {**CASES, **FAMILIES}[name]
    names, configs = {}, {}
    for value in (True, False):
        biases = {"attention_bias": value, "mlp_bias": value}
        config = getattr(transformers, kind)(**{**SIZES, **changes, **biases})
        configs[value] = {**config.to_dict(), **biases}
        with torch.device("meta"):
            names[value] = set(transformers.AutoModelForCausalLM.from_config(config).state_dict())
        default = getattr(transformers, kind)().to_dict().get("attention_bias")
        mapping = find_mapping(None, configs[value])
        assert default in (None, option.default if (option := mapping.options.get("attention_bias")) else default)
    for had, said in product((True, False), repeat=2):
        with nullcontext() if names[had] == names[said] else pytest.raises(KeyMismatch, match=f"_bias {said}"):
            mapping.refuse_options(names[had], Sizes(configs[said], keys=mapping.keys), "it")
        mapping.refuse_options(names[had], Sizes({}), "without config.json, it")


@pytest.mark.parametrize(
    ("config", "kind", "complaint"),
    [
        ({"first_k_dense_replace": 0}, KeyMismatch, r"layers\.0\.mlp\."),
        ({"moe_intermediate_size": 25}, ShapeMismatch, r"experts\.0\.gate_proj\.weight has .* be \(25, 32\)"),
    ],
)
def test_an_export_is_refused_too(
    tmp_path: Path, config: dict[str, Any], kind: type[CheckpointError], complaint: str
) -> None:
    """A tag whose dense layers, or sizes, are others than config.json says."""
    model = written(tmp_path / "config", "deepseek-v3", **config)
    save_checkpoint(tmp_path / "run", "step_1", model)
    with pytest.raises(kind, match=complaint):
        convert(tmp_path / "run" / "step_1", tmp_path / "out", to="hf", config=tmp_path / "config")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"tp": 3}, r"the \d+ \w+ of .* cannot be divided equally among 3"),
        ({"tp": 16}, r"the 8 num_attention_heads of .* cannot be divided equally among 16"),
        ({"dp": 3, "ep": 3}, r"4 experts cannot be divided equally among 3"),
    ],
)
def test_heads_and_experts_are_not_cut(tmp_path: Path, sizes: dict[str, Any], complaint: str) -> None:
    """Although 16 ranks would divide the elements of latent queries."""
    written(tmp_path / "hf", "deepseek-v3")
    with pytest.raises(TopologyMismatch, match=complaint):
        convert(tmp_path / "hf", tmp_path / "run" / "step_0", to="tag", names="nxd", **sizes)


def test_mappings_know_the_sizes_in_config() -> None:
    """All lengths in config.json of each family of transformers; a ``head_dim`` is known by the heads."""
    length = re.compile(r"hidden_size|\w*intermediate_size\w*|d_model|n_embd|\w+_lora_rank|(linear|qk|v)_\w+_dim")
    unused = {"deepseek_v3": "qk_head_dim", "gpt2": "intermediate_size", "dbrx": "intermediate_size"}
    for name, (kind, changes, _) in {**CASES, **FAMILIES}.items():
        config = getattr(transformers, kind)(**{**SIZES, **changes}).to_dict()
        mapping = find_mapping(None, config)
        sizes = mapping.sizes(config, 1, "trn1")
        terms = {each for shape in mapping.shapes.values() for each in shape if each}
        known = {sizes.key(size) for each in terms for size in re.findall(r"[a-z][\w.]*", each)}
        named = set(filter(length.fullmatch, config)) - {unused.get(mapping.name)}
        assert (name, set()) == (name, named - known)
        missing = [each for each in terms if sizes.length(each) is None]
        assert (name, []) == (name, [each for each in missing if each not in ("n_inner", "q_lora_rank")])


def test_layers_of_multi_token_prediction_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Those after the model's own, as DeepSeek's files have them; an import and a load say so."""
    model = written(tmp_path / "hf", "deepseek-v3")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    own = {name.replace("layers.1.", "layers.2."): torch.ones(2) for name in state if "layers.1." in name}
    extra = {**own, "model.layers.2.eh_proj.weight": torch.ones(2, 4), "model.layers.2.enorm.weight": torch.ones(2)}
    save_file({**state, **extra}, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})

    done = convert(tmp_path / "hf", tmp_path / "run" / "step_0", to="tag", names="nxd", tp=2)
    assert (f"tensors for multi-token prediction: {first_of(sorted(extra))}",) == done.left_out
    half: dict[str, torch.Tensor] = {}
    load_checkpoint(tmp_path / "run", model=half, topology=Topology(tp=2, tp_rank=1))
    assert [] == [name for name in half if ".layers.2." in name]
    assert 0 == main(["convert", "--to=tag", "--names=nxd", str(tmp_path / "hf"), str(tmp_path / "run" / "step_1")])
    assert "left out: tensors for multi-token prediction: model.layers.2." in capsys.readouterr().out

    fresh = random_model("deepseek-v3")
    with torch.no_grad():
        for tensor in fresh.state_dict().values():
            tensor.zero_()
    load_checkpoint(tmp_path / "hf", model=fresh)
    assert [] == differences(dict(model.state_dict()), dict(fresh.state_dict()))
    assert "left out, for multi-token prediction: model.layers.2." in caplog.text


def test_a_layer_is_of_a_kind_by_each_condition() -> None:
    """Alone and together; a list of all such layers replaces the others."""
    conditions = {"start": "first", "every": "step", "excluded": "not", "listed": "all"}
    (kind,) = find_mapping(document(conditions), {}).layer_kinds

    def layers(**config: Any) -> list[int]:
        return [layer for layer in range(6) if kind.includes(layer, Sizes(config))]

    assert [0, 1, 2, 3, 4, 5] == layers()
    assert [2, 3, 4, 5] == layers(first=2)
    assert [1, 3, 5] == layers(step=2)
    assert [3] == layers(first=2, step=2, **{"not": [5]})
    assert [0, 4] == layers(first=2, step=2, all=[0, 4])


def test_layer_types_have_one_for_each_layer() -> None:
    (kind,) = find_mapping(document({"layer_type": "full"}), {}).layer_kinds
    sizes = Sizes({"layer_types": ["full", "linear"], "num_hidden_layers": 2})
    assert [True, False] == [kind.includes(layer, sizes) for layer in range(2)]
    with pytest.raises(InvalidArgument, match=r"layer_types must be a list with an entry for each of 3 layers"):
        kind.includes(0, Sizes({"layer_types": ["full"], "num_hidden_layers": 3}))

    (kind,) = find_mapping(document({"layer_type": "full", "every": "interval"}), {}).layer_kinds
    assert [False, True] == [kind.includes(layer, Sizes({"interval": 2})) for layer in range(2)]
    both = Sizes({**sizes.config, "interval": 2})
    assert [True, False] == [kind.includes(layer, both) for layer in range(2)]


def document(kind: dict[str, Any], **changes: Any) -> dict[str, Any]:
    kinds = [{"tensors": ["h.{layer}."], **kind}]
    return {"format_version": 1, "name": "mine", "rules": [], "layer_kinds": kinds, **changes}


def test_a_mapping_extends_a_shipped_one() -> None:
    """Its rules replace those of the same tensors, and new ones stand with the layers'."""
    norm = {"nxd": "model.layers.{layer}.extra.weight", "hf": "model.layers.{layer}.extra.weight"}
    head = {"nxd": "lm_head.weight", "hf": "output.weight", "rows": "vocab", "dim": 0}
    llama = shipped_mappings()["llama"]
    mine = find_mapping(
        {
            "format_version": 1, "name": "mine", "extends": "llama", "without": ["model.layers.{layer}.self_attn.qkv_"],
            "rules": [norm, head],
        },
        {},
    )
    before = [rule.nxd.text for rule in llama.rules if ".qkv_" not in rule.nxd.text]
    place = before.index("model.norm.weight")
    assert [*before[:place], norm["nxd"], *before[place:]] == [rule.nxd.text for rule in mine.rules]
    assert ["output.weight"] == [rule.members[0].name.text for rule in mine.rules if rule.nxd.text == "lm_head.weight"]
    assert (llama.tied, llama.ignored, ()) == (mine.tied, mine.ignored, mine.model_types)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"extends": "lama"}, r"extends 'lama', expected one of .*llama"),
        ({"extends": "llama", "without": ["model.layer."]}, r"without 'model\.layer\.', with which no rule .* begins"),
        ({"layer_kinds": [{"tensors": ["h.{layer}."]}]}, r"layer_kinds 0: needs a condition, and tensors or others"),
        ({"layer_kinds": [{"start": "first"}]}, r"needs a condition, and tensors or others"),
        ({"layer_kinds": [{"start": "first", "tensors": "h."}]}, r"'h\.' must have the placeholder \{layer\}"),
        ({"layer_kinds": [{"start": "first", "tensors": "h.{layer}.", "last": 1}]}, r"unknown \['last'\]"),
        ({"rules": [{"nxd": "w", "hf": "w", "units": "heads"}]}, r"units must be one of .*, with dim"),
        ({"rules": [{"nxd": "w", "hf": "w", "dim": 0, "units": "ears"}]}, r"units must be one of "),
    ],
)
def test_a_malformed_document_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        load_mapping({"format_version": 1, "name": "mine", "rules": [], **changes}, "mine.json", shipped_mappings())
