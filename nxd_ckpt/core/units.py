"""Text forms of sizes, times, counts and topologies for people."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

from nxd_ckpt.core.arguments import Kind, at_least_1, number, plain_value, scalar, whole_number

T = TypeVar("T")

_SHOWN = ("KiB", "MiB", "GiB", "TiB", "PiB")
_DURATIONS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_WRITTEN = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}}
_WRITTEN |= {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", 1)}
_TIMES = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}


def size(nbytes: int) -> str:
    """Return ``1.5 GiB``; below a KiB in bytes."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in _SHOWN:
        value /= 1024
        if value < 1023.95 or unit == _SHOWN[-1]:
            break
    return f"{value:.1f} {unit}"


def bytes_of(size: int | str, what: str = "size_per_shard") -> int:
    """Return the bytes of ``5GB``, ``512MiB`` or a number. Raises InvalidArgument, naming ``what`` it is."""
    return int(plain_value(Size, size, what))


def _bytes(value: Any) -> int:
    amount, unit = _amount(value)
    return at_least_1(whole_number(value if unit is None else int(float(amount) * _WRITTEN[unit.upper()])))


_LEAST = 2**20
"""Bytes of a file below which a number without unit is no number of bytes: ColossalAI's 1024 is in MB."""


class _WithUnit(int):
    """Few bytes that were written with their unit: options are read once more when they are copied."""


def _shard_bytes(value: Any) -> int:
    nbytes = _bytes(value)
    if nbytes >= _LEAST:
        return nbytes
    if not (isinstance(value, _WithUnit) or _amount(value)[1]):
        raise ValueError
    return _WithUnit(nbytes)


def _time(number_is: float, value: Any) -> float:
    """Return a time in the unit, of so many seconds, that a number without one has."""
    amount, unit = _amount(value)
    time = number(amount) * (_TIMES[unit.lower()] / number_is if unit else 1)
    if not 0 < time < math.inf:
        raise ValueError
    return time


def _amount(value: Any) -> tuple[Any, str | None]:
    """Split ``"30 s"`` into its amount and its unit; anything but a string has none."""
    value = scalar(value)
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    return (value, None) if match is None else (match[1], match[2])


_SIZE = Kind('a number of bytes, at least 1, such as 2**30, "5GB" or "512MiB"', _bytes)
_TIME = 'a time above 0, such as 90, "90 s", "10m" or "2h"'

Size = Annotated[int, _SIZE]
"""Bytes. Callers may write "5GB"."""
ShardSize = Annotated[
    int, Kind('a size with its unit, such as "5GB" or "1024MB", or a number of bytes from 2**20 on', _shard_bytes)
]
"""Bytes of a file, the largest of many. Callers may write "5GB"; a small number needs its unit."""
AnySize = Annotated[int | str, _SIZE]
"""Bytes, as callers may write them."""
Seconds = Annotated[float, Kind(f"{_TIME}; a number is in seconds", partial(_time, 1))]
"""Seconds, above 0. Callers may write "10m"."""
Minutes = Annotated[float, Kind(f"{_TIME}; a number is in minutes", partial(_time, 60))]


def duration(seconds: float) -> str:
    """Return ``3 h``: the largest unit of which there are two."""
    for length, unit in _DURATIONS:
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def time_of_day(iso: str) -> str:
    """Return ``2025-11-21 13:51:02`` for ``2025-11-21T13:51:02.250000Z``."""
    return iso.replace("T", " ").removesuffix("Z").partition(".")[0]


def count(number: int, noun: str) -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def topology(sizes: Mapping[str, int | None] | None) -> str:
    """Return ``dp=2 tp=4 pp=1 ep=1``, with ``?`` for a size that the files do not record."""
    if sizes is None:
        return "?"
    return " ".join(f"{name}={'?' if number is None else number}" for name, number in sizes.items())


def short_topology(sizes: Mapping[str, int | None] | None) -> str:
    """Return the topology without sizes of one: ``dp=2 tp=4``, ``1 rank``."""
    if sizes is None:
        return "?"
    return topology({name: number for name, number in sizes.items() if number != 1}) or "1 rank"


def neighbours(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[tuple[T, ...]]:
    """Yield neighbouring items of at most ``limit`` bytes together, or one larger item."""
    group: list[T] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if group and total + size > limit:
            yield tuple(group)
            group = []
            total = 0
        group.append(item)
        total += size
    if group:
        yield tuple(group)
