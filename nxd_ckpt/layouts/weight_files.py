"""Which files of a Hugging Face directory hold the model's weights, and which tensor is in which.

In this order, and safetensors before files of torch.save: by an index; one file of the usual name; shards without an
index, if the numbers in their names show that all are there; shards of one other name, alike; the only safetensors
file, of any name except those of adapters and of our exports' optimizer states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nxd_ckpt.core import document
from nxd_ckpt.core.document import known_by_name
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import MalformedFile, PartNotFound, UnsupportedState
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.layouts.files import TagFiles

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"

Read = Callable[[str], Mapping[str, TensorStub]]
"""Returns the tensors of a file, by name, from its header."""


_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})(?P<end>\.safetensors|\.bin)")


@dataclass(frozen=True)
class _Kind:
    """A kind of files: the name of a single one, which is that of shards without their numbers, and of an index."""

    single: str
    index: str

    def shard(self, name: str) -> re.Match[str] | None:
        """Return the name's match if it is a shard of this kind."""
        match = _SHARD.fullmatch(name)
        return match if match is not None and match["stem"] + match["end"] == self.single else None


_USUAL = tuple(_Kind(single, f"{single}.index.json") for single in (SINGLE, "pytorch_model.bin"))
_PLAIN = _Kind("", "index.json")
"""OLMo-core's and ours, of plain files of whole tensors."""

OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Ends of the names of files that torch.save wrote."""
WEIGHT_FILES = (".safetensors", *OF_TORCH)
_OF_RANKS = re.compile(r"(full_)?[dt]p_rank_\d|tensor_\d")
"""Names of ranks' files of a tag."""
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""PEFT's files of an adapter."""


@dataclass(frozen=True)
class WeightFiles:
    """The model's weights in a directory.

    Attributes:
        places: file of each tensor.
        source: what says so, for errors.
        strays: other files of that kind, which are not read. Many models have files of both kinds, which say the same.
    """

    places: Mapping[str, str]
    source: str
    strays: tuple[str, ...] = ()


def has_weights(names: Iterable[str]) -> bool:
    """Return whether one of the files is, by its name, of a model's weights, or of an adapter's."""
    return any(
        (name.endswith(".safetensors") and known_by_name(name) is None)
        or name in ADAPTERS
        or any(_is_of(name, kind) for kind in (*_USUAL, _PLAIN, *_unusual([name])))
        for name in names
    )


def torch_files(names: Iterable[str]) -> list[str]:
    """Return the files of torch.save; without ranks' files of a tag, and those that are called as another's copy."""
    files = sorted(name for name in names if name.endswith(OF_TORCH) and not _OF_RANKS.match(name))
    return [name for name in files if not name.startswith("latest")] or files


def refuse_part(name: str, where: str) -> None:
    """Raise UnsupportedState if the file ``name``, at the place ``where``, is by its name no whole model.

    Other files may be one.
    """
    shard = _SHARD.fullmatch(name)
    if shard is not None and known_by_name(name) is None:
        raise UnsupportedState(f"{where} is one of {int(shard['total'])} files of a model: pass their directory")


def find_weights(files: TagFiles, read: Read) -> WeightFiles:
    """Find the weights in the directory ``files``; ``read`` is used where nothing but headers says what is where.

    Raises:
        PartNotFound: there are none; or files that an index, or the names of others, tell of are missing.
        MalformedFile: a malformed index, or shards that contradict each other.
    """
    names = sorted(name for name, is_dir in files.names().items() if not is_dir)
    unusual = _unusual(names)
    for kind in (*_USUAL, _PLAIN, *(unusual if len(unusual) == 1 else ())):
        if kind.index in names:
            places = by_index(files, kind.index)
            if not places and kind is not _PLAIN:
                raise MalformedFile(f"{files.where(kind.index)}: weight_map names no tensor; download it again")
        elif kind.single in names:
            places = dict.fromkeys(read(kind.single), kind.single)
        elif any(map(kind.shard, names)):
            places = _by_names(files, kind, list(filter(kind.shard, names)), read)
        else:
            continue
        used = {*places.values()}
        alike = _USUAL[0] if kind is _PLAIN else kind
        similar = (name for name in names if _is_of(name, alike))
        strays = tuple(name for name in similar if name not in {*used, kind.index})
        return WeightFiles(places, kind.index if kind.index in names else "the naming of its files", strays)
    others = [
        name
        for name in names
        if name.endswith(".safetensors") and known_by_name(name) is None
    ]
    if len(others) == 1:
        return WeightFiles(dict.fromkeys(read(others[0]), others[0]), "the only file")
    where = files.directory
    if others:
        raise PartNotFound(f"{files.where(INDEX)} is missing, which says what in {first_of(others)} is the model's")
    for adapter in {*names}.intersection(ADAPTERS):
        raise UnsupportedState(f"{where} is {known_by_name(adapter)}")
    raise PartNotFound(f"{where} holds no weights: expected {SINGLE}, or {INDEX} and the files that it names")


def _is_of(name: str, kind: _Kind) -> bool:
    return name in (kind.single, kind.index) or kind.shard(name) is not None


def _unusual(names: Iterable[str]) -> list[_Kind]:
    """Return the kinds of shards with another name than transformers', as diffusers and torchtune write them."""
    shards = [shard for name in names if known_by_name(name) is None and (shard := _SHARD.fullmatch(name)) is not None]
    singles = dict.fromkeys(shard["stem"] + shard["end"] for shard in shards)
    kinds = (_Kind(single, f"{single}.index.json") for single in singles)
    return [kind for kind in kinds if kind not in _USUAL]


def by_index(files: TagFiles, index: str) -> dict[str, str]:
    """Return the file of each entry of an ``index``, relative to its directory, in which they all are.

    Raises:
        PartNotFound: the index, or one of the files, is missing.
        MalformedFile: a malformed index, or one of other files.
    """
    where, (folder, slash, name) = files.where(index), index.rpartition("/")
    if not files.has(index):
        raise PartNotFound(f"{where} is missing, which says what file each tensor is in; download it again")
    places = document.small(files.storage.read(files.key(index)), where).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise MalformedFile(f"{where}: weight_map must name the file of each tensor")
    stem = name.removesuffix(".index.json")
    suffixes = (".safetensors", ".pt") if stem == name else (f".{stem.rpartition('.')[2]}",)
    for file in sorted(set(places.values())):
        if "/" in file or not file.endswith(suffixes):
            raise MalformedFile(f"{where}: {file!r} is not a {' or '.join(suffixes)} file of this directory")
        if not files.has(f"{folder}{slash}{file}"):
            count = list(places.values()).count(file)
            raise PartNotFound(
                f"{files.where(f'{folder}{slash}{file}')} is missing, in which {name} says {count} tensors are; "
                "download it again"
            )
    return dict(places)


def tensors_of(files: TagFiles, file: str, model_key: str = "model") -> Mapping[str, TensorStub]:
    """Return the tensors of a file, which is a state dict, or has one under ``model_key``; from its header."""
    if file.endswith(".safetensors"):
        return files.safetensors(file)
    tree = files.tree(file)
    if isinstance(tree, dict) and isinstance(tree.get(model_key), dict):
        tree = tree[model_key]
    if not isinstance(tree, dict) or not all(isinstance(leaf, TensorStub) for leaf in tree.values()):
        raise MalformedFile(f"{files.where(file)}: expected a state dict, all tensors, or one under {model_key!r}")
    return {str(name): leaf for name, leaf in tree.items()}


def _by_names(files: TagFiles, kind: _Kind, shards: list[str], read: Read) -> dict[str, str]:
    """Return the file of each tensor in shards that no index describes."""
    where = files.directory
    parsed = [match for match in map(kind.shard, shards) if match is not None]
    totals = sorted({int(match["total"]) for match in parsed})
    if len(totals) > 1:
        raise MalformedFile(
            f"{where} has no {kind.index}, and shards of several models: {first_of(shards)}; move those of one away"
        )
    numbers = {int(match["number"]) for match in parsed}
    missing = [number for number in range(1, totals[0] + 1) if number not in numbers]
    if missing or len(shards) != totals[0]:
        raise PartNotFound(
            f"{where} has no {kind.index}, and {len(shards)} of {totals[0]} shards, without numbers "
            f"{first_of(map(str, missing))}; download what is missing"
        )
    places: dict[str, str] = {}
    for shard in shards:
        for name in read(shard):
            if name in places:
                raise MalformedFile(
                    f"{where} has no {kind.index}, and {name} is in both {places[name]} and {shard}; the shards are of "
                    "two models, or of two versions of one"
                )
            places[name] = shard
    return places
