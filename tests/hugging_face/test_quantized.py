"""gpt-oss in 4 bits (MXFP4), as openai/gpt-oss has it: imported and loaded in bfloat16, as transformers makes it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nxd_ckpt import convert, diff_checkpoints, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.layouts import dequantizing
from nxd_ckpt.layouts.dequantizing import dequantized_mxfp4
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.hugging_face.reference import Model, State
from tests.hugging_face.saved import differences, live, weights, write_config, write_files
from tests.migrate.dcp_directory import from_dcp

EXPERTS, HIDDEN, WIDE, LAYERS = 2, 64, 32, 1
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
}  # fmt: skip
HELD = {"gate_up_proj": (2 * WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}
"""Outputs and inputs of what is quantized."""


def write_quantized(path: Path) -> State:
    """Files as on the hub, every byte random and scales of all sizes; the state that transformers makes of them."""
    import transformers

    torch.manual_seed(3)
    config = transformers.GptOssConfig(**SIZES, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config)
    plain = {name: torch.randn_like(tensor) for name, tensor in model.to(torch.bfloat16).state_dict().items()}
    files: State = dict(plain)
    for layer in range(LAYERS):
        for name, (out, inner) in HELD.items():
            at = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = torch.randint(256, (EXPERTS, out, inner // 32, 16), dtype=torch.uint8)
            scales = torch.randint(110, 140, (EXPERTS, out, inner // 32), dtype=torch.uint8)
            del files[at]
            files |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
            plain[at] = convert_moe_packed_tensors(blocks, scales)
    write_files(path, {**config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}, files)
    return plain


def test_weights_of_4_bits_are_imported_and_loaded_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what transformers makes of them, cut for the ranks of a job, in parts of a few groups; an export's
    config.json no longer says that weights are quantized."""
    monkeypatch.setattr(dequantizing, "_GROUPS", 7)
    expected = write_quantized(tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "run" / "step_0", to="tag", names="nxd", dp=2, tp=2, ep=2, fuse_qkv=True)
    convert(tmp_path / "run" / "step_0", tmp_path / "out", to="hf", config=tmp_path / "hub")
    assert [] == differences(expected, weights(tmp_path / "out"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())

    model = live({name: torch.zeros_like(tensor) for name, tensor in expected.items()})
    load_checkpoint(tmp_path / "hub", model=model)
    assert [] == differences(expected, dict(model.state_dict()))


def test_weights_of_4_bits_are_migrated_in_bfloat16(tmp_path: Path) -> None:
    """To every form, in one pass; TorchTitan's module has the last two dimensions of experts swapped."""
    expected = write_quantized(tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "dcp", names="hf", to="dcp")
    assert [] == differences({f"model.{name}": each for name, each in expected.items()}, from_dcp(tmp_path / "dcp"))
    convert(tmp_path / "hub", tmp_path / "run" / "step_0", names="hf", to="tag")
    fresh: State = {}
    load_checkpoint(tmp_path / "run", model=fresh)
    assert [] == differences(expected, fresh)
    convert(tmp_path / "hub", tmp_path / "titan", to="torchtitan")
    moved, experts = from_dcp(tmp_path / "titan" / "step-0"), "layers.0.moe.routed_experts.inner_experts"
    named = {"mlp1_weight_EGD": "gate_up_proj", "mlp2_weight_EDF": "down_proj"}
    swapped = {name: expected[f"model.layers.0.mlp.experts.{name}"].mT for name in named.values()}
    assert [] == differences(swapped, {name: moved[f"{experts}.{titan}"] for titan, name in named.items()})


def test_every_number_is_that_of_transformers() -> None:
    """All bytes with all scales, those that overflow too."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).repeat(1, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales)[0].T.reshape(-1, 32)
    found = dequantized_mxfp4(blocks.reshape(-1, 16), scales.flatten())
    assert torch.equal(expected.contiguous().view(torch.int16), found.view(torch.int16))


@pytest.mark.parametrize(
    ("part", "shape", "dtype"),
    [
        ("scales", (EXPERTS, HIDDEN, 2), torch.uint8),
        ("blocks", (EXPERTS, HIDDEN, 1, 8), torch.uint8),
        ("blocks", (EXPERTS, HIDDEN, 16), torch.uint8),
        ("scales", (EXPERTS, HIDDEN, 1), torch.int8),
    ],
)
def test_another_kind_of_quantization_is_refused(
    tmp_path: Path, part: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    write_quantized(tmp_path / "hub")
    files = load_file(tmp_path / "hub" / "model.safetensors")
    files[f"model.layers.0.mlp.experts.down_proj_{part}"] = torch.zeros(shape, dtype=dtype)
    save_file(files, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MalformedFile, match=r"\.down_proj_blocks is uint8 .* expected MXFP4, .* with transformers"):
        convert(tmp_path / "hub", tmp_path / "run" / "step_0", to="tag", names="nxd")
    plain = {"model.layers.0.mlp.experts.down_proj": torch.zeros(EXPERTS, WIDE, HIDDEN)}
    save_file({**files, **plain}, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MalformedFile, match=r"\.down_proj itself and quantized, as .*\.down_proj_blocks"):
        convert(tmp_path / "hub", tmp_path / "run" / "step_0", to="tag", names="nxd")
    assert not (tmp_path / "run" / "step_0").exists()


MODEL = Model(layers=1, heads=2, kv_heads=2, head_dim=4, intermediate=8, vocab=16)
Q = "model.layers.0.self_attn.q_proj"


def plain() -> State:
    return {name: torch.ones_like(tensor) for name, tensor in MODEL.state().items()}


FP8 = {f"{Q}.weight": torch.full((8, 8), 100.0).to(torch.float8_e4m3fn)}
INT8 = {f"{Q}.weight": torch.full((8, 8), 100, dtype=torch.int8)}


def companion(name: str) -> State:
    return {f"{Q}.{name}": torch.ones(1)}


CASES = [
    ({"quantization_config": {"quant_method": "modelopt"}}, FP8 | companion("weight_scale"), "by modelopt"),
    ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, {}, "by gptq"),
    ({"compression_config": {"format": "int-quantized"}}, INT8, "by compressed-tensors"),
    ({"quantization_config": {"load_in_8bit": True}}, INT8 | companion("SCB"), "by bitsandbytes"),
    ({}, FP8 | companion("weight_scale_inv"), rf"holds {Q}.weight_scale_inv"),
    *[({}, companion(name), rf"holds {Q}.{name}") for name in ("weight_packed", "qweight", "qzeros", "SCB")],
    ({}, FP8, rf"{Q}.weight is float8_e4m3fn"),
    ({}, INT8, rf"{Q}.weight is int8"),
    (None, companion("weight_scale"), rf"holds {Q}.weight_scale"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, companion("weight_scale"), rf"holds {Q}.weight_scale"),
]


@pytest.mark.parametrize(("config", "tensors", "text"), CASES)
def test_quantized_weights_are_refused(
    tmp_path: Path, config: dict[str, Any] | None, tensors: State, text: str
) -> None:
    hub = tmp_path / "hub"
    write_files(hub, {**MODEL.config, **(config or {})}, plain() | tensors)
    for strict in (True, False):
        live = {name: tensor.clone() for name, tensor in plain().items()}
        with pytest.raises(UnsupportedState, match=text):
            load_checkpoint(hub, model=live, strict=strict)
        assert all(torch.equal(live[name], tensor) for name, tensor in plain().items())
    source, options = hub, dict[str, Any]()
    if config is None:
        (hub / "config.json").rename(tmp_path / "config.json")
        source, options = hub / "model.safetensors", {"config": tmp_path / "config.json"}
    with pytest.raises(UnsupportedState, match=text):
        convert(source, tmp_path / "run" / "step_0", to="tag", names="nxd", **options)
    assert not (tmp_path / "run" / "step_0").exists()


def test_a_config_of_quantized_weights_is_refused_for_others(tmp_path: Path) -> None:
    """Sizes that are taken from another config.json do not hide that the weights are quantized."""
    config = write_files(tmp_path, {**MODEL.config, "quantization_config": {"quant_method": "awq"}}, plain())
    with pytest.raises(UnsupportedState, match="by awq"):
        convert(tmp_path / "model.safetensors", tmp_path / "run" / "s", to="tag", names="nxd", config=config)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "float8_e4m3fn"), (torch.int8, "int8")])
def test_quantized_weights_of_a_tag_are_not_exported(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    """Their scales are in no file of the export, whatever dtype they are cast to."""
    config = write_config(tmp_path, MODEL.config)
    save_checkpoint(tmp_path / "run", "s", plain() | {f"{Q}.weight": torch.ones(8, 8).to(dtype)})
    for cast in (None, "bfloat16"):
        with pytest.raises(UnsupportedState, match=f"{Q}.weight is {name}"):
            convert(tmp_path / "run" / "s", tmp_path / "out", to="hf", config=config, dtype=cast)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("sections", [(), ("text_config",), ("thinker_config", "text_config")])
def test_no_section_of_an_export_says_that_it_is_quantized(tmp_path: Path, key: str, sections: tuple[str, ...]) -> None:
    """What is written is plain. Everything else in those sections stays."""
    inner: dict[str, Any] = {key: {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, "rope_theta": 1.5}
    for section in reversed(sections):
        inner = {section: inner}
    config = write_config(tmp_path, {**MODEL.config, **inner})
    save_checkpoint(tmp_path / "run", "s", plain())
    convert(tmp_path / "run" / "s", tmp_path / "out", to="hf", config=config)
    text = (tmp_path / "out" / "config.json").read_text()
    assert key not in text
    assert "modules_to_not_convert" not in text
    assert '"rope_theta": 1.5' in text
    load_checkpoint(tmp_path / "out", model=plain())


def test_whole_numbers_of_a_live_model_are_no_quantized_weights(tmp_path: Path) -> None:
    """A buffer of int8 comes back from plain files; a weight that has this dtype in the files alone is refused."""
    state = {"table": torch.arange(4, dtype=torch.int8), "mask": torch.tensor([1, 0], dtype=torch.uint8)}
    save_checkpoint(tmp_path / "run", "s", state | {"weight": torch.ones(2)})
    convert(tmp_path / "run" / "s", tmp_path / "out", to="files", use_safetensors=True)
    convert(tmp_path / "out", tmp_path / "again" / "s", to="tag", names="own")
    for source in (tmp_path / "out", tmp_path / "out" / "model.safetensors", tmp_path / "again"):
        live = {name: torch.zeros_like(tensor) for name, tensor in state.items()} | {"weight": torch.zeros(2)}
        load_checkpoint(source, model=live)
        assert all(torch.equal(live[name], tensor) for name, tensor in state.items())
        assert not diff_checkpoints(open_checkpoint(tmp_path / "run"), open_checkpoint(source))
    assert () == verify_checkpoint(tmp_path / "out").problems
    live = {"table": torch.zeros(4), "mask": torch.zeros(2, dtype=torch.uint8), "weight": torch.zeros(2)}
    with pytest.raises(UnsupportedState, match="table is int8"):
        load_checkpoint(tmp_path / "out", model=live)


def test_a_quantized_weight_is_refused_beside_live_ones_of_its_dtype(tmp_path: Path) -> None:
    """It would be cast without its scale."""
    numbers = torch.ones(2).to(torch.float8_e4m3fn)
    save_file({"a": numbers, "b": numbers.clone()}, tmp_path / "model.safetensors")
    live = {"a": numbers.clone(), "b": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(UnsupportedState, match="b is float8_e4m3fn"):
        load_checkpoint(tmp_path, model=live)
