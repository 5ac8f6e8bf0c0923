"""What of an NxD tensor is in no Hugging Face tensor: rows that pad a vocabulary, heads that pad others. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.mapping import Match
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.hugging_face.hf_slice import HfSlice, hf_slices

_MULTIPLES = tuple(2**power for power in range(11))
"""To which multiples frameworks round a vocabulary (``make_vocab_size_divisible_by`` is 128 with Megatron)."""


def padding_of(match: Match, shape: tuple[int, ...], sizes: Sizes) -> list[HfSlice]:
    """The parts of the NxD tensor of whole ``shape`` that no Hugging Face tensor has, as slices of their own.

    Raises as :func:`~nxd_ckpt.hugging_face.hf_slice.hf_slices`.
    """
    rule = match.rule
    if rule.dim is None or (rule.stacked is not None and not shape[0]):
        return []
    found = hf_slices(match, shape, sizes)
    first = [piece.box for one in found for piece in one.pieces if rule.stacked is None or not piece.box.offset[0]]
    gaps = list(_gaps([(box.offset[rule.dim], box.size[rule.dim]) for box in first], shape[rule.dim]))
    whole = Box.whole(shape)
    boxes = [whole.narrowed(rule.dim, start, length) for start, length in gaps]
    if rule.stacked is not None:
        boxes = [box.narrowed(0, index, 1) for box in boxes for index in range(shape[0])]
    return [_slice(match, box) for box in boxes]


def is_rounded(length: int, rows: int, tp: int) -> bool:
    """Whether ``length`` is the number of ``rows`` rounded up, to a power of two or a multiple of it and ``tp``."""
    multiples = {size for one in _MULTIPLES for size in (one, one * tp)}
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
