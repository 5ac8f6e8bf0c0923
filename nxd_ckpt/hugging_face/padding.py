"""Padding in a tag that Hugging Face's files lack; it is removed only if no values are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.mapping import Match
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.errors import ShapeMismatch
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.hugging_face.hf_slice import HfSlice, hf_slices
from nxd_ckpt.hugging_face.mapped_tensors import HfTensor
from nxd_ckpt.tag.opened import OpenTag

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


logger = logging.getLogger("nxd_ckpt")


def refuse_lost_values(
    opened: OpenTag, sizes: Sizes, tensors: Iterable[HfTensor], assembly: Callable[[HfTensor], Assembly]
) -> None:
    """Check that the removed parts of ``tensors`` are padding: explained by the sizes, and zero. Bounded memory.

    Raises:
        ShapeMismatch: they may be trained rows or heads; the message has them, config.json's size, and the remedy.
    """
    sources = {tensor.source_name: tensor for tensor in tensors}
    cut: list[str] = []
    with opened.reader() as reader:
        for name, tensor in sources.items():
            for padding in padding_of(tensor.source.match, tensor.source.shape, sizes):
                _refuse_unexplained(opened, name, tensor, padding, sizes)
                nonzero: list[int] = []

                def note_nonzero(number: int, parts: list[torch.Tensor], nonzero: list[int] = nonzero) -> None:
                    if any(bool((part != 0).any()) for part in parts):
                        nonzero.append(number)

                reader.visit(assembly(replace(tensor, hf_slice=padding)), name, note_nonzero)
                reader.finish()
                if nonzero:
                    raise ShapeMismatch(
                        f"{_described(opened, name, tensor, padding, sizes)} They are not zero, so they are not "
                        f"padding, and would be lost; {_remedy(tensor, sizes)}"
                    )
                cut.append(f"{name} {_range(tensor, padding)}")
    if cut:
        logger.info("%s: padding of zeros is left out: %s", opened.where, "; ".join(cut[:5]))


def _refuse_unexplained(opened: OpenTag, name: str, tensor: HfTensor, padding: HfSlice, sizes: Sizes) -> None:
    rule, rows = tensor.source.match.rule, tensor.source.match.rule.members[0].rows
    if rows is None or rule.dim is None:
        return
    if not is_rounded(tensor.source.shape[rule.dim], sizes.get(rows), opened.topology.tp):
        raise ShapeMismatch(
            f"{_described(opened, name, tensor, padding, sizes)} No rounding of the vocabulary gives so many rows, so "
            f"they may be trained; {_remedy(tensor, sizes)}"
        )


def _described(opened: OpenTag, name: str, tensor: HfTensor, padding: HfSlice, sizes: Sizes) -> str:
    rule = tensor.source.match.rule
    length = tensor.source.shape[rule.dim or 0]
    rows = rule.members[0].rows
    size = f"{sizes.key(rows)} {sizes.get(rows)}" if rows else f"{sizes.key('heads')} {sizes.get('heads')}"
    return (
        f"{opened.where}: {name} has {length} rows along dimension {rule.dim}, but config.json has {size}: "
        f"{_range(tensor, padding)} are in no tensor of the result."
    )


def _range(tensor: HfTensor, padding: HfSlice) -> str:
    box, dim = padding.pieces[0].box, tensor.source.match.rule.dim or 0
    return f"rows {box.offset[dim]} to {box.offset[dim] + box.size[dim] - 1}"


def _remedy(tensor: HfTensor, sizes: Sizes) -> str:
    rule = tensor.source.match.rule
    rows = rule.members[0].rows
    if rows:
        return f"pass a config.json with {sizes.key(rows)} {tensor.source.shape[rule.dim or 0]}, which keeps all rows"
    return f"pass the config.json of the model that was trained, with all of its {sizes.key('heads')}"
