"""The text model of a multimodal one: imported, loaded and exported, in both orders of names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nxd_ckpt import convert, load_checkpoint, save_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import InvalidArgument, KeyMismatch
from tests.hugging_face.families import GROUPED, SIZES
from tests.hugging_face.reference import State
from tests.hugging_face.saved import differences, weights
from tests.migrate.dcp_directory import from_dcp

VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}
OF_LLAMA_4: dict[str, Any] = {
    "num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", "Gemma3TextConfig", {}, {"mm_tokens_per_image": 4}),
    "llama4": ("Llama4Config", "Llama4TextConfig", OF_LLAMA_4, {}),
    "mistral3": ("Mistral3Config", "MistralConfig", {}, {}),
    "llava": ("LlavaConfig", "LlamaConfig", {"tie_word_embeddings": True}, {}),
}
VISION_KINDS = {
    "gemma3": "SiglipVisionConfig", "llama4": "Llama4VisionConfig", "mistral3": "PixtralVisionConfig",
    "llava": "CLIPVisionConfig",
}
OLD, NEW = "language_model.model.", "model.language_model."


def written(path: Path, name: str, first: str) -> tuple[Any, State]:
    """The directory of a random model, with names in the order that begins with ``first``; its text model, all files'
    tensors."""
    whole, text, changes, more = CASES[name]
    torch.manual_seed(3)
    vision = {**VISION, "vision_output_dim": 16} if name == "llama4" else VISION
    config = getattr(transformers, whole)(
        text_config=getattr(transformers, text)(**{**SIZES, **GROUPED, **changes}).to_dict(),
        vision_config=getattr(transformers, VISION_KINDS[name])(**vision).to_dict(),
        **more,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(path)
    state = {}
    for at, tensor in weights(path).items():
        if first == NEW:
            at = at.replace(OLD, NEW).replace("language_model.lm_head.", "lm_head.")
        elif at.startswith(NEW) or at.startswith("lm_head."):
            at = at.replace(NEW, OLD) if at.startswith(NEW) else f"language_model.{at}"
        state[at] = tensor
    assert any(at.startswith(first) for at in state)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    names = {f"{first}": "model.", "language_model.lm_head." if first == OLD else "lm_head.": "lm_head."}
    inside = {new + at.removeprefix(old): state[at] for at in state for old, new in names.items() if at.startswith(old)}
    own = transformers.AutoModelForCausalLM.from_config(config.get_text_config())
    problems = own.load_state_dict(inside, strict=False)
    assert [] == problems.unexpected_keys
    assert {*problems.missing_keys} <= {"lm_head.weight"}
    own.tie_weights()
    return own, state


def zeros(model: Any) -> Any:
    """A model of the same kind whose values are others."""
    fresh = transformers.AutoModelForCausalLM.from_config(model.config)
    with torch.no_grad():
        for tensor in fresh.state_dict().values():
            tensor.zero_()
    return fresh


@pytest.mark.parametrize("first", [OLD, NEW])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(3)
def test_its_text_model_is_imported_exported_and_loaded(
    tmp_path: Path, name: str, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its config.json is that of the text model; the rest is left out, and named."""
    text, state = written(tmp_path / "hf", name, first)
    done = convert(tmp_path / "hf", tmp_path / "run" / "step_0", to="tag", names="nxd", tp=2)
    inside = (first, "language_model.lm_head." if first == OLD else "lm_head.")
    others = sorted(at for at in state if not at.startswith(inside))
    assert (f"tensors outside of the text model: {first_of(others)}",) == done.left_out

    convert(tmp_path / "run" / "step_0", tmp_path / "out", to="hf", config=tmp_path / "hf")
    assert text.config.model_type == json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert [] == differences(dict(text.state_dict()), dict(loaded.state_dict()))

    fresh = zeros(text)
    load_checkpoint(tmp_path / "hf", model=fresh)
    assert [] == differences(dict(text.state_dict()), dict(fresh.state_dict()))
    assert "left out, outside of the text model: " in caplog.text


def test_names_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By prefix= and key_mapping=, in all three directions, the optimizer too."""
    text, state = written(tmp_path / "hf", "mistral3", OLD)
    state["head"] = state.pop("language_model.lm_head.weight")
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    names: dict[str, Any] = {"prefix": "language_model.", "key_mapping": {"lm_head.weight": "head"}}

    fresh = zeros(text)
    load_checkpoint(tmp_path / "hf", model=fresh, **names)
    assert [] == differences(dict(text.state_dict()), dict(fresh.state_dict()))

    (tmp_path / "names.json").write_text(json.dumps(names["key_mapping"]))
    flags = ["--prefix", names["prefix"], "--key-mapping", str(tmp_path / "names.json")]
    tag = str(tmp_path / "run" / "step_0")
    assert 0 == main(["convert", "--to=tag", "--names=nxd", str(tmp_path / "hf"), tag, *flags])
    assert "left out: tensors outside of the text model: multi_modal_projector." in capsys.readouterr().out
    assert 0 == main(["convert", str(tmp_path / "hf"), str(tmp_path / "dcp"), "--names", "hf", "--to", "dcp", *flags])
    assert "left out: tensors outside of the text model: multi_modal_projector." in capsys.readouterr().out
    moved = {at.removeprefix("model."): tensor for at, tensor in from_dcp(tmp_path / "dcp").items()}
    assert [] == differences(dict(text.state_dict()), moved)

    optimizer = torch.optim.AdamW(text.parameters())
    text(torch.arange(8)[None]).logits.sum().backward()
    before = {at: tensor.clone() for at, tensor in text.state_dict().items()}
    optimizer.step()
    order = [[at for at, _ in text.named_parameters()]]
    save_checkpoint(tmp_path / "run", "step_1", before, optimizer, param_names=order)
    convert(tmp_path / "run" / "step_1", tmp_path / "out", to="hf", config=tmp_path / "hf", optimizer=True, **names)
    inside = {at: tensor for at, tensor in state.items() if at.startswith("language_model.") or at == "head"}
    assert [] == differences(inside, weights(tmp_path / "out"))
    assert "mistral3" == json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
    moments = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert torch.equal(moments["head/exp_avg"], optimizer.state[text.lm_head.weight]["exp_avg"])
    rest = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert "language_model.model.norm.weight" in rest["param_groups"][0]["params"]
    assert {*inside} == rest["state"].keys()


@pytest.mark.parametrize(
    ("names", "kind", "complaint"),
    [
        ({"prefix": "text."}, KeyMismatch, r"no name begins with prefix='text\.'; there are .*language_model\."),
        ({"key_mapping": {"lm_head.weight": "head"}}, KeyMismatch, r"key_mapping= names head, which it does not hold"),
        ({"key_mapping": {"a": "b", "c": "b"}}, InvalidArgument, r"'a' and 'c' would both be loaded from 'b'"),
        ({"prefix": 1}, InvalidArgument, r"prefix must be a string, found 1"),
    ],
)
def test_names_that_are_not_there_are_refused(
    tmp_path: Path, names: dict[str, Any], kind: type[Exception], complaint: str
) -> None:
    text, _ = written(tmp_path / "hf", "mistral3", OLD)
    fresh = zeros(text)
    with pytest.raises(kind, match=complaint):
        load_checkpoint(tmp_path / "hf", model=fresh, **names)
    assert not any(bool(tensor.any()) for tensor in fresh.state_dict().values())
    with pytest.raises(kind, match=complaint):
        convert(tmp_path / "hf", tmp_path / "run" / "step_0", to="tag", names="nxd", **names)
    assert not (tmp_path / "run" / "step_0").exists()
