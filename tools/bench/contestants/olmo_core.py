"""OLMo-core's save_model_and_optim_state and load_model_and_optim_state: torch DCP as a training stack uses it."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state

from tools.bench.contestants.contract import Contestant
from tools.bench.host import make_durable
from tools.bench.results import SAVE
from tools.bench.workloads import State
from tools.bench.world import World


class OlmoCore(Contestant):
    """Takes a module and its optimizer, nothing else."""

    notes = MappingProxyType({SAVE: "fsync by the benchmark"})

    def __init__(self, state: State, directory: Path, world: World) -> None:
        super().__init__("OLMo-core", state, directory, world)

    def save(self, durable: bool) -> None:
        path = self.next_path()
        save_model_and_optim_state(path, self.state.model, self.state.optimizer)
        if durable and self.leads:
            make_durable(path)

    def load(self, how: str) -> None:
        load_model_and_optim_state(self.path, self.state.model, self.state.optimizer)
