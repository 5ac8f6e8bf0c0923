"""What torch DCP's state dicts of a run hold, and what SageMaker's tiered storage makes of them: a directory of each
rank, and the metadata of all in the first one's (sources.md here has the sources)."""

import pickle
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.migrate.old_run import ADAMW, GROUPS, STEPS, OldRun, is_decayed

WORLD_SIZE = 2
_MODULE = "amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem"


@dataclass
class _SageMakerStorageInfo:
    rank: int
    offset: int
    length: int


_SageMakerStorageInfo.__module__ = _MODULE


def by_name(run: OldRun) -> dict[tuple[Any, ...], Any]:
    """Model and optimizer, this by the names of parameters, as ``get_state_dict`` has them: by the keys of each."""
    found: dict[tuple[Any, ...], Any] = {("model", name): tensor for name, tensor in run.weights.items()}
    for name in run.weights:
        found["optim", "state", name, "step"] = torch.tensor(float(STEPS))
        for kind, held in run.moments.items():
            found["optim", "state", name, kind] = held[name]
    for number, options in enumerate(GROUPS):
        names = [name for name in run.weights if is_decayed(name) == (number == 0)]
        for key, value in {**ADAMW, **options, "lr": run.lr, "initial_lr": 0.01, "params": names}.items():
            found["optim", "param_groups", number, key] = value
    return {**found, **{("scheduler", key): value for key, value in run.scheduler.items()}, ("step",): STEPS}


def by_number(run: OldRun) -> dict[tuple[Any, ...], Any]:
    """The same where a script saves ``optimizer.state_dict()``."""
    names = [name for decayed in (True, False) for name in run.weights if is_decayed(name) == decayed]
    found: dict[tuple[Any, ...], Any] = {}
    for path, value in by_name(run).items():
        if path[0] == "optim":
            of_state = path[1] == "state"
            path = ("optimizer", "state", names.index(path[2]), path[3]) if of_state else ("optimizer", *path[1:])
            value = [names.index(name) for name in value] if path[-1] == "params" else value
        found[path] = value
    return found


def write_tiered(namespace: Path, state: dict[tuple[Any, ...], Any], step: int, *, by_ray: bool = False) -> Path:
    """One save of ``state`` by :data:`WORLD_SIZE` ranks: matrices are cut along rows, all else is the first rank's."""
    buffers = [BytesIO() for _ in range(WORLD_SIZE)]
    metadata = Metadata({}, {}, {}, StorageMeta())
    for path, value in state.items():
        name = ".".join(map(str, path))
        metadata.planner_data[name] = path
        if not isinstance(value, torch.Tensor):
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(name)] = _appended(buffers, 0, value)
            continue
        parts = list(value.chunk(WORLD_SIZE)) if value.dim() > 1 else [value]
        chunks = []
        for rank, part in enumerate(parts):
            offset = (sum(len(one) for one in parts[:rank]), *(0 for _ in part.shape[1:])) if part.dim() else ()
            chunks.append(ChunkStorageMetadata(torch.Size(offset), part.shape))
            place = _appended(buffers, rank, part.clone())
            metadata.storage_data[MetadataIndex(name, torch.Size(offset), rank)] = place
        properties = TensorProperties(dtype=value.dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, value.shape, chunks)
    for rank, buffer in enumerate(buffers):
        names = [f"rank_{rank}", f"step_{step}"]
        folder = namespace.joinpath(*(reversed(names) if by_ray else names))
        folder.mkdir(parents=True)
        (folder / "checkpoint.pt").write_bytes(buffer.getvalue())
        if rank == 0:
            (folder / "metadata.metadata").write_bytes(_pickled(metadata))
    return namespace


def _appended(buffers: list[BytesIO], rank: int, value: Any) -> _SageMakerStorageInfo:
    offset = buffers[rank].tell()
    torch.save(value, buffers[rank])
    return _SageMakerStorageInfo(rank, offset, buffers[rank].tell() - offset)


def _pickled(metadata: Metadata) -> bytes:
    """As the library does it, whose class is not installed here."""
    module, parts = ModuleType(_MODULE), _MODULE.split(".")
    module.__dict__["_SageMakerStorageInfo"] = _SageMakerStorageInfo
    modules = [".".join(parts[: count + 1]) for count in range(len(parts))]
    sys.modules |= dict.fromkeys(modules, module)
    try:
        return pickle.dumps(metadata, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        for name in modules:
            del sys.modules[name]
