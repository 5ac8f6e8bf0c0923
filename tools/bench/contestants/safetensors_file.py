"""safetensors' save_file and load_file."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from safetensors.torch import load_file, save_file

from tools.bench.contestants.contract import Contestant
from tools.bench.host import make_durable
from tools.bench.results import SAVE
from tools.bench.workloads import State
from tools.bench.world import World


class SafetensorsFile(Contestant):
    """What is loaded is copied into the live tensors."""

    notes = MappingProxyType({SAVE: "fsync by the benchmark"})

    def __init__(self, state: State, directory: Path, world: World) -> None:
        super().__init__("safetensors", state, directory, world)

    def save(self, durable: bool) -> None:
        path = self.next_path()
        if self.leads:
            save_file(self.state.host(), path)
            if durable:
                make_durable(path)

    def load(self, how: str) -> None:
        self.state.fill(load_file(self.path))
        self.state.settle()
