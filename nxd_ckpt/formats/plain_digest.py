"""Digests of plain data: numbers, text, bytes, arrays, and containers of these."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

import numpy as np

from nxd_ckpt.formats.crc32 import crc32


def digest_of_value(value: Any) -> int:
    """Return a digest that is equal for equal plain data."""
    try:
        return crc32(repr(_plain(value)).encode("utf-8", "surrogatepass"))
    except RecursionError:  # it contains itself
        return crc32(pickle.dumps(value))


def _plain(value: Any) -> Any:
    """Return the value in a form whose text tells all of it, and nothing else."""
    if isinstance(value, dict):
        return type(value).__name__, [(_plain(key), _plain(child)) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, list(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, map(_plain, value)))
    if isinstance(value, BytesIO):
        return value.tell(), crc32(value.getbuffer())
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype), value.shape, crc32(np.ascontiguousarray(value).tobytes())
    if isinstance(value, (bytes, bytearray)):
        return type(value).__name__, crc32(value)
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return value
    try:
        return pickle.dumps(value)
    except Exception:
        return repr(value)
