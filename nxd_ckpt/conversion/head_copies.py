"""The order of a tag's copies of key-value heads. Files do not record it, so the copies are read and compared.

NxD's layers and its converter use different orders on trn2 (`nxd_ckpt.core.heads`). A wrong order, or a wrong
``kv_size_multiplier``, would export one head as another. In both cases copies differ.
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
    """Return whether the copies in the tag have the order of NxD's converter for trn2, not that of its layers.

    ``mapped`` reads the tag in the layers' order, ``otherwise()`` in the converter's. If both fit, as with equal heads,
    the layers' order counts. The converter's order is possible only for a tag without optimizer and without our
    manifest; in any other tag, copies in that order mean that the job ran on trn1. Reads all copies, in bounded memory.

    Raises:
        TopologyMismatch: copies differ in both orders; the message names the tensor.
        CorruptCheckpoint: bytes changed since they were written.
    """
    unequal, sizes = _unequal(opened, mapped), mapped.sizes
    if unequal is None:
        return False
    may_be_converted = sizes.hardware == "trn2" and opened.manifest is None and opened.parts.optimizer is None
    if may_be_converted and _unequal(opened, otherwise()) is None:
        logger.warning(
            "%s: key-value heads and their copies are in the order of NxD's converter for trn2, so query heads are "
            "expected in order. If the tag is of a job on trn1, export it with hardware='trn1'",
            opened.where,
        )
        return True
    neither = "neither as NxD's layers keep them nor as its converter writes them"
    orders = neither if may_be_converted else "not as NxD keeps them"
    raise TopologyMismatch(
        f"{opened.where}: copies of a key-value head in {unequal} differ, so they lie {orders} with "
        f"kv_size_multiplier={sizes.kv_size_multiplier}, hardware={sizes.hardware!r} and this mapping; pass those of "
        "the job that saved it"
    )


def _unequal(opened: OpenTag, mapped: MappedTag) -> str | None:
    """Return a tensor of the tag with copies that differ, or None."""
    for window in SideBySide(opened).windows(_pairs(mapped)):
        for name, (first, copy) in window:
            if not torch.equal(first.view(torch.uint8), copy.view(torch.uint8)):
                return name
    return None


def _pairs(mapped: MappedTag) -> Iterator[Matched[str]]:
    for tensor in mapped.tensors:
        first, *others = map(mapped.assembly, _copies(tensor))
        for other in others:
            yield Matched(tensor.source.name, tensor.source.name, ((0, first), (0, other)))


def _copies(tensor: HfTensor) -> Iterator[HfTensor]:
    for pieces in tensor.hf_slice.copies:
        yield replace(tensor, hf_slice=replace(tensor.hf_slice, pieces=pieces))
