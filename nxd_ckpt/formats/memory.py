"""Tensors in memory: dtypes, allocation, bytes."""

from __future__ import annotations

import ctypes
import math

import torch

from nxd_ckpt.errors import HostExhausted, InvalidArgument
from nxd_ckpt.formats.tensors import Assembly, TensorStub, itemsize

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
        if stride is not None:
            return torch.empty_strided(shape, stride, dtype=torch_dtype(dtype))
        return torch.empty(shape, dtype=torch_dtype(dtype))
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
    # A view that keeps it alive takes most of a small tensor's time.
    (ctypes.c_char * len(data)).from_address(tensor.data_ptr()).raw = data  # type: ignore[assignment]  # any buffer


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, one byte per item; it keeps the tensor alive."""
    _refuse_others(tensor)
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _refuse_others(tensor: torch.Tensor) -> None:
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise InvalidArgument(
            f"a contiguous CPU tensor is needed, got one on {tensor.device} strided {tensor.stride()}"
        )
