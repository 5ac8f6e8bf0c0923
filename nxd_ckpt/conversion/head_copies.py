"""In which order a tag's copies of key-value heads lie: files do not say, so the copies are read and compared.

NxD's layers and its converter keep them in different orders on trn2 (:mod:`nxd_ckpt.core.heads`). A wrong order, or a
wrong ``kv_size_multiplier``, would export one head as another. Both show in copies that differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from nxd_ckpt.errors import TopologyMismatch
from nxd_ckpt.hugging_face.mapped_tag import MappedTag
from nxd_ckpt.hugging_face.mapped_tensors import HfTensor
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.side_by_side import Matched, SideBySide

logger = logging.getLogger("nxd_ckpt")


def are_converted(opened: OpenTag, mapped: MappedTag, otherwise: Callable[[], MappedTag]) -> bool:
    """Whether the copies in the tag lie as NxD's converter writes them for trn2, and not as its layers keep them.

    The tag is ``mapped`` as if by the layers, ``otherwise`` as if by the converter. Both orders may fit, as where all
    heads are equal: then it is the layers'. The converter's is looked for only in what can be a file of its own,
    without an optimizer and without our manifest: on any other tag copies in that order mean that the job ran on trn1.
    Reads all copies, in bounded memory.

    Raises:
        TopologyMismatch: copies differ in either order; names the tensor.
        CorruptCheckpoint: bytes are not those that were written.
    """
    unequal, sizes = _unequal(opened, mapped), mapped.sizes
    if unequal is None:
        return False
    may_be = sizes.hardware == "trn2" and opened.manifest is None and opened.parts.optimizer is None
    if may_be and _unequal(opened, otherwise()) is None:
        logger.warning(
            "%s: key-value heads and their copies lie as NxD's converter writes them for trn2; query heads are taken "
            "to be in order. If the tag is of a job on trn1, export it with hardware='trn1'",
            opened.where,
        )
        return True
    orders = "neither as NxD's layers keep them nor as its converter writes them" if may_be else "not as NxD keeps them"
    raise TopologyMismatch(
        f"{opened.where}: copies of a key-value head in {unequal} differ, so they lie {orders} with "
        f"kv_size_multiplier={sizes.kv_size_multiplier}, hardware={sizes.hardware!r} and this mapping; are these those "
        "of the job that saved it?"
    )


def _unequal(opened: OpenTag, mapped: MappedTag) -> str | None:
    """A tensor of the tag with copies that differ, or None."""
    for window in SideBySide(opened).windows(_pairs(mapped)):
        for name, (one, other) in window:
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                return name
    return None


def _pairs(mapped: MappedTag) -> Iterator[Matched[str]]:
    for tensor in mapped.tensors:
        first, *others = (mapped.assembly(one) for one in _copies(tensor))
        for other in others:
            yield Matched(tensor.source.name, tensor.source.name, ((0, first), (0, other)))


def _copies(tensor: HfTensor) -> Iterator[HfTensor]:
    for pieces in tensor.hf_slice.copies:
        yield replace(tensor, hf_slice=replace(tensor.hf_slice, pieces=pieces))
