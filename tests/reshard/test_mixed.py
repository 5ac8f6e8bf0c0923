"""Live objects that are not the usual pair: a dict beside a live optimizer, interleaved and unpartitioned pipelines."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, close_checkpointers, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch
from tests.interop.saving import save_as_every_rank
from tests.live.doubles import NxDWrapper, ShardedOptimizer

LAYERS = 4


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    yield
    close_checkpointers()


class Net(torch.nn.Module):
    """The whole model."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(LAYERS)])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(shift)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return values


class InterleavedPipeline(torch.nn.Module):
    """NxD's pipeline model: stage modules with names of their own, translated to those of the whole model."""

    def __init__(self, whole: Net, chunks: list[list[int]]) -> None:
        super().__init__()
        self.original, self.partitioned = whole, False
        self.local_stage_modules: list[torch.nn.Module] = []
        self._chunks = chunks
        self._names: dict[str, str] = {}

    def partition(self) -> None:
        for number, layers in enumerate(self._chunks):
            chunk = torch.nn.ModuleDict({f"submod_{number}_{layer}": self.original.layers[layer] for layer in layers})
            self.local_stage_modules.append(chunk)
            for layer in layers:
                for name in ("weight", "bias"):
                    self._names[f"submod_{number}_{layer}.{name}"] = f"layers.{layer}.{name}"
        self.partitioned = True

    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("model.state_dict() is not supported in pipeline mode")

    def local_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        if not self.partitioned:
            raise RuntimeError("Model has not been partitioned yet")
        held = [chunk.state_dict(*args, **options) for chunk in self.local_stage_modules]
        return {self._names[name]: tensor for chunk in held for name, tensor in chunk.items()}

    def local_modules(self) -> Iterator[torch.nn.Module]:
        yield from self.local_stage_modules


class NxDModel(torch.nn.Module):
    """What NxD's trainer returns for a model: attributes that it lacks are the model's."""

    module: Any

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.local_state_dict(*args, **options)

    def local_modules(self) -> list[torch.nn.Module]:
        found: list[torch.nn.Module] = self.module.local_stage_modules
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def adamw(model: torch.nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def zero1(model: torch.nn.Module) -> Any:
    return ShardedOptimizer(model.parameters(), 0, [[0]], lr=0.1)


def zero1_with_masters(model: torch.nn.Module) -> Any:
    return NxDWrapper(ShardedOptimizer(model.parameters(), 0, [[0]], lr=0.1, save_master_weights=True))


def steps(model: torch.nn.Module, optimizer: Any, number: int) -> list[str]:
    losses = []
    for _ in range(number):
        loss = model(torch.arange(6.0).reshape(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item().hex())
    return losses


def saved_run(directory: Path, make: Callable[[torch.nn.Module], Any]) -> list[str]:
    """Save after two steps; the losses of the next two."""
    model = Net()
    optimizer = make(model)
    steps(model, optimizer, 2)
    save_checkpoint(directory, "t", model, optimizer, durable=False)
    return steps(model, optimizer, 2)


@pytest.mark.parametrize("make", [adamw, zero1, zero1_with_masters])
@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_models_own_state_dict_beside_a_live_optimizer(tmp_path: Path, make: Any, keep_vars: bool) -> None:
    """Its tensors are the parameters: filling them is loading the model, and the run continues to the last bit."""
    expected = saved_run(tmp_path, make)
    model = Net(1.0)
    optimizer = make(model)
    steps(model, optimizer, 1)
    load_checkpoint(tmp_path, "t", model.state_dict(keep_vars=keep_vars), optimizer)
    assert expected == steps(model, optimizer, 2)


@pytest.mark.parametrize("make", [adamw, zero1, zero1_with_masters])
def test_a_dict_beside_a_live_optimizer_is_refused(tmp_path: Path, make: Any) -> None:
    """ZeRO-1 without saved master weights takes them from its parameters, which must be loaded by then: refused."""
    expected = saved_run(tmp_path, make)
    model = Net(1.0)
    optimizer = make(model)
    weights: dict[str, Any] = {}
    if make is zero1:
        with pytest.raises(OptimizerMismatch, match=r"shards are cut .*second call"):
            load_checkpoint(tmp_path, "t", weights, optimizer)
        assert {} == weights
        load_checkpoint(tmp_path, "t", weights)
        model.load_state_dict(weights)
        load_checkpoint(tmp_path, "t", None, optimizer)
    else:
        load_checkpoint(tmp_path, "t", weights, optimizer)
        model.load_state_dict(weights)
    assert expected == steps(model, optimizer, 2)


STAGES = {"interleaved": [[[0], [2]], [[1], [3]]], "in order": [[[0, 1]], [[2, 3]]], "whole": [[[0, 1, 2, 3]]]}


def pipelines(form: str, shift: float) -> list[tuple[Topology, Any, Any]]:
    """Topology, model and optimizer of each stage."""
    found = []
    for stage, chunks in enumerate(STAGES[form]):
        pipeline = InterleavedPipeline(Net(shift), chunks)
        pipeline.partition()
        mine = [parameter for chunk in pipeline.local_stage_modules for parameter in chunk.parameters()]
        topology = Topology(pp=len(STAGES[form]), pp_rank=stage)
        found.append((topology, NxDModel(pipeline), torch.optim.AdamW(mine, lr=0.1)))
    return found


def held(jobs: list[tuple[Topology, Any, Any]]) -> dict[str, Any]:
    """Values and moments of all stages by name."""
    return {
        name: [parameter.tolist(), optimizer.state[parameter]["exp_avg"].tolist()]
        for _, model, optimizer in jobs
        for name, parameter in model.local_state_dict(keep_vars=True).items()
    }


@pytest.mark.parametrize(
    ("on", "live"),
    [("interleaved", "in order"), ("in order", "interleaved"), ("interleaved", "whole"), ("whole", "interleaved")],
)
def test_interleaved_stages_go_by_name(tmp_path: Path, on: str, live: str) -> None:
    """Virtual stages, stages in order and the whole model: each loads what another one saved, moments too."""
    jobs, others = pipelines(on, 0.0), pipelines(live, 1.0)
    for number, (_, model, optimizer) in enumerate(jobs):
        for name, parameter in model.local_state_dict(keep_vars=True).items():
            parameter.grad = torch.full_like(parameter, len(name) + number)
        optimizer.step()
    topologies = [topology for topology, _, _ in jobs]
    save_as_every_rank(tmp_path, "t", topologies, lambda rank: {"model": jobs[rank][1], "optimizer": jobs[rank][2]})
    for topology, model, optimizer in others:
        load_checkpoint(tmp_path, "t", model, optimizer, topology=topology)
    assert held(jobs) == held(others)


@pytest.mark.parametrize("wrap", [NxDModel, lambda model: model])
def test_a_pipeline_that_is_not_partitioned_yet(tmp_path: Path, wrap: Any) -> None:
    """What its stage holds is not known: saving and loading say what to do."""
    save_checkpoint(tmp_path, "t", Net(), durable=False)
    model = wrap(InterleavedPipeline(Net(), STAGES["whole"][0]))
    for call in (load_checkpoint, save_checkpoint):
        with pytest.raises(InvalidArgument, match=r"not partitioned yet.*partition\(\)"):
            call(tmp_path, "t", model)
