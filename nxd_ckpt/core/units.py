"""Text forms of sizes, times, counts and topologies for people."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nxd_ckpt.errors import InvalidArgument

_SHOWN = ("KiB", "MiB", "GiB", "TiB", "PiB")
_DURATIONS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_WRITTEN = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}}
_WRITTEN |= {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", 1)}


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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    unit = match[2].upper() if match else ""
    if match is None or unit not in _WRITTEN or float(match[1]) * _WRITTEN[unit] < 1 or isinstance(size, bool):
        raise InvalidArgument(f"{what} must be a number of bytes, or a size such as 5GB or 512MiB, found {size!r}")
    return int(float(match[1]) * _WRITTEN[unit])


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
