"""Sizes, times, counts and topologies as people read and write them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nxd_ckpt.errors import InvalidArgument

_SHOWN = ("KiB", "MiB", "GiB", "TiB", "PiB")
_WRITTEN = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}}
_WRITTEN |= {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", 1)}


def size(nbytes: int) -> str:
    """``1.5 GiB``; below a KiB in bytes."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in _SHOWN:
        value /= 1024
        if value < 1023.95 or unit == _SHOWN[-1]:
            break
    return f"{value:.1f} {unit}"


def bytes_of(size: int | str, what: str = "size_per_shard") -> int:
    """``5GB``, ``512MiB`` or a number of bytes. Raises InvalidArgument, naming ``what`` it is."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    unit = found[2].upper() if found else ""
    if found is None or unit not in _WRITTEN or float(found[1]) * _WRITTEN[unit] < 1 or isinstance(size, bool):
        raise InvalidArgument(f"{what} must be bytes, or such as 5GB or 512MiB, found {size!r}")
    return int(float(found[1]) * _WRITTEN[unit])


def time_of_day(iso: str) -> str:
    """``2025-11-21 13:51:02`` of ``2025-11-21T13:51:02.250000Z``."""
    return iso.replace("T", " ").removesuffix("Z").partition(".")[0]


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def topology(sizes: Mapping[str, int | None] | None) -> str:
    """``dp=2 tp=4 pp=1 ep=1``, with ``?`` for a size that the files do not tell."""
    if sizes is None:
        return "?"
    return " ".join(f"{name}={'?' if number is None else number}" for name, number in sizes.items())


def short_topology(sizes: Mapping[str, int | None] | None) -> str:
    """The same without sizes of one: ``dp=2 tp=4``, ``1 rank``."""
    if sizes is None:
        return "?"
    return topology({name: number for name, number in sizes.items() if number != 1}) or "1 rank"
