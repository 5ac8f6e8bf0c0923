"""What is run. Adding a scenario is adding a line."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.results import ASYNC, COLD, RETURNED, SAVE, SLOWDOWN, WARM

PEERS = ("torch.save", "safetensors", "torch DCP")
NXD = ("nxd_ckpt", "nxd_ckpt xser")
XLA = ("floor", *NXD, "torch DCP", "torch-xla xser")
FSDP2 = ("floor", "nxd_ckpt", "torch DCP")
TINY = ("memcpy", "nxd_ckpt")


@dataclass(frozen=True)
class Scenario:
    """Contestants that take turns on the same state.

    Attributes:
        workload: a name of :data:`tools.bench.workloads.WORKLOADS`.
        device: ``"cpu"``, ``"xla"`` (torch-xla's CPU device, one per process) or ``"fsdp2"`` (DTensors on the CPU).
        processes: data-parallel replicas of the same state, joined by gloo; with FSDP2, each has its shards of it.
        contestants: names of :data:`tools.bench.contestants.CONTESTANTS`.
        measures: what each is measured at, if it has it.
        scale: bytes of the state, in multiples of the workload's.
        rounds: that count, after one that does not, for what a target is about.
        other_rounds: of them, those in which everything else takes its turn too.
        quick: whether ``--quick`` runs it.
    """

    workload: str
    device: str
    processes: int
    contestants: tuple[str, ...]
    measures: tuple[str, ...]
    scale: float = 1.0
    rounds: int = 7
    other_rounds: int = 1
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.workload} {self.device} {self.processes}p"


SCENARIOS = (
    Scenario("W1", "cpu", 1, ("floor", *NXD, *PEERS), (SAVE, RETURNED, ASYNC, SLOWDOWN, WARM, COLD), quick=True),
    Scenario("W2", "cpu", 1, ("floor", *NXD, *PEERS), (SAVE, ASYNC, WARM, COLD), quick=True),
    Scenario("W3", "cpu", 1, ("floor", "nxd_ckpt", *PEERS), (SAVE, ASYNC, WARM), quick=True),
    Scenario("W1", "xla", 1, XLA, (SAVE, ASYNC, WARM)),
    Scenario("W2", "xla", 1, XLA, (SAVE, ASYNC, WARM)),
    Scenario("W3", "xla", 1, ("floor", "nxd_ckpt", "torch DCP"), (ASYNC, WARM)),
    Scenario("W1", "cpu", 2, ("floor", *NXD, "torch DCP"), (SAVE, ASYNC, WARM), scale=1 / 4, other_rounds=3),
    Scenario("W2", "cpu", 2, ("floor", *NXD, "torch DCP"), (SAVE, ASYNC, WARM), scale=1 / 4, other_rounds=3),
    Scenario("W3", "cpu", 2, ("nxd_ckpt", "torch DCP", "OLMo-core"), (SAVE, WARM), scale=1 / 2),
    Scenario("W1", "xla", 2, ("nxd_ckpt", "torch-xla xser"), (SAVE, ASYNC, WARM), scale=1 / 4, other_rounds=3),
    Scenario("W2", "xla", 2, (*NXD, "torch-xla xser"), (SAVE, ASYNC, WARM), scale=1 / 4, other_rounds=3),
    Scenario("W3", "xla", 2, ("nxd_ckpt",), (SAVE, ASYNC, WARM), scale=1 / 4, other_rounds=3),
    Scenario("W1", "fsdp2", 2, FSDP2, (SAVE, ASYNC, WARM), scale=1 / 2, quick=True),
    Scenario("W3", "fsdp2", 2, FSDP2, (SAVE, ASYNC, WARM), scale=1 / 2),
    *(Scenario(f"{count} tiny", "cpu", 1, TINY, (ASYNC,)) for count in ("25k", "50k", "100k")),
    *(Scenario(f"{count} tiny, module", "cpu", 1, TINY, (ASYNC,)) for count in ("25k", "50k", "100k")),
)

SCALE, ROUNDS = 1 / 2, 5
"""Of an ordinary run: some 17 minutes."""

QUICK_SCALE, QUICK_ROUNDS = 1 / 16, 3
"""Of one with ``--quick``."""
