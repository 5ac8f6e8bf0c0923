"""Safe unpickling of a torch file's ``data.pkl``: data, not code, and no tensor's bytes are read.

Only the globals of :mod:`.inert` and torch's rebuilding of tensors are known here; anything else is refused
by name, never imported. ``trust_pickle=True`` lets the rest through to Python's own machinery.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Iterable, Mapping
from operator import mul
from typing import Any

import torch

from nxd_ckpt.errors import CheckpointError, MalformedFile, UnsafePickle, UnsupportedState
from nxd_ckpt.formats.inert import ATTRIBUTED, GLOBALS, Call, Sealed, StandIn
from nxd_ckpt.formats.plain_data import check_picklable_as_data
from nxd_ckpt.formats.tensors import StorageSpan, TensorReference, TensorStub, itemsize, map_tensors

__all__ = ["STORAGE_CLASSES", "Leaf", "check_picklable_as_data", "unpickle"]

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
"""torch's legacy storage class of each dtype that has one; newer dtypes are written as ``UntypedStorage``."""

_DTYPE_OF_STORAGE = {storage: dtype for dtype, storage in STORAGE_CLASSES.items()}
_UNTYPED = "uint8"
_PYTHON_2_NAMES = {"xrange": "range", "long": "int", "unicode": "str"}  # what protocol 2 still writes

Leaf = Callable[[TensorStub], Any]


def unpickle(
    data: bytes,
    file: str,
    storages: Mapping[str, StorageSpan],
    *,
    trust_pickle: bool = False,
    leaf: Leaf = lambda stub: stub,
) -> Any:
    """The tree that ``data`` describes, with ``leaf(stub)`` for every tensor.

    ``file`` names the file in stubs and errors; ``storages`` are its records by storage key. Views and
    parameters come as plain tensors; Python attributes of tensors and of OrderedDicts are dropped. Raises
    UnsafePickle for anything that is more than data (unless ``trust_pickle``), MalformedFile for what is no
    pickle of a torch file.
    """
    unpickler = _Unpickler(data, file, storages, trust_pickle, leaf)
    try:
        tree = unpickler.load()
        unpickler.check_attributes()
    except UnsafePickle as error:
        raise UnsafePickle(f"{file}: {error}. {_REMEDY}") from error
    except MalformedFile as error:
        raise MalformedFile(f"{file}: {error}") from error
    except (CheckpointError, OSError):  # the latter from a leaf that reads
        raise
    except Exception as error:
        # An unpickler fed with garbage raises whatever the garbage leads to.
        raise MalformedFile(f"{file}: not the pickle of a torch file: {type(error).__name__}: {error}") from error
    if unpickler.has_stand_ins:
        tree = map_tensors(tree, lambda stand_in: stand_in.real(), StandIn)
    return tree


_REMEDY = "If you trust whoever wrote the file, pass trust_pickle=True"


class _Storage(Sealed):
    """A record of the file and the dtype it is said to hold."""

    __slots__ = ("dtype", "span")

    def __init__(self, dtype: str, span: StorageSpan) -> None:
        self.dtype, self.span = dtype, span


class _StorageClass(Sealed):
    __slots__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, file: str, storages: Mapping[str, StorageSpan], trust_pickle: bool, leaf: Leaf
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._file, self._storages, self._trust_pickle, self._leaf = file, storages, trust_pickle, leaf
        self._attributed: list[Any] = []
        self.has_stand_ins = False
        self._tensors: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor"): Call(self._tensor),
            ("torch._utils", "_rebuild_tensor_v2"): Call(self._tensor_v2),
            ("torch._utils", "_rebuild_tensor_v3"): Call(self._tensor_v3),
            ("torch._utils", "_rebuild_parameter"): Call(lambda tensor, *_: tensor),
            ("torch._utils", "_rebuild_parameter_with_state"): Call(lambda tensor, *_: tensor),
            ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): Call(lambda tensor, *_: tensor),
            ("torch._tensor", "_rebuild_from_type_v2"): Call(lambda rebuild, _, args, __: self._rebuild(rebuild, args)),
        }

    def find_class(self, module: str, name: str) -> Any:
        storage = name.removesuffix("Storage") != name and module in ("torch", "torch.storage", "torch.cuda")
        if storage and (name == "UntypedStorage" or name in _DTYPE_OF_STORAGE):
            return _StorageClass(_DTYPE_OF_STORAGE.get(name, _UNTYPED))
        key = (module, name)
        if key in self._tensors:
            return self._tensors[key]
        if name == "TensorReference" and module.startswith(("torch_xla.", "neuronx_distributed.")):
            return TensorReference
        if self._trust_pickle:
            return super().find_class(module, name)
        if module == "__builtin__":
            key = ("builtins", _PYTHON_2_NAMES.get(name, name))
        if key in ATTRIBUTED:
            return Call(lambda *args: self._tracked(ATTRIBUTED[key](*args)))
        if key in GLOBALS:
            self.has_stand_ins |= module.startswith("numpy")
            return GLOBALS[key]
        raise UnsafePickle(f"its pickle asks for {module}.{name}, which is not plain data")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_class, key, _location, numel = pid
        if kind != "storage" or not isinstance(storage_class, _StorageClass):
            raise MalformedFile(f"its pickle refers to {pid!r:.200}, expected a tensor's storage")
        if key not in self._storages:
            raise MalformedFile(f"its pickle refers to storage {key!r}, which the file does not hold")
        span = self._storages[key]
        if span.nbytes != numel * itemsize(storage_class.dtype):
            raise MalformedFile(
                f"storage {key!r} has {span.nbytes} bytes, expected {numel} elements of {storage_class.dtype}"
            )
        return _Storage(storage_class.dtype, span)

    def check_attributes(self) -> None:
        """Drop what was set on containers (it could shadow methods); a namespace's attributes need names."""
        for obj in self._attributed:
            if not isinstance(obj, types.SimpleNamespace):
                vars(obj).clear()
            elif not all(isinstance(name, str) for name in vars(obj)):
                raise MalformedFile("a SimpleNamespace must hold a dict of named attributes")

    def _tracked(self, obj: Any) -> Any:
        self._attributed.append(obj)
        return obj

    def _rebuild(self, rebuild: Any, args: Iterable[Any]) -> Any:
        if rebuild not in self._tensors.values():
            raise MalformedFile(f"a tensor is rebuilt by {rebuild!r:.80}")
        return rebuild(*args)

    def _tensor(self, storage: Any, offset: int, shape: Iterable[int], stride: Iterable[int]) -> Any:
        return self._stub(storage, storage.dtype, offset, shape, stride, None)

    def _tensor_v2(
        self,
        storage: Any,
        offset: int,
        shape: Iterable[int],
        stride: Iterable[int],
        requires_grad: Any = False,
        hooks: Any = None,
        bits: Any = None,
    ) -> Any:
        return self._stub(storage, storage.dtype, offset, shape, stride, bits)

    def _tensor_v3(
        self,
        storage: Any,
        offset: int,
        shape: Iterable[int],
        stride: Iterable[int],
        requires_grad: Any,
        hooks: Any,
        dtype: Any,
        bits: Any = None,
    ) -> Any:
        if not isinstance(dtype, torch.dtype):
            raise MalformedFile(f"a tensor of dtype {dtype!r:.80}")
        return self._stub(storage, str(dtype).removeprefix("torch."), offset, shape, stride, bits)

    def _stub(
        self,
        storage: _Storage,
        dtype: str,
        offset: int,
        shape: Iterable[int],
        stride: Iterable[int],
        bits: Any,
    ) -> Any:
        shape, stride = tuple(shape), tuple(stride)
        if not _are_counts((offset, *shape, *stride)) or len(shape) != len(stride):
            raise MalformedFile(f"a tensor of offset {offset!r}, shape {shape!r:.80} and stride {stride!r:.80}")
        if bits:
            raise UnsupportedState(
                f"{self._file}: a tensor is stored with its bits {sorted(bits)} to be applied; "
                "save it again after .resolve_conj().resolve_neg()"
            )
        size = itemsize(dtype)
        end = offset + 1 + sum(map(mul, shape, stride)) - sum(stride) if 0 not in shape else 0
        if end * size > storage.span.nbytes:
            raise MalformedFile(
                f"a tensor of shape {shape} and stride {stride} at {offset} ends behind its storage "
                f"{storage.span.record} of {storage.span.nbytes} bytes"
            )
        begin = storage.span.offset + (offset * size if end else 0)
        return self._leaf(TensorStub(self._file, begin, dtype, shape, stride, storage.span))


def _are_counts(numbers: Iterable[Any]) -> bool:
    for number in numbers:  # noqa: SIM110 - twice as fast, and called for each tensor
        if type(number) is not int or number < 0:
            return False
    return True
