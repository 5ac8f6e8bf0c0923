"""Exports from the optimizer's master weights: more exact than the model's, or all that was saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology
from nxd_ckpt.errors import PartNotFound
from tests.hugging_face import saved
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, local_state, weights
from tests.interop.saving import save_as_every_rank

JOB = Job(Model(heads=8), tp=4, qkv="linear", copies=2)
MASTERS: State = {name: tensor / 7 for name, tensor in JOB.model.state().items()}
MODEL: State = {name: tensor.bfloat16() for name, tensor in MASTERS.items()}


def optimizer(at: Topology) -> dict[str, Any]:
    """The rank's ZeRO-1 optimizer: shards of its master weights, padded."""

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        missing = -len(tensor) % at.dp
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]).chunk(at.dp)[at.dp_rank].clone()

    held = list(local_state(JOB, MASTERS, at).values())
    return {
        "state": {},
        "param_groups": [{"lr": 0.1, "params": list(range(len(held)))}],
        "base_state": {},
        "shape_info": {index: list(tensor.shape) for index, tensor in enumerate(held)},
        "sharded_master_weights": {index: shard(tensor) for index, tensor in enumerate(held)},
    }


def save(directory: Path, **options: Any) -> Path:
    """A tag of dp3 x tp4: bfloat16 weights and their masters."""
    topologies = [Topology(dp=3, tp=4, rank=rank) for rank in range(12)]

    def what(rank: int) -> dict[str, Any]:
        return {"model": local_state(JOB, MODEL, topologies[rank]), "optimizer": optimizer(topologies[rank])}

    names = [list(local_state(JOB, MODEL, topologies[0]))]
    save_as_every_rank(directory, "step_1", topologies, what, param_names=names, durable=False, **options)
    return directory / "step_1"


def export(tag: Path, out: Path, **options: Any) -> State:
    saved.export(tag, out, JOB, **options)
    return weights(out)


def test_master_weights_are_exported_on_request(tmp_path: Path) -> None:
    """In float32, put together from the shards of all data-parallel ranks; or cast once."""
    tag = save(tmp_path / "run", use_xser=True)
    assert [] == differences(MODEL, export(tag, tmp_path / "model"))
    assert [] == differences(MASTERS, export(tag, tmp_path / "masters", master_weights=True))
    halves = {name: tensor.half() for name, tensor in MASTERS.items()}
    assert [] == differences(halves, export(tag, tmp_path / "halves", master_weights=True, dtype="float16"))


def test_weights_that_were_left_out_come_from_their_masters(tmp_path: Path) -> None:
    """Of a tag saved with avoid_saving_lower_precision_weights: in the model's dtype."""
    tag = save(tmp_path / "run", use_xser=True, avoid_saving_lower_precision_weights=True)
    assert [] == differences(MODEL, export(tag, tmp_path / "out"))


def test_a_weight_that_is_nowhere_is_named(tmp_path: Path) -> None:
    tag = save(tmp_path / "run", use_xser=True)
    next(tag.glob("model/*tp_rank_01*.tensors/tensor_3.pt")).unlink()
    with pytest.raises(PartNotFound, match=r"tensor_3\.pt"):
        export(tag, tmp_path / "out")
    assert not (tmp_path / "out").exists()
