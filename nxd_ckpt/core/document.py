"""JSON documents of many equal elements, each converted to its object, and written from the object directly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nxd_ckpt.core.limits import shown
from nxd_ckpt.core.other_files import instead_of_json
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.gc_paused import gc_paused

quoted: Callable[[str], str] = json.encoder.encode_basestring_ascii
"""Return a string as JSON."""

plain: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Return any plain value as JSON. Raises ValueError for NaN and infinity, which JSON does not have."""


def integers(values: Iterable[int]) -> str:
    """Return a list of integers as JSON."""
    return f"[{','.join(map(str, values))}]"


def array(elements: Iterable[str]) -> str:
    """Join JSON texts into one array."""
    return f"[{','.join(elements)}]"


def members(elements: Mapping[str, str]) -> str:
    """Join JSON texts, by name, into one object."""
    return "{" + ",".join(f"{quoted(name)}:{text}" for name, text in elements.items()) + "}"


def whole(data: bytes) -> Any:
    """Parse a whole document.

    Raises ValueError or RecursionError if it is invalid, or has a name twice, since readers differ in which value they
    take.
    """
    with gc_paused():  # it would visit nested lists again and again
        return _decode(data.decode(json.detect_encoding(data), "surrogatepass"))


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.80} is there twice")
    return values


_decode: Callable[[str], Any] = json.JSONDecoder(object_pairs_hook=_once_each).decode


def small(data: bytes, where: str) -> dict[str, Any]:
    """Parse a file that is one small JSON object. Raises MalformedFile, naming ``where``, for anything else."""
    try:
        fields = whole(data)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{where}: not valid JSON ({instead_of_json(data) or error})") from error
    if not isinstance(fields, dict):
        raise MalformedFile(f"{where}: expected a JSON object, found {shown(fields)}")
    return fields
