"""The layout of an unsharded checkpoint: names and contents of its files.

It is that of OLMo-core's ``unshard_checkpoint``. Touches no file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

from nxd_ckpt.core.units import bytes_of
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.formats.tensors import Assembly, TensorStub, itemsize, iter_tensors
from nxd_ckpt.options.torch_forms import Strategy, StrategyName
from nxd_ckpt.reshard.whole_tag import WholeTag

MODEL, OPTIM = "model", "optim"
INDEX = "index.json"
STRATEGIES = ONE_FILE, PER_TENSOR, CHUNKS = get_args(StrategyName)

_LONGEST = 200
"""Characters of a tensor's name in a file's name; file systems allow 255 bytes."""


@dataclass(frozen=True)
class UnshardStrategy:
    """A way to divide tensors into files: ``name`` is "one_file", "one_file_per_tensor" or "chunks".

    Chunks are files of at most ``chunk_size_bytes`` bytes, or a size such as "5GB".
    """

    name: str = ONE_FILE
    chunk_size_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if self.name not in STRATEGIES:
            raise InvalidArgument(f"unshard_strategy must be one of {', '.join(STRATEGIES)}, found {self.name!r}")
        if (self.name == CHUNKS) != (self.chunk_size_bytes is not None):
            raise InvalidArgument(f"chunk_size_bytes is needed for {CHUNKS!r}, and for no other unshard_strategy")
        if self.chunk_size_bytes is not None:
            bytes_of(self.chunk_size_bytes, "chunk_size_bytes")

    @classmethod
    def one_file(cls) -> UnshardStrategy:
        return cls(ONE_FILE)

    @classmethod
    def one_file_per_tensor(cls) -> UnshardStrategy:
        return cls(PER_TENSOR)

    @classmethod
    def chunks(cls, chunk_size_in_bytes: int | str) -> UnshardStrategy:
        return cls(CHUNKS, chunk_size_in_bytes)


@dataclass(frozen=True)
class Item:
    """An entry of the state dict: ``value``, a leaf that stands for a tensor or any other value, at ``path``."""

    path: tuple[Any, ...]
    value: Any

    @property
    def name(self) -> str:
        """The path in torch's flattened form: ``state.embed.weight.exp_avg``."""
        return ".".join(map(str, self.path))

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, (TensorStub, Assembly))

    @property
    def nbytes(self) -> int:
        return sum(prod(leaf.shape) * itemsize(leaf.dtype) for _, leaf in iter_tensors(self.value))


@dataclass(frozen=True)
class UnshardedFile:
    """One file and its items; ``key`` is relative to the new directory."""

    key: str
    items: tuple[Item, ...]

    def tree(self) -> dict[Any, Any]:
        """Return the items as nested dicts."""
        return nested(self.items)


def items_of(tag: WholeTag, part: str) -> list[Item]:
    """Return the model by parameter name, or the optimizer as ``{"state": {name: entries}, "param_groups": groups}``.

    Raises the errors of `WholeTag.leaf`.
    """
    if part == MODEL:
        return [Item((name,), value) for name, value in tag.model_state().items()]
    state = tag.optimizer_state().items()
    entries = [Item(("state", name, key), value) for name, slot in state for key, value in slot.items()]
    entries += [Item(("state", key), value) for key, value in tag.general_state.items()]
    return [*entries, Item(("param_groups",), tag.param_groups)]


def split(items: Iterable[Item], part: str) -> tuple[list[Item], list[Item]]:
    """Divide items into tensors, which safetensors can hold, and other values.

    Raises UnsupportedState for a container with tensors in it.
    """
    tensors, others = list[Item](), list[Item]()
    for item in items:
        (tensors if item.is_tensor else others).append(item)
        if not item.is_tensor and any(leaf.shape for _, leaf in iter_tensors(item.value)):
            raise UnsupportedState(
                f"{part}: {item.name} is a {type(item.value).__name__} with tensors in it, which safetensors files "
                "cannot hold; write .pt files (use_safetensors=False)"
            )
    return tensors, others


def files_of(part: str, items: Sequence[Item], strategy: Strategy, extension: str) -> list[UnshardedFile]:
    """Return the files of a part, in the order of its items."""
    if strategy.name == ONE_FILE:
        return [UnshardedFile(f"{part}.{extension}", tuple(items))]
    if strategy.name == PER_TENSOR:
        names = _distinct(f"{part}.{item.name}" for item in items)
        return [
            UnshardedFile(f"{part}/{name}.{extension}", (item,)) for name, item in zip(names, items, strict=True)
        ]
    chunks = _chunks(items, bytes_of(strategy.chunk_size_bytes or "", "chunk_size_bytes"))
    return [UnshardedFile(f"{part}/chunk-{number:05d}.{extension}", chunk) for number, chunk in enumerate(chunks)]


def index_of(files: Sequence[UnshardedFile]) -> bytes:
    """Return the index of the file of each item, by flattened name, in the form of Hugging Face's index."""
    total = sum(item.nbytes for file in files for item in file.items)
    places = {item.name: file.key.rpartition("/")[2] for file in files for item in file.items}
    document = {"metadata": {"total_size": total}, "weight_map": places}
    return json.dumps(document, indent=2).encode() + b"\n"


def json_of(items: Iterable[Item], part: str) -> bytes:
    """Return values that are no tensors as nested JSON. Raises UnsupportedState for values without a JSON form."""
    try:
        return json.dumps(nested(items), indent=2).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedState(
            f"{part}: it holds values that JSON cannot hold ({error}); write .pt files (use_safetensors=False)"
        ) from error


def nested(items: Iterable[Item]) -> dict[Any, Any]:
    """Return the items as nested dicts."""
    tree: dict[Any, Any] = {}
    for item in items:
        inner = tree
        for key in item.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[item.path[-1]] = item.value
    return tree


def _chunks(items: Iterable[Item], limit: int) -> Iterator[tuple[Item, ...]]:
    """Yield neighbouring items of at most ``limit`` bytes together, or one larger item."""
    chunk: list[Item] = []
    nbytes = 0
    for item in items:
        size = item.nbytes
        if chunk and nbytes + size > limit:
            yield tuple(chunk)
            chunk, nbytes = [], 0
        chunk.append(item)
        nbytes += size
    if chunk:
        yield tuple(chunk)


def _distinct(names: Iterable[str]) -> Iterator[str]:
    """Yield a distinct file name for each name: dashes for special characters, and a number if one is taken."""
    taken = set()
    for name in names:
        base = unique = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:_LONGEST]
        number = 1
        while unique.lower() in taken:  # some file systems ignore case
            number += 1
            unique = f"{base}-{number}"
        taken.add(unique.lower())
        yield unique
