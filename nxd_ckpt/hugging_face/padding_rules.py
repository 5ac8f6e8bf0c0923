"""Padding of an NxD tensor, which no Hugging Face tensor has: rows of a vocabulary, or heads. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.mapping import Match
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.hugging_face.hf_slice import HfSlice, hf_slices

_MULTIPLES = tuple(2**power for power in range(11))
"""Multiples to which frameworks round a vocabulary (Megatron's ``make_vocab_size_divisible_by`` is 128)."""


def padding_of(match: Match, shape: tuple[int, ...], sizes: Sizes) -> list[HfSlice]:
    """Return the parts of the NxD tensor of whole ``shape`` that no Hugging Face tensor has, as separate slices.

    Raises ShapeMismatch or InvalidArgument like `hf_slices`.
    """
    rule = match.rule
    if rule.dim is None or (rule.stacked is not None and not shape[0]):
        return []
    pieces = [piece for hf_slice in hf_slices(match, shape, sizes) for piece in hf_slice.pieces]
    first = [piece.box for piece in pieces if rule.stacked is None or not piece.box.offset[0]]
    gaps = list(_gaps([(box.offset[rule.dim], box.size[rule.dim]) for box in first], shape[rule.dim]))
    whole = Box.whole(shape)
    boxes = [whole.narrowed(rule.dim, start, length) for start, length in gaps]
    if rule.stacked is not None:
        boxes = [box.narrowed(0, index, 1) for box in boxes for index in range(shape[0])]
    return [_slice(match, box) for box in boxes]


def is_rounded(length: int, rows: int, tp: int) -> bool:
    """Return whether ``length`` is ``rows`` rounded up to a multiple of a power of two, or of that times ``tp``."""
    multiples = {size for power in _MULTIPLES for size in (power, power * tp)}
    return any(length == rows + -rows % size for size in multiples)


def _gaps(intervals: list[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    end = 0
    for start, size in sorted(intervals):
        if start > end:
            yield end, start - end
        end = max(end, start + size)
    if end < length:
        yield end, length - end


def _slice(match: Match, box: Box) -> HfSlice:
    shape = box.size if match.rule.stacked is None else box.size[1:]
    if match.rule.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return HfSlice(f"padding of {match.name}", shape, (Piece(Box.whole(box.size), box),))
