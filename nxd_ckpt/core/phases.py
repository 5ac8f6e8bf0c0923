"""Phases of a save by rank, which the manifest keeps so that a slow rank can be found. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core.limits import checked, checked_text, integers

_LATE = 1.5
"""A straggler writes for this many times the median rank's time."""
_WORTH_TELLING = 1.0
"""A straggler writes for this many seconds longer than the median rank."""


@dataclass(frozen=True)
class RankPhases:
    """One rank's phases: seconds on its calling thread, seconds of writing, bytes written, and its host's name."""

    stage_seconds: float
    write_seconds: float
    nbytes: int
    host: str


def straggler(phases: Sequence[RankPhases]) -> int | None:
    """Return the rank that all others waited for; None if none was much slower than most."""
    if len(phases) < 2:
        return None
    median = sorted(each.write_seconds for each in phases)[(len(phases) - 1) // 2]
    rank = max(range(len(phases)), key=lambda rank: phases[rank].write_seconds)
    slowest = phases[rank].write_seconds
    return rank if slowest > _LATE * median and slowest - median > _WORTH_TELLING else None


def phases_fields(phases: Sequence[RankPhases]) -> dict[str, list[Any]]:
    """Return the manifest's members, with each host's name once."""
    hosts = {name: number for number, name in enumerate(dict.fromkeys(each.host for each in phases))}
    lines = [[each.stage_seconds, each.write_seconds, each.nbytes, hosts[each.host]] for each in phases]
    return {"hosts": list(hosts), "phases": lines}


def phases_of(fields: Mapping[str, Any], ranks: int) -> tuple[RankPhases, ...]:
    """Parse the manifest's members. Raises ValueError, TypeError or LookupError if they are malformed."""
    hosts = [checked_text(name) for name in checked(list, fields["hosts"])]
    phases = []
    for stage, write, nbytes, host in checked(list, fields["phases"]):
        if not all(type(seconds) in (int, float) and 0 <= seconds < 2**63 for seconds in (stage, write)):
            raise ValueError(f"expected seconds, found {[stage, write]!r:.80}")
        size, place = integers([nbytes, host])
        phases.append(RankPhases(float(stage), float(write), size, hosts[place]))
    if len(phases) != ranks:
        raise ValueError(f"phases of {len(phases)} ranks, expected {ranks}")
    return tuple(phases)
