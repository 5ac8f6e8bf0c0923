"""SimpleFSDP on gloo ranks: DTensor parameters that each forward pass gathers, by TorchTitan or parametrizations."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from nxd_ckpt import Checkpointer, dcp
from tests.mesh import jobs

OLD = Path(sys.prefix, "torchtitan-0.2.2")


class Net(jobs.Net):
    """TorchTitan cuts along two mesh dimensions only what they divide; the head, which one alone cuts, is uneven."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("steps", torch.zeros(()))
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleDict({str(number): jobs.Block(8, 16) for number in range(2)})
        self.head = nn.Linear(8, 9, bias=False)


class Gather(nn.Module):
    """The whole parameter; its gradient is reduced and cut again."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, parameter: DTensor) -> torch.Tensor:
        return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class Halved(nn.Module):
    """Other values than the parameter's."""

    def forward(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter / 2


def plain(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def data_parallel(version: str) -> Any:
    """TorchTitan's own function, of the package that is installed or of 0.2.2 beside it."""
    if version == "0.3":
        from torchtitan.experiments.graph_trainer import simple_fsdp as installed

        installed._wrap_class_cache.clear()  # it would give a class the mesh of the first job in this process
        return installed.data_parallel
    source = OLD / "torchtitan" / "experiments" / "simple_fsdp" / "simple_fsdp.py"
    namespace: dict[str, Any] = {"__name__": "simple_fsdp_0_2_2"}
    sys.modules.setdefault("simple_fsdp_0_2_2", type(sys)("simple_fsdp_0_2_2")).__dict__.update(namespace)
    loaded = sys.modules["simple_fsdp_0_2_2"].__dict__
    exec(compile(source.read_text(), os.fspath(source), "exec"), loaded)
    return loaded["data_parallel"]


def _titan(version: str) -> Callable[[int], nn.Module]:
    def made(seed: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        model: nn.Module = data_parallel(version)(plain(seed), mesh, "fully_shard")
        return model

    return made


def _titan_tp(seed: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    model: Any = plain(seed)
    jobs.tensor_parallel(model, mesh["tp"])
    wrapped: nn.Module = data_parallel("0.3")(model, mesh["fsdp"], "fully_shard")
    return wrapped


def _titan_hsdp(seed: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "fsdp"))
    wrapped: nn.Module = data_parallel("0.3")(plain(seed), mesh, "hybrid_shard")
    return wrapped


def _parametrized(seed: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = plain(seed)
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
            nn.utils.parametrize.register_parametrization(module, name, Gather(mesh), unsafe=True)
    return model


def _fsdp(seed: int) -> nn.Module:
    model: Any = plain(seed)
    jobs.sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


JOBS: Mapping[str, Callable[[int], nn.Module]] = {
    "simple": _titan("0.3"),
    "simple 0.2.2": _titan("0.2.2"),
    "simple x tp": _titan_tp,
    "simple hsdp": _titan_hsdp,
    "parametrized": _parametrized,
    "fsdp": _fsdp,
    "plain": plain,
}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer, gathered, by the names of the model alone."""
    names = {name: _plain(name) for name in model.state_dict()}
    found = {f"model/{names[name]}": _full(value) for name, value in model.state_dict().items()}
    of: dict[Any, str] = {parameter: names[name] for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"optim/{of[parameter]}/{key}": _full(value) for key, value in state.items()}
    lrs = [[of[parameter], group["lr"]] for group in optimizer.param_groups for parameter in group["params"]]
    return {**dict(sorted(found.items())), "lr": sorted(lrs)}


def _plain(name: str) -> str:
    return name.replace("parametrizations.", "").removesuffix(".original")


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value


def trained(name: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = JOBS[name](seed)
    optimizer = jobs.adamw(model)
    jobs.train(model, optimizer)
    return model, optimizer


def save(rank: int, directory: Path, name: str, by_dcp: bool = False) -> dict[str, Any]:
    """Train a job and save it; what is saved."""
    model, optimizer = trained(name)
    if by_dcp:
        state, optim = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optim": optim}, checkpoint_id=directory / "step_1")
    else:
        with Checkpointer(directory) as checkpointer:
            checkpointer.save("step_1", model, optimizer)
    return whole(model, optimizer)


def load(rank: int, directory: Path, name: str, by_dcp: bool = False) -> dict[str, Any]:
    """Load into a fresh job; what it holds then. It trains on."""
    model = JOBS[name](1)
    optimizer = jobs.adamw(model)
    if by_dcp:
        model_state, optim_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optim": optim_state}
        dcp.load(state, checkpoint_id=directory / "step_1")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    else:
        with Checkpointer(directory) as checkpointer:
            checkpointer.load(None, model, optimizer)
    found = whole(model, optimizer)
    jobs.train(model, optimizer, 1)
    return found


def load_former(rank: int, directory: Path) -> dict[str, Any]:
    """Load a tag whose names are those of the parametrizations, as earlier versions saved them."""
    model, optimizer = trained("parametrized")
    state = {"model": model.state_dict(), "optim": {"state": {}, "param_groups": []}}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        of = [names[id(parameter)] for parameter in group["params"]]
        state["optim"]["param_groups"].append({**group, "params": of})
        state["optim"]["state"] |= {
            name: optimizer.state[parameter] for name, parameter in zip(of, group["params"], strict=True)
        }
    dcp.save(state, checkpoint_id=directory / "step_1")
    expected = whole(model, optimizer)
    found = load(rank, directory, "parametrized")
    return {"expected": expected, "found": found}


def load_halved(rank: int, directory: Path) -> list[str]:
    """Names of a model whose parametrization computes other values."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
    nn.utils.parametrize.register_parametrization(layer, "weight", Halved(), unsafe=True)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("halved", layer)
        other = nn.Linear(4, 4, bias=False)
        other.weight = nn.Parameter(distribute_tensor(other.weight, mesh, [Shard(0)]))
        try:
            checkpointer.load("halved", other)
        except Exception as error:
            return [type(error).__name__]
    return []
