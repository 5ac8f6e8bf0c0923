"""``nxd-ckpt inspect``: everything that is known of one tag, and nothing that is not."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import nxd_ckpt
from nxd_ckpt import Topology
from nxd_ckpt.cli.text import group_names
from tests.cli.checkpoints import CUTS, GLOBAL, PLACES, held, whole
from tests.cli.conftest import Run
from tests.golden.checkpoints import CONFIGURATIONS, saved
from tests.interop.saving import save_as_every_rank


def document(run: Run, *arguments: str | Path) -> dict[str, Any]:
    outcome = run("inspect", *arguments, "--json")
    assert (0, "") == (outcome.code, outcome.err)
    return outcome.document


def bytes_on_disk(tag: Path, tensor: dict[str, Any]) -> bytes:
    with open(tag / tensor["file"], "rb") as stream:
        stream.seek(tensor["offset"])
        return stream.read(tensor["nbytes"])


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def test_what_the_manifest_says_is_shown(run: Run, examples: Path) -> None:
    """Of the latest tag, unless another is named: whose it is, on how many ranks, by which versions, how fast."""
    found = document(run, examples)
    manifest = json.loads((examples / "cut" / "manifest.json").read_bytes())
    assert ("cut", True, True, "nxd_ckpt") == tuple(found[key] for key in ("tag", "latest", "complete", "written_by"))
    for key in ("attempt", "versions", "timings", "parts"):
        assert manifest[key] == found[key]
    assert (8, True, {"dp": 2, "tp": 4, "pp": 1, "ep": 2}) == (
        found["world_size"],
        found["standard_rank_order"],
        found["topology"],
    )


@pytest.mark.parametrize("tag", ["z_plain", "zero1", "cut"])
def test_sizes_are_those_on_disk(run: Run, examples: Path, tag: str) -> None:
    """For each part the number of files and their bytes, markers left out."""
    expected: dict[str, dict[str, int]] = {}
    parts = {"optim": "optimizer", "manifest.json": "index", "scheduler.pt": "scheduler"}
    for path in (examples / tag).rglob("*"):
        if path.is_file() and path.name not in ("checkpoint", "done"):
            top = path.relative_to(examples / tag).parts[0]
            part = expected.setdefault(parts.get(top, top.removesuffix(".pt")), {"files": 0, "nbytes": 0})
            part["files"] += 1
            part["nbytes"] += path.stat().st_size
    assert expected == document(run, examples, tag)["sizes"]


def test_parameters_are_shown_with_their_cut(run: Run, examples: Path) -> None:
    """Local and global shape, the partition, and the same in words; no global shape where the cut is unknown."""
    found = {one["name"]: one for one in document(run, examples, "cut")["parameters"]}
    for name, (partition, words) in CUTS.items():
        expected = {
            "name": name,
            "dtype": "float32",
            "shape": list(held(name, PLACES[0]).shape),
            "global_shape": list(GLOBAL[name]) if partition.known else None,
            "partition": partition.to_json(),
            "cut": words,
            "trainable": None,
        }
        assert expected == found[name]
    rows = [re.split("  +", line.strip()) for line in run("inspect", examples, "cut").out.splitlines()]
    assert ["qkv", "float32", "[6, 2]", "[16, 2]", CUTS["qkv"][1], "?"] in rows


def test_the_optimizer_is_described(run: Run, examples: Path) -> None:
    """Kind, entries, counts and groups with their options, as the asked rank holds them."""
    found = document(run, examples, "zero1", "--rank", "1")["optimizer"]
    [group] = found.pop("param_groups")
    expected = {
        "kind": "zero1",
        "rank": 1,
        "parameters": 3,
        "parameters_with_state": 3,
        "entries": ["step", "exp_avg", "exp_avg_sq"],
        "master_weights": True,
        "names_known": True,
    }
    assert expected == found
    assert (3, 0.01, [0.9, 0.999]) == (group["parameters"], group["options"]["weight_decay"], group["options"]["betas"])
    text = run("inspect", examples, "zero1").out
    assert "optimizer of rank 0: zero1, 3 parameters, 3 with state\n" in text
    assert "state: step, exp_avg, exp_avg_sq; with master weights\n" in text
    assert None is document(run, examples, "cut")["optimizer"]
    trained = {one["name"]: one["trainable"] for one in document(run, examples, "zero1")["parameters"]}
    assert {"up.weight": True, "up.bias": True, "down.weight": True, "scale": False, "steps_seen": False} == trained


def test_user_content_is_shown_shortly(run: Run, examples: Path) -> None:
    """Key, type and one bounded line each: tensors by shape, deep and long values abridged."""
    found = document(run, examples, "z_plain")["user_content"]
    entries = {entry["key"]: (entry["type"], entry["value"]) for entry in found["entries"]}
    assert ("dict", None) == (found["type"], found["refused"])
    assert {"steps", "seen", "args", "5"} == entries.keys()
    assert ("int", "7") == entries["steps"]
    assert ("Tensor", "tensor int64 [3]") == entries["seen"]
    assert ("dict", "{'deep': {'er': {...}}, 'lr': 0.1}") == entries["args"]
    assert "..." in entries["5"][1]
    assert len(entries["5"][1]) <= 60


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_a_flat_state_dict_of_torch_dcp_has_a_model(run: Run, tmp_path: Path) -> None:
    """As TorchTitan saves: tensors at the top are the model, nested ones are content, and are called tensors."""
    state = {
        "norm.weight": torch.ones(3),
        "optimizer.state.norm.weight.exp_avg": torch.zeros(3),
        "optimizer.param_groups.norm.weight.lr": 0.1,
        "train_state": {"step": 3},
        "user_content": {"mean": torch.ones(2)},
    }
    save(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    found = document(run, tmp_path / "step-3")
    assert ["norm.weight"] == [parameter["name"] for parameter in found["parameters"]]
    content = {entry["key"]: (entry["type"], entry["value"]) for entry in found["user_content"]["entries"]}
    assert {"train_state": ("dict", "{'step': 3}"), "mean": ("Tensor", "tensor float32 [2]")} == content


def test_code_in_user_content_is_not_run(run: Run, tmp_path: Path) -> None:
    """What only trust_pickle would load is refused by name; the rest is shown, and that is no problem."""
    with nxd_ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save("one", {"w": torch.ones(2)}, user_content=Trap(tmp_path / "sprung"), trust_pickle=True)
    found = document(run, tmp_path / "run")
    assert "not plain data" in found["user_content"]["refused"] or "asks for" in found["user_content"]["refused"]
    assert ["w"] == [one["name"] for one in found["parameters"]]
    assert "user content: not shown: " in run("inspect", tmp_path / "run").out
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("tag", ["z_plain", "zero1", "cut"])
def test_tensors_lie_where_they_are_said_to(run: Run, examples: Path, tag: str) -> None:
    """For every rank, each tensor that it holds: file, offset and bytes lead to the values that it loads."""
    checkpoint = nxd_ckpt.open_checkpoint(examples, tag)
    for rank in range(checkpoint.topology.world_size):
        model = checkpoint.model_state(rank)
        found = document(run, examples, tag, "--tensors", "model/*", "--rank", str(rank))["tensors"]
        assert {f"model/{name}" for name in model} == {tensor["name"] for tensor in found}
        for tensor in found:
            live = model[tensor["name"].removeprefix("model/")]
            assert (str(live.dtype), list(live.shape)) == (f"torch.{tensor['dtype']}", tensor["shape"])
            assert raw(live) == bytes_on_disk(examples / tag, tensor)


def test_pieces_are_parts_of_the_global_tensor(run: Run, examples: Path) -> None:
    """What lies at a piece of the local tensor is what lies at its place in the global one, for every cut."""
    for rank, at in enumerate(PLACES):
        found = document(run, examples, "cut", "--tensors", "--rank", str(rank))["tensors"]
        assert list(CUTS) == [tensor["name"].removeprefix("model/") for tensor in found]
        for tensor in found:
            name = tensor["name"].removeprefix("model/")
            if name == "lost":
                assert tensor["pieces"] is None
                continue
            local = held(name, at)
            covered = 0
            for piece in tensor["pieces"]:
                here, there = (window(piece[start], piece["size"]) for start in ("local", "offset"))
                assert torch.equal(whole(name)[there], local[here])
                covered += local[here].numel()
            assert local.numel() == covered
    text = run("inspect", examples, "--tensors", "*qkv", "--rank", "1").out
    assert text.endswith("  [2:4, 0:2] [10:12, 0:2] [14:16, 0:2]\n")


def window(offset: list[int], size: list[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))


def test_only_matching_tensors_are_listed(run: Run, examples: Path) -> None:
    """The pattern is a shell's, on the whole name; without --tensors there is no list."""
    found = document(run, examples, "zero1", "--tensors", "optim/up.*/exp_avg")["tensors"]
    assert ["optim/up.weight/exp_avg", "optim/up.bias/exp_avg"] == [tensor["name"] for tensor in found]
    assert None is document(run, examples, "zero1")["tensors"]
    outcome = run("inspect", examples, "zero1", "--tensors", "model/up.wieght", "--json")
    assert (1, []) == (outcome.code, outcome.document["tensors"])
    said = "no tensor of this rank is called 'model/up.wieght' (did you mean 'model/up.weight'?)"
    assert said in outcome.document["problems"][0]


@pytest.mark.parametrize("form", ["{}/zero1", "{}/zero1/", "{}/../checkpoints/zero1"])
def test_the_path_may_be_the_tag_itself(
    run: Run, examples: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory above it is found; also of ``.``, inside a tag."""
    found = document(run, form.format(examples))
    assert (str(examples), "zero1", False) == (found["directory"], found["tag"], found["latest"])
    monkeypatch.chdir(examples / "zero1")
    assert ("zero1", "z_plain") == (document(run, ".")["tag"], document(run, "..", "z_plain")["tag"])


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.one_in(3)
def test_golden_tags_are_shown_as_far_as_files_tell(run: Run, golden: Path, name: str) -> None:
    """Names, dtypes and local shapes of all stages; cuts and global shapes where ranks hold the same."""
    golden_one = saved(golden, name)
    tag = golden_one.tags[-1]
    found = document(run, golden_one.directory, tag, "--tensors")
    first_of_stage = [
        rank for rank, at in enumerate(golden_one.config["rank_coords"]) if (at["dp"], at["tp"]) == (0, 0)
    ]
    live = {name: held for rank in first_of_stage for name, held in golden_one.held(tag, rank)["model"].items()}
    expected = {name: (str(held.dtype).removeprefix("torch."), list(held.shape)) for name, held in live.items()}
    assert expected == {one["name"]: (one["dtype"], one["shape"]) for one in found["parameters"]}
    grouped = document(run, golden_one.directory, tag, "--by-prefix")["prefixes"]
    cuts = Counter(one["cut"] for one in grouped if one["prefix"].startswith("model/") for _ in range(one["tensors"]))
    assert cuts == Counter(one["cut"] for one in found["parameters"]), "both views say the same"
    alone = golden_one.config["tp"] == golden_one.config["ep"] == 1
    assert alone == ("unknown" not in {one["cut"] for one in found["parameters"]})
    assert {None} == {one["trainable"] for one in found["parameters"]}
    optimizer, kept = found["optimizer"], golden_one.held(tag, 0)["optimizer"]
    assert list(map(len, (group["params"] for group in kept["param_groups"]))) == [
        group["parameters"] for group in optimizer["param_groups"]
    ]
    assert golden_one.config["master_in_ckpt"] == optimizer["master_weights"]
    assert {"step", "exp_avg", "exp_avg_sq"} == set(optimizer["entries"])
    assert (None, None, {}) == (found["attempt"], found["world_size"], found["versions"])


def test_a_lost_index_does_not_hide_the_rest(run: Run, copied: Path) -> None:
    """What needs it is missing, the problem says why, and the exit code tells scripts."""
    index = copied / "zero1" / "index" / "dp_rank_00_tp_rank_00_pp_rank_00.json"
    index.unlink()
    outcome = run("inspect", copied, "zero1", "--tensors", "--json")
    found = outcome.document
    assert 1 == outcome.code
    assert [f"{index} is missing: the tag lost files since it was saved"] == found["problems"]
    assert (None, None, 5) == (found["optimizer"], found["tensors"], len(found["parameters"]))
    assert f"problem: {found['problems'][0]}\n" in run("inspect", copied, "zero1", "--tensors").out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("absent",), "no tag 'absent'"),
        (("zero1/model",), "not a path"),
        (("zero1", "--rank", "2"), "rank 2 is not in [0, 2)"),
        (("zero1", "--rank", "-1"), "rank -1 is not in [0, 2)"),
    ],
)
def test_a_wrong_tag_or_rank_is_an_error(run: Run, examples: Path, arguments: tuple[str, ...], complaint: str) -> None:
    outcome = run("inspect", examples, *arguments)
    assert (1, "") == (outcome.code, outcome.out)
    assert complaint in outcome.err


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


def test_cuts_and_unknown_shapes_are_told(run: Run, examples: Path) -> None:
    """By prefix, with the sum of what is known, and a rank's part where a shape is not."""
    groups = run("inspect", examples, "cut", "--by-prefix", "--json").document["prefixes"]
    assert 9 == sum(group["tensors"] for group in groups)
    assert {"whole", "dim 0 in 4", "unknown"} <= {group["cut"] for group in groups}
    unknown = sum(group["tensors"] for group in groups if group["nbytes"] is None)
    total = run("inspect", examples, "cut", "--by-prefix").out.splitlines()[1]
    assert total.endswith(f" without the {unknown} whose cut, and so size, is not known")
    assert 0 < unknown < 9


def test_partitions_tell_what_the_tag_does_not(run: Run, golden: Path, tmp_path: Path) -> None:
    """Without them there is the shape, and the bytes, of one rank's part."""
    tag = golden / "c_dp2_tp2_zero1_xser" / "ckpt"
    unknown = [one for one in run("inspect", tag, "--json").document["parameters"] if one["global_shape"] is None]
    name, [rows, *rest] = unknown[0]["name"], unknown[0]["shape"]
    text = next(line for line in run("inspect", tag, "--by-prefix").out.splitlines() if f"model/{name} " in line)
    assert f"[{', '.join(map(str, [rows, *rest]))}] on a rank" in text
    assert "B on a rank" in text.replace("iB", "B")
    cuts = tmp_path / "cuts.json"
    cuts.write_text(json.dumps({name: {"partition_dim": 0, "num_partitions": 2}}))
    document = run("inspect", tag, "--by-prefix", "--partitions", cuts, "--json").document
    [parameter] = [one for one in document["parameters"] if one["name"] == name]
    assert ([2 * rows, *rest], "dim 0 in 2") == (parameter["global_shape"], parameter["cut"])
    assert f"model/{name}" not in [one["prefix"] for one in document["prefixes"] if one["nbytes"] is None]
