"""Safe unpickling of a torch file's ``data.pkl``: data, not code, and no tensor's bytes are read.

Only the globals of `safe_globals` and torch's functions that rebuild tensors are allowed; others are refused by name,
never imported. With ``trust_pickle=True`` Python's own unpickler handles the others.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from math import prod
from operator import mul
from typing import Any

from nxd_ckpt.core import limits
from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.limits import check_form, check_sizes, shown
from nxd_ckpt.errors import HostExhausted, MalformedFile, UnsafePickle, UnsupportedState
from nxd_ckpt.formats import strides
from nxd_ckpt.formats.dtensors import DTENSORS, SubclassRebuilder
from nxd_ckpt.formats.inert import Call, Inert
from nxd_ckpt.formats.machine import Machine, check_walk
from nxd_ckpt.formats.safe_globals import global_of
from nxd_ckpt.formats.tensors import (
    StorageSpan,
    TensorReference,
    TensorStub,
    UnfinishedReference,
    dtype_name,
    itemsize,
    torch_class,
)

STORAGE_CLASSES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
"""Torch's legacy storage class of each dtype that has one; newer dtypes are written as ``UntypedStorage``."""

_NOT_DENSE = {
    "_rebuild_sparse_tensor": "a sparse tensor: densify it (to_dense())",
    "_rebuild_sparse_csr_tensor": "a sparse tensor: densify it (to_dense())",
    "_rebuild_qtensor": "a quantized tensor: save the dense tensors that it is made of",
    "_rebuild_nested_tensor": "a nested tensor: keep its parts (unbind())",
    "_rebuild_njt": "a nested tensor: keep its parts (unbind())",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, without values: leave it out",
}
"""Tensors that are no numbers in one storage, by torch's functions that rebuild them, with what to save in place."""

_DTYPE_OF_STORAGE = {storage: dtype for dtype, storage in STORAGE_CLASSES.items()}
_UNTYPED = "uint8"

Leaf = Callable[[TensorStub], Any]


def unpickle(
    data: bytes,
    file: str,
    storages: Mapping[str, StorageSpan],
    *,
    trust_pickle: bool = False,
    leaf: Leaf = lambda stub: stub,
    dtensors: bool = False,
) -> Any:
    """Return the tree in ``data``, with ``leaf(stub)`` for every tensor.

    ``file`` names the file in stubs and errors; ``storages`` are its records by storage key. With
    ``dtensors`` a DTensor becomes a `LocalTensor`, which is refused otherwise. Views and parameters
    become plain tensors; Python attributes of tensors and of OrderedDicts are dropped. Raises UnsafePickle for
    anything that is more than data (unless ``trust_pickle``), MalformedFile if it is no pickle of a torch file.
    """
    parts = _Parts(file, storages, leaf, DTENSORS if dtensors else {})
    try:
        with parsing("its pickle", "that of a torch file"):
            tree = _Trusting(data, parts).load() if trust_pickle else _load(_Safe(data, parts))
    except UnsafePickle as error:
        raise UnsafePickle(f"{file}: {error}. {_REMEDY}") from error
    except (MalformedFile, HostExhausted) as error:
        raise type(error)(f"{file}: {error}") from error
    except EOFError as error:
        raise MalformedFile(f"{file}: its pickle breaks off") from error
    return tree


def _load(machine: _Safe) -> Any:
    tree = machine.load()
    check_walk(tree)
    if not all(hasattr(reference, "tid") for reference in machine.references):
        raise MalformedFile("a tensor reference without a `tid`")
    return tree


_NAME = 100
_REMEDY = (
    "If you trust the author of the file, load it with trust_pickle=True; conversions take plain data only: save its "
    "state_dict() alone"
)


def global_named(module: str, name: str) -> Any:
    """Return the object for a global of plain data. Raises UnsafePickle for any other."""
    plain_global = global_of(module, name)
    if plain_global is None:
        raise UnsafePickle(f"its pickle asks for {module:.{_NAME}}.{name:.{_NAME}}, which is not plain data")
    return plain_global


class _SavedStorage(Inert):
    """A record of the file, and the dtype that the pickle gives for it."""

    __slots__ = ("dtype", "span")

    def __init__(self, dtype: str, span: StorageSpan) -> None:
        self.dtype = dtype
        self.span = span


class _StorageClass(Inert):
    __slots__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class _Safe(Machine):
    """The unpickler for untrusted files: safe globals only."""

    def __init__(self, data: bytes, parts: _Parts) -> None:
        super().__init__(data)
        self._parts = parts
        self.references: list[TensorReference] = []

    def find_class(self, module: str, name: str) -> Any:
        rebuilder = self._parts.find(module, name)
        if rebuilder is not None:
            return rebuilder
        kind = _reference_named(module, name)
        if kind is not None:
            return Call(partial(self._reference, kind))
        return global_named(module, name)

    def persistent_load(self, pid: Any) -> _SavedStorage:
        return self._parts.storage(pid)

    def _reference(self, kind: type[TensorReference]) -> TensorReference:
        """Create a reference, as torch-xla's class of that name does; its state follows."""
        reference = kind.__new__(kind)
        self.references.append(reference)
        return reference


class _Trusting(pickle.Unpickler):
    """The unpickler for trusted files: any global."""

    def __init__(self, data: bytes, parts: _Parts) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._parts = parts

    def find_class(self, module: str, name: str) -> Any:
        return _reference_named(module, name) or self._parts.find(module, name) or super().find_class(module, name)

    def persistent_load(self, pid: Any) -> _SavedStorage:
        return self._parts.storage(pid)


def _reference_named(module: str, name: str) -> type[TensorReference] | None:
    """Return our class for another program's class of that name, if it is a reference."""
    if name == "_InternalTensorReference" and module.startswith("neuronx_distributed."):
        return UnfinishedReference
    is_known = module.startswith(("torch_xla.", "neuronx_distributed.", "nemo."))
    return TensorReference if name == "TensorReference" and is_known else None


class _Parts:
    """The pickle's tensor parts: storages, and the functions that rebuild tensors."""

    def __init__(
        self, file: str, storages: Mapping[str, StorageSpan], leaf: Leaf, others: Mapping[tuple[str, str], Any]
    ) -> None:
        self._file = file
        self._storages = storages
        self._leaf = leaf
        self._noted: strides.Stride | None = None  # of the tensor that is being rebuilt
        stored = sum(span.nbytes for span in storages.values())
        self._limit = self._left = limits.REPEATS * stored + limits.REPEATED_NBYTES
        self._tensors: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor"): Call(self._tensor),
            ("torch._utils", "_rebuild_tensor_v2"): Call(self._tensor_v2),
            ("torch._utils", "_rebuild_tensor_v3"): Call(self._tensor_v3),
            ("torch._utils", "_rebuild_parameter"): Call(lambda tensor, *_: tensor),
            ("torch._utils", "_rebuild_parameter_with_state"): Call(lambda tensor, *_: tensor),
            ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): Call(lambda tensor, *_: tensor),
            ("torch._tensor", "_rebuild_from_type_v2"): Call(self._rebuild),
            **others,
        }

    def find(self, module: str, name: str) -> Any:
        """Return the object for one of torch's globals, None for any other.

        Raises UnsupportedState for those of tensors that are not dense.
        """
        if name in _NOT_DENSE and module.startswith("torch."):
            raise UnsupportedState(f"{self._file}: it holds {_NOT_DENSE[name]}, and save the file again")
        storage = name.removesuffix("Storage") != name and module in ("torch", "torch.storage", "torch.cuda")
        if storage and (name == "UntypedStorage" or name in _DTYPE_OF_STORAGE):
            return _StorageClass(_DTYPE_OF_STORAGE.get(name, _UNTYPED))
        return self._tensors.get((module, name))

    def storage(self, pid: Any) -> _SavedStorage:
        """Return the storage of a persistent id."""
        kind, storage_class, key, _location, numel = pid if type(pid) is tuple and len(pid) == 5 else (None,) * 5
        if kind != "storage" or not isinstance(storage_class, _StorageClass) or not isinstance(key, str):
            raise MalformedFile(f"its pickle refers to {shown(pid)}, expected a tensor's storage")
        span = self._storages.get(key)
        if span is None:
            raise MalformedFile(f"its pickle refers to storage {shown(key)}, which the file does not hold")
        if type(numel) is not int or span.nbytes != numel * itemsize(storage_class.dtype):
            raise MalformedFile(
                f"storage {shown(key)} has {span.nbytes} bytes, expected {shown(numel)} elements of "
                f"{storage_class.dtype}"
            )
        return _SavedStorage(storage_class.dtype, span)

    def _rebuild(self, rebuild: Any, _: object, args: Iterable[Any], attributes: object) -> Any:
        """Rebuild a tensor that has Python attributes."""
        if isinstance(rebuild, SubclassRebuilder):
            return rebuild.rebuild(attributes)
        if not isinstance(rebuild, Call) or rebuild not in self._tensors.values():
            raise MalformedFile(f"a tensor is rebuilt by {shown(rebuild)}")
        self._noted = strides.noted(attributes)
        try:
            return rebuild(*args)
        finally:
            self._noted = None

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Iterable[int]) -> Any:
        return self._stub(storage, storage.dtype, offset, shape, stride, None)

    def _tensor_v2(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        requires_grad: Any = False,
        hooks: Any = None,
        bits: Any = None,
    ) -> Any:
        return self._stub(storage, storage.dtype, offset, shape, stride, bits)

    def _tensor_v3(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        requires_grad: Any,
        hooks: Any,
        dtype: Any,
        bits: Any = None,
    ) -> Any:
        if not isinstance(dtype, torch_class("dtype")):
            raise MalformedFile(f"a tensor of dtype {shown(dtype)}")
        return self._stub(storage, dtype_name(dtype), offset, shape, stride, bits)

    def _stub(
        self,
        storage: _SavedStorage,
        dtype: str,
        offset: Any,
        shape: Any,
        stride: Any,
        bits: Any,
    ) -> Any:
        if not isinstance(storage, _SavedStorage):
            raise MalformedFile(f"a tensor in {shown(storage)}, expected a storage")
        if bits:
            raise UnsupportedState(
                f"{self._file}: it holds a tensor whose values are still to be conjugated or negated; save it again "
                "after .resolve_conj().resolve_neg()"
            )
        if not _are_counts(shape) or not _are_counts(stride) or type(offset) is not int or offset < 0:
            raise MalformedFile(f"a tensor of offset {shown(offset)}, shape {shown(shape)} and stride {shown(stride)}")
        shape = tuple(shape)
        stride = tuple(stride)
        size = itemsize(dtype)
        nbytes, last = _extent(shape, stride, size)
        end = offset + 1 + last if nbytes else 0
        if end * size > storage.span.nbytes:
            raise MalformedFile(
                f"a tensor of shape {shape} and stride {stride} at {offset} ends beyond its storage "
                f"{storage.span.record} of {storage.span.nbytes} bytes"
            )
        self._left -= nbytes
        if self._left < 0:
            raise MalformedFile(
                f"a tensor of shape {shape} and stride {stride} in {storage.span.nbytes} bytes: by repetition, the "
                f"tensors of the file have more than the allowed {self._limit} bytes; save expanded tensors "
                "unexpanded, and expand them after loading"
            )
        begin = storage.span.offset + (offset * size if end else 0)
        stub = TensorStub(self._file, begin, dtype, shape, stride, storage.span)
        return self._leaf(stub if self._noted is None else strides.with_stride(stub, self._noted))


def _are_counts(numbers: Any) -> bool:
    if not isinstance(numbers, (tuple, list)) or len(numbers) > limits.DIMENSIONS:
        return False
    for number in numbers:  # noqa: SIM110 - twice as fast, and called for each tensor
        if type(number) is not int or number < 0:
            return False
    return True


@lru_cache(maxsize=4096)
def _extent(shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> tuple[int, int]:
    """Return the bytes of a tight tensor of ``shape``, and the place of its last element, counted in elements."""
    check_form(shape, size, "a tensor")
    if len(shape) != len(check_sizes(stride, "a tensor's stride")):
        raise MalformedFile(f"a tensor of shape {shape} and stride {stride}")
    return prod(shape) * size, sum(map(mul, shape, stride)) - sum(stride)
