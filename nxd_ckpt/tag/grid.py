"""Grid of ranks that a set of file names spans: its sizes and its holes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod

from nxd_ckpt.core.limits import RANKS
from nxd_ckpt.core.names import ParsedName
from nxd_ckpt.errors import MalformedFile


def spanned(files: Iterable[ParsedName]) -> ParsedName:
    """Return the size of every dimension: one more than its highest rank. ``ep`` is None if no name has that field.

    Raises MalformedFile for a grid of more ranks than there can be.
    """
    names = list(files)
    experts = [name.ep for name in names if name.ep is not None]
    size = ParsedName(
        dp=max((name.dp for name in names), default=0) + 1,
        ep=max(experts) + 1 if experts else None,
        tp=max((name.tp for name in names), default=0) + 1,
        pp=max((name.pp for name in names), default=0) + 1,
    )
    if prod(extent or 1 for extent in size) > RANKS:
        raise MalformedFile(f"the files' names are those of {size} ranks; at most {RANKS} are allowed")
    return size


def holes(files: Iterable[ParsedName]) -> list[ParsedName]:
    """Return the names that are missing from the grid that the others span."""
    names = set(files)
    if not names:
        return []
    size = spanned(names)
    experts: Iterable[int | None] = [None] if size.ep is None else range(size.ep)
    cells = product(range(size.dp), experts, range(size.tp), range(size.pp))
    return [cell for place in cells if (cell := ParsedName(*place)) not in names]


def describe(files: Iterable[ParsedName]) -> str:
    """Describe the ranks for errors: ``4 rank files: dp 0-3, tp 0-0, pp 0-0``."""
    names = set(files)
    if not names:
        return "no rank files"
    size = spanned(names)
    fields = {"dp": size.dp, "ep": size.ep, "tp": size.tp, "pp": size.pp}
    ranges = ", ".join(f"{key} 0-{extent - 1}" for key, extent in fields.items() if extent is not None)
    missing = len(holes(names))
    return f"{len(names)} rank files: {ranges}" + (f" with {missing} missing" if missing else "")
