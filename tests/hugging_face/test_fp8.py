"""Weights of 8 bits (FP8), as DeepSeek, Qwen and Mistral write them, are read as plain numbers."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_loader import load

from nxd_ckpt import Topology, convert, load_checkpoint
from nxd_ckpt.core.box import Box
from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.layouts import dequantizing
from nxd_ckpt.layouts.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.layouts.quantization import quantization_of
from nxd_ckpt.storage.urls import open_storage
from tests.formats.assemblies import read_leaf
from tests.hugging_face.families import random_model
from tests.hugging_face.reference import State
from tests.hugging_face.saved import differences, live, weights, write_config, write_files
from tests.support.processes import run_program

BLOCK = 16


def numbers(*shape: int) -> torch.Tensor:
    """Every number of 8 bits but NaN, in turn."""
    values = (torch.arange(int(torch.Size(shape).numel())) * 7 + 3) % 254
    return torch.where(values > 126, values + 1, values).to(torch.uint8).view(torch.float8_e4m3fn).reshape(shape)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = ((torch.arange(int(torch.Size(shape).numel())) * 37) % 11 + 1).float() / 7
    return values.to(dtype).reshape(shape)


def fine_grained(block: Any = (BLOCK, BLOCK), dtype: str = "bfloat16") -> dict[str, Any]:
    """A config.json as of DeepSeek."""
    about = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    return {"torch_dtype": dtype, "quantization_config": about}


def opened(path: Path, config: dict[str, Any], state: State) -> HuggingFaceDirectory:
    write_files(path, config, state)
    directory = HuggingFaceDirectory(open_storage(path))
    directory.dequantize(quantization_of(directory.config, directory.where))
    return directory


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


POWERS = (torch.arange(12) + 120).to(torch.uint8).view(torch.float8_e8m0fnu).reshape(3, 4)


@pytest.mark.parametrize(
    ("config", "shape", "scale", "expected"),
    [
        (fine_grained(), (48, 64), scales(3, 4), "f04366126b8987e8"),
        (fine_grained(dtype="float32"), (48, 64), scales(3, 4), "0069bfb72e644931"),
        (fine_grained(None), (48, 64), scales(), "8a94044f910a996e"),
        (fine_grained(), (48, 64), POWERS, "5cf31988f7afab7d"),
    ],
)
def test_numbers_are_those_of_the_quantizers_own_code(
    tmp_path: Path, config: dict[str, Any], shape: tuple[int, ...], scale: torch.Tensor, expected: str
) -> None:
    """Digests of the results of transformers 5.24.0 (Fp8Dequantize)."""
    directory = opened(tmp_path, config, {"x.weight": numbers(*shape), "x.weight_scale_inv": scale})
    assert ["x.weight"] == directory.names
    assert expected == digest(read_leaf(directory.tensor("x.weight"), directory.files.read_ranges))


def spread(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """One scale for each element; blocks at the edges are cut off, as by DeepSeek's weight_dequant."""
    wide = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]


@given(data=st.data())
def test_any_part_is_that_of_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Of matrices and stacks of them, with cut-off blocks at the edges, in groups of a few numbers."""
    path = tmp_path_factory.mktemp("part")
    size = st.integers(1, 9)
    shape = tuple(data.draw(st.lists(size, min_size=2, max_size=3)))
    block = data.draw(st.tuples(size, size))
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    state = {"x": numbers(*shape), "x_scale_inv": scales(*grid)}
    whole = (state["x"].float() * spread(state["x_scale_inv"], shape, block)).bfloat16()
    bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantizing, "_ELEMENTS", data.draw(st.integers(1, 20)))
        directory = opened(path, fine_grained(list(block)), state)
        box = Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
        part = Assembly.of(directory.tensor("x")).within(box)
        assert torch.equal(whole[tuple(slice(*each) for each in bounds)], read_leaf(part, directory.files.read_ranges))


def quantized(state: State, config: dict[str, Any], chosen: Callable[[str], bool]) -> tuple[State, State]:
    """The tensors of files with those that are ``chosen`` in blocks of 8 bits, and all of them as they are read."""
    files: State = {}
    plain: State = {}
    for name, tensor in state.items():
        files[name] = plain[name] = tensor.bfloat16()
        if chosen(name):
            rows, columns = tensor.shape
            files[name] = numbers(rows, columns)
            scale = files[f"{name}_scale_inv"] = scales(-(-rows // BLOCK), -(-columns // BLOCK))
            plain[name] = (files[name].float() * spread(scale, (rows, columns), (BLOCK, BLOCK))).bfloat16()
    return files, plain


@pytest.mark.parametrize("family", ["qwen3-moe-dense-layers", "deepseek-v3"])
def test_a_model_of_8_bits_is_imported_and_loaded(tmp_path: Path, family: str) -> None:
    """Cut for the ranks of a job, fused and stacked; an export's config.json no longer says that it is quantized."""
    model = random_model(family)
    config = {**model.config.to_dict(), **fine_grained(), "dtype": "bfloat16"}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files, plain = quantized(state, config, lambda name: "proj" in name and name.endswith(".weight"))
    files["model.layers.0.self_attn.o_proj.activation_scale"] = torch.ones(())
    hub = tmp_path / "hub"
    write_config(hub, config)
    halves = dict(list(files.items())[::2]), dict(list(files.items())[1::2])  # scales in other files than their numbers
    for number, half in enumerate(halves):
        save_file(half, hub / f"model-0000{number + 1}-of-00002.safetensors", metadata={"format": "pt"})
    places = {name: f"model-0000{number + 1}-of-00002.safetensors" for number in (0, 1) for name in halves[number]}
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    convert(hub, tmp_path / "run" / "step_0", to="tag", names="nxd", dp=2, tp=2, ep=2, pp=2)
    convert(tmp_path / "run" / "step_0", tmp_path / "out", to="hf", config=hub)
    assert [] == differences(plain, weights(tmp_path / "out"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())

    convert(hub, tmp_path / "dcp", names="hf", to="dcp")
    held = {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
    load({"model": held}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert [] == differences(plain, held)

    for dtype in (torch.bfloat16, torch.float32):
        target = live(plain, dtype=dtype)
        load_checkpoint(hub, model=target)
        exact = {name: tensor.to(dtype) for name, tensor in plain.items()}
        for name in plain if dtype is torch.float32 else ():
            if f"{name}_scale_inv" in files:
                scale = spread(files[f"{name}_scale_inv"], tuple(plain[name].shape), (BLOCK, BLOCK))
                exact[name] = files[name].float() * scale
        assert [] == differences(exact, dict(target.state_dict()))


def test_the_text_model_of_a_multimodal_one_is_loaded(tmp_path: Path) -> None:
    """The whole's config.json says how it is quantized, and a section which text model it is."""
    model = random_model("qwen3")
    files, plain = quantized(dict(model.state_dict()), {}, lambda name: "_proj.weight" in name)
    write_files(tmp_path, {"model_type": "mine_vl", "text_config": model.config.to_dict(), **fine_grained()}, files)
    target = live(plain)
    load_checkpoint(tmp_path, model=target)
    assert [] == differences(plain, dict(target.state_dict()))


def test_ranks_read_their_parts(tmp_path: Path) -> None:
    """Cut by columns and by rows; and float32 that an import asks for is not rounded before."""
    state = {name: numbers(32, 32) for name in ("row.weight", "column.weight")}
    state |= {f"{name}_scale_inv": scales(2, 2) for name in list(state)}
    opened(tmp_path / "hub", fine_grained(), state)
    rules = [{"nxd": f"{name}.weight", "hf": f"{name}.weight", "dim": dim} for name, dim in (("row", 1), ("column", 0))]
    mapping = {"format_version": 1, "name": "mine", "rules": rules}
    convert(tmp_path / "hub", tmp_path / "run" / "s", to="tag", names="nxd", tp=2, mapping=mapping, dtype="float32")
    exact = numbers(32, 32).float() * spread(scales(2, 2), (32, 32), (BLOCK, BLOCK))
    for rank in (0, 1):
        model = {"row.weight": torch.zeros(32, 16), "column.weight": torch.zeros(16, 32)}
        load_checkpoint(tmp_path / "run", "s", model=model, topology=Topology(tp=2, tp_rank=rank))
        assert torch.equal(exact.chunk(2, 1)[rank], model["row.weight"])
        assert torch.equal(exact.chunk(2, 0)[rank], model["column.weight"])
        direct = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        load_checkpoint(tmp_path / "hub", model=direct, mapping=mapping, topology=Topology(tp=2, tp_rank=rank))
        assert [] == differences(model, direct)


NAME = "model.layers.0.self_attn.q_proj.weight"
SHAPE = (64, 32)


@pytest.mark.parametrize(
    ("name", "tensor", "kind", "text"),
    [
        (f"{NAME}_scale_inv", None, UnsupportedState, rf"{NAME} is float8_e4m3fn, .*no file has {NAME}_scale_inv"),
        (NAME, None, UnsupportedState, rf"holds {NAME}_scale_inv, .* no weight of that name"),
        (f"{NAME}_scale_inv", scales(4, 4), MalformedFile, rf"{NAME} is .*\(4, 4\); expected scales \(4, 2\)"),
        (f"{NAME}_scale_inv", scales(4), MalformedFile, rf"{NAME} is .*\(4,\); expected scales \(4, 2\)"),
        (NAME, torch.ones(SHAPE), MalformedFile, rf"{NAME} is float32 .* expected FP8 numbers"),
        (NAME, numbers(32), UnsupportedState, rf"{NAME} is float8_e4m3fn \(32,\).* at least two dimensions"),
        (f"{NAME}_scale_inv", scales(4, 2).int(), UnsupportedState, rf"{NAME} is .* scales int32"),
        ("model.norm.weight_packed", torch.ones(4), UnsupportedState, r"holds model\.norm\.weight_packed"),
        ("model.layers.0.mlp.experts.down_proj_scales", torch.ones(4), UnsupportedState, r"holds .*down_proj_scales"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, kind: type[Exception], text: str
) -> None:
    """By the tensor's name, whatever strict says; nothing changes, and no tag is made."""
    model = random_model("qwen3")
    files, plain = quantized(dict(model.state_dict()), {}, lambda each: "_proj.weight" in each)
    files |= {NAME: numbers(*SHAPE), f"{NAME}_scale_inv": scales(4, 2)}
    files = {each: one for each, one in {**files, name: tensor}.items() if one is not None}
    write_files(tmp_path / "hub", {**model.config.to_dict(), **fine_grained()}, files)
    for strict in (True, False):
        target = live({**plain, NAME: torch.zeros(SHAPE)})
        with pytest.raises(kind, match=text):
            load_checkpoint(tmp_path / "hub", model=target, strict=strict)
        assert all(torch.all(tensor == -1) for tensor in target.parameters())
    with pytest.raises(kind, match=text):
        convert(tmp_path / "hub", tmp_path / "run" / "s", to="tag", names="nxd", tp=2)
    assert not (tmp_path / "run" / "s").exists()


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        (fine_grained([16]), MalformedFile, r"a block must have .* found \[16\]"),
        (fine_grained([0, 16]), MalformedFile, r"a block must have .* found \[0, 16\]"),
        ({**fine_grained(), "text_config": fine_grained([8, 8])}, UnsupportedState, r"contradict each other"),
    ],
)
def test_other_descriptions_are_refused(
    tmp_path: Path, config: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        opened(tmp_path, config, {"x.weight": numbers(32, 32), "x.weight_scale": scales(1)})


def test_a_section_says_how_its_model_is_quantized(tmp_path: Path) -> None:
    """Numbers are read in the dtype that the section says."""
    config = {"text_config": {**fine_grained(), "dtype": "float32"}}
    directory = opened(tmp_path, config, {"x.weight": numbers(32, 32), "x.weight_scale_inv": scales(2, 2)})
    assert "float32" == directory.tensor("x.weight").dtype


GROWTH = """
import resource, sys
from nxd_ckpt import convert

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

mapping = {"format_version": 1, "name": "mine", "rules": [{"nxd": "x.weight", "hf": "x.weight", "dim": 1}]}
before = peak()
convert(sys.argv[1], sys.argv[2], to="tag", names="nxd", tp=2, mapping=mapping, durable=False)
print(peak() - before)
"""


def test_a_weight_is_never_whole_in_memory(tmp_path: Path) -> None:
    """Of 128 MiB in 8 bits, and 256 MiB in bfloat16."""
    state = {"x.weight": torch.zeros(16384, 8192, dtype=torch.uint8).view(torch.float8_e4m3fn)}
    opened(tmp_path / "hub", fine_grained([128, 128]), {**state, "x.weight_scale_inv": scales(128, 64)})
    growth = int(run_program(GROWTH, tmp_path / "hub", tmp_path / "run" / "s").stdout)
    assert growth < 200 * 2**20
