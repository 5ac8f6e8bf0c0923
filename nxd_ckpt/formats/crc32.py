"""CRC-32 (the zip container's digest) of bytes, blocks, concatenations, and plain data.

The algebra: a CRC is a polynomial over GF(2) modulo P, and appending n bytes multiplies it by x^(8n). So the CRC of a
concatenation follows from the CRCs and lengths of its parts (`combine`), and a file of a small header and gigabytes of
tensors need not be read again for its digest. Polynomials are bit-reflected, as in zip and zlib: the coefficient of x^0
is the highest bit.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from io import BytesIO
from operator import eq
from typing import Any, TypeAlias

from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.formats.tensors import is_flat

_combine: Callable[[int, int, int], int]
try:
    from isal.isal_zlib import crc32 as _crc32
    from isal.isal_zlib import crc32_combine as _combine
except ImportError:  # no wheel for this platform: zlib's CRC is five times slower, but equal
    from zlib import crc32 as _crc32

    def _combine(crc_a: int, crc_b: int, length_b: int) -> int:
        return _shift(crc_a, length_b) ^ crc_b


Bytes: TypeAlias = "bytes | bytearray | memoryview | ctypes.Array[ctypes.c_char]"

BLOCK = CRC_BLOCK

_P = 0xEDB88320
_ONE = 1 << 31
_ONES = 0xFFFFFFFF


def crc32(buffer: Bytes, value: int = 0) -> int:
    """Return the CRC-32 of ``buffer``, continuing from ``value`` (the CRC of the bytes before). Releases the GIL."""
    return _crc32(buffer, value)


def _multiply(a: int, b: int) -> int:
    """Return a * b mod P."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & _ONES
        b = (b >> 1) ^ _P if b & 1 else b >> 1
    return product


@cache
def _x_to_two_to(k: int) -> int:
    """Return x^(2^k) mod P, by squaring."""
    if k == 0:
        return _ONE >> 1
    root = _x_to_two_to(k - 1)
    return _multiply(root, root)


@lru_cache(maxsize=65536)
def _x_to_bytes(nbytes: int) -> int:
    """Return x^(8 * nbytes) mod P, the factor of a CRC for ``nbytes`` more bytes."""
    power = _ONE
    k = 3
    while nbytes:
        if nbytes & 1:
            power = _multiply(_x_to_two_to(k), power)
        nbytes >>= 1
        k += 1
    return power


def _shift(crc: int, nbytes: int) -> int:
    """Return ``crc`` times x^(8 * nbytes)."""
    return _multiply(_x_to_bytes(nbytes), crc)


def combine(crc_a: int, crc_b: int, length_b: int) -> int:
    """Return the CRC of ``a + b`` from the CRC of ``a``, and the CRC and length in bytes of ``b``: O(log length)."""
    return _combine(crc_a, crc_b, length_b)


def zeros(length: int) -> int:
    """Return the CRC of ``length`` zero bytes, without making them."""
    # The register's initial and final values are inverted.
    return combine(_ONES, 0, length) ^ _ONES


def block_crcs(buffer: memoryview, before: Callable[[int], None] | None = None) -> list[int]:
    """Return the CRC of each `BLOCK` of ``buffer`` (contiguous, one byte per item); the last may be shorter.

    ``before`` is called with the bytes of each, before it is read.
    """
    crcs = []
    for start in range(0, len(buffer), BLOCK):
        block = buffer[start : start + BLOCK]
        if before is not None:
            before(len(block))
        crcs.append(crc32(block))
    return crcs


def count_blocks(nbytes: int) -> int:
    """Return the number of blocks of so many bytes."""
    return -(-nbytes // BLOCK)


def combine_blocks(crcs: Sequence[int], nbytes: int) -> int:
    """Return the CRC of all ``nbytes`` bytes from the CRCs of `block_crcs`."""
    if len(crcs) == 1:
        return crcs[0]
    whole = 0
    for index, crc in enumerate(crcs):
        whole = combine(whole, crc, min(BLOCK, nbytes - index * BLOCK))
    return whole


def digest_of_value(value: Any) -> int:
    """Return a digest that is equal for equal plain data."""
    try:
        return crc32(repr(_plain(value)).encode("utf-8", "surrogatepass"))
    except RecursionError:  # it contains itself
        return crc32(pickle.dumps(value))


_TEXTS = (bool, int, float, complex, str, type(None))
"""Types whose text tells all, except of what is not a number and of integers too long to become text."""

_LARGE = 2**1024


def _plain(value: Any) -> Any:
    """Return the value in a form whose text tells all of it, and nothing else."""
    if type(value) in _TEXTS and value == value and (type(value) is not int or abs(value) < _LARGE):
        return value
    if type(value) is not dict and is_flat(value) and all(map(eq, value, value)):  # without what is not a number
        with suppress(ValueError):  # an integer is too long
            return type(value).__name__, repr(value)
    import numpy as np  # not at the top: commands that compare digests of files alone start without it

    if isinstance(value, dict):
        return type(value).__name__, [(_plain(key), _plain(child)) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, list(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, map(_plain, value)))
    if isinstance(value, BytesIO):
        return value.tell(), crc32(value.getbuffer())
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype), value.shape, value.flags.fnc, crc32(np.ascontiguousarray(value).tobytes())
    if isinstance(value, (bytes, bytearray)):
        return type(value).__name__, crc32(value)
    try:
        return pickle.dumps(value)
    except Exception:
        return repr(value)
