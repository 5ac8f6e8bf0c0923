"""Hugging Face tensors that hold several layers: what ranks get of them, and what is made of them again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nxd_ckpt import Topology, convert, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import IncompatibleState, InvalidArgument, KeyMismatch, ShapeMismatch, UnsupportedState
from nxd_ckpt.hugging_face.mapping import load_mapping
from nxd_ckpt.hugging_face.mappings import adapter_mapping, find_mapping
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.hugging_face.reference import State
from tests.hugging_face.saved import differences, live, weights, write_config, write_files
from tests.migrate.dcp_directory import from_dcp

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "head_dim": 2,
    "vocab_size": 6, "num_experts": 2,
}  # fmt: skip

QKV = ["h.{layer}.q", "h.{layer}.k", "h.{layer}.v"]
GATE_UP = ["h.{layer}.{expert}.gate", "h.{layer}.{expert}.up"]

MAPPING: dict[str, Any] = {
    "format_version": 1,
    "name": "mine",
    "packed": [
        {"hf": "h.{layer}.qkv", "parts": QKV, "heads": ["query", "kv", "kv"], "dim": 0},
        {"hf": "h.{layer}.moe", "parts": GATE_UP, "dim": 2, "stacked": "expert", "alternating": True},
        {"hf": "h.{layer}.rows", "parts": "h.{layer}.{expert}.rows", "stacked": "expert", "flat": True},
    ],
    "rules": [
        {"nxd": "h.{layer}.q", "hf": "h.{layer}.q", "heads": "query", "dim": 0},
        {"nxd": "h.{layer}.k", "hf": "h.{layer}.k", "heads": "kv", "dim": 0},
        {"nxd": "h.{layer}.v", "hf": "h.{layer}.v", "heads": "kv", "dim": 0},
        {"nxd": "h.{layer}.gate_up", "hf": GATE_UP, "dim": 2, "stacked": "expert"},
        {"nxd": "h.{layer}.rows", "hf": "h.{layer}.{expert}.rows", "dim": 2, "stacked": "expert", "transposed": True},
    ],
}

ATTENTION = {**MAPPING, "packed": MAPPING["packed"][:1], "rules": MAPPING["rules"][:3]}
"""Of q, k and v alone."""

HELD: dict[str, Callable[[State, int, int], torch.Tensor]] = {
    "h.0.q": lambda state, tp, ep: state["h.0.qkv"][:8].chunk(2)[tp],
    "h.0.k": lambda state, tp, ep: state["h.0.qkv"][8:12].chunk(2)[tp],
    "h.0.v": lambda state, tp, ep: state["h.0.qkv"][12:].chunk(2)[tp],
    "h.0.gate_up": lambda state, tp, ep: torch.cat(
        [state["h.0.moe"][ep : ep + 1, :, first::2].chunk(2, 2)[tp] for first in (0, 1)], 2
    ),
    "h.0.rows": lambda state, tp, ep: state["h.0.rows"].reshape(2, 4, 8)[ep : ep + 1].transpose(1, 2).chunk(2, 2)[tp],
}
"""What a rank of two tensor-parallel and two expert-parallel ones holds."""


def packed_state() -> State:
    """Every element another number."""
    shapes = {"h.0.qkv": (16, 8), "h.0.moe": (2, 8, 12), "h.0.rows": (8, 8)}
    return {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * number
        for number, (name, shape) in enumerate(shapes.items())
    }


def write_packed(path: Path, state: State) -> Path:
    write_files(path, CONFIG, state)
    return path


def held_by(state: State, tp_rank: int, ep_rank: int) -> State:
    return {name: find(state, tp_rank, ep_rank).contiguous() for name, find in HELD.items()}


@pytest.mark.parametrize("ranks", [(0, 0), (1, 1)], ids=str)
def test_a_rank_gets_its_share_of_every_part(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """As a conversion by hand with torch has it: by an import, and by a load of the directory itself."""
    state, (tp_rank, ep_rank) = packed_state(), ranks
    source = write_packed(tmp_path / "hf", state)
    convert(source, tmp_path / "run" / "step_0", to="tag", names="nxd", mapping=MAPPING, dp=2, tp=2, ep=2)
    topology = Topology(dp=2, tp=2, ep=2, tp_rank=tp_rank, dp_rank=ep_rank)
    expected = held_by(state, tp_rank, ep_rank)

    imported: State = {}
    load_checkpoint(tmp_path / "run", model=imported, topology=topology)
    assert [] == differences(expected, imported)

    model = live(expected)
    load_checkpoint(source, model=model, topology=topology, mapping=MAPPING)
    assert [] == differences(expected, dict(model.state_dict()))


def test_an_export_packs_them_again(tmp_path: Path) -> None:
    """And a dry run names tensors as files do."""
    state = packed_state()
    source = write_packed(tmp_path / "hf", state)
    done = convert(source, tmp_path / "run" / "step_0", to="tag", names="nxd", mapping=MAPPING, tp=2)
    assert {("h.0.qkv",), ("h.0.moe",), ("h.0.rows",)} == {tensor.made_of for tensor in done.tensors}

    planned = convert(
        tmp_path / "run" / "step_0", tmp_path / "out", to="hf", config=source, mapping=MAPPING, dry_run=True
    )
    assert {"h.0.qkv": ("h.0.q, h.0.k, h.0.v",), "h.0.moe": ("h.0.gate_up",), "h.0.rows": ("h.0.rows",)} == {
        tensor.name: tensor.made_of for tensor in planned.tensors
    }
    convert(tmp_path / "run" / "step_0", tmp_path / "out", to="hf", config=source, mapping=MAPPING)
    assert [] == differences(state, weights(tmp_path / "out"))


def whole_attention(state: State) -> State:
    """What a single rank holds of q, k and v."""
    return {f"h.0.{name}": torch.cat([HELD[f"h.0.{name}"](state, tp, 0) for tp in range(2)]) for name in "qkv"}


def trained(state: State, groups: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A live model of one rank after a step; in several groups, each parameter is in one of its own."""
    model = live(whole_attention(state))
    parameters = list(model.parameters())
    params = [{"params": [one], "lr": 0.1 * (number + 1)} for number, one in enumerate(parameters)]
    optimizer = torch.optim.AdamW(params if groups > 1 else parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return model, optimizer


def test_state_of_the_optimizer_is_packed_alike(tmp_path: Path) -> None:
    """Moments of q, k and v are those of the one tensor, which is in its param group once; so too after a migration."""
    model, optimizer = trained(packed_state())
    save_checkpoint(tmp_path / "run", "step_1", model, optimizer)
    source = write_config(tmp_path / "config", CONFIG)

    convert(tmp_path / "run" / "step_1", tmp_path / "out", to="hf", config=source, mapping=ATTENTION, optimizer=True)

    expected = torch.cat([optimizer.state[one]["exp_avg"] for one in model.parameters()])
    assert torch.equal(expected, load_file(tmp_path / "out" / "optimizer.safetensors")["h.0.qkv/exp_avg"])
    rest = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert [["h.0.qkv"]] == [group["params"] for group in rest["param_groups"]]
    assert {"h.0.qkv": {"step": 1.0}} == rest["state"]

    terms: dict[str, Any] = {"names": "hf", "config": source, "mapping": ATTENTION}
    convert(tmp_path / "run" / "step_1", tmp_path / "plain" / "step_1", to="tag", **terms)
    fresh: State = {}
    load_checkpoint(tmp_path / "plain", model=fresh)
    assert torch.equal(torch.cat(list(model.parameters())), fresh["h.0.qkv"])


def trained_in_part(state: State, steps: tuple[int, int, int]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A live model of one rank, whose q, k and v had so many gradients."""
    model = live(whole_attention(state))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(max(steps)):
        for parameter, count in zip(model.parameters(), steps, strict=True):
            parameter.grad = torch.rand_like(parameter) if step < count else None
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("steps", [(0, 2, 2), (2, 0, 0)])
def test_a_part_that_never_had_a_gradient_has_moments_of_zeros(tmp_path: Path, steps: tuple[int, int, int]) -> None:
    """As where its gradients were zeros, which the one tensor would have had."""
    model, optimizer = trained_in_part(packed_state(), steps)
    save_checkpoint(tmp_path / "run", "step_2", model, optimizer)
    options: dict[str, Any] = {"config": write_config(tmp_path / "config", CONFIG), "mapping": ATTENTION}
    convert(tmp_path / "run" / "step_2", tmp_path / "out", to="hf", optimizer=True, **options)
    saved = load_file(tmp_path / "out" / "optimizer.safetensors")
    for key in ("exp_avg", "exp_avg_sq"):
        parts = [optimizer.state[one].get(key, torch.zeros_like(one)) for one in model.parameters()]
        assert torch.equal(torch.cat(parts), saved[f"h.0.qkv/{key}"])
    rest = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert {"h.0.qkv": {"step": 2.0}} == rest["state"]
    convert(tmp_path / "run" / "step_2", tmp_path / "dcp", names="hf", to="dcp", **options)
    assert torch.equal(saved["h.0.qkv/exp_avg"], from_dcp(tmp_path / "dcp")["optim.state.h.0.qkv.exp_avg"])


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (lambda: trained(packed_state(), groups=3), r"h\.0\.qkv is one tensor .* h\.0\.k, are in different param g"),
        (lambda: trained_in_part(packed_state(), (2, 1, 2)), r"h\.0\.k, .* have made different numbers of steps"),
    ],
    ids=["param groups", "steps"],
)
def test_parts_that_differ_are_refused(tmp_path: Path, job: Callable[[], Any], message: str) -> None:
    """One tensor cannot have two learning rates, nor two numbers of steps."""
    save_checkpoint(tmp_path / "run", "step_1", *job())
    options: dict[str, Any] = {"config": write_config(tmp_path / "config", CONFIG), "mapping": ATTENTION}
    with pytest.raises(IncompatibleState, match=message):
        convert(tmp_path / "run" / "step_1", tmp_path / "out", to="hf", optimizer=True, **options)


def test_what_alternates_goes_to_every_form(tmp_path: Path) -> None:
    state = packed_state()
    source = write_packed(tmp_path / "hf", state)
    convert(source, tmp_path / "run" / "step_0", to="tag", names="nxd", mapping=MAPPING, dp=2, tp=2, ep=2)
    options: dict[str, Any] = {"config": source, "mapping": MAPPING}
    convert(tmp_path / "run" / "step_0", tmp_path / "plain" / "step_0", names="hf", to="tag", **options)
    fresh: State = {}
    load_checkpoint(tmp_path / "plain", model=fresh)
    assert [] == differences(state, fresh)
    assert not verify_checkpoint(tmp_path / "plain", "step_0").problems
    convert(tmp_path / "run" / "step_0", tmp_path / "dcp", names="hf", to="dcp", **options)
    assert [] == differences({f"model.{name}": tensor for name, tensor in state.items()}, from_dcp(tmp_path / "dcp"))


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("h.0.qkv", (18, 8), r"h\.0\.qkv: 18 elements along dimension 0 do not fit the parts h\.\{layer\}\.q, "),
        ("h.0.moe", (3, 8, 12), r"h\.0\.moe has shape \(3, 8, 12\), but by config.json it should hold 2 parts"),
        ("h.0.moe", (2, 8, 13), r"h\.0\.moe: 13 elements along dimension 2"),
        ("h.0.moe", (2, 8), r"h\.0\.moe has shape \(2, 8\), but its parts need at least 3 dimensions"),
        ("h.0.rows", (9, 8), r"h\.0\.rows has shape \(9, 8\), but by config.json it should hold 2 parts"),
    ],
)
def test_a_tensor_of_another_shape_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], complaint: str
) -> None:
    source = write_packed(tmp_path / "hf", {**packed_state(), name: torch.zeros(shape)})
    with pytest.raises(ShapeMismatch, match=complaint):
        convert(source, tmp_path / "run" / "step_0", to="tag", names="nxd", mapping=MAPPING)


def test_a_tensor_that_is_missing_is_named_as_in_files(tmp_path: Path) -> None:
    """In both directions, and not by the names of its parts."""
    state = packed_state()
    source = write_packed(tmp_path / "hf", {name: state[name] for name in ("h.0.moe", "h.0.rows")})
    with pytest.raises(KeyMismatch, match=r"tensors are missing: h\.0\.qkv, which every"):
        convert(source, tmp_path / "run" / "step_0", to="tag", names="nxd", mapping=MAPPING)
    save_checkpoint(tmp_path / "run", "step_1", whole_attention(state))
    with pytest.raises(KeyMismatch, match=r"lacks h\.0\.moe, h\.0\.rows \(2 tensors\)"):
        convert(tmp_path / "run" / "step_1", tmp_path / "out", to="hf", config=source, mapping=MAPPING)


def test_adapters_of_a_packed_layer_are_refused() -> None:
    """PEFT has one for the tensor, NxD one for each part."""
    with pytest.raises(UnsupportedState, match=r"'phi3' models cannot be exported: .*qkv_proj\.weight is one layer"):
        adapter_mapping(find_mapping("phi3", {}), {})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"parts": []}, "parts must name tensors"),
        ({"heads": ["query"]}, "one entry for each"),
        ({"heads": ["query", "kv", "value"]}, "heads must be 'query' or 'kv'"),
        ({"dim": None}, "several parts need dim"),
        ({"dim": -1}, "not the stacked one"),
        ({"alternating": True}, "alternating parts need dim, and cannot have heads"),
        ({"flat": True}, "flat needs stacked"),
        ({"parts": ["q", "k", "v"]}, "must have the placeholders \\['layer'\\]"),
        ({"hf": "qkv.{block}", "parts": ["q.{block}", "k.{block}", "v.{block}"]}, "must be one of the sizes"),
        ({"extra": 1}, "unknown \\['extra'\\]"),
    ],
)
def test_a_malformed_entry_is_refused(changes: dict[str, Any], complaint: str) -> None:
    entry = {key: value for key, value in {**MAPPING["packed"][0], **changes}.items() if value is not None}
    with pytest.raises(InvalidArgument, match=rf"mine: packed 0.*{complaint}"):
        load_mapping({**MAPPING, "packed": [entry]}, "mine")
