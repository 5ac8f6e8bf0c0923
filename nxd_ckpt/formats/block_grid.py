"""Forms of quantized weights: which numbers share a scale. `low_precision` computes with them."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 32
"""Numbers of MXFP4 that share a scale."""
GROUP_NBYTES = GROUP // 2

NUMBERS = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of numbers of 8 bits that have scales beside them."""


@dataclass(frozen=True)
class BlockGrid:
    """Blocks of ``rows`` x ``columns`` elements of each matrix in a row-major tensor of ``shape``, which share a scale.

    The scales of a matrix are row-major too, and those of further matrices follow.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks along both dimensions of a matrix; those at the edges may be cut off."""
        return -(-self.shape[-2] // self.rows), -(-self.shape[-1] // self.columns)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], *self.counts)
