"""The tree of a torch file as JSON, for an index: a load of our own tags reads no pickle.

Text, true, false, null, integers and finite numbers are themselves, and a dict whose keys are all text is an object.
Everything else is a list that begins with its kind; a tensor without a noted stride is the empty list. Tensors have no
place here: they are those that the index lists for the file, in its order. docs/format.md has the table.
"""

from __future__ import annotations

import base64
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from struct import pack
from typing import Any, NamedTuple

from nxd_ckpt.core.limits import TREE_DEPTH, check_sizes, shown
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.safe_globals import Keys
from nxd_ckpt.formats.strides import Stride, noted
from nxd_ckpt.formats.tensors import TensorReference, dtype_name, is_flat, tensor_types, torch_class

_ITSELF = frozenset({int, bool, type(None)})
_NUMBERS = frozenset({int, bool, float})

_NBYTES, _ELEMENT_NBYTES = 16 * 2**20, 16
"""Bytes of a recorded tree, roughly, and of an element. A larger one, of content that is no state, only the file has.
"""

_SURROGATE = re.compile("[\ud800-\udfff]")

_INTEGER_BITS = 2**13
"""Bits of an integer: Python turns no longer ones into text."""


Make = Callable[[Stride | None, int | None], Any]
"""Makes the next tensor, of a noted stride; with a number, the reference to the tensor of that number elsewhere."""


class RecordedTree(NamedTuple):
    """A tree as JSON values, and the number of its tensors."""

    element: Any
    tensors: int


def recorded(tree: Any, stride_of: Callable[[Any], Stride | None]) -> RecordedTree | None:
    """Return the tree as recorded; None if it holds other values, or a container twice, or is too large.

    ``stride_of`` returns the stride to note for a tensor.
    """
    recorder = _Recorder(stride_of)
    try:
        return RecordedTree(recorder.element(tree, 0), recorder.tensors)
    except _NotRecorded:
        return None


class _NotRecorded(Exception):
    pass


class _Recorder:
    def __init__(self, stride_of: Callable[[Any], Stride | None]) -> None:
        self._stride_of = stride_of
        self._tensors = tensor_types()
        self._containers: set[int] = set()
        self._left = _NBYTES
        self.tensors = 0

    def _spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise _NotRecorded

    def element(self, node: Any, depth: int) -> Any:
        kind = type(node)
        self._spend(_ELEMENT_NBYTES)
        if kind is str:
            self._spend(len(node))
            return _text(node)
        if kind in _ITSELF:
            if kind is int and node.bit_length() > _INTEGER_BITS:
                raise _NotRecorded
            return node
        if isinstance(node, self._tensors):
            self.tensors += 1
            stride = self._stride_of(node)
            return [] if stride is None else ["tensor", *stride]
        if kind is float:
            if node != node and pack("d", node) != pack("d", math.nan):  # whose text does not tell which it is
                raise _NotRecorded
            return node if math.isfinite(node) else ["float", repr(node)]
        if kind is tuple:
            return ["tuple", *self._elements(node, depth)]
        if kind is torch_class("Size"):
            return ["Size", *node]
        if kind is torch_class("dtype"):
            return ["dtype", dtype_name(node)]
        if kind is bytes:
            self._spend(2 * len(node))
            return ["bytes", base64.b64encode(node).decode()]
        if kind is TensorReference:
            stride = noted(node.noted)
            return ["reference", node.tid, *(stride or ())]
        if kind not in (dict, OrderedDict, list) or id(node) in self._containers or depth > TREE_DEPTH:
            raise _NotRecorded
        self._containers.add(id(node))
        if kind is list:
            return ["list", *self._elements(node, depth)]
        if kind is dict and all(type(key) is str for key in node):
            return dict(zip(map(_text, node), self._elements(node.values(), depth), strict=True))
        pairs = ([self.element(key, depth + 1), self.element(value, depth + 1)] for key, value in node.items())
        return [kind.__name__, *(element for pair in pairs for element in pair)]

    def _elements(self, nodes: Collection[Any], depth: int) -> Iterable[Any]:
        if not _are_numbers(nodes):
            return (self.element(node, depth + 1) for node in nodes)
        self._spend(_ELEMENT_NBYTES * len(nodes))
        return nodes


def _are_numbers(nodes: Collection[Any]) -> bool:
    """Return whether these are numbers alone that JSON keeps as they are; there may be millions."""
    try:
        return _NUMBERS.issuperset(map(type, nodes)) and all(map(math.isfinite, nodes))
    except OverflowError:  # a long integer
        return False


def _text(text: str) -> str:
    """Return the text. Raises _NotRecorded for one that JSON changes: of two surrogates it makes one character."""
    if not text.isascii() and _SURROGATE.search(text):
        raise _NotRecorded
    return text


def tree_of(element: Any, make: Make) -> Any:
    """Return the tree of a recorded one, whose tensors and references ``make`` returns.

    Raises:
        MalformedFile: it is not what `recorded` returns.
    """
    try:
        return _tree(element, make, 0)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MalformedFile(f"its recorded tree is malformed ({type(error).__name__}: {error})") from error


def _tree(element: Any, make: Make, depth: int) -> Any:
    kind = type(element)
    if kind is dict:
        _check_depth(depth)
        if is_flat(element):
            return dict(element)
        return {key: _tree(child, make, depth + 1) for key, child in element.items()}
    if kind is not list:
        return element
    if not element:
        return make(None, None)
    name, *parts = element
    if name in ("tensor", "reference"):
        return _of_tensor(name, parts, make)
    if name in ("Size", "dtype", "bytes", "float"):
        return _plain(name, parts)
    _check_depth(depth)
    children = parts if is_flat(parts) else [_tree(part, make, depth + 1) for part in parts]
    if name == "list":
        return children
    if name == "tuple":
        return tuple(children)
    if name not in ("dict", "OrderedDict") or len(children) % 2:
        raise MalformedFile(f"its recorded tree has {shown(name)} with {len(parts)} parts")
    keys = children[::2]
    values = children[1::2]
    Keys().check(keys)
    pairs = zip(keys, values, strict=True)
    made: dict[Any, Any] = OrderedDict(pairs) if name == "OrderedDict" else dict(pairs)
    if len(made) < len(keys):
        raise MalformedFile("its recorded tree has a key twice")
    return made


def _check_depth(depth: int) -> None:
    if depth > TREE_DEPTH:
        raise MalformedFile(f"its recorded tree is nested more than {TREE_DEPTH} deep")


def _of_tensor(name: str, parts: Sequence[Any], make: Make) -> Any:
    if name == "tensor":
        return make(_stride(parts), None)
    tid, *stride = parts
    return make(_stride(stride) if stride else None, *check_sizes([tid], "a recorded reference"))


def _stride(parts: Sequence[Any]) -> Stride:
    steps, as_parameter = parts
    return Stride(check_sizes(tuple(steps), "the stride of a live tensor"), as_parameter is True)


def _plain(name: str, parts: Sequence[Any]) -> Any:
    if name in ("Size", "dtype"):
        return _of_torch(name, parts)
    (text,) = parts
    if name == "bytes":
        return base64.b64decode(text, validate=True)
    if text not in ("nan", "inf", "-inf"):
        raise MalformedFile(f"its recorded tree has the number {shown(text)}")
    return float(text)


def _of_torch(name: str, parts: Sequence[Any]) -> Any:
    import torch

    from nxd_ckpt.formats.memory import torch_dtype

    if name == "Size":
        return torch.Size(check_sizes(parts, "a recorded size"))
    (text,) = parts
    return torch_dtype(text)
