"""What is run. Adding a scenario is adding a line."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.results import ASYNC, COLD, RETURNED, SAVE, SLOWDOWN, WARM

FLOORS = ("floor",)
PLAIN = ("nxd_ckpt", "torch.save", "safetensors", "torch DCP")
XLA = ("nxd_ckpt", "nxd_ckpt xser", "torch.save", "torch DCP", "torch-xla xser")
SAVING = (SAVE, ASYNC)
LOADING = (WARM, COLD)


@dataclass(frozen=True)
class Scenario:
    """Contestants that take turns on the same state.

    Attributes:
        workload: a name of :data:`tools.bench.workloads.WORKLOADS`.
        device: ``"cpu"`` or ``"xla"``: torch-xla's CPU device, one per process.
        processes: data-parallel replicas of the same state, joined by gloo.
        contestants: names of :data:`tools.bench.contestants.CONTESTANTS`.
        measures: what each is measured at, if it has it.
        rounds: that count, after one that does not.
        cold_rounds: of them, in how many the page cache is emptied: what takes long.
    """

    workload: str
    device: str
    processes: int
    contestants: tuple[str, ...]
    measures: tuple[str, ...]
    rounds: int = 7
    cold_rounds: int = 3

    @property
    def name(self) -> str:
        return f"{self.workload} {self.device} {self.processes}p"


SCENARIOS = (
    Scenario("W1", "cpu", 1, (*FLOORS, *PLAIN, "nxd_ckpt xser"), (*SAVING, RETURNED, *LOADING, SLOWDOWN)),
    Scenario("W2", "cpu", 1, (*FLOORS, *PLAIN, "nxd_ckpt xser"), (*SAVING, *LOADING)),
    Scenario("W3", "cpu", 1, (*FLOORS, *PLAIN), (*SAVING, *LOADING), cold_rounds=1),
)

QUICK_SCALE = 0.25
QUICK_ROUNDS = 3
