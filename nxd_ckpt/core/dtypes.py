"""Bytes per element of torch's dtypes, by the name without prefix ("bfloat16"). Pure: nothing asks torch for them."""

from __future__ import annotations

NBYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
}
"""Other dtypes, which hardly anybody saves, and those of a newer torch than is known here, are asked of torch."""
