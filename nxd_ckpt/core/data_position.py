"""Where a run is in its data, as plain data: what each data-parallel rank saved of it, and all of them together. Pure.

A position is a dict. ``dp`` and ``dp_rank`` say which share of the data its loader reads, None where the loader does
not tell; ``state`` is what the loader's ``state_dict()`` gave. ``shared`` is what loaders of any dp can go on from:

- ``{"kind": "samples", "consumed": 96, ...}``: all ranks together read one order of samples, and are so far in it;
- ``{"kind": "streams", "count": 24, "states": {3: ...}}``: the data are so many streams, of which each rank reads some.

Where ``shared`` is None, ``alone`` says why. Put together, positions have no ``state`` and no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from nxd_ckpt.core.limits import RANKS, shown
from nxd_ckpt.errors import IncompatibleState, MalformedFile

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
    return isinstance(value, dict) and type(value.get(_MARK)) is int and value[_MARK] == _VERSION


def check_position(value: Position, where: str) -> None:
    """Raise MalformedFile for what is marked as a data position, and is not built as one."""
    if missing := [name for name in ("dp", "dp_rank", "state", "shared", "alone") if name not in value]:
        raise MalformedFile(f"{where}: expected a data position, which has {missing[0]!r}")
    dp, dp_rank, shared = value["dp"], value["dp_rank"], value["shared"]
    if not (dp is None and dp_rank is None) and not (_is_below(dp, RANKS + 1) and _is_below(dp_rank, dp)):
        raise MalformedFile(
            f"{where}: expected a data-parallel rank of at most {RANKS}, found {shown(dp_rank)} of {shown(dp)}"
        )
    if shared is None:
        return
    kind = shared.get("kind") if isinstance(shared, dict) else None
    if kind == "samples":
        is_right = all(isinstance(one, Integral) for name, one in shared.items() if name != "kind")
    elif kind == "streams":
        count, states = shared.get("count"), shared.get("states")
        is_right = isinstance(count, Integral) and isinstance(states, dict)
        is_right = is_right and all(_is_below(number, count) and _is_stream(one) for number, one in states.items())
    else:
        raise MalformedFile(f"{where}: expected a data position of samples or streams, found {shown(kind)}")
    if not is_right:
        raise MalformedFile(f"{where}: a data position of {kind} whose numbers or states are of another type or range")


def _is_below(number: Any, limit: Any) -> bool:
    return isinstance(number, Integral) and 0 <= int(number) < limit


def _is_stream(state: Any) -> bool:
    return isinstance(state, dict) and state.keys() >= {"turns", "ended", "state"}


def is_complete(positions: Mapping[int | None, Position]) -> bool:
    """Whether there is one of every data-parallel rank, as far as these tell; by rank."""
    return all(_is_together(one) or one["dp"] == len(positions) for one in positions.values())  # ranks are below dp


def _is_together(one: Position) -> bool:
    """Whether positions were put together to this one: each rank of a converted tag has it."""
    return one["dp"] is None and one["shared"] is not None


def put_together(positions: Mapping[int | None, Position], where: str) -> Position:
    """One position, from which loaders of any dp go on. ``positions`` are by data-parallel rank; one that was put
    together before is None's, and the only one.

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
    if None in positions and len(positions) == 1:
        return position(None, None, None, positions[None]["shared"])
    if None in positions:
        raise IncompatibleState(f"{where}: some ranks saved a data position of their own, others one of all ranks")
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
    return ", ".join(f"{name}={shown(value)}" for name, value in shared.items() if name != "kind")


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
    if len(states) < count:
        missing = next(number for number in range(count) if number not in states)
        others = count - len(states) - 1
        more = f" and {others} more" if others else ""
        raise IncompatibleState(f"{where}: no rank saved stream {missing}{more} of {count}")
    return {"kind": "streams", "count": count, "states": states}
