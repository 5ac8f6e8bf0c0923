"""Tensors in memory: dtypes, allocation, bytes, and copies of their values for every dtype, layout and stride."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from functools import lru_cache

import torch

from nxd_ckpt.errors import HostExhausted, InvalidArgument
from nxd_ckpt.formats.strides import Stride, fitted
from nxd_ckpt.formats.tensors import Assembly, TensorStub, contiguous_stride, dtype_name, itemsize

TENSORS = (TensorStub, Assembly, torch.Tensor)
"""Types of tensors, torch's own and their stand-ins. Torch's last: to ask it of another object takes ten times as long.
"""


def is_shards(tensor: torch.Tensor) -> bool:
    """Return whether it is torch's ShardedTensor, on which even ``is_nested`` raises."""
    return type(tensor).__module__.startswith("torch.distributed._shard.")


def has_own_operations(tensor: torch.Tensor) -> bool:
    """Return whether its class computes otherwise than a plain tensor: masked, fake, sharded."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_shards(tensor)


_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name. Raises InvalidArgument if the installed torch does not have it."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise InvalidArgument(f"torch {torch.__version__} has no dtype {name!r}; install a newer torch")
    return dtype


def allocated(shape: tuple[int, ...], dtype: str, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return an uninitialised tensor on the CPU, contiguous or with the given ``stride`` in elements.

    Raises HostExhausted if the host has no memory for it.
    """
    try:
        # Always with a stride: torch.empty may take twice as long.
        return torch.empty_strided(shape, stride or contiguous_stride(shape), dtype=torch_dtype(dtype))
    except (RuntimeError, MemoryError) as error:  # torch's allocator has no error class of its own
        raise HostExhausted(
            f"the host has no memory left for the {math.prod(shape) * itemsize(dtype)} bytes of a tensor {dtype} "
            f"{list(shape)}; free some, or load on more ranks"
        ) from error


def put_bytes(tensor: torch.Tensor, data: memoryview) -> None:
    """Overwrite a contiguous CPU tensor by all of its bytes. Raises InvalidArgument for more or less of them."""
    _refuse_others(tensor)
    if len(data) != tensor.nbytes:
        raise InvalidArgument(f"{len(data)} bytes for a tensor {tensor.dtype} {tuple(tensor.shape)}")
    bytes_at(len(data))(tensor.data_ptr()).raw = data  # type: ignore[assignment]  # any buffer


@lru_cache(maxsize=4096)
def bytes_at(nbytes: int) -> Callable[[int], ctypes.Array[ctypes.c_char]]:
    """Return a function from an address to so many bytes there, which does not keep their tensor alive.

    To make a view that does would take most of a small tensor's time.
    """
    return (ctypes.c_char * nbytes).from_address


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, one byte per item; it keeps the tensor alive."""
    _refuse_others(tensor)
    memory = bytes_at(tensor.nbytes)(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _refuse_others(tensor: torch.Tensor) -> None:
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise InvalidArgument(
            f"a contiguous CPU tensor is needed, got one on {tensor.device} strided {tensor.stride()}"
        )


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
        target = target.view(torch.uint8)
        source = source.view(torch.uint8)
    if target.is_cpu and source.is_cpu and target.shape == source.shape and source.numel() >= _LARGE:
        _copy(target.squeeze(), source.squeeze())
    else:
        target.copy_(source)


def strided(value: torch.Tensor, stride: Stride | None) -> torch.Tensor:
    """Return a contiguous CPU tensor's values in memory of that stride, as far as it fits."""
    if stride is None:
        return value
    shape = tuple(value.shape)
    steps = fitted(stride.steps, shape)
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
        target = target.mT
        source = source.mT
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
