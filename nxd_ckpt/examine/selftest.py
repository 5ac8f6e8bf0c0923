"""The self-test on a user's own hardware: its checks, their results, and the page and report made of them.

Nothing here runs a check: `examine.selftest_ranks` starts the ranks, which run `nxd_ckpt.testing.selftest`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

__all__ = ["CHECKS", "Check", "CheckResult", "SelfTest", "checks_for", "merged", "page_lines", "safe_environment"]

Outcome = Literal["ok", "failed", "not possible here"]

WIDTH = 80
"""Columns of the page."""


class Check(NamedTuple):
    """One check: its name, the words that the page has for it, and where it applies ("torch" is all but torch-xla)."""

    name: str
    title: str
    stack: Literal["any", "torch", "xla"] = "any"


CHECKS = (
    Check("versions", "versions and device"),
    Check("transfers", "pinned memory, events, copies that do not block"),
    Check("dtypes", "every dtype, bit for bit"),
    Check("fsdp2", "FSDP2: saved, resumed, loaded on the CPU", "torch"),
    Check("tp", "tensor parallel: saved, resumed, loaded on the CPU", "torch"),
    Check("simple_fsdp", "SimpleFSDP: saved, resumed, loaded on the CPU", "torch"),
    Check("zero1", "ZeRO-1: saved, resumed, loaded on the CPU", "xla"),
    Check("xser", "ZeRO-1 in xser files: the same", "xla"),
    Check("kill", "killed in the middle of a save, resumed"),
    Check("compilations", "saving and loading compile nothing"),
    Check("storage", "promises of the storage"),
    Check("speed", "stall and speed"),
)
"""All checks, in the order in which they run and are shown."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: that of the check.
        outcome: how it ended.
        detail: a sentence about it: numbers, the reason, or the error.
        seconds: how long it took.
        facts: what was measured, as plain data.
        traceback: where the error came from; empty if there was none.
    """

    name: str
    outcome: Outcome
    detail: str
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""


@dataclass(frozen=True)
class SelfTest:
    """A finished self-test. True if no check failed.

    Attributes:
        directory: the directory or URL that was tested, without a password.
        device: the type of device, such as "neuron".
        ranks: the number of ranks.
        results: one for each check that applies to this device.
        seconds: how long it took.
        environment: settings that say how torch and Neuron run.
        logs: the end of what each rank of this host printed, if a check failed.
    """

    directory: str
    device: str
    ranks: int
    results: tuple[CheckResult, ...]
    seconds: float
    environment: Mapping[str, str]
    logs: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return all(result.outcome != "failed" for result in self.results)

    def document(self) -> dict[str, Any]:
        """Return all of it as plain data: what --json prints, and what the report holds."""
        return {"ok": bool(self), **asdict(self)}


def checks_for(device: str) -> tuple[Check, ...]:
    """Return the checks that apply to a type of device."""
    stack = "xla" if device == "xla" else "torch"
    return tuple(check for check in CHECKS if check.stack in ("any", stack))


def merged(results: Sequence[CheckResult]) -> CheckResult:
    """Return the result of a check from that of each rank, in their order: the first failure, else that of rank 0.

    A failure without a traceback is only that another rank has failed.
    """
    failed = [(rank, result) for rank, result in enumerate(results) if result.outcome == "failed"]
    if not failed:
        return results[0]
    rank, first = next((pair for pair in failed if pair[1].traceback), failed[0])
    return replace(first, detail=f"rank {rank}: {first.detail}")


def page_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Return the page as lines of at most 80 columns, except words that are longer."""
    results = document["results"]
    failed = sum(result["outcome"] == "failed" for result in results)
    verdict = f"{failed} of {len(results)} checks failed" if failed else "ok"
    head = f"{document['device']}, {document['ranks']} ranks: {verdict} ({document['seconds']:.0f} s)"
    yield from _wrapped(f"{document['directory']} on {head}", "", "  ")
    titles = {check.name: check.title for check in CHECKS}
    marks = {"ok": "ok", "failed": "FAILED", "not possible here": "-"}
    for result in results:
        indent = "  " + marks[result["outcome"]].ljust(8)
        possible = "" if result["outcome"] != "not possible here" else "not possible here: "
        yield from _wrapped(f"{titles[result['name']]}: {possible}{result['detail']}", indent, " " * 12)


def _wrapped(words: str, first: str, below: str) -> list[str]:
    return textwrap.wrap(
        words, WIDTH, initial_indent=first, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )


_SETTINGS = re.compile(
    r"(NEURON|XLA|PJRT|TORCH|NCCL|GLOO|FI|OMP|CUDA|NXD_CKPT|MASTER|LOCAL|WORLD|PYTHON)(_\w+|HASHSEED)?"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|SIGN", re.IGNORECASE)


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say how torch, XLA and Neuron run.

    A value that may be secret is left out by name, and so is what stands between "://" and "@" in one.
    """
    return {
        name: "(not shown)" if _SECRET.search(name) else re.sub(r"://[^/@\s]*@", "://", value)
        for name, value in sorted(environment.items())
        if _SETTINGS.fullmatch(name)
    }
