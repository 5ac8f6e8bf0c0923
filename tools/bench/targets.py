"""What this project promises of its speed, and whether a run kept it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.results import COLD, SAVE, SLOWDOWN, STALL, WARM, Results, Spread, best, ratios, spread

NXD = "nxd_ckpt"
ONCE = 'nxd_ckpt, verify="reading"'
UNVERIFIED = "nxd_ckpt, verify=False"
TWICE = "nxd_ckpt, verify=True"
XSER = "nxd_ckpt xser"
DIRECT = ("floor: O_DIRECT write",)
BUFFERED = ("floor: buffered write",)
READS = ("floor: read, 1 thread", "floor: read, 2 threads")
COPY = ("floor: memcpy",)
DEVICE_TO_HOST = ("floor: grouped device-to-host", "floor: .cpu() of each")
DCP = ("torch DCP",)


@dataclass(frozen=True)
class Target:
    """A ratio of one contestant to the best of some others, at most or at least a limit; None: only reported.

    Attributes:
        contestant: ours.
        against: others; the best of them in each round.
        at_most: ours / theirs must not exceed it.
        at_least: theirs / ours must not fall below it: so many times faster.
        microseconds: ours for each tensor of the state must not exceed it; no ratio.
    """

    scenario: str
    measure: str
    contestant: str
    against: tuple[str, ...] = ()
    at_most: float | None = None
    at_least: float | None = None
    microseconds: float | None = None

    @property
    def wanted(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g} x faster"
        if self.microseconds is not None:
            return f"<= {self.microseconds:g} us a tensor"
        return f"<= {self.at_most:g} x" if self.at_most is not None else "reported"

    def met(self, ratio: float) -> bool:
        """Whether a median ratio, as :func:`judge` gives it, will do."""
        if self.at_least is not None:
            return ratio >= self.at_least
        limit = self.microseconds if self.microseconds is not None else self.at_most
        return limit is None or ratio <= limit

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
        if self.target.wanted == "reported":
            return "reported"
        return "met" if self.target.met(self.ratio.median) else "MISSED"


def judge(target: Target, results: Results) -> Judged:
    """Round by round, ours over the best of theirs, or theirs over ours where the target is to be faster."""
    ours = results.find(target.scenario, target.measure, target.contestant)
    theirs = [row for name in target.against if (row := results.find(target.scenario, target.measure, name))]
    if ours is None or not (theirs or target.microseconds):
        return Judged(target, None)
    if target.microseconds is not None:
        tensors = max(results.sizes[target.scenario][1], 1)
        return Judged(target, spread([1e6 * value / tensors for value in ours.values]))
    above, below = (best(theirs), ours.values) if target.at_least is not None else (ours.values, best(theirs))
    found = ratios(above, below)
    return Judged(target, spread(found) if found else None)


def _save(workload: str, floor: float, dcp: float) -> list[Target]:
    scenario = f"{workload} cpu 1p"
    return [
        Target(scenario, SAVE, NXD, DIRECT, at_most=floor),
        Target(scenario, SAVE, NXD, DCP, at_least=dcp),
    ]


def _against_buffers(workload: str) -> list[Target]:
    scenario = f"{workload} cpu 1p"
    return [
        Target(scenario, SAVE, NXD, BUFFERED, at_most=0.7),
        Target(scenario, SAVE, NXD, ("torch.save",), at_least=2),
    ]


def _stall(workload: str) -> list[Target]:
    scenario = f"{workload} cpu 1p"
    return [
        Target(scenario, STALL, NXD, COPY, at_most=1.2),
        Target(scenario, STALL, NXD, DCP, at_least=5),
    ]


def _load(workload: str, floor: float) -> list[Target]:
    scenario = f"{workload} cpu 1p"
    return [
        Target(scenario, WARM, ONCE, READS[:1], at_most=floor),
        Target(scenario, WARM, ONCE, READS),
        Target(scenario, WARM, ONCE, DCP, at_least=6),
        Target(scenario, WARM, ONCE, ("torch.save, mmap=True",), at_least=1),
        Target(scenario, WARM, TWICE, READS),
        Target(scenario, WARM, ONCE, (UNVERIFIED,), at_most=1.15),
    ]


def _fsdp2(workload: str) -> list[Target]:
    scenario = f"{workload} fsdp2 2p"
    return [
        Target(scenario, SAVE, NXD, DCP, at_least=1.4),
        Target(scenario, STALL, NXD, COPY, at_most=1.2),
        Target(scenario, WARM, ONCE, DCP, at_least=3),
    ]


def _tiny(workload: str) -> Target:
    return Target(f"{workload} cpu 1p", STALL, NXD, microseconds=20)


TARGETS: Sequence[Target] = (
    *_save("W1", 1.3, 2.5),
    *_against_buffers("W1"),
    *_save("W3", 1.3, 2.5),
    *_against_buffers("W3"),
    *_save("W2", 1.5, 4),
    Target("W2 xla 1p", SAVE, XSER, ("torch-xla xser",), at_least=3),
    *_stall("W1"),
    *_stall("W2"),
    *_stall("W3"),
    Target("W1 xla 1p", STALL, NXD, DEVICE_TO_HOST, at_most=1.2),
    Target("W2 xla 1p", STALL, NXD, DEVICE_TO_HOST, at_most=1.2),
    Target("W3 xla 1p", STALL, NXD, DEVICE_TO_HOST, at_most=1.2),
    Target("W1 cpu 1p", SLOWDOWN, NXD, DCP, at_most=1),
    *_load("W1", 1.2),
    *_load("W2", 1.5),
    *_load("W3", 1.2),
    Target("W1 cpu 1p", COLD, ONCE, READS),
    Target("W2 cpu 1p", COLD, ONCE, READS),
    Target("W3 cpu 2p", SAVE, NXD, ("OLMo-core",), at_least=2.5),
    Target("W3 cpu 2p", WARM, ONCE, ("OLMo-core",), at_least=6),
    *_fsdp2("W1"),
    *_fsdp2("W3"),
    *(_tiny(f"{thousands}k tiny{kind}") for kind in ("", ", module") for thousands in (25, 50, 100)),
)

