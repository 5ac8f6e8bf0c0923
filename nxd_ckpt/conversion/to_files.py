"""Form "files": model and optimizer as plain files of whole tensors by name.

Names and contents of the files are those of OLMo-core's ``unshard_checkpoint``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from nxd_ckpt.conversion.result import Converted
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.units import neighbours
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.formats.safetensors import TensorForm
from nxd_ckpt.formats.tensors import Assembly, TensorStub, form_of, iter_tensors, map_tensors, nbytes_of
from nxd_ckpt.options.conversion import ConvertOptions, StrategyName
from nxd_ckpt.output.image_writer import write_images
from nxd_ckpt.output.locations import locate_apart
from nxd_ckpt.output.model_files import WeightFile, index_file, json_file
from nxd_ckpt.output.output import Output, OutputKind
from nxd_ckpt.output.source import Source
from nxd_ckpt.reshard.resharded_state import checked_facts
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.saving.planned_file import NamedLeaf, PlannedFile, file_of
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import refuse_per_rank

MODEL, OPTIM = "model", "optim"
INDEX = "index.json"
ONE_FILE, PER_TENSOR, _ = get_args(StrategyName)

_LONGEST = 200
"""Characters of a tensor's name in a file's name; file systems allow 255 bytes."""


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
        return sum(nbytes_of(*form_of(leaf)) for _, leaf in iter_tensors(self.value))


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
    return [*(entries or [Item(("state",), {})]), Item(("param_groups",), tag.param_groups)]


def split(items: Iterable[Item], part: str) -> tuple[list[Item], list[Item]]:
    """Divide items into tensors, which safetensors can hold, and other values.

    Raises UnsupportedState for a container with tensors in it.
    """
    tensors: list[Item] = []
    others: list[Item] = []
    for item in items:
        (tensors if item.is_tensor else others).append(item)
        if not item.is_tensor and any(leaf.shape for _, leaf in iter_tensors(item.value)):
            raise UnsupportedState(
                f"{part}: {item.name} is a {type(item.value).__name__} with tensors in it, which safetensors files "
                "cannot hold; write .pt files (use_safetensors=False)"
            )
    return tensors, others


def files_of(part: str, items: Sequence[Item], chosen: ConvertOptions, extension: str) -> list[UnshardedFile]:
    """Return the files of a part, in the order of its items."""
    if chosen.unshard_strategy == ONE_FILE:
        return [UnshardedFile(f"{part}.{extension}", tuple(items))]
    if chosen.unshard_strategy == PER_TENSOR:
        names = _distinct(f"{part}.{item.name}" for item in items)
        return [UnshardedFile(f"{part}/{name}.{extension}", (item,)) for name, item in zip(names, items, strict=True)]
    chunks = neighbours(items, lambda item: item.nbytes, chosen.size_per_shard)
    return [UnshardedFile(f"{part}/chunk-{number:05d}.{extension}", chunk) for number, chunk in enumerate(chunks)]


def index_of(files: Sequence[UnshardedFile]) -> bytes:
    """Return the index of the file of each item, by flattened name, in the form of Hugging Face's index."""
    places = {item.name: file.key.rpartition("/")[2] for file in files for item in file.items}
    return index_file(places, sum(item.nbytes for file in files for item in file.items))


def json_of(items: Iterable[Item], part: str) -> bytes:
    """Return values that are no tensors as nested JSON. Raises UnsupportedState for values without a JSON form."""
    try:
        return json_file(nested(items))
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


_EXTENSIONS = ("pt", "safetensors")
_FILES = [f"{part}.json" for part in (MODEL, OPTIM)] + [f"{part}/{INDEX}" for part in (MODEL, OPTIM)]
_FILES += [
    f"{part}{file}.{extension}"
    for part in (MODEL, OPTIM)
    for extension in _EXTENSIONS
    for file in ("", "/chunk-*", f"/{part}-*")
]
_PARTS = Parts(model=True, optimizer="plain")
_UNSHARDED = OutputKind("unsharded checkpoint", tuple(_FILES))


def to_files(source: Source, dst: StrPath, chosen: ConvertOptions, opened: OpenTag | None = None) -> Converted:
    """Make ``dst``: plain files of whole tensors by name, of the source, or of it translated as ``opened``.

    ``model.pt`` is a state dict. ``optim.pt`` has the form of torch's distributed state dicts: ``{"state": {name:
    {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [name, ...], ...}]}``, with ``master_weights`` among a
    parameter's entries if there are any. Both load with ``torch.load(weights_only=True)``. With ``use_safetensors``,
    files are ``model.safetensors`` and ``optim.safetensors``, with names such as ``state.NAME.exp_avg``, and other
    values (steps, param groups) are in ``optim.json``. If a part has several files, they are in the directories
    ``model`` and ``optim``, whose ``index.json`` lists the file of each tensor.

    Raises:
        PartNotFound: neither model nor optimizer, or no optimizer though ``optimizer=True``; or a file is missing.
        TopologyMismatch, OptimizerMismatch: a tensor's cut, or its parameter's name, is not known.
        UnsupportedState: safetensors cannot hold a value.
    """
    target = locate_apart(dst, source.place, chosen.written_with)
    opened = source.open() if opened is None else opened
    refuse_per_rank(opened, "model", "optim")
    with opened.guarded():
        cuts = checked_facts(opened, chosen.partitions, chosen.saved_param_names)
        tag = WholeTag(opened, partitions=cuts, saved_param_names=chosen.saved_param_names)
        parts = [_Part(opened, tag, part, chosen) for part in _parts(opened)]
    output = Output(target, chosen, _UNSHARDED)
    nbytes = sum(part.nbytes for part in parts)
    files = {name: size for part in parts for name, size in part.sizes().items()}
    paths = (source.root.path, target.path, "files", source.writer.value)
    left_out = source.left_out(opened.parts, _PARTS)
    done = Converted(*paths, sum(files.values()), files=files, left_out=left_out)
    if chosen.dry_run:
        return done
    with output.filled(source, opened, nbytes, chosen.progress) as written:
        for part in reversed(parts):  # on a store the model, which readers look for, comes last
            part.write(output, written)
    return done


class _Part:
    """Model or optimizer, planned: nothing is written yet, and everything that must be refused was."""

    def __init__(self, opened: OpenTag, tag: WholeTag, name: str, chosen: ConvertOptions) -> None:
        safetensors = chosen.use_safetensors
        self.name = name
        self._opened = opened
        items = items_of(tag, name)
        others: list[Item] = []
        if safetensors:
            items, others = split(items, name)
        files = files_of(name, items, chosen, _EXTENSIONS[safetensors])
        self._files = [_safetensors(file) if safetensors else _torch_file(file) for file in files]
        single = chosen.unshard_strategy == ONE_FILE
        self.place = files[0].key if single else name
        self._documents = _values(opened, others, name)
        if not single:
            self._documents[f"{name}/{INDEX}"] = index_of(files)

    @property
    def nbytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.image.nbytes for file in self._files)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file, by name."""
        sizes = {file.key: file.image.nbytes for file in self._files}
        return sizes | {name: len(content) for name, content in self._documents.items()}

    def write(self, output: Output, written: Counter) -> None:
        output.require()
        with self._opened.reader() as reader:
            write_images(reader, output.storage, output.folder, [self._files], written.add)
        for name, content in self._documents.items():
            output.write(name, content)
        if self.place == self.name:
            output.storage.sync_dir(f"{output.folder}/{self.place}")


def _values(opened: OpenTag, others: Sequence[Item], part: str) -> dict[str, bytes]:
    """Return the file of values that are no tensors, by name; empty without any."""

    def number(leaf: TensorStub | Assembly) -> Any:  # a tensor of one element, such as a learning rate
        return opened.read(leaf).item()

    plain = [Item(item.path, map_tensors(item.value, number)) for item in others]
    return {f"{part}.json": json_of(plain, part)} if plain else {}


def _parts(opened: OpenTag) -> list[str]:
    return [MODEL] * opened.parts.model + [OPTIM] * (opened.parts.optimizer is not None)


def _torch_file(file: UnshardedFile) -> PlannedFile:
    """Plan a torch file. Raises UnsafePickle for values that cannot be pickled."""
    leaves = [
        NamedLeaf(leaf, id(leaf), item.name) for item in file.items for _, leaf in iter_tensors(item.value)
    ]
    return file_of(file.key, file.tree(), leaves)


def _safetensors(file: UnshardedFile) -> PlannedFile:
    """Plan a safetensors file. Raises UnsupportedState for a dtype that it cannot hold."""
    leaves = {item.name: Assembly.of(item.value) for item in file.items}
    forms = (TensorForm(name, leaf.dtype, tuple(leaf.shape)) for name, leaf in leaves.items())
    return WeightFile(file.key, tuple(forms)).planned(leaves.__getitem__)
