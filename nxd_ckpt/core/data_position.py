"""Data positions as plain data: the progress of each data-parallel rank's loader, and of all ranks merged. Pure.

A position is a dict. ``dp`` and ``dp_rank`` identify the loader's share of the data, None if the loader does not say.
``state`` is the result of its ``state_dict()``. Loaders of any dp can continue from ``shared``:

- ``{"kind": "samples", "consumed": 96, ...}``: all ranks together read one order of samples, up to this number;
- ``{"kind": "streams", "count": 24, "states": {3: ...}}``: the data is so many streams, of which each rank reads some.

If ``shared`` is None, ``alone`` is the reason. A merged position has no ``state`` and no rank.
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
    """Return the position of a loader, as a rank saves it."""
    return {_MARK: _VERSION, "dp": dp, "dp_rank": dp_rank, "state": state, "shared": shared, "alone": alone}


def is_data_position(value: Any) -> bool:
    """Return whether ``value`` is a position of a supported version."""
    return isinstance(value, dict) and type(value.get(_MARK)) is int and value[_MARK] == _VERSION


def check_position(value: Position, where: str) -> None:
    """Raise MalformedFile for a value that is marked as a data position, but not built as one."""
    if missing := [name for name in ("dp", "dp_rank", "state", "shared", "alone") if name not in value]:
        raise MalformedFile(f"{where}: expected a data position, which has {missing[0]!r}")
    dp = value["dp"]
    dp_rank = value["dp_rank"]
    shared = value["shared"]
    if not (dp is None and dp_rank is None) and not (_is_below(dp, RANKS + 1) and _is_below(dp_rank, dp)):
        raise MalformedFile(
            f"{where}: expected a data-parallel rank of at most {RANKS}, found {shown(dp_rank)} of {shown(dp)}"
        )
    if shared is None:
        return
    kind = shared.get("kind") if isinstance(shared, dict) else None
    if kind == "samples":
        is_right = all(isinstance(number, Integral) for name, number in shared.items() if name != "kind")
    elif kind == "streams":
        count = shared.get("count")
        states = shared.get("states")
        is_right = isinstance(count, Integral) and isinstance(states, dict)
        is_right = is_right and all(_is_below(number, count) and _is_stream(state) for number, state in states.items())
    else:
        raise MalformedFile(f"{where}: expected a data position of samples or streams, found {shown(kind)}")
    if not is_right:
        raise MalformedFile(f"{where}: a data position of {kind} whose numbers or states are of another type or range")


def _is_below(number: Any, limit: Any) -> bool:
    return isinstance(number, Integral) and 0 <= int(number) < limit


def _is_stream(state: Any) -> bool:
    return isinstance(state, dict) and state.keys() >= {"turns", "ended", "state"}


def is_complete(positions: Mapping[int | None, Position]) -> bool:
    """Return whether there is a position of every data-parallel rank, as far as they say; ``positions`` are by rank."""
    return all(_is_merged(each) or each["dp"] == len(positions) for each in positions.values())  # ranks are below dp


def _is_merged(value: Position) -> bool:
    """Return whether this is the merged position of all ranks, which each rank of a converted tag has."""
    return value["dp"] is None and value["shared"] is not None


def merge_positions(positions: Mapping[int | None, Position], where: str) -> Position:
    """Merge positions into one, from which loaders of any dp continue.

    ``positions`` are by data-parallel rank; a merged one has the key None, and is the only one.

    Raises IncompatibleState if they cannot be split again, or do not belong together.
    """
    for each in positions.values():
        if each["shared"] is None:
            raise IncompatibleState(
                f"{where}: this data position belongs to the rank that saved it, {each['alone']}. Load it on the sizes "
                "of the save, or leave it out with ignore_keys and make sure that no sample is lost or read twice"
            )
    if not is_complete(positions):
        ranks = ", ".join(f"{each['dp_rank']} of {each['dp']}" for each in positions.values())
        raise IncompatibleState(f"{where}: expected a data position of every data-parallel rank, found {ranks}")
    if None in positions and len(positions) == 1:
        return position(None, None, None, positions[None]["shared"])
    if None in positions:
        raise IncompatibleState(f"{where}: some ranks saved their own data position, others one of all ranks")
    shared = [positions[rank]["shared"] for rank in range(len(positions))]
    together = _streams(shared, where) if shared[0]["kind"] == "streams" else _samples(shared, where)
    return position(None, None, None, together)


def _samples(shared: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Merge positions of ranks that are at the same place of the same order."""
    for rank, own in enumerate(shared):
        if own != shared[0]:
            raise IncompatibleState(
                f"{where}: data-parallel ranks are not at one place of one order: rank 0 is at "
                f"{_position_text(shared[0])}, rank {rank} at {_position_text(own)}; take the position on all ranks "
                "after the same step"
            )
    return dict(shared[0])


def _position_text(shared: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in shared.items() if name != "kind")


def _streams(shared: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Merge positions of ranks each of which read other streams."""
    count: Any = shared[0].get("count")
    states: dict[int, Any] = {}
    for rank, own in enumerate(shared):
        twice = states.keys() & own.get("states", {}).keys()
        if own.get("count") != count or twice:
            problem = f"stream {min(twice)} of another rank too" if twice else f"one of {own.get('count')} streams"
            raise IncompatibleState(f"{where}: expected {count} streams, each on one rank; rank {rank} has {problem}")
        states |= own["states"]
    if len(states) < count:
        missing = next(number for number in range(count) if number not in states)
        rest = count - len(states) - 1
        more = f" and {rest} more" if rest else ""
        raise IncompatibleState(f"{where}: no rank saved stream {missing}{more} of {count}")
    return {"kind": "streams", "count": count, "states": states}
