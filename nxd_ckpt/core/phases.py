"""How each rank took part in a save: what the manifest keeps so that a slow one can be found. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.entries import checked, integers
from nxd_ckpt.core.keys import checked_text

_LATE = 1.5
_WORTH_TELLING = 1.0
"""A straggler took so many times as long to write as the median rank, and so many seconds longer."""


@dataclass(frozen=True)
class RankPhases:
    """One rank's part: seconds on its calling thread, seconds of writing, bytes written, and its host's name."""

    stage_seconds: float
    write_seconds: float
    nbytes: int
    host: str


def straggler(phases: Sequence[RankPhases]) -> int | None:
    """The rank that all others waited for; None where none was much slower than most."""
    if len(phases) < 2:
        return None
    median = sorted(one.write_seconds for one in phases)[(len(phases) - 1) // 2]
    rank = max(range(len(phases)), key=lambda rank: phases[rank].write_seconds)
    slowest = phases[rank].write_seconds
    return rank if slowest > _LATE * median and slowest - median > _WORTH_TELLING else None


def phases_text(phases: Sequence[RankPhases]) -> dict[str, str]:
    """The manifest's members, with each host's name once."""
    hosts = {name: number for number, name in enumerate(dict.fromkeys(one.host for one in phases))}
    lines = ([one.stage_seconds, one.write_seconds, one.nbytes, hosts[one.host]] for one in phases)
    return {"hosts": document.plain(list(hosts)), "phases": document.array(map(document.plain, lines))}


def phases_of(fields: Mapping[str, Any], ranks: int) -> tuple[RankPhases, ...]:
    """What the manifest says. Raises ValueError, TypeError or LookupError where it is malformed."""
    hosts = [checked_text(name) for name in checked(list, fields["hosts"])]
    found = []
    for stage, write, nbytes, host in checked(list, fields["phases"]):
        if not all(type(one) in (int, float) and 0 <= one < 2**63 for one in (stage, write)):
            raise ValueError(f"expected seconds, found {[stage, write]!r:.80}")
        size, place = integers([nbytes, host])
        found.append(RankPhases(float(stage), float(write), size, hosts[place]))
    if len(found) != ranks:
        raise ValueError(f"phases of {len(found)} ranks, expected {ranks}")
    return tuple(found)
