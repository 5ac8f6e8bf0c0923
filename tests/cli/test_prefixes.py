"""``nxd-ckpt inspect`` of a deep model: layers are taken together, and global tensors are told by prefix."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from nxd_ckpt import Topology
from nxd_ckpt.cli.text import group_names
from tests.cli.conftest import Run
from tests.interop.saving import save_as_every_rank


def test_names_that_differ_in_numbers_are_one_line() -> None:
    """Ranges are shown as ranges; gaps, and numbers that do not go with all others, as a star; other forms apart."""
    layers = [(f"layers.{layer}.up", "f32") for layer in range(12)]
    experts = [(f"moe.{layer}.{expert}.w", "f32") for layer in range(2) for expert in range(4)]
    gaps = [(f"gap.{layer}.w", "f32") for layer in (0, 2)] + [("ragged.0.0", "x"), ("ragged.1.1", "x")]
    odd = [("layers.12.up", "bf16"), ("conv1d.weight", "x"), ("conv2d.weight", "x"), ("a*b.7", "x")]
    assert group_names([*layers, *experts, *gaps, *odd]) == [
        ("layers.{0..11}.up", 12, "f32"),
        ("moe.{0..1}.{0..3}.w", 8, "f32"),
        ("gap.*.w", 2, "f32"),
        ("ragged.*.*", 2, "x"),
        ("layers.12.up", 1, "bf16"),
        ("conv1d.weight", 1, "x"),
        ("conv2d.weight", 1, "x"),
        ("a*b.7", 1, "x"),
    ]


def test_a_model_of_a_thousand_layers_is_a_page(run: Run, tmp_path: Path) -> None:
    """In the table of parameters and by prefix; the document counts everything."""
    model = {f"layers.{layer}.{name}": torch.ones(2, 3) for layer in range(1000) for name in ("up", "down")}
    model["norm"] = torch.ones(3)
    save_as_every_rank(tmp_path, "deep", [Topology()], lambda _: {"model": model})

    assert "  layers.{0..999}.up    float32  [2, 3]  [2, 3]  whole  ?" in run("inspect", tmp_path).out.splitlines()
    lines = run("inspect", tmp_path, "--by-prefix").out.splitlines()
    assert "  model/layers.{0..999}.up    1000     float32  [2, 3]  23.4 KiB  whole" in lines
    assert 6 == len(lines)
    assert lines[:5] == run("inspect", tmp_path, "--by-prefix", "0", "--largest", "2").out.splitlines()
    largest = run("inspect", tmp_path, "--largest", "2", "--json").document["prefixes"]
    assert ["model/layers.0.up", "model/layers.0.down"] == [one["prefix"] for one in largest], "single tensors"
    document = run("inspect", tmp_path, "--by-prefix", "2", "--largest", "1", "--json").document
    assert [("model/layers.", 2000, 48000, [2, 3])] == [
        (one["prefix"], one["tensors"], one["nbytes"], one["shape"]) for one in document["prefixes"]
    ]


def test_cuts_and_unknown_shapes_are_told(run: Run, examples: Path) -> None:
    """By prefix, with the sum of what is known, and nothing where a shape is not."""
    [model] = run("inspect", examples, "cut", "--by-prefix", "1", "--json").document["prefixes"]
    assert (9, None, ["float32"]) == (model["tensors"], model["nbytes"], model["dtypes"])
    assert {"whole", "dim 0 in 4", "unknown"} <= set(model["cuts"])
    total = run("inspect", examples, "cut", "--by-prefix", "1").out.splitlines()[1]
    assert total.endswith(f" without the {model['tensors_of_unknown_size']} whose cut, and so size, is not known")
    assert 0 < model["tensors_of_unknown_size"] < 9
    assert model["known_nbytes"] > 0


def test_groups_of_unknown_size_come_before_the_largest(run: Run, golden: Path) -> None:
    """NxD records no cut: each of them may be the largest."""
    tag = golden / "c_dp2_tp2_zero1_xser" / "ckpt"
    every, largest = (
        [group["nbytes"] for group in run("inspect", tag, *flags, "--json").document["prefixes"]]
        for flags in (["--by-prefix"], ["--by-prefix", "--largest", "2"])
    )
    sizes = sorted((nbytes for nbytes in every if nbytes is not None), reverse=True)
    assert len(sizes) > 2
    assert None in every
    assert [None] * every.count(None) + sizes[:2] == largest


def test_partitions_tell_what_the_tag_does_not(run: Run, golden: Path, tmp_path: Path) -> None:
    """Without them there is the shape, and the bytes, of one rank's part."""
    tag = golden / "c_dp2_tp2_zero1_xser" / "ckpt"
    unknown = [one for one in run("inspect", tag, "--json").document["parameters"] if one["global_shape"] is None]
    name, [rows, *rest] = unknown[0]["name"], unknown[0]["shape"]
    text = next(line for line in run("inspect", tag, "--largest", "1").out.splitlines() if f"model/{name} " in line)
    assert f"[{', '.join(map(str, [rows, *rest]))}] on a rank" in text
    assert "B on a rank" in text.replace("iB", "B")
    cuts = tmp_path / "cuts.json"
    cuts.write_text(json.dumps({name: {"partition_dim": 0, "num_partitions": 2}}))
    document = run("inspect", tag, "--largest", "1", "--partitions", cuts, "--json").document
    [parameter] = [one for one in document["parameters"] if one["name"] == name]
    assert ([2 * rows, *rest], "dim 0 in 2") == (parameter["global_shape"], parameter["cut"])
    assert f"model/{name}" not in [one["prefix"] for one in document["prefixes"] if one["nbytes"] is None]
