"""Copies of the values of tensors, for every dtype, layout and stride."""

from __future__ import annotations

import re

import torch

from nxd_ckpt.formats.memory import allocated, byte_view
from nxd_ckpt.formats.strides import Stride, fitted
from nxd_ckpt.formats.tensors import contiguous_stride, dtype_name

_WITHOUT_KERNELS = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and re.fullmatch(r"u?int[1-7]|float4_\w+", name)
)
"""Dtypes whose elements torch, or some of its releases, cannot copy; each element is one byte."""

_LARGE = 2**16
"""Elements from which on a transposed matrix is copied in parts."""
_ROWS, _COLUMNS = 128, 1024
"""Shape of a part: it fits a core's cache."""
_LINE = 64
"""Bytes of a line of the cache."""


def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``target`` for every dtype; if torch has no kernel, copy the bytes."""
    if target.dtype == source.dtype and target.dtype in _WITHOUT_KERNELS:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    if target.is_cpu and source.is_cpu and target.shape == source.shape and source.numel() >= _LARGE:
        _copy(target.squeeze(), source.squeeze())
    else:
        target.copy_(source)


def strided(value: torch.Tensor, stride: Stride | None) -> torch.Tensor:
    """Return a contiguous CPU tensor's values in memory of that stride, as far as it fits."""
    shape = tuple(value.shape)
    steps = contiguous_stride(shape) if stride is None else fitted(stride.steps, shape)
    if steps == value.stride():
        return value
    memory = allocated(shape, dtype_name(value.dtype), steps)
    fill(memory, value)
    return memory


def fill(memory: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` into ``memory``; along dimensions of stride 0, which have one value, only once."""
    at = tuple(slice(0, 1) if step == 0 else slice(None) for step in memory.stride())
    copy_values(memory[at], value[at])


def distinct(values: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return ``values`` without those at places where ``of``, of the same shape, repeats an element: it is expanded."""
    for dim, (size, step) in enumerate(zip(of.shape, of.stride(), strict=True)):
        if size > 1 and step == 0:
            values = values.narrow(dim, 0, 1)
    return values


def repeats(values: torch.Tensor, of: torch.Tensor) -> bool:
    """Return whether elements of ``values`` are equal, to the bit, where ``of`` has one element for all of them."""
    once = distinct(values, of)
    return once is values or byte_view(values.contiguous()) == byte_view(once.expand_as(values).contiguous())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.dim() > 1 and source.stride(-1) != 1:
        target, source = target.mT, source.mT
    if source.dim() < 2 or source.shape[-2:].numel() < _LARGE or not _has_distant_columns(target, source):
        target.copy_(source)
    elif source.dim() == 2:
        _copy_transposed(target, source)
    else:
        for part, values in zip(target, source, strict=True):
            _copy(part, values)


def _has_distant_columns(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether rows are copied to columns, and the elements of a column displace each other from the cache.

    They do if rows begin at multiples of a power of two that is not small.
    """
    return target.stride(-2) == source.stride(-1) == 1 and source.stride(-2) * source.element_size() % (8 * _LINE) == 0


def _copy_transposed(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy rows to columns by way of rows that are a line of the cache longer: up to six times as fast."""
    rows = torch.empty(_ROWS, _COLUMNS + _LINE // source.element_size(), dtype=source.dtype)
    for row in range(0, source.shape[0], _ROWS):
        for column in range(0, source.shape[1], _COLUMNS):
            at = slice(row, row + _ROWS), slice(column, column + _COLUMNS)
            values = source[at]
            target[at].copy_(rows[: values.shape[0], : values.shape[1]].copy_(values))
