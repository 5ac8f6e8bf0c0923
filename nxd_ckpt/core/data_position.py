"""Where a run is in its data, as plain data: what each data-parallel rank saved of it, and all of them together. Pure.

A position is a dict. ``dp`` and ``dp_rank`` say which share of the data its loader reads, None where the loader does
not tell; ``state`` is what the loader's ``state_dict()`` gave. ``shared`` is what loaders of any dp can go on from:

- ``{"kind": "samples", "consumed": 96, ...}``: all ranks together read one order of samples, and are so far in it;
- ``{"kind": "streams", "count": 24, "states": {3: ...}}``: the data are so many streams, of which each rank reads some.

Where ``shared`` is None, ``alone`` says why. Put together, positions have no ``state`` and no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import IncompatibleState

_MARK = "data_position"
_VERSION = 1

Position = dict[str, Any]


def position(
    dp: int | None, dp_rank: int | None, state: Any, shared: Mapping[str, Any] | None, alone: str = ""
) -> Position:
    """The position of a loader, as a rank saves it."""
    return {_MARK: _VERSION, "dp": dp, "dp_rank": dp_rank, "state": state, "shared": shared, "alone": alone}


def is_data_position(value: Any) -> bool:
    """Whether it is a position of a version that is known here."""
    return isinstance(value, dict) and value.get(_MARK) == _VERSION


def is_complete(positions: Mapping[int | None, Position]) -> bool:
    """Whether there is one of every data-parallel rank, as far as these tell; by rank."""
    return all(one["dp"] is not None and positions.keys() == set(range(one["dp"])) for one in positions.values())


def put_together(positions: Mapping[int | None, Position], where: str) -> Position:
    """One position, from which loaders of any dp go on. ``positions`` are by data-parallel rank.

    Raises IncompatibleState where they cannot be re-split, or do not belong together.
    """
    for one in positions.values():
        if one["shared"] is None:
            raise IncompatibleState(
                f"{where}: this data position belongs to the rank that saved it, {one['alone']}. Load it on the sizes "
                "of the save, or leave it out with ignore_keys, and see to it that no sample is lost or read twice"
            )
    if not is_complete(positions):
        ranks = ", ".join(f"{one['dp_rank']} of {one['dp']}" for one in positions.values())
        raise IncompatibleState(f"{where}: expected a data position of every data-parallel rank, found {ranks}")
    shared = [positions[rank]["shared"] for rank in range(len(positions))]
    together = _streams(shared, where) if shared[0]["kind"] == "streams" else _samples(shared, where)
    return position(None, None, None, together)


def _samples(shared: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """All ranks are at the same place of the same order."""
    for rank, one in enumerate(shared):
        if one != shared[0]:
            raise IncompatibleState(
                f"{where}: data-parallel ranks are not at one place of one order: rank 0 is at {_told(shared[0])}, "
                f"rank {rank} at {_told(one)}; take the position on all ranks after the same step"
            )
    return dict(shared[0])


def _told(shared: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in shared.items() if name != "kind")


def _streams(shared: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Each stream is read by one rank."""
    count: Any = shared[0].get("count")
    states: dict[int, Any] = {}
    for rank, one in enumerate(shared):
        twice = states.keys() & one.get("states", {}).keys()
        if one.get("count") != count or twice:
            found = f"stream {min(twice)} of another rank too" if twice else f"one of {one.get('count')} streams"
            raise IncompatibleState(f"{where}: expected {count} streams, each on one rank; rank {rank} has {found}")
        states |= one["states"]
    missing = [str(number) for number in range(count or 0) if number not in states]
    if missing:
        raise IncompatibleState(f"{where}: no rank saved stream {first_of(missing)} of {count}")
    return {"kind": "streams", "count": count, "states": states}
