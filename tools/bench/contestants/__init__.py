"""Who takes part. A contestant's module imports what it needs: where that is not installed, a row says so."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tools.bench.contestants.contract import Contestant
from tools.bench.workloads import State
from tools.bench.world import World


class Place(NamedTuple):
    """Where a contestant is made: a module beside this one, and a function or class of it."""

    module: str
    factory: str


CONTESTANTS = {
    "floor": Place("floors", "floors"),
    "memcpy": Place("floors", "copies"),
    "nxd_ckpt": Place("nxd_ckpt_files", "plain"),
    "nxd_ckpt xser": Place("nxd_ckpt_files", "xser"),
    "torch.save": Place("torch_save", "TorchSave"),
    "safetensors": Place("safetensors_file", "SafetensorsFile"),
    "torch DCP": Place("torch_dcp", "contestants"),
    "torch-xla xser": Place("torch_xla_xser", "TorchXlaXser"),
    "OLMo-core": Place("olmo_core", "OlmoCore"),
}


def make(name: str, state: State, directory: Path, world: World) -> list[Contestant]:
    """The contestants behind ``name``, each with a directory of its own below ``directory``.

    Raises:
        ImportError: what it needs is not installed.
    """
    module, factory = CONTESTANTS[name]
    made = getattr(import_module(f"{__name__}.{module}"), factory)(state, directory, world)
    return made if isinstance(made, list) else [made]
