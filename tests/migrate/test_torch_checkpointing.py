"""Directories that the real torch_checkpointing 0.1.1 wrote (`tests.golden.write_torch_checkpointing`), without it."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import convert, dcp
from nxd_ckpt.cli.main import main
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, UnsafePickle

READ = [
    ("one", 1),
    ("one", 2),
    ("fsdp2", 1),
    ("fsdp2", 2),
    ("fsdp2_tp", 1),
    ("fsdp2_tp", 2),
    ("safetensors", 1),
    ("boxes", 1),
]
"""The library writes metadata.pkl beside a process's first save only; DTensors say themselves where they belong."""


def truth(root: Path, name: str) -> dict[str, Any]:
    return dict(torch.load(root / f"{name}.pt"))


def states_by_name(optimizer: dict[str, Any]) -> dict[str, Any]:
    names = optimizer["param_groups"][0]["param_names"]
    return {names[number]: entries for number, entries in optimizer["state"].items()}


def assert_equal(expected: Any, actual: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "step"), READ)
def test_it_becomes_a_tag(torch_checkpointing: Path, tmp_path: Path, name: str, step: int) -> None:
    """Model, optimizer and the rest are those that torch gathers, bit for bit, and a job goes on from the tag."""
    whole = truth(torch_checkpointing, name)
    done = convert(torch_checkpointing / name / f"step_{step}", tmp_path / "run" / "step", names="hf", to="tag")
    assert ("torch_checkpointing", step) == (
        done.writer,
        nxd_ckpt.load_checkpoint(tmp_path / "run")["train_state"]["step"],
    )
    model: dict[str, Any] = {}
    content = nxd_ckpt.load_checkpoint(tmp_path / "run", model=model)
    assert_equal(whole["model"], model)
    if "optimizer" in whole:
        assert_equal(whole["rng"], content["rng"])
        net = torch.nn.ModuleDict({"up": torch.nn.Linear(6, 10), "down": torch.nn.Linear(10, 3, bias=False)})
        adam = torch.optim.AdamW(net.named_parameters(), lr=9.0)
        nxd_ckpt.load_checkpoint(tmp_path / "run", model=net, optimizer=adam)
        assert_equal(states_by_name(whole["optimizer"]), states_by_name(adam.state_dict()))
        assert 1e-2 == adam.param_groups[0]["lr"]


@pytest.mark.parametrize(("name", "step"), READ)
def test_torch_loads_it(torch_checkpointing: Path, name: str, step: int) -> None:
    """By nxd_ckpt.dcp.load, into a state dict, without any conversion."""
    whole = truth(torch_checkpointing, name)
    state = {"model": {key: torch.zeros_like(tensor) for key, tensor in whole["model"].items()}}
    dcp.load(state, checkpoint_id=torch_checkpointing / name / f"step_{step}")
    assert_equal(whole["model"], state["model"])


def test_it_is_inspected_and_converted(
    torch_checkpointing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = torch_checkpointing / "fsdp2_tp" / "step_2"
    assert 0 == main(["inspect", str(place)])
    assert "up.weight" in capsys.readouterr().out
    cuts = {"up.weight": nxd_ckpt.Partition(partition_dim=0)}
    convert(place, tmp_path / "run" / "step_2", to="tag", tp=2, partitions=cuts)
    opened = nxd_ckpt.open_checkpoint(tmp_path / "run")
    assert "dp=1 tp=2 pp=1 ep=1" == opened.topology.describe()
    assert_equal(truth(torch_checkpointing, "fsdp2_tp")["model"]["up.weight"], opened.read("model/up.weight"))


def rename(before: str, after: str) -> Callable[[Path], Any]:
    return lambda place: (place / before).rename(place / after)


def remove(pattern: str) -> Callable[[Path], Any]:
    def apply(place: Path) -> None:
        for path in place.glob(pattern):
            path.unlink()

    return apply


def described(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Change metadata.pkl."""

    def apply(place: Path) -> None:
        metadata = pickle.loads((place / "metadata.pkl").read_bytes())
        change(metadata)
        (place / "metadata.pkl").write_bytes(pickle.dumps(metadata))

    return apply


def of_tensor(metadata: dict[str, Any], name: str = '["up.weight"]') -> dict[str, Any]:
    group = metadata["metadata"]["model"]["nested_path_to_metadata"][name][0]
    return dict(group)["sharding_metadata"]["data"]


BAD: list[tuple[str, int, Callable[[Path], Any], str]] = [
    ("fsdp2", 1, remove("model_1.pt"), "model_1.pt, which metadata.pkl names, are missing"),
    ("fsdp2", 2, remove("model_1.pt"), "the parts of .* do not cover its shape .*: a rank's file is missing"),
    ("fsdp2_tp", 2, remove("*_2.pt"), r"the files of ranks \[2\] are missing, of 4"),
    ("fsdp2_tp", 2, remove("*_3.pt"), "do not cover its shape"),
    ("fsdp2_tp", 1, remove("*_3.pt"), "_3.pt, which metadata.pkl names, are missing"),
    ("safetensors", 1, remove("rank_1/*"), "rank_1/model.safetensors, which metadata.pkl names, are missing"),
    ("boxes", 2, lambda place: None, "ranks 0 and 1 hold different tensors model.weight, and nothing says which part"),
    ("fsdp2", 1, described(lambda m: m.update(world_size=1)), "is of 1 ranks, but there is a file of rank 1"),
    ("fsdp2", 1, described(lambda m: m.update(version="3.0")), "version '3.0', expected 2.0"),
    ("boxes", 1, described(lambda m: of_tensor(m, '["weight"]').update(global_shape=[5, 6])), "files of two saves are"),
    ("boxes", 1, described(lambda m: of_tensor(m, '["weight"]').update(local_offsets=[[9, 0]] * 2)), "a shard at "),
    ("safetensors", 1, described(lambda m: of_tensor(m).update(global_shape=[99, 6])), "has shape .*, found"),
    ("safetensors", 1, described(lambda m: of_tensor(m)["mesh_spec"].update(mesh_shape=(3,))), "a mesh of"),
    ("safetensors", 1, described(lambda m: of_tensor(m).update(placements=[{"type": "Odd"}])), "placement 'Odd'"),
    ("safetensors", 1, described(lambda m: of_tensor(m).update(placements=[])), "do not fit"),
    (
        "safetensors",
        1,
        described(lambda m: m["metadata"]["model"]["rank_to_layout_info"][0].update(file_path="../x.safetensors")),
        "expected the name of a file",
    ),
    ("fsdp2", 1, lambda place: (place / "metadata.pkl").write_bytes(b""), "it ends too early"),
    ("fsdp2", 2, rename("train_state_1.pt", "train_state_7.pt"), r"the files of ranks \[2, 3, 4, 5, 6\] are missing"),
]


@pytest.mark.parametrize(("name", "step", "damage", "complaint"), BAD)
def test_a_damaged_directory_is_refused(
    torch_checkpointing: Path, tmp_path: Path, name: str, step: int, damage: Callable[[Path], Any], complaint: str
) -> None:
    place = copied(torch_checkpointing, tmp_path, name, step)
    damage(place)
    with pytest.raises(CheckpointError, match=complaint):
        convert(place, tmp_path / "run" / "step", names="hf", to="tag")
    assert not (tmp_path / "run").exists()


def copied(root: Path, folder: Path, name: str, step: int) -> Path:
    shutil.copytree(root / name / f"step_{step}", folder / "step")
    return folder / "step"


def test_files_of_two_saves(torch_checkpointing: Path, tmp_path: Path) -> None:
    place = copied(torch_checkpointing, tmp_path, "fsdp2", 2)
    shutil.copy(torch_checkpointing / "fsdp2" / "step_1" / "train_state_1.pt", place)
    with pytest.raises(CheckpointError, match=r"train_state_1.pt is of step 1, train_state_0.pt of 2; files of two"):
        convert(place, tmp_path / "run" / "step", names="hf", to="tag")


def test_an_interrupted_save(torch_checkpointing: Path, tmp_path: Path) -> None:
    """The library renames tmp_step_2 when all ranks have written."""
    shutil.copytree(torch_checkpointing / "fsdp2" / "step_2", tmp_path / "tmp_step_2")
    with pytest.raises(CheckpointNotFound, match="that save was interrupted"):
        convert(tmp_path / "tmp_step_2", tmp_path / "run" / "step", names="hf", to="tag")


class Attack:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", ["metadata.pkl", "model_1.pt", "optimizer_0.pt"])
def test_a_pickle_runs_nothing(torch_checkpointing: Path, tmp_path: Path, file: str) -> None:
    place, attack = copied(torch_checkpointing, tmp_path, "fsdp2", 1), Attack(tmp_path / "attacked")
    if file == "metadata.pkl":
        (place / file).write_bytes(pickle.dumps({"metadata": attack}))
    else:
        torch.save({"up.weight": attack}, place / file)
    with pytest.raises(UnsafePickle, match="mkdir"):
        convert(place, tmp_path / "run" / "step", names="hf", to="tag")
    assert not attack.path.exists()


def test_content_that_is_no_data_is_left_out(torch_checkpointing: Path, tmp_path: Path) -> None:
    """An item beside model and optimizer that holds an object: the model is carried, the object not made."""
    place, attack = copied(torch_checkpointing, tmp_path, "fsdp2", 1), Attack(tmp_path / "attacked")
    torch.save(attack, place / "rng_0.pt")
    done = convert(place, tmp_path / "run" / "step", names="hf", to="tag")
    assert "mkdir" in str(done.left_out)
    assert not attack.path.exists()
    model: dict[str, Any] = {}
    nxd_ckpt.load_checkpoint(tmp_path / "run", model=model)
    assert_equal(truth(torch_checkpointing, "fsdp2")["model"], model)
