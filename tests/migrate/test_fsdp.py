"""torch-xla's own FSDP writes the ranks' files: its consolidation and a migration find the same tensors in them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import convert
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, weights
from tests.migrate.written_by_torch_xla import WORLD_SIZE, FsdpRank

pytestmark = pytest.mark.xla

STATE = Job(Model(heads=4, kv_heads=4, head_dim=4)).model.state()


class Part(torch.nn.Module):
    """What FSDP wraps must have a forward; nothing calls it here."""

    def forward(self) -> None:
        raise NotImplementedError


def wrapped(module: torch.nn.Module, rank: int, **options: Any) -> torch.nn.Module:
    """What one rank of several has of the module. No collective is run."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    sharding = {"sharding_groups": [[0]], "sharding_rank": rank, "sharding_world_size": WORLD_SIZE}
    found: torch.nn.Module = XlaFullyShardedDataParallel(module, **sharding, **options)
    return found


def model_of(state: State, rank: int, **options: Any) -> torch.nn.Module:
    """A module with these parameters, its layers wrapped and all around them."""
    module = Part()
    for name, tensor in state.items():
        *path, last = name.split(".")
        inner: torch.nn.Module = module
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, Part())
            inner = inner.get_submodule(part)
        inner.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    layers: Any = module.get_submodule("model.layers")
    for name, layer in list(layers.named_children()):
        setattr(layers, name, wrapped(layer, rank, **options))
    return wrapped(module, rank, **options)


def saved(folder: Path, model: Any) -> dict[str, Any]:
    """Its file, and what it holds."""
    import torch_xla.core.xla_model as xm

    content = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    folder.mkdir(exist_ok=True)
    path = folder / f"ckpt_rank-{content['shard_metadata']['rank']}.pth"
    xm.save(content, str(path), master_only=False)
    found: dict[str, Any] = torch.load(path)
    return found


def consolidated(folder: Path) -> State:
    from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints

    found: State = consolidate_sharded_model_checkpoints(f"{folder}/ckpt", "_rank-*.pth", save_model=False)[0]
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"flatten_parameters": True}, {"shard_param_on_dim_0": True}],
    ids=lambda options: next(iter(options), "each"),
)
def test_each_tensor_is_that_of_the_consolidation(tmp_path: Path, options: dict[str, bool]) -> None:
    """Bit for bit; and the files of the fixtures are those that FSDP writes, in all that describes them."""
    for rank in range(WORLD_SIZE):
        model = model_of(STATE, rank, **options)
        content = saved(tmp_path / "old", model)
        imitated = FsdpRank(
            STATE, rank, flatten="flatten_parameters" in options, rows="shard_param_on_dim_0" in options
        )
        assert [name.replace("_fpw_module.", "") for name, _ in model.named_parameters()] == list(content["model"])
        assert content["shard_metadata"] == imitated.metadata
        assert [] == differences(dict(content["model"]), imitated.state_dict)
    convert(tmp_path / "old", tmp_path / "hf", to="hf", optimizer=False)
    found = weights(tmp_path / "hf")
    assert [] == differences(consolidated(tmp_path / "old"), found)
    assert [] == differences(STATE, found)


class Odd(Part):
    """A single number, a frozen parameter, one of two names, and buffers of which FSDP casts one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.tensor([2.5]))
        self.frozen = torch.nn.Parameter(torch.rand(5, 3), requires_grad=False)
        self.first = torch.nn.Linear(7, 33)
        self.second = torch.nn.Linear(7, 33, bias=False)
        self.second.weight = self.first.weight
        self.third = torch.nn.Conv1d(3, 5, 2)
        self.register_buffer("table", torch.rand(4, 2))
        self.register_buffer("count", torch.arange(3))


@pytest.mark.parametrize("flatten", [False, True])
def test_models_of_any_kind(tmp_path: Path, flatten: bool) -> None:
    """Single numbers, frozen and shared parameters, three dimensions, buffers in bfloat16."""
    for rank in range(WORLD_SIZE):
        saved(tmp_path / "old", wrapped(Odd(), rank, flatten_parameters=flatten, compute_dtype=torch.bfloat16))
    convert(tmp_path / "old", tmp_path / "hf", to="hf", optimizer=False)
    found = weights(tmp_path / "hf")
    assert [] == differences(consolidated(tmp_path / "old"), found)
    assert torch.equal(Odd().frozen, found["frozen"])
