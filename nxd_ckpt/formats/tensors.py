"""Stand-ins for stored tensors, and walks through trees of tensors.

A *tree* is the content of a checkpoint file: dicts, lists, tuples and namespaces of plain data, with tensors (or their
stand-ins `TensorStub` and `TensorReference`) as leaves.
"""

from __future__ import annotations

import copy
import math
import sys
from argparse import Namespace
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from operator import is_
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.limits import TENSOR_NBYTES, check_sizes, shown
from nxd_ckpt.errors import MalformedFile, UnsupportedState

if TYPE_CHECKING:
    import torch

NBYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
}
"""Other dtypes, which hardly anybody saves, and those of a newer torch than is known here, are asked of torch."""


Path = tuple[Any, ...]
"""Keys, indices and attribute names from the root of a tree to a leaf."""


class StorageSpan(NamedTuple):
    """One record of a torch zip file: its name, offset and number of bytes in the file, and their digest.

    ``crc32`` is None if the file has 0, which torch uses for "not recorded" and which verifies nothing.
    """

    record: str
    offset: int
    nbytes: int
    crc32: int | None


@dataclass(frozen=True)
class TensorStub:
    """The place of one tensor's bytes in a file; none of them are in memory.

    ``file`` is a key relative to the tag (posix), ``offset`` the absolute offset in bytes of the first element in that
    file, ``dtype`` torch's name without prefix ("bfloat16"); ``shape`` and ``stride`` count elements. ``storage`` is
    the record that the tensor is a view of; a foreign file has no other digest.
    """

    # Slots, frozen, no __setstate__: an unpickler's BUILD cannot point a stub elsewhere.
    __slots__ = ("dtype", "file", "offset", "shape", "storage", "stride")

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: StorageSpan

    def __reduce__(self) -> tuple[type[TensorStub], tuple[Any, ...]]:
        return TensorStub, (self.file, self.offset, self.dtype, self.shape, self.stride, self.storage)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when stored tightly: elements times element size."""
        return _nbytes(self.dtype, self.shape)

    @property
    def is_contiguous(self) -> bool:
        """True if the bytes in the file are contiguous and row-major."""
        return _is_tight(self.shape, self.stride)

    @property
    def is_record(self) -> bool:
        """True if it is all of the record that it is a view of, row-major."""
        return _is_record(self.dtype, self.shape, self.stride, self.storage.nbytes)

    @property
    def storage_order(self) -> tuple[int, ...] | None:
        """The order of dimensions in which the bytes in the file are tight and row-major; None if there is none."""
        return _tight_order(self.shape, self.stride)

    def permuted(self, order: tuple[int, ...]) -> TensorStub:
        """Return the same bytes with the dimensions ``order``, like ``torch.permute``."""
        shape, stride = (tuple(sizes[dim] for dim in order) for sizes in (self.shape, self.stride))
        return TensorStub(self.file, self.offset, self.dtype, shape, stride, self.storage)


@dataclass(frozen=True)
class NotedStub(TensorStub):
    """A stub with the tensor's stride in memory: a `formats.strides.Stride`."""

    __slots__ = ("live_stride",)

    live_stride: Any

    def __reduce__(self) -> tuple[type[TensorStub], tuple[Any, ...]]:
        return NotedStub, (*super().__reduce__()[1], self.live_stride)


@dataclass(frozen=True)
class Fragment:
    """A part of an assembly: ``source``, a box of the stored tensor ``stub``, goes to the box ``target``."""

    stub: TensorStub
    source: Box
    target: Box

    def permuted(self, order: tuple[int, ...]) -> Fragment:
        """Return the fragment with both tensors permuted to the dimensions ``order``."""
        return Fragment(self.stub.permuted(order), self.source.permuted(order), self.target.permuted(order))

    def without(self, dim: int) -> Fragment:
        """Return the fragment without a dimension along which it has a single element."""
        stub = self.stub
        at = slice(dim, dim + 1)
        shape = list(stub.shape)
        stride = list(stub.stride)
        offset = stub.offset + self.source.offset[dim] * stride[dim] * itemsize(stub.dtype)
        del shape[at], stride[at]
        inner = TensorStub(stub.file, offset, stub.dtype, tuple(shape), tuple(stride), stub.storage)
        return Fragment(inner, self.source.without(dim), self.target.without(dim))

    def with_dim(self, dim: int) -> Fragment:
        """Return the fragment with one more dimension, of a single element."""
        stub = self.stub
        shape, stride = ((*sizes[:dim], 1, *sizes[dim:]) for sizes in (stub.shape, stub.stride))
        outer = TensorStub(stub.file, stub.offset, stub.dtype, shape, stride, stub.storage)
        return Fragment(outer, self.source.with_dim(dim), self.target.with_dim(dim))

    def unflattened(self, dim: int, sizes: tuple[int, ...]) -> Iterator[Fragment]:
        """Yield the fragment in parts, with the target's dimension ``dim`` as several of these sizes."""
        first = self.target.offset[dim]
        length = self.target.size[dim]
        start = first
        while start < first + length:
            stop = min(first + length, start - start % sizes[-1] + sizes[-1])
            part = Fragment(
                self.stub,
                self.source.narrowed(dim, start - first, stop - start),
                self.target.narrowed(dim, start - first, stop - start),
            )
            for _ in sizes[1:]:
                part = part.with_dim(dim)
            at = [start // math.prod(sizes[inner + 1 :]) % size for inner, size in enumerate(sizes)]
            offset = (*part.target.offset[:dim], *at, *part.target.offset[dim + len(sizes) :])
            yield Fragment(part.stub, part.source, Box(offset, part.target.size))
            start = stop

    def is_whole(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Return whether the assembled tensor, of ``dtype`` and ``shape``, is simply the stored one."""
        stub = self.stub
        whole = Box.whole(shape)
        return (stub.dtype, stub.shape) == (dtype, shape) and self.source == self.target == whole

    def moved(self, offset: tuple[int, ...]) -> Fragment:
        """Return the fragment with its target moved by ``offset``."""
        return Fragment(self.stub, self.source, self.target.moved(offset))


@dataclass(frozen=True)
class Assembly:
    """A tensor of ``dtype`` and ``shape``, to be assembled from parts of saved tensors, which are cast if necessary.

    Parts do not overlap; elements in no part are zero (the padding of ZeRO-1 shards). ``live_stride`` is the stride in
    memory, a `formats.strides.Stride`, or None.
    """

    dtype: str
    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    live_stride: Any = field(default=None, compare=False)

    @staticmethod
    def of(leaf: TensorStub | Assembly) -> Assembly:
        """Return the leaf as an assembly; a saved tensor becomes its only part."""
        if isinstance(leaf, Assembly):
            return leaf
        whole = Box.whole(leaf.shape)
        return Assembly(leaf.dtype, leaf.shape, (Fragment(leaf, whole, whole),))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)

    @property
    def base(self) -> Assembly:
        """An assembly of the same row-major bytes, whose fragments are boxes of its shape."""
        return self

    def cast(self, dtype: str) -> Assembly:
        """Return the tensor in another dtype."""
        return Assembly(dtype, self.shape, self.fragments, self.live_stride)

    def holding(self, fragments: tuple[Fragment, ...]) -> Assembly:
        """Return the tensor with these fragments."""
        return Assembly(self.dtype, self.shape, fragments, self.live_stride)

    def permuted(self, order: tuple[int, ...]) -> Assembly:
        """Return the tensor with the dimensions ``order``, like ``torch.permute``."""
        shape = tuple(self.shape[dim] for dim in order)
        return Assembly(self.dtype, shape, tuple(fragment.permuted(order) for fragment in self.fragments))

    def unflattened(self, dim: int, sizes: tuple[int, ...]) -> Assembly:
        """Return the tensor with dimension ``dim`` as several of these sizes, like ``torch.unflatten``."""
        parts = tuple(part for fragment in self.fragments for part in fragment.unflattened(dim, sizes))
        return Assembly(self.dtype, (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]), parts)

    def within(self, window: Box) -> Assembly:
        """Return the part of this tensor inside ``window``, of the window's size."""
        parts = []
        for fragment in self._near(window):
            common = fragment.target.intersect(window)
            if common is not None:
                source = common.shifted(fragment.target.offset)
                offset = tuple(a + b for a, b in zip(source.offset, fragment.source.offset, strict=True))
                parts.append(Fragment(fragment.stub, Box(offset, common.size), common.shifted(window.offset)))
        return Assembly(self.dtype, window.size, tuple(parts))

    def _near(self, window: Box) -> Sequence[Fragment]:
        """Return the fragments in the rows of ``window``, and maybe others."""
        if len(self.fragments) < _MANY or not self.shape:
            return self.fragments
        starts, order, longest = self._by_row
        first = window.offset[0]
        stop = window.offset[0] + window.size[0]
        near = order[bisect_right(starts, first - longest) : bisect_left(starts, stop)]
        return [self.fragments[number] for number in sorted(near)]

    @cached_property
    def _by_row(self) -> tuple[list[int], list[int], int]:
        """The first row of each fragment, ascending; the numbers of these fragments; and the most rows of any."""
        boxes = [fragment.target for fragment in self.fragments]
        order = sorted(range(len(boxes)), key=lambda number: boxes[number].offset[0])
        return [boxes[number].offset[0] for number in order], order, max(box.size[0] for box in boxes)


_MANY = 16
"""Fragments from which on those of a window are looked up by their rows: a stack of experts has hundreds."""


class DeferredAssembly(Assembly):
    """An assembly whose parts are computed on demand: ``find(box)`` returns the parts in a box, relative to it."""

    _find: Callable[[Box], tuple[Fragment, ...]]

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        find: Callable[[Box], tuple[Fragment, ...]],
        live_stride: Any = None,
    ) -> None:
        for name, value in (("dtype", dtype), ("shape", shape), ("_find", find), ("live_stride", live_stride)):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type[Assembly], tuple[Any, ...]]:
        return Assembly, (self.dtype, self.shape, self.fragments, self.live_stride)

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        return self._find(Box.whole(self.shape))

    def cast(self, dtype: str) -> Assembly:
        return DeferredAssembly(dtype, self.shape, self._find, self.live_stride)

    def within(self, window: Box) -> Assembly:
        return Assembly(self.dtype, window.size, self._find(window))


class ReshapedAssembly(Assembly):
    """A tensor of ``shape`` with the row-major bytes of ``base``, which has more dimensions.

    In these, elements that alternate are boxes. It is read as a whole.
    """

    _base: Assembly

    def __init__(self, shape: tuple[int, ...], base: Assembly) -> None:
        for name, value in (("dtype", base.dtype), ("shape", shape), ("_base", base), ("live_stride", None)):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type[Assembly], tuple[Any, ...]]:
        return ReshapedAssembly, (self.shape, self._base)

    @property
    def base(self) -> Assembly:
        return self._base

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return self._base.fragments

    def cast(self, dtype: str) -> Assembly:
        return ReshapedAssembly(self.shape, self._base.cast(dtype))

    def holding(self, fragments: tuple[Fragment, ...]) -> Assembly:
        return ReshapedAssembly(self.shape, self._base.holding(fragments))

    def within(self, window: Box) -> Assembly:
        if window != Box.whole(self.shape):
            raise UnsupportedState(f"a tensor of {self.shape} whose elements alternate cannot be cut at {window}")
        return self


class TensorReference:
    """A reference to a tensor in another file, ``NAME.pt.tensors/tensor_{tid}.pt``.

    On disk it is torch-xla's class of this name (``torch_xla.utils.serialization``), which is neither imported nor
    needed here. The class of neuronx-nemo-megatron also has dtype and shape of the tensor, which are in ``about``.
    ``noted`` are further attributes that ours may have (`formats.strides`).
    """

    __slots__ = ("about", "noted", "tid")

    def __init__(self, tid: int, noted: Mapping[str, Any] | None = None) -> None:
        self.tid: int = tid
        self.about: dict[str, Any] = dict[str, Any]()
        self.noted: dict[str, Any] = dict(noted or {})

    def __getstate__(self) -> dict[str, Any]:
        return {"tid": self.tid, **self.noted}

    def __setstate__(self, state: object) -> None:
        state = state if isinstance(state, dict) else {}
        tid = state.get("tid")
        if type(tid) is not int or not 0 <= tid <= TENSOR_NBYTES:
            raise MalformedFile(f"a tensor reference must hold a non-negative integer `tid`, found {shown(tid)}")
        self.tid = tid
        self.about = {}
        self.noted = {key: value for key, value in state.items() if key != "tid"}
        if isinstance(state.get("dtype"), torch_class("dtype")) and "shape" in state:
            self.about = {"dtype": state["dtype"], "shape": check_sizes(state["shape"], "a tensor reference")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorReference) and self.tid == other.tid

    def __hash__(self) -> int:
        return hash((TensorReference, self.tid))

    def __repr__(self) -> str:
        return f"TensorReference({getattr(self, 'tid', '?')})"


class UnfinishedReference(TensorReference):
    """A reference of NxD's own class, in a list: NxD converts those in dicts to torch-xla's, and reads only these."""

    __slots__ = ()


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``torch.float32`` -> "float32"."""
    return str(dtype).removeprefix("torch.")


def cast_dtype(dtype: str, target: str | None) -> str:
    """Return the dtype that a tensor is cast to: floating-point numbers to ``target``, if not None; others stay."""
    return dtype if target is None or not is_floating(dtype) else target


def is_floating(dtype: str) -> bool:
    """Return whether it is a dtype of floating-point numbers, as torch says of it; complex ones are not."""
    return dtype.startswith(("float", "bfloat"))


@cache
def itemsize(name: str) -> int:
    """Return the bytes per element of the dtype of a name. Raises InvalidArgument if the installed torch has none."""
    if name in NBYTES:
        return NBYTES[name]
    from nxd_ckpt.formats.memory import torch_dtype

    return torch_dtype(name).itemsize


def nbytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a dense tensor."""
    return math.prod(shape) * itemsize(dtype)


_nbytes = lru_cache(maxsize=4096)(nbytes_of)
"""`nbytes_of` with a memory, for shapes that are tuples: most tensors have few."""


@lru_cache(maxsize=4096)
def _is_record(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], nbytes: int) -> bool:
    return _is_tight(shape, stride) and nbytes_of(dtype, shape) == nbytes


@lru_cache(maxsize=4096)
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tight row-major tensor of ``shape``."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def _is_tight(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    tight = contiguous_stride(shape)
    if stride == tight or math.prod(shape) == 0:
        return True
    return all(a == b for size, a, b in zip(shape, stride, tight, strict=True) if size > 1)


@lru_cache(maxsize=4096)
def _tight_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    order = tuple(sorted(range(len(shape)), key=lambda dim: (shape[dim] > 1, -stride[dim])))
    is_tight = _is_tight(tuple(shape[dim] for dim in order), tuple(stride[dim] for dim in order))
    return order if is_tight else None


def torch_class(name: str) -> Any:
    """Return torch's class of this name, for ``isinstance``; before torch is imported one that nothing is of.

    What only looks at files need not import it.
    """
    return getattr(sys.modules.get("torch"), name, ())


def tensor_types() -> tuple[Any, ...]:
    """Return the types of tensors, torch's own and their stand-ins."""
    return TensorStub, Assembly, torch_class("Tensor")


def iter_tensors(tree: Any, leaves: type | tuple[type, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every tensor, or every instance of ``leaves``, with its path: depth first, dicts in their order."""
    leaves = leaves or tensor_types()

    def walk(node: Any, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
        for key, child in () if is_flat(node) else children_of(node):
            if isinstance(child, leaves):
                yield (*path, key), child
            # A pickle may contain itself, and there may be millions of empty containers.
            elif isinstance(child, CONTAINERS) and child and id(child) not in above:
                yield from walk(child, (*path, key), (*above, id(child)))

    return iter([((), tree)]) if isinstance(tree, leaves) else walk(tree, (), (id(tree),))


def iter_leaves(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield everything in ``tree`` that is no container, tensors too, with its path.

    An empty container is a leaf. The walk does not enter a container again below itself.
    """

    def walk(node: Any, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
        children = list(children_of(node))
        if not children:
            yield path, node
        elif id(node) not in above:
            for key, child in children:
                yield from walk(child, (*path, key), (*above, id(node)))

    return walk(tree, (), ())


def by_digest(tree: Any) -> Any:
    """Return ``tree`` with dtype, shape and digest for each stored tensor, so that trees of equal tensors are equal."""

    def described(leaf: TensorStub) -> tuple[Any, ...]:
        return leaf.dtype, leaf.shape, leaf.storage.crc32

    return map_tensors(tree, described, TensorStub)


def digest_of(leaf: Any) -> tuple[Any, ...] | None:
    """Return dtype, shape and digest, equal for stored tensors of equal bytes; None if the file has no digest."""
    has_digest = isinstance(leaf, TensorStub) and leaf.storage.crc32 is not None
    return (leaf.dtype, leaf.shape, leaf.storage.crc32) if has_digest else None


def map_tensors(tree: Any, fn: Callable[[Any], Any], leaves: type | tuple[type, ...] = ()) -> Any:
    """Return a copy of ``tree`` with ``fn(leaf)`` for every tensor, or every instance of ``leaves``.

    Leaves are passed depth first, dicts in their order. Containers keep their type, and one that occurs twice is copied
    once; other values are shared.
    """
    leaves = leaves or tensor_types()
    copies = dict[int, Any]()

    def walk(node: Any) -> Any:
        if isinstance(node, leaves):
            return fn(node)
        if not isinstance(node, CONTAINERS):
            return node
        if id(node) not in copies:
            if is_flat(node):
                copies[id(node)] = copy.copy(node)
            elif isinstance(node, tuple):
                copies[id(node)] = like_tuple(node, [walk(child) for child in node])
            else:
                new = copies[id(node)] = copy.copy(node)  # before its children, since it may contain itself
                for key, child in children_of(node):
                    _set(new, key, walk(child))
        return copies[id(node)]

    return walk(tree)


CONTAINERS = (dict, list, tuple, deque, Namespace, SimpleNamespace)
"""Types of the inner nodes of trees."""


SCALARS = frozenset({bool, int, float, str, type(None)})
"""Types of numbers and texts."""


def is_flat(node: Any) -> bool:
    """Return whether a dict, list or tuple has numbers and texts alone: such a one may be long, and needs no walk."""
    kind = type(node)
    return kind in (dict, list, tuple) and SCALARS.issuperset(map(type, node.values() if kind is dict else node))


def children_of(node: Any) -> Iterable[tuple[Any, Any]]:
    """Return the children of a container, each with its key, index or name; nothing for any other value."""
    if isinstance(node, dict):
        return node.items()
    if isinstance(node, (list, tuple, deque)):
        return enumerate(node)
    if isinstance(node, (Namespace, SimpleNamespace)):
        return vars(node).items()
    return ()


def _set(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (dict, list, deque)):
        container[key] = value
    else:
        setattr(container, key, value)


def like_tuple(original: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the type of ``original`` with other items; the ``original`` if they are the same objects."""
    kind = type(original)
    if all(map(is_, original, items)):
        return original
    # Those in C, such as what torch.linalg.qr returns, are only made by their own call.
    like = kind(items) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, items)
    if hasattr(original, "__dict__"):
        vars(like).update(vars(original))
    return like


def is_tensor(leaf: Any) -> bool:
    """Return whether ``leaf`` is a tensor or a saved one's stand-in: it has dtype and shape, and is not NumPy's."""
    if isinstance(leaf, tensor_types()):
        return True
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not hasattr(leaf, "__array__")


def form_of(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype's name and the shape of a tensor or its stand-in."""
    dtype = leaf.dtype
    return (dtype if isinstance(dtype, str) else dtype_name(dtype)), tuple(leaf.shape)
