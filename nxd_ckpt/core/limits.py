"""How much a file may ask for. What asks for more is refused, before the memory or the time is spent.

An untrusted file can name any number: a tensor of 2**40 elements in 4 bytes, a thousand million ranks, a value that
takes all memory to build. So each budget is far above what a real checkpoint needs (a model of 400B parameters, 10,000
ranks, 100,000 tensors in one file) and far below what would harm the host. docs/format.md lists them. Pure.
"""

from __future__ import annotations

from math import prod
from typing import Any

from nxd_ckpt.errors import MalformedFile

NOTE = 2**20
"""Bytes of markers, the lease, the journal, intents, verdicts: a few fields, and in a verdict an error's message."""

DOCUMENT = 2**28
"""Bytes of manifests, indexes and votes, of config.json. An index of 100,000 tensors, or a manifest of as
many parameters, has a tenth of it."""

MAPPING = 2**18
"""Bytes of a mapping: a rule has about two hundred, a model about twenty rules. Its patterns are compiled."""

MAPPING_YAML = 2**15
"""Bytes of one in YAML, which takes a hundred times as long to read as JSON."""

MAPPING_DEPTH = 16
"""Values inside each other of a mapping in YAML, whose reader looks at all of them for each word."""

DCP_METADATA = 2**32
"""Bytes of ``.metadata`` of a torch DCP directory, which lists the chunks of all ranks."""

TENSOR_NBYTES = 2**63 - 1
"""Bytes of one tensor: what torch can address."""

DIMENSIONS = 64
"""Dimensions of one tensor."""

REPEATED_NBYTES = 2**30
"""Bytes that the tensors of one file may have *beyond* :data:`REPEATS` times those that it stores for them."""

REPEATS = 256
"""How often a file's tensors may use its bytes: tied ones once each, an expanded one (stride 0) many times."""

RECORDS = 300_000
"""Records of one torch zip file: one for each tensor that shares its storage with no other."""

PICKLE_NBYTES = 2**31
"""Bytes of one pickle. Tensors are not in it; NumPy arrays and everything else of user content is."""

PICKLE_OBJECTS = 2**17
"""Containers and other objects that any pickle may make; a set, and whatever is called, counts as three, and an item
that is put into a dict by itself as one. Numbers and text are not counted."""

PICKLE_OBJECT_NBYTES = 3
"""Bytes of a pickle for each object that it may make beside these: picklers write more, eight for each of the thirteen
objects of a tensor, and four for those of torch DCP's metadata, which is the least. Only a pickle that was made to cost
time and memory has fewer."""

TREE_DEPTH = 100
"""Containers inside each other."""

TREE_VALUES = 50_000_000
"""Values of one tree, those of a container that occurs twice counted twice, and a container with values as ten."""

TREE_REPEATS = 13
"""How often a tree may hold its values on average, by containers that occur again and again."""

TREE_REPEATED_VALUES = 1_100_000
"""Values that a tree may have *beyond* :data:`TREE_REPEATS` times those that it holds."""

KEY_VALUES = 64
"""Values of one key of a dict, or of one item of a set: of a tuple, and of the tuples in it."""

KEYS_OF_ONE_HASH = 100
"""Different keys of one dict, or items of one set, that have the same hash as another one: each is compared with those
before it."""

KEY_VALUES_OF_ONE_HASH = 400
"""The same for tuples, by their values: that many values of them together."""

NUMBER_DIGITS = 4_300
"""Decimal digits of a Fraction or a Decimal: as many as Python reads of an int."""

PATH_LENGTH = 32_768
"""Characters of one path."""

MEMBER_LENGTH = 4_096
"""Characters of the name of a member of an archive: longer than any path of Linux, and than any key of S3."""

RANKS = 2**20
"""Ranks of one checkpoint, and of the grid that the names of files span."""

MODEL_TENSORS = 500_000
"""Tensors that config.json and a mapping may say that a model has: layers times experts times rules."""

HEADS = 2**20
"""Key-value heads of one attention layer, each copy counted."""

MESSAGE = 80
"""Characters that a message quotes of a file."""


_NESTED = (list, tuple, dict, set, frozenset)


def shown(value: Any) -> str:
    """A value of a file in a message: short, and cheap to make, whatever it is."""
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
    """``sizes``, if they are ints that a tensor's sizes, offsets or strides can be. Raises MalformedFile."""
    if not isinstance(sizes, (tuple, list)) or len(sizes) > DIMENSIONS:
        raise MalformedFile(f"{what}: expected at most {DIMENSIONS} sizes, found {shown(sizes)}")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= TENSOR_NBYTES:
            raise MalformedFile(f"{what}: expected sizes from 0 to 2**63 - 1, found {shown(sizes)}")
    return tuple(sizes)


def check_form(shape: Any, itemsize: int, what: str) -> tuple[int, ...]:
    """``shape``, if torch can have a tensor of it with ``itemsize`` bytes an element. Raises MalformedFile."""
    sizes = check_sizes(shape, what)
    # Sizes of 0 count as 1: strides are made of the others.
    if itemsize * prod(size or 1 for size in sizes) > TENSOR_NBYTES:
        raise MalformedFile(f"{what}: shape {shown(sizes)} is larger than a tensor can be, {TENSOR_NBYTES} bytes")
    return sizes


def check_count(found: int, limit: int, what: str) -> None:
    """Raise MalformedFile where ``found`` is above the limit; ``what`` is counted."""
    if found > limit:
        raise MalformedFile(f"{what}: at most {limit} are allowed, found {found}")
