"""The machine that runs a pickle's opcodes, with a bound on the cost of each of them.

Python's own machine in C trusts the pickle: a key of deeply nested tuples crashes the process (they are hashed without
a check of the stack), one that contains itself twice, 60 levels deep, takes for ever, and ten bytes that name memo slot
2**31 take 32 GiB. So pickles of checkpoints are run by the standard library's machine in Python, which torch also uses
for ``weights_only``, with these rules:

- A key has few values (`limits.KEY_VALUES`), counted before it is hashed, and few keys have the same hash
  (`limits.KEYS_OF_ONE_HASH`).
- Only `inert.Call` objects can be called, and a few builtin types with their usual arguments. All calls together get
  little more to work on than the pickle has bytes, so that a long value cannot be copied again and again.
- Only objects that are written with a state get one. A stand-in for a NumPy object is then replaced by the object,
  before anything else can refer to it.
- Opcodes that no checkpoint has (``INST``, ``OBJ``, ``DUP``, extension codes, buffers) are refused.

The result is a tree that can be walked: not too deep, and not too large if shared parts count each time.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from typing import Any

from nxd_ckpt.core import limits
from nxd_ckpt.core.limits import check_count, shown
from nxd_ckpt.errors import MalformedFile, UnsafePickle
from nxd_ckpt.formats.inert import Call, StandIn
from nxd_ckpt.formats.safe_globals import Keys, call_builtin, set_state
from nxd_ckpt.formats.tensors import CONTAINERS, TensorStub

_REUSE = 4
"""How often a pickle may pass each of its bytes to calls; short texts, such as an encoding's name, are shared."""

_SPARE = 2**20

_Machine: Any = pickle._Unpickler
_Load = Callable[[Any], None]


class Machine(_Machine):  # type: ignore[misc]
    """A run of the pickle ``data``. Subclasses define ``find_class`` and ``persistent_load``.

    At most ``objects`` containers and other objects are made, and one more for every `limits.PICKLE_OBJECT_NBYTES` of
    ``data``.
    """

    def __init__(self, data: bytes, objects: int = limits.PICKLE_OBJECTS) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._objects = objects + len(data) // limits.PICKLE_OBJECT_NBYTES
        self._work_left = _REUSE * len(data) + _SPARE
        self._keys: dict[int, tuple[Any, Keys]] = {}
        self._stand_ins = 0  # whose state was not set yet

    def load(self) -> Any:
        """Return the pickle's object. Hostile bytes may raise anything."""
        # Frames only hint how much to read at once, but all of the pickle is in memory.
        self.read: Callable[[int], bytes] = self._file_read
        self.readline: Callable[[], bytes] = self._file_readline
        read = self.read
        self.metastack: list[Any] = list[Any]()
        self.stack: list[Any] = list[Any]()
        self.append: Callable[[Any], None] = self.stack.append
        left = self._objects
        try:
            while True:
                load, objects = _OPCODES[read(1)]
                left -= objects
                if left < 0:
                    raise UnsafePickle(
                        f"its pickle makes more than {self._objects} objects, which is the limit for a pickle of this "
                        "length"
                    )
                load(self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            if self._stand_ins:
                raise MalformedFile("a numpy object without contents") from None
            return stop.value

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        if keywords:
            raise UnsafePickle("its pickle makes an object with keywords, which plain data never needs")
        self.load_reduce()

    def load_build(self) -> None:
        state = self.stack.pop()
        self._work(state if isinstance(state, tuple) else (state,))
        self._work((state,))
        built = self.stack[-1]
        set_state(built, state)
        if isinstance(built, StandIn):
            self.stack[-1] = built.real()
            self._stand_ins -= 1

    def load_append(self) -> None:
        value = self.stack.pop()
        self._top((list, deque)).append(value)

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._top((list, deque)).extend(items)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        target = self._top(dict)
        if type(key) is not str:
            self._check_keys(target, (key,))
        target[key] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(self._top(dict), items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        new: dict[Any, Any] = {}
        self._set(new, items)
        self.append(new)

    def load_additems(self) -> None:
        items = self.pop_mark()
        target = self._top(set)
        self._check_keys(target, items)
        target.update(items)

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        Keys(self._spend).check(items)
        self.append(frozenset(items))

    def load_bytearray8(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    def _set(self, target: dict[Any, Any], items: list[Any]) -> None:
        keys = items[::2]
        self._check_keys(target, keys)
        for key, value in zip(keys, items[1::2], strict=True):  # a Counter's update would count pairs
            target[key] = value

    def _check_keys(self, target: Any, keys: Collection[Any]) -> None:
        """Check all keys of a dict or a set together, even if several opcodes fill it.

        The dict or set is kept, so that no other one gets its id.
        """
        if not target:
            Keys(self._spend).check(keys)
            return
        if id(target) not in self._keys:
            self._keys[id(target)] = target, Keys(self._spend)
            self._keys[id(target)][1].check(target)
        self._keys[id(target)][1].check(keys)

    def _top(self, kind: type | tuple[type, ...]) -> Any:
        """Return the top of the stack, which must be of that kind."""
        top = self.stack[-1]
        if not isinstance(top, kind):
            raise MalformedFile(f"its pickle puts items into {shown(top)}")
        return top

    def _call(self, function: Any, args: Any) -> Any:
        if type(args) is not tuple:
            raise MalformedFile(f"its pickle calls with {shown(args)}")
        self._work_left -= len(args)  # a long one may be passed again and again
        self._work(args)
        result = function(*args) if isinstance(function, Call) else call_builtin(function, args, self._spend)
        self._stand_ins += isinstance(result, StandIn)
        return result

    def _work(self, values: Iterable[Any]) -> None:
        """Subtract the length of these values from the work that calls may do."""
        work = 0
        for value in values:
            kind = type(value)
            if kind is int:
                work += value.bit_length() // 8
            elif _has_length(kind):
                work += len(value)
        self._spend(work)

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise UnsafePickle("its pickle copies its own values, to many times its length")


_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_has_length: Callable[[type], bool] = cache(lambda kind: issubclass(kind, _SIZED))


def _without_stand_in(get: _Load) -> _Load:
    """Wrap ``get``, which reads the memo: a stand-in was put there before its state was set, so replace it."""

    def load(self: Machine) -> None:
        get(self)
        if isinstance(self.stack[-1], StandIn):
            self.stack[-1] = self.stack[-1].real()

    return load


def _skip_frame(self: Any) -> None:
    self.read(8)


def _end(self: Any) -> None:
    raise EOFError


def _unknown(opcode: str) -> _Load:
    def refuse(self: Machine) -> None:
        raise UnsafePickle(f"its pickle has the opcode {opcode}, which no checkpoint has")

    return refuse


_UNKNOWN = ("INST", "OBJ", "DUP", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER")
_REPLACED = {
    "FRAME": _skip_frame,
    "REDUCE": Machine.load_reduce,
    "NEWOBJ": Machine.load_reduce,
    "NEWOBJ_EX": Machine.load_newobj_ex,
    "BUILD": Machine.load_build,
    "APPEND": Machine.load_append,
    "APPENDS": Machine.load_appends,
    "SETITEM": Machine.load_setitem,
    "SETITEMS": Machine.load_setitems,
    "DICT": Machine.load_dict,
    "ADDITEMS": Machine.load_additems,
    "FROZENSET": Machine.load_frozenset,
    "BYTEARRAY8": Machine.load_bytearray8,
    "GET": _without_stand_in(_Machine.load_get),
    "BINGET": _without_stand_in(_Machine.load_binget),
    "LONG_BINGET": _without_stand_in(_Machine.load_long_binget),
    **{name: _unknown(name) for name in _UNKNOWN},
}
_ONE = (
    *("MARK", "EMPTY_LIST", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_DICT", "DICT", "SETITEM", "BINPERSID"),
)
_OBJECTS = {
    **dict.fromkeys(_ONE, 1),
    **dict.fromkeys(("EMPTY_SET", "FROZENSET", "REDUCE", "NEWOBJ", "NEWOBJ_EX"), 3),
}
"""Number of objects that an opcode counts as, by its time and memory."""


def _opcodes() -> dict[bytes, tuple[_Load, int]]:
    """Return (function, number of objects that it counts as) by opcode. An empty opcode is the end of the pickle."""
    loads = {**_Machine.dispatch, **{getattr(pickle, name)[0]: load for name, load in _REPLACED.items()}}
    objects = {getattr(pickle, name): count for name, count in _OBJECTS.items()}
    by_opcode = {bytes([code]): load for code, load in loads.items()}
    return {b"": (_end, 0), **{code: (load, objects.get(code, 0)) for code, load in by_opcode.items()}}


_OPCODES = _opcodes()


def check_walk(tree: Any) -> None:
    """Raise MalformedFile unless a walk through ``tree`` ends soon, and without too deep a recursion.

    A container that occurs twice counts twice, since a walk with paths visits it twice; the walk ends at a container
    inside of itself. A few bytes can repeat many values, so the limit depends on the number of distinct values.
    """
    values = distinct = 0
    most = limits.TREE_REPEATED_VALUES
    above: dict[int, None] = {}
    seen: set[int] = set()
    stack: list[tuple[int, Iterator[Any]]] = [(0, iter(_containers((tree,))))]
    while stack:
        for node in stack[-1][1]:
            below = node if type(node) in _SEQUENCES else _values_of(node)
            if not below or id(node) in above:
                continue
            count = len(below) + _CONTAINER
            values += count
            if id(node) not in seen:
                seen.add(id(node))
                distinct += count
            if values > most:  # the limit for fewer distinct values
                most = min(limits.TREE_VALUES, limits.TREE_REPEATED_VALUES + limits.TREE_REPEATS * distinct)
                check_count(values, most, f"values of its tree, shared ones counted each time ({distinct} distinct)")
            if len(stack) > limits.TREE_DEPTH:
                check_count(len(stack), limits.TREE_DEPTH, "nested containers")
            containers = _containers(below)
            if containers:
                above[id(node)] = None
                stack.append((id(node), iter(containers)))
                break
        else:
            above.pop(stack.pop()[0], None)


_CONTAINER = 10
"""The cost of entering a container, in values."""

_LEAVES = frozenset({type(None), bool, int, float, str, bytes, TensorStub})
"""The most frequent types of leaves, checked first."""

_SEQUENCES = (list, tuple, deque)


def _containers(values: Collection[Any]) -> Collection[Any]:
    """Return the containers among ``values`` that are not empty."""
    if _LEAVES.issuperset(map(type, values)):
        return ()
    return [value for value in values if type(value) not in _LEAVES and isinstance(value, CONTAINERS) and value]


def _values_of(node: Any) -> Collection[Any]:
    if isinstance(node, _SEQUENCES):
        return node
    return node.values() if isinstance(node, dict) else vars(node).values()
