"""torch.save and torch.load of all tensors as one dict."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import torch

from tools.bench.contestants.contract import Contestant
from tools.bench.host import make_durable
from tools.bench.results import SAVE
from tools.bench.workloads import State
from tools.bench.world import World

READ, MAPPED = "", "mmap=True"


class TorchSave(Contestant):
    """What is loaded is copied into the live tensors."""

    loads = (READ, MAPPED)
    notes = MappingProxyType({SAVE: "fsync by the benchmark"})

    def __init__(self, state: State, directory: Path, world: World) -> None:
        super().__init__("torch.save", state, directory, world)

    def save(self, durable: bool) -> None:
        path = self.next_path()
        if self.leads:
            torch.save(self.state.host(), path)
            if durable:
                make_durable(path)

    def load(self, how: str) -> None:
        self.state.fill(torch.load(self.path, mmap=how == MAPPED, weights_only=True))
        self.state.settle()
