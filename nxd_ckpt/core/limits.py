"""Budgets for the contents of untrusted files; a file above one is refused before memory or time is spent.

A hostile file can claim anything: a tensor of 2**40 elements in 4 bytes, a billion ranks, a value that takes all memory
to build. Each budget is far above the needs of a real checkpoint (400B parameters, 10,000 ranks, 100,000 tensors in one
file) and far below what would harm the host. Pure.

Members of documents are checked here too: every name of a file, a tag or an attempt, before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

from nxd_ckpt.errors import MalformedFile

KindT = TypeVar("KindT")

_NAME, _KEY = 255, 1024
"""Bytes that a name in a file system, and a key in an object store, may have."""


def checked_name(name: Any) -> str:
    """Return ``name``; raise ValueError unless it can be the name of one file or directory."""
    if type(name) is not str or not name or name in (".", ".."):
        raise ValueError(f"expected the name of a file or directory, found {name!r:.80}")
    if any(mark in name for mark in "/\\\0"):
        raise ValueError(f"{name!r:.80} must be one name, without '/', '\\' or NUL; it is not a path")
    if _length(name) > _NAME:
        raise ValueError(f"{name[:40]!r}... has {_length(name)} bytes, at most {_NAME} are allowed")
    return name


def checked_key(key: Any) -> str:
    """Return ``key``; raise ValueError unless it is names joined by ``/``, and so below its directory."""
    if type(key) is not str or _length(key) > _KEY:
        raise ValueError(f"expected a path of at most {_KEY} bytes, found {key!r:.80}")
    for name in key.split("/"):
        checked_name(name)
    return key


def checked_text(text: Any) -> str:
    """Return ``text``; raise ValueError unless it is a string that can be written as UTF-8."""
    if type(text) is not str:
        raise ValueError(f"expected a string, found {text!r:.80}")
    _length(text)
    return text


def is_text(text: str) -> bool:
    """Return whether ``text`` can be written as UTF-8."""
    try:
        return checked_text(text) == text
    except ValueError:
        return False


def _length(text: str) -> int:
    """Return the length in bytes of UTF-8."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{text[:40]!a} holds half a character, which no name may") from None


NOTE = 2**20
"""Bytes of markers, the lease, the journal, intents, verdicts: a few fields, and in a verdict an error's message."""

DOCUMENT = 2**28
"""Bytes of manifests, indexes, votes and config.json; an index of 100,000 tensors has a tenth of it."""

MAPPING = 2**18
"""Bytes of a mapping; a rule has about 200, a model about twenty rules, and patterns are compiled."""

DCP_METADATA = 2**32
"""Bytes of ``.metadata`` of a torch DCP directory, which lists the chunks of all ranks."""

TENSOR_NBYTES = 2**63 - 1
"""Bytes of one tensor, the most that torch can address."""

DIMENSIONS = 64
"""Dimensions of one tensor."""

REPEATED_NBYTES = 2**30
"""Bytes that the tensors of one file may have *beyond* `REPEATS` times the bytes that it stores for them."""

REPEATS = 256
"""Average number of times that tensors may use a file's bytes: ties add one each, stride 0 adds many."""

RECORDS = 300_000
"""Records of one torch zip file, which has one for each storage."""

PICKLE_NBYTES = 2**31
"""Bytes of one pickle, without tensors; NumPy arrays and all other user content count."""

PICKLE_OBJECTS = 2**17
"""Containers and other objects that any pickle may make.

A set or a call counts as three, an item that is put into a dict singly as one; numbers and text do not count.
"""

PICKLE_OBJECT_NBYTES = 3
"""Bytes of a pickle that allow one more object than `PICKLE_OBJECTS`.

Picklers write more: eight for each of the thirteen objects of a tensor, and at least four, in torch DCP's metadata.
Only a pickle that was made to cost time and memory has fewer.
"""

TREE_DEPTH = 100
"""Nesting depth of containers."""

TREE_VALUES = 50_000_000
"""Values of one tree; a container that occurs twice counts twice, and each container with values as ten."""

TREE_REPEATS = 13
"""Average number of times that a tree may repeat its values, by containers that occur more than once."""

TREE_REPEATED_VALUES = 1_100_000
"""Values that a tree may have *beyond* `TREE_REPEATS` times its distinct values."""

KEY_VALUES = 64
"""Values in one key of a dict or one item of a set: a tuple, and the tuples in it."""

KEYS_OF_ONE_HASH = 100
"""Different keys of one dict, or items of one set, with equal hashes: each is compared with all before it."""

KEY_VALUES_OF_ONE_HASH = 400
"""Values in all tuples with equal hashes, among the keys of one dict or items of one set."""

NUMBER_DIGITS = 4_300
"""Decimal digits of a Fraction or a Decimal; Python's own limit for an int."""

PATH_LENGTH = 32_768
"""Characters of one path."""

MEMBER_LENGTH = 4_096
"""Characters in the name of an archive's member; Linux's paths and S3's keys are shorter."""

RANKS = 2**20
"""Ranks of one checkpoint, and of the grid that file names span."""

MODEL_TENSORS = 500_000
"""Tensors of a model by config.json and mapping: layers times experts times rules."""

HEADS = 2**20
"""Key-value heads of one attention layer, copies included."""

MESSAGE = 80
"""Characters of a file that an error message quotes."""


_NESTED = (list, tuple, dict, set, frozenset)


def shown(value: Any) -> str:
    """Return a value from a file as short text for a message; cheap for every value."""
    kind = type(value)
    if kind is int and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    if kind in (int, float, bool, type(None)):
        return repr(value)
    if kind in (str, bytes):
        return repr(value[:MESSAGE]) + ("..." if len(value) > MESSAGE else "")
    if kind in (list, tuple) and len(value) <= DIMENSIONS and not any(isinstance(item, _NESTED) for item in value):
        text = ", ".join(map(shown, value))
        return f"[{text[:MESSAGE]}{'...' if len(text) > MESSAGE else ''}]"
    return f"a {kind.__name__}"


def check_sizes(sizes: Any, what: str) -> tuple[int, ...]:
    """Return ``sizes``; raise MalformedFile unless they can be a tensor's sizes, offsets or strides."""
    if not isinstance(sizes, (tuple, list)) or len(sizes) > DIMENSIONS:
        raise MalformedFile(f"{what}: expected at most {DIMENSIONS} sizes, found {shown(sizes)}")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= TENSOR_NBYTES:
            raise MalformedFile(f"{what}: expected sizes from 0 to 2**63 - 1, found {shown(sizes)}")
    return tuple(sizes)


def check_form(shape: Any, itemsize: int, what: str) -> tuple[int, ...]:
    """Return ``shape``; raise MalformedFile unless torch can have such a tensor, of ``itemsize`` bytes per element."""
    sizes = check_sizes(shape, what)
    # Sizes of 0 count as 1, because strides are products of the other sizes.
    if itemsize * prod(size or 1 for size in sizes) > TENSOR_NBYTES:
        raise MalformedFile(f"{what}: shape {shown(sizes)} is larger than a tensor can be, {TENSOR_NBYTES} bytes")
    return sizes


def check_count(count: int, limit: int, what: str) -> None:
    """Raise MalformedFile if ``count`` is above the limit; ``what`` names what is counted."""
    if count > limit:
        raise MalformedFile(f"{what}: at most {limit} are allowed, found {count}")


def checked(kind: type[KindT], value: Any) -> KindT:
    """Return ``value``; raise TypeError unless it is of that kind."""
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, found {value!r:.80}")
    return value


def integers(values: Any, count: int | None = None) -> Sequence[int]:
    """Return ``values``; raise ValueError or TypeError unless they are ``count`` non-negative integers."""
    if {*map(type, values)} - {int} or min(values, default=0) < 0:
        raise ValueError(f"expected non-negative integers, found {values!r:.80}")
    if count is not None and len(values) != count:
        raise ValueError(f"expected {count} numbers, found {len(values)}")
    return values  # type: ignore[no-any-return]
