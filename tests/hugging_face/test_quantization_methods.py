"""Quantized weights that cannot be dequantized here are refused by name: on load and import, whatever strict says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import convert, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import UnsupportedState
from tests.hugging_face.reference import Model, State
from tests.hugging_face.saved import write_config, write_files

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
    """The live model stays as it is, and no tag is made."""
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
