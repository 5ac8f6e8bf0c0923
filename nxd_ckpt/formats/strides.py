"""Strides of saved tensors in memory. Files hold every tensor row-major, with a note of its stride.

In a torch file the note is a Python attribute of the tensor, which ``torch.load`` restores. In a file of references it
is an attribute of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nxd_ckpt.core.limits import DIMENSIONS, check_sizes, shown
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.tensors import Assembly, NotedStub, TensorStub, contiguous_stride, torch_class

if TYPE_CHECKING:
    import torch

LeafT = TypeVar("LeafT", bound=TensorStub | Assembly)

ATTRIBUTE, AS_PARAMETER = "live_stride", "as_parameter"

_SPARSENESS = 4
"""The most that a tensor may span in memory, as a multiple of its elements; with larger gaps it is loaded dense."""


class Stride(NamedTuple):
    """Strides in elements.

    With ``as_parameter`` they equal those of the state's parameter, so a load uses the live parameter's.
    """

    steps: tuple[int, ...]
    as_parameter: bool = False


def note(stride: Stride) -> dict[str, Any]:
    """Return the attributes that record the stride in a file."""
    return {ATTRIBUTE: stride.steps} | ({AS_PARAMETER: True} if stride.as_parameter else {})


def noted(attributes: object) -> Stride | None:
    """Return the stride in a saved tensor's attributes, or None. Raises MalformedFile if it is invalid."""
    steps = attributes.get(ATTRIBUTE) if isinstance(attributes, Mapping) else None
    if steps is None or not isinstance(attributes, Mapping):
        return None
    return Stride(check_sizes(steps, "the stride of a live tensor"), attributes.get(AS_PARAMETER) is True)


def stride_of(leaf: Any) -> Stride | None:
    """Return the recorded stride of a leaf of a tree."""
    stride: Stride | None = getattr(leaf, ATTRIBUTE, None)
    return stride


def with_note(tensor: torch.Tensor, stride: Stride) -> torch.Tensor:
    """Return another tensor object of the same memory with the note; the caller's own is unchanged."""
    alias = tensor.detach()
    setattr(alias, ATTRIBUTE, stride)
    return alias


def stride_in_content(tensor: Any) -> Stride | None:
    """Return the stride to record for a tensor in user content: None if it is row-major."""
    if stride_of(tensor) is not None:
        return stride_of(tensor)
    if not isinstance(tensor, torch_class("Tensor")) or tensor.device.type in ("xla", "meta"):
        return None
    return Stride(tensor.stride()) if tensor.stride() != contiguous_stride(tuple(tensor.shape)) else None


def stored_stride(leaf: Any) -> Stride | None:
    """Return a leaf's recorded stride, or the one that ``torch.save`` kept; None if it was row-major."""
    stride = stride_of(leaf)
    if stride is None and isinstance(leaf, TensorStub) and leaf.stride != contiguous_stride(leaf.shape):
        return Stride(leaf.stride)
    return stride


def fitted(steps: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``steps`` if a tensor of ``shape`` can have them; otherwise dense strides in the same dimension order.

    Elements may share memory only along dimensions of stride 0.
    """
    if len(steps) != len(shape) or not math.prod(shape):
        return contiguous_stride(shape)
    reach = 0  # of the dimensions of smaller strides
    for step, size in sorted((step, size) for step, size in zip(steps, shape, strict=True) if step and size > 1):
        if step <= reach:
            return dense(steps, shape)
        reach += step * (size - 1)
    return steps if reach < _SPARSENESS * math.prod(shape) + DIMENSIONS else dense(steps, shape)


def dense(steps: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides without gaps for a tensor of ``shape`` with the dimension order of ``steps``."""
    order = sorted(range(len(shape)), key=lambda dim: -steps[dim]) if len(steps) == len(shape) else range(len(shape))
    tight = contiguous_stride(tuple(shape[dim] for dim in order))
    return tuple(tight[place] for place in _inverse(list(order)))


def with_stride(leaf: LeafT, stride: Stride | None) -> LeafT:
    """Return the leaf with the stride recorded. Raises MalformedFile unless it has a step for each dimension."""
    if stride is None:
        return leaf
    if len(stride.steps) != len(leaf.shape):
        raise MalformedFile(f"a tensor of shape {shown(leaf.shape)}, noted with the stride {shown(stride.steps)}")
    if isinstance(leaf, TensorStub):
        return NotedStub(leaf.file, leaf.offset, leaf.dtype, leaf.shape, leaf.stride, leaf.storage, stride)  # type: ignore[return-value]
    return replace(leaf, live_stride=stride)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda place: order[place])
