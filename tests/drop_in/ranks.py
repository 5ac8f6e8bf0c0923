"""Jobs of several ranks, each of which has installed nxd_ckpt and calls neuronx-distributed's functions."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import nxd_ckpt
from nxd_ckpt import Topology
from nxd_ckpt.storage.local import LocalStorage


@contextmanager
def library_of(rank: int, package: Path, **options: Any) -> Iterator[Any]:
    """The library with our functions, for a rank of tp=2 dp=2."""
    sys.path.insert(0, str(package))
    nxd_ckpt.install(topology=Topology(tp=2, dp=2, rank=rank), **options)
    try:
        yield import_module("neuronx_distributed")
    finally:
        nxd_ckpt.uninstall()
        sys.path.remove(str(package))
        for name in [name for name in sys.modules if name.partition(".")[0] == "neuronx_distributed"]:
            del sys.modules[name]


def content(rank: int, step: int) -> dict[str, Any]:
    """What a rank saves: other values on each."""
    return {"model": {"weight": torch.full((3,), float(rank))}, "global_step": step, "rank": rank}


def save_and_load(rank: int, package: Path, directory: Path, **options: Any) -> Any:
    """Save with ``options``; what this rank then loads, with those that are the load's too."""
    with library_of(rank, package) as nxd:
        nxd.parallel_layers.save(content(rank, 1), str(directory), **options)
        shared = {name: value for name, value in options.items() if name == "master_dp_only"}
        return nxd.parallel_layers.load(str(directory), load_xser=options.get("save_xser", False), **shared)


def interrupted(rank: int, package: Path, directory: Path, at: int) -> list[Any]:
    """Save, then save again while rank 0's move number ``at`` fails; the error, and the step that this rank loads."""
    with library_of(rank, package) as nxd:
        nxd.parallel_layers.save(content(rank, 1), str(directory))
        with failing_moves(at if rank == 0 else None):
            try:
                nxd.parallel_layers.save(content(rank, 2), str(directory))
            except nxd_ckpt.errors.CheckpointError as error:
                failed = type(error).__name__
            else:
                failed = "nothing"
        loaded = nxd.parallel_layers.load(str(directory))
        return [failed, loaded["global_step"], loaded["rank"]]


def removed_by_rank_0(rank: int, package: Path, directory: Path) -> list[str]:
    """Save, then remove on the first rank only, as Lightning does, and save again; what is there in the end."""
    with library_of(rank, package, timeout=20) as nxd:
        adapter = import_module("neuronx_distributed.lightning.checkpoint_io").NeuronCheckpointIO(save_load_xser=False)
        adapter.save_checkpoint(content(rank, 1), directory / "one.ckpt")
        if rank == 0:
            adapter.remove_checkpoint(directory / "one.ckpt")
        nxd.parallel_layers.save(content(rank, 2), directory / "two.ckpt")
        return sorted(path.name for path in directory.iterdir())


@contextmanager
def failing_moves(at: int | None) -> Iterator[None]:
    """Inside, the move of a file number ``at``, and all after it, fail."""
    rename: Any = LocalStorage.rename
    moves = iter(range(1000))

    def fails(storage: LocalStorage, source: str, target: str) -> None:
        if at is not None and next(moves) >= at:
            raise OSError(5, "Input/output error")
        rename(storage, source, target)

    storage_class: Any = LocalStorage
    storage_class.rename = fails
    try:
        yield
    finally:
        storage_class.rename = rename


def on_device(rank: int, package: Path, directory: Path) -> list[Any]:
    """Save tensors of an XLA device as xser; what each rank loads, and what torch-xla's own reader finds."""
    from torch_xla import device
    from torch_xla.utils import serialization

    with library_of(rank, package) as nxd:
        weight = torch.full((3,), float(rank), device=device())
        saved = {"model": {"weight": weight}, "step": torch.tensor(3.0), "betas": (0.9, 0.99)}
        nxd.parallel_layers.save(saved, str(directory), save_xser=True)
        own = nxd.parallel_layers.load(str(directory), load_xser=True)
        theirs = serialization.load(str(directory / f"tp_rank_{rank % 2:02d}_pp_rank_00"))
        return [one["model"]["weight"].cpu().tolist() for one in (own, theirs)]
