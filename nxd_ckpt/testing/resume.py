"""A rehearsal of a resume with a user's own training objects, compared with a run that was not interrupted."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from os import environ
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nxd_ckpt.checkpointer import Checkpointer
from nxd_ckpt.errors import InvalidArgument, ResumeDiffers
from nxd_ckpt.live.named import by_name

__all__ = ["ResumeDiffers", "check_resume"]

_TAG = "rehearsal"
_FRESH = 2**31
"""Seed of the objects that are loaded into, different from the first ones' seed."""


def check_resume(
    make: Callable[[], Any],
    step: Callable[..., Any],
    *,
    steps: int = 3,
    steps_after: int = 3,
    save: Callable[..., Any] | None = None,
    load: Callable[..., Any] | None = None,
    new_process: bool = True,
) -> None:
    """Train, save, train on; load into fresh objects, train on; and compare the two, bit for bit.

    Compared are, after the load and after the last step: losses, weights, buffers, state and options of the optimizer,
    the scheduler; values, types, dtypes, shapes, strides. Before the load every weight and buffer of the fresh objects
    that a save holds is changed, so that one that is left out is seen. Before each step torch's, NumPy's and Python's
    random numbers start fresh. Among several ranks, each calls this. It needs memory for four copies of the state.

    Args:
        make: returns fresh training objects, as at the start of a run: a model, or a tuple of a model, an optimizer
            and a scheduler.
        step: takes these objects, makes one step of training and returns the loss, a number or tensor.
        steps, steps_after: number of steps before the save, and after it.
        save: takes a directory (a path), a tag, and the objects; by default `Checkpointer.save`.
        load: takes the same, and loads into the objects; by default `Checkpointer.load`.
        new_process: load in a new process, as a job that starts again does. ``make``, ``step``, ``save`` and ``load``
            must then be functions of a module. False loads in this process: on devices that belong to one process,
            such as NeuronCores.

    Raises:
        ResumeDiffers: on every rank.
        InvalidArgument: the arguments cannot be sent to a new process.
        CheckpointError: the save or the load was refused.
    """
    plan = _Plan(make, step, steps, steps_after, save or _save, load or _load)
    if new_process:
        _require_importable(plan)
    directory = _common_directory()
    try:
        expected = _uninterrupted(plan, directory)
        if new_process:
            group = _group_of_its_own()
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                actual = pool.submit(_resumed_elsewhere, plan, directory, group).result()
        else:
            actual = _resumed(plan, directory)
        _require_equal(expected, actual)
    finally:
        if _rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class _Plan:
    make: Callable[[], Any]
    step: Callable[..., Any]
    steps: int
    steps_after: int
    save: Callable[..., Any]
    load: Callable[..., Any]

    def made(self, seed: int) -> tuple[Any, ...]:
        _start_random_numbers(seed)
        objects = self.make()
        return objects if isinstance(objects, tuple) else (objects,)

    def train(self, objects: tuple[Any, ...], numbers: range) -> dict[str, Any]:
        losses = {}
        for number in numbers:
            _start_random_numbers(number)
            losses[f"loss of step {number}"] = self.step(*objects)
        return losses

    @property
    def numbers_after(self) -> range:
        return range(self.steps, self.steps + self.steps_after)


@dataclass(frozen=True)
class _TensorValue:
    """A tensor in a form that can be compared, and sent to another process."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    data: bytes


_Leaves = dict[str, Any]
_Runs = list[tuple[str, _Leaves]]


def _save(directory: str, tag: str, *objects: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(tag, *objects)


def _load(directory: str, tag: str, *objects: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(tag, *objects)


def _require_importable(plan: _Plan) -> None:
    try:
        pickle.dumps(plan)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidArgument(
            f"a new process cannot import the arguments: {error}; make, step, save and load must be functions at the "
            "top level of a module; or pass new_process=False to load in this process"
        ) from error


def _uninterrupted(plan: _Plan, directory: str) -> _Runs:
    objects = plan.made(0)
    plan.train(objects, range(plan.steps))
    saved = dict(_leaves("", _state(objects)))
    plan.save(directory, _TAG, *objects)
    after_save = dict(_leaves("", _state(objects)))
    problem = _first_difference(saved, after_save)
    if problem:
        raise ResumeDiffers(f"the save changed the objects: {problem}")
    losses = plan.train(objects, plan.numbers_after)
    return [("after the load", saved), *_after(losses, objects)]


def _resumed(plan: _Plan, directory: str) -> _Runs:
    objects = plan.made(_FRESH)
    _spoil(objects[0])
    plan.load(directory, _TAG, *objects)
    loaded = dict(_leaves("", _state(objects)))
    losses = plan.train(objects, plan.numbers_after)
    return [("after the load", loaded), *_after(losses, objects)]


def _after(losses: dict[str, Any], objects: tuple[Any, ...]) -> _Runs:
    return [("after it", dict(_leaves("", losses))), ("after the last step", dict(_leaves("", _state(objects))))]


def _spoil(model: Any) -> None:
    """Change all numbers of ``model`` that a save has, so that a number that a load leaves out is not right by chance.
    """
    for one in (by_name(model, "model") or {}).values():
        _spoil(one)
    if not isinstance(model, torch.nn.Module):
        return
    with torch.no_grad():
        for value in {id(entry): entry for entry in model.state_dict(keep_vars=True).values()}.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not _is_lazy(value):
                value.add_(1)


def _is_lazy(value: torch.Tensor) -> bool:
    return value.is_meta or torch.nn.parameter.is_lazy(value)


def _start_random_numbers(seed: int) -> None:
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _agreed(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def _common_directory() -> str:
    return str(_agreed(tempfile.mkdtemp(prefix="check_resume-") if _rank() == 0 else None))


@dataclass(frozen=True)
class _Group:
    """A process group like this one, for the new processes of all ranks."""

    backend: str
    address: str
    rank: int
    size: int


def _group_of_its_own() -> _Group | None:
    if not dist.is_initialized():
        return None
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as unused:
        unused.bind(("", 0))
        port = _agreed(unused.getsockname()[1])
    return _Group(str(dist.get_backend()), f"tcp://{host}:{port}", dist.get_rank(), dist.get_world_size())


def _resumed_elsewhere(plan: _Plan, directory: str, group: _Group | None) -> _Runs:
    """Make the second run, in a process of its own."""
    if group is None:
        return _resumed(plan, directory)
    dist.init_process_group(group.backend, init_method=group.address, rank=group.rank, world_size=group.size)
    try:
        return _resumed(plan, directory)
    finally:
        dist.destroy_process_group()


def _require_equal(expected: _Runs, actual: _Runs) -> None:
    problem = ""
    for (when, leaves), (_, others) in zip(expected, actual, strict=True):
        problem = _first_difference(leaves, others)
        if problem:
            problem = f"{when}: {problem}"
            break
    problems = [problem]
    if dist.is_initialized():
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for rank, its_problem in enumerate(problems):
        if its_problem:
            raise ResumeDiffers(its_problem if len(problems) == 1 else f"rank {rank}: {its_problem}")


def _first_difference(expected: _Leaves, actual: _Leaves) -> str:
    """Return the first difference in words; empty if there is none."""
    for name, value in expected.items():
        if name not in actual:
            return f"{name}: expected {_shown(value)}, it is not there"
        if not _equal(value, actual[name]):
            return f"{name}: {_difference(value, actual[name])}"
    added = [name for name in actual if name not in expected]
    return f"{added[0]}: it was not there before the save, found {_shown(actual[added[0]])}" if added else ""


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, numpy.ndarray):
        return bool((a.dtype, a.shape) == (b.dtype, b.shape)) and a.tobytes() == b.tobytes()
    return bool(a == b) or (a != a and b != b)


def _difference(expected: Any, actual: Any) -> str:
    if isinstance(expected, _TensorValue) and isinstance(actual, _TensorValue):
        for field in ("dtype", "shape", "stride", "requires_grad"):
            if getattr(expected, field) != getattr(actual, field):
                return f"expected {field} {getattr(expected, field)}, found {getattr(actual, field)}"
        a = _numbers(expected)
        b = _numbers(actual)
        largest = (a - b).abs().max().item()
        return f"expected other values: {int((a != b).sum())} of {a.numel()} differ, by at most {largest:g}"
    return f"expected {_shown(expected)}, found {_shown(actual)}"


def _numbers(value: _TensorValue) -> torch.Tensor:
    """Return the values as float64, or as their bytes if torch cannot convert them."""
    data = bytearray(value.data)
    try:
        return torch.frombuffer(data, dtype=value.dtype).double()
    except (RuntimeError, NotImplementedError, ValueError):
        return torch.frombuffer(data, dtype=torch.uint8).double()


def _shown(value: Any) -> str:
    if isinstance(value, _TensorValue):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


def _state(objects: tuple[Any, ...]) -> dict[str, Any]:
    return {name: _parts(live) for name, live in zip(("model", "optimizer", "scheduler"), objects, strict=False)}


def _parts(live: Any) -> Any:
    """Return the state of a training object, or of several by name, that a load must restore."""
    if isinstance(live, dict) and any(hasattr(one, "state_dict") for one in live.values()):
        return {name: _parts(one) for name, one in live.items()}
    if isinstance(live, (list, tuple)):
        return [_parts(one) for one in live]
    if isinstance(live, torch.nn.Module):
        return {
            "state_dict": dict(live.state_dict()),
            "parameters": dict(live.named_parameters(remove_duplicate=False)),
            "buffers": dict(live.named_buffers(remove_duplicate=False)),
        }
    if isinstance(live, torch.optim.Optimizer):
        # Beside its state dict, which may show them otherwise: the next step goes on from these.
        groups = [{key: value for key, value in group.items() if key != "params"} for group in live.param_groups]
        inner = getattr(live, "optim", None)  # torch's ZeroRedundancyOptimizer: what this rank steps
        if isinstance(inner, torch.optim.Optimizer):
            return {"param_groups": groups, "state": inner.state_dict()["state"]}
        parameters = [each for group in live.param_groups for each in group["params"]]
        state = {index: live.state.get(each, {}) for index, each in enumerate(parameters)}
        return {"param_groups": groups, "state": state, "state_dict": live.state_dict()}
    return live.state_dict() if hasattr(live, "state_dict") else live


def _leaves(path: str, value: Any, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every value in ``value`` by its path, with the types of the containers."""
    if isinstance(value, torch.Tensor):
        yield from _tensor_leaves(path, value)
        return
    children = _children(value)
    if children is None or id(value) in above:
        yield path, value if children is None else "itself"
        return
    yield f"type of {path or 'all'}", f"{type(value).__module__}.{type(value).__qualname__}"
    yield f"size of {path or 'all'}", len(children)
    for key, child in children:
        yield from _leaves(f"{path}/{key}" if path else str(key), child, (*above, id(value)))


def _children(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return keys and values of a container, or of an object without its own equality; None for a plain value."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Set):
        return [(repr(item), item) for item in sorted(value, key=repr)]
    if isinstance(value, (str, bytes, range)) or callable(value):
        return None
    if isinstance(value, Sequence):
        return list(enumerate(value))
    if getattr(type(value), "__eq__", None) is object.__eq__ and hasattr(value, "__dict__"):
        return list(vars(value).items())
    return list(enumerate(value)) if hasattr(value, "maxlen") else None


def _tensor_leaves(path: str, value: torch.Tensor) -> Iterator[tuple[str, Any]]:
    kind = type(value.data) if isinstance(value, torch.nn.Parameter) else type(value)
    yield f"type of {path}", f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, DTensor):
        yield f"placements of {path}", f"{value.placements} of mesh {tuple(value.device_mesh.shape)}"
        yield from _tensor_leaves(f"{path} (local)", value.to_local())
    elif hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        yield f"context of {path}", repr(context)
        for name in names:
            yield from _tensor_leaves(f"{path}.{name}", getattr(value, name))
    elif _is_lazy(value):
        yield path, f"{value.dtype} without a shape or memory"
    elif value.layout is not torch.strided:
        yield f"layout of {path}", str(value.layout)
        yield from _tensor_leaves(path, value.to_dense())
    else:
        dense = value.detach().cpu().contiguous()
        data = dense.flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        yield path, _TensorValue(value.dtype, tuple(value.shape), value.stride(), value.requires_grad, data)

