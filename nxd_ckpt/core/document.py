"""JSON documents: what could mean two things is refused, and never written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from nxd_ckpt.core.limits import shown
from nxd_ckpt.core.other_files import instead_of_json
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.gc_paused import gc_paused

plain: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=dict).encode
"""Return any plain value as JSON; a mapping of any kind counts as a dict.

Raises ValueError for NaN and infinity, which JSON does not have.
"""


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
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} is there twice")
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
