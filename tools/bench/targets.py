"""What this project promises of its speed, and whether a run kept it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.results import COLD, SAVE, SLOWDOWN, STALL, WARM, Results, Spread, best, ratios, spread

NXD = "nxd_ckpt"
SLOW = "nxd_ckpt, 200 MB/s"
ONCE = 'nxd_ckpt, verify="reading"'
UNVERIFIED = "nxd_ckpt, verify=False"
TWICE = "nxd_ckpt, verify=True"
UNPROVED = "nxd_ckpt, verify=True, prove=False"
XSER = "nxd_ckpt xser"
DIRECT = ("floor: O_DIRECT write",)
READS = ("floor: read, 1 thread", "floor: read, 2 threads")
COPY = ("floor: memcpy",)
NO_SAVE = ("floor: no save",)
DEVICE_TO_HOST = ("floor: grouped device-to-host", "floor: .cpu() of each")
DCP = ("torch DCP",)
DCPS = (*DCP, "torch DCP, cached staging")
SAVERS = ("torch.save", "safetensors", *DCP)
LOADERS = ("torch.save", "torch.save, mmap=True", "safetensors", *DCP)

NOT_SLOWER = 1.0

PROOF = 1.2
"""What the proof of a load may cost."""


@dataclass(frozen=True)
class Target:
    """A ratio of one contestant to the best of some others in the same round.

    Attributes:
        contestant: ours.
        against: a floor, or the peers; the best of them in each round.
        at_most: ours / theirs must not exceed it. None: only reported.
    """

    scenario: str
    measure: str
    contestant: str
    against: tuple[str, ...]
    at_most: float | None = None

    @property
    def limit(self) -> str:
        return f"<= {self.at_most:g} x" if self.at_most is not None else "reported"

    @property
    def rows(self) -> set[tuple[str, str]]:
        """Measures and contestants that it is about."""
        return {(self.measure, name) for name in (self.contestant, *self.against)}


@dataclass(frozen=True)
class Judged:
    """A target and the ratios of a run; None: it was not measured."""

    target: Target
    ratio: Spread | None

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        if self.target.at_most is None:
            return "reported"
        return "met" if self.ratio.median <= self.target.at_most else "MISSED"


def judge(target: Target, results: Results) -> Judged:
    """Ours over the best of theirs, round by round. Peers that were not measured, as not installed, do not count."""
    ours = results.find(target.scenario, target.measure, target.contestant)
    theirs = [row for name in target.against if (row := results.find(target.scenario, target.measure, name))]
    found = ratios(ours.values, best(theirs)) if ours is not None else []
    return Judged(target, spread(found) if found else None)


def _save(workload: str, floor: float) -> list[Target]:
    scenario = f"{workload} cpu 1p"
    return [
        Target(scenario, SAVE, NXD, DIRECT, floor),
        Target(scenario, SAVE, NXD, SAVERS, NOT_SLOWER),
    ]


def _stall(workload: str) -> list[Target]:
    scenario = f"{workload} cpu 1p"
    return [
        Target(scenario, STALL, NXD, COPY, 1.2),
        Target(scenario, STALL, NXD, DCPS, NOT_SLOWER),
    ]


def _load(workload: str, floor: float) -> list[Target]:
    scenario = f"{workload} cpu 1p"
    return [
        Target(scenario, WARM, ONCE, READS[:1], floor),
        Target(scenario, WARM, ONCE, READS),
        Target(scenario, WARM, ONCE, LOADERS, NOT_SLOWER),
        Target(scenario, WARM, TWICE, READS),
        Target(scenario, WARM, ONCE, (UNVERIFIED,), 1.15),
        Target(scenario, WARM, TWICE, (UNPROVED,), PROOF),
    ]


def _fsdp2(workload: str) -> list[Target]:
    scenario = f"{workload} fsdp2 2p"
    return [
        Target(scenario, SAVE, NXD, DIRECT, 1.3),
        Target(scenario, SAVE, NXD, DCP, NOT_SLOWER),
        Target(scenario, STALL, NXD, COPY, 1.2),
        Target(scenario, STALL, NXD, DCPS, NOT_SLOWER),
        Target(scenario, WARM, ONCE, DCP, NOT_SLOWER),
        Target(scenario, WARM, TWICE, (UNPROVED,), PROOF),
    ]


TARGETS: Sequence[Target] = (
    *_save("W1", 1.3),
    *_save("W3", 1.3),
    *_save("W2", 1.5),
    Target("W2 xla 1p", SAVE, XSER, ("torch-xla xser",), NOT_SLOWER),
    *_stall("W1"),
    *_stall("W2"),
    *_stall("W3"),
    *(Target(f"{workload} xla 1p", STALL, NXD, DEVICE_TO_HOST, 1.2) for workload in ("W1", "W2", "W3")),
    Target("W1 cpu 1p", SLOWDOWN, NXD, DCPS, NOT_SLOWER),
    Target("W1 cpu 1p", SLOWDOWN, NXD, NO_SAVE),
    Target("W1 cpu 1p", SLOWDOWN, SLOW, NO_SAVE, 1.02),
    *_load("W1", 1.2),
    *_load("W2", 1.5),
    *_load("W3", 1.2),
    Target("W1 cpu 1p", COLD, ONCE, READS),
    Target("W2 cpu 1p", COLD, ONCE, READS),
    *(Target(f"{workload} cpu 2p", STALL, NXD, COPY) for workload in ("W1", "W2")),  # with the comparison of replicas
    Target("W3 cpu 2p", SAVE, NXD, (*DCP, "OLMo-core"), NOT_SLOWER),
    Target("W3 cpu 2p", WARM, ONCE, (*DCP, "OLMo-core"), NOT_SLOWER),
    *_fsdp2("W1"),
    *_fsdp2("W3"),
    *(
        Target(f"{thousands}k tiny{kind} cpu 1p", STALL, NXD, COPY, 1.2)
        for kind in ("", ", module")
        for thousands in (25, 50, 100)
    ),
)
"""Physical: times a floor of the same run, or not slower than the best peer in it."""
