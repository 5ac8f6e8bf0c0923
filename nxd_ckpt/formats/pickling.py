"""Pickling of a tree of tensors like ``torch.save``, without reading the tensors' data.

Each tensor is written as a tight, contiguous CPU tensor with its own storage, even if it is a view or on a device.
``torch.load`` rebuilds it by ``torch._utils._rebuild_tensor_v2`` (or v3, for dtypes without a legacy storage class).
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from datetime import datetime, time
from functools import cache
from typing import Any

import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from nxd_ckpt.core import limits
from nxd_ckpt.errors import UnsafePickle, UnsupportedState
from nxd_ckpt.formats.memory import has_own_operations, torch_dtype
from nxd_ckpt.formats.strides import Stride, note, stride_of
from nxd_ckpt.formats.tensors import Assembly, TensorReference, TensorStub, contiguous_stride, dtype_name
from nxd_ckpt.formats.unpickle import STORAGE_CLASSES

PROTOCOL = 2  # torch.save's; a later one would also change how bytes and globals are written


def pickle_tree(
    tree: Any,
    tensor_key: Callable[[Any], Hashable],
    stride_of: Callable[[Any], Stride | None] = stride_of,
) -> tuple[bytes, list[tuple[Any, int]]]:
    """Return the pickle of ``tree``, and its distinct tensors with their tight bytes, in storage key order.

    The pickle records the strides that ``stride_of`` returns for tensors.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, tensor_key, stride_of)
    try:
        pickler.dump(tree)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise UnsafePickle(f"this state cannot be pickled: {error}. Save a state_dict() of it instead") from error
    if file.tell() > limits.PICKLE_NBYTES:
        raise UnsafePickle(
            f"this state, without its tensors, is a pickle of {file.tell()} bytes, but a load reads at most "
            f"{limits.PICKLE_NBYTES}; keep large arrays as tensors"
        )
    return _with_torch_xla_references(file.getvalue()), [
        (storage.tensor, storage.nbytes) for storage in pickler.storages.values()
    ]


class _StorageReference:
    """A record of the file to be written, pickled as a persistent id."""

    __slots__ = ("nbytes", "persistent_id", "tensor")

    def __init__(self, key: str, tensor: Any, dtype: torch.dtype, numel: int) -> None:
        kind, legacy = _storage_class(dtype)
        self.tensor = tensor
        self.nbytes = numel * dtype.itemsize
        self.persistent_id = ("storage", kind, key, "cpu", numel if legacy else self.nbytes)


class _NoHooks:
    """A tensor's backward hooks, pickled as an empty OrderedDict; each tensor has its own, since hooks may be added."""

    __slots__ = ()


@cache
def _storage_class(dtype: torch.dtype) -> tuple[type, bool]:
    """Return the storage class of ``dtype``, and True if it is a legacy class, which counts elements."""
    legacy = STORAGE_CLASSES.get(dtype_name(dtype))
    return (getattr(torch, legacy), True) if legacy else (torch.UntypedStorage, False)


class _Pickler(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, tensor_key: Callable[[Any], Hashable], stride_of: Callable[[Any], Stride | None]
    ) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._tensor_key = tensor_key
        self._stride_of = stride_of
        self.storages: dict[Hashable, _StorageReference] = {}

    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if type(obj) is _StorageReference else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            _refuse_unusual(obj)
            return self._reduce(obj, obj.dtype)
        if type(obj) is _NoHooks:
            return OrderedDict, ()
        if isinstance(obj, (TensorStub, Assembly)):
            return self._reduce(obj, torch_dtype(obj.dtype))
        if isinstance(obj, (datetime, time)) and obj.fold:  # which protocol 2 drops
            return obj.__reduce_ex__(4)
        return NotImplemented

    def _reduce(self, tensor: Any, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
        shape = tuple(tensor.shape)
        key = (self._tensor_key(tensor), dtype, shape)
        storage = self.storages.get(key)
        if storage is None:
            storage = _StorageReference(str(len(self.storages)), tensor, dtype, math.prod(shape))
            self.storages[key] = storage
        args: tuple[Any, ...] = (storage, 0, shape, contiguous_stride(shape), False, _NoHooks())
        rebuild: Callable[..., Any] = _rebuild_tensor_v2
        if storage.persistent_id[1] is torch.UntypedStorage:
            rebuild = _rebuild_tensor_v3
            args = (*args, dtype)
        stride = self._stride_of(tensor)
        if stride is None:
            return rebuild, args
        return _rebuild_from_type_v2, (rebuild, torch.Tensor, args, note(stride))


def _refuse_unusual(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    if has_own_operations(tensor) or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedState(
            f"a tensor {kind.__module__}.{kind.__qualname__} of layout {tensor.layout} and dtype {tensor.dtype} "
            "cannot be saved; save its dense local tensors instead"
        )


_TORCH_XLA_REFERENCE: Mapping[type, str] = {TensorReference: "torch_xla.utils.serialization TensorReference"}


def _with_torch_xla_references(pickled: bytes) -> bytes:
    """Return ``pickled`` with torch-xla's TensorReference instead of ours.

    In a reference file the search ends at the first tensor.
    """
    if TensorReference.__module__.encode() not in pickled:
        return pickled
    return renamed(pickled, _TORCH_XLA_REFERENCE)


def dumped(value: Any, names: Mapping[type, str]) -> bytes:
    """Pickle ``value`` with other names ("module name") for classes, which need not be installed.

    The names come first, in a list that is dropped: behind it a class is a number, so that no text can look like one.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file, PROTOCOL)
    pickler.dump(list(names))
    head = file.getvalue()
    pickler.dump(value)
    without_protocol = file.getvalue()[len(head) + 2 :]
    return renamed(head, names).removesuffix(pickle.STOP) + pickle.POP + without_protocol


def renamed(pickled: bytes, names: Mapping[type, str]) -> bytes:
    """Return ``pickled``, of protocol 2, with other names ("module name") for classes; these need not be installed.

    A pickle names a class once, at its first use. Only opcodes are replaced, because user data may have the same text.
    """
    left = {f"{kind.__module__} {kind.__qualname__}": name for kind, name in names.items()}
    parts: list[bytes] = []
    begin = 0
    for opcode, name, at in pickletools.genops(pickled):
        if opcode.name == "GLOBAL" and name in left and at is not None:
            parts += [pickled[begin:at], b"c%s\n" % left.pop(name).replace(" ", "\n").encode()]
            begin = at + len(name) + 2
            if not left:
                break
    return b"".join(parts) + pickled[begin:]
