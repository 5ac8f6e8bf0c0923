"""torch-xla's own xser: a file per device tensor."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import torch_xla.utils.serialization as xser

from tools.bench.contestants.contract import Contestant
from tools.bench.host import make_durable
from tools.bench.results import SAVE
from tools.bench.workloads import State
from tools.bench.world import World


class TorchXlaXser(Contestant):
    """What is loaded is copied into the live tensors."""

    notes = MappingProxyType({SAVE: "fsync of each file and directory by the benchmark"})

    def __init__(self, state: State, directory: Path, world: World) -> None:
        super().__init__("torch-xla xser", state, directory, world)

    def save(self, durable: bool) -> None:
        path = self.next_path()
        if self.leads:
            xser.save(self.state.tensors, str(path), master_only=False)
            if durable:
                make_durable(path)
                make_durable(path.with_name(f"{path.name}.tensors"))

    def load(self, how: str) -> None:
        self.state.fill(xser.load(str(self.path)))
        self.state.settle()
