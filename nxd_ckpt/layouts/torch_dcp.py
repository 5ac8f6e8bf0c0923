"""Directories of torch.distributed.checkpoint: content of ``.metadata``, read without torch.distributed.

``.metadata`` is a pickle of a few dataclasses (``torch.distributed.checkpoint.metadata``). It is unpickled
into inert records: a short list of classes is known, each of which becomes a `_Record` of its fields;
nothing is called. Every entry, a tensor's chunk or a plain object, is a ``torch.save`` file of its own inside
``__{rank}_{n}.distcp``. SageMaker's tiered storage has a directory per rank instead, ``rank_R/step_N`` or
``step_N/rank_R``; its saves are recognised by these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import NoneType
from typing import Any

from nxd_ckpt.core.document import instead_of_data, parsing
from nxd_ckpt.core.limits import DCP_METADATA, TREE_DEPTH, check_form, check_sizes, shown
from nxd_ckpt.errors import MalformedFile, UnsafePickle, UnsupportedState
from nxd_ckpt.formats.inert import Call, Inert
from nxd_ckpt.formats.machine import Machine
from nxd_ckpt.formats.safe_globals import Keys, global_of
from nxd_ckpt.formats.tensors import dtype_name, itemsize, torch_class
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.storage.base import Storage

METADATA = ".metadata"


@dataclass(frozen=True)
class DcpFiles:
    """Places of a DCP save's files: ``directory`` of a tag, "" for all of it."""

    directory: str = ""

    @property
    def metadata(self) -> str:
        return _inside(self.directory, METADATA)

    def file(self, info: Mapping[str, Any]) -> str | None:
        """Return the file in the fields of a storage info; None for one that is elsewhere."""
        relative = _name(info["relative_path"])
        return None if "/" in relative else _inside(self.directory, relative)


@dataclass(frozen=True)
class TieredFiles:
    """Places of the files of SageMaker's tiered storage.

    ``first`` is the first rank's directory, ``rank_0/step_300`` or ``rank_0``; other ranks' differ in the rank.
    """

    first: str

    @property
    def metadata(self) -> str:
        return f"{self.first}/{TIERED_METADATA}"

    def file(self, info: Mapping[str, Any]) -> str | None:
        (rank,) = check_sizes((info["rank"],), "the rank of a storage info")
        return f"{of_rank(self.first, rank)}/{TIERED_DATA}"


TIERED_METADATA, TIERED_DATA = "metadata.metadata", "checkpoint.pt"
TIERED_RANK = re.compile(r"rank_(\d+)")


def of_rank(folder: str, rank: int) -> str:
    """Return that rank's directory, given one of any rank."""
    return "/".join(f"rank_{rank}" if TIERED_RANK.fullmatch(name) else name for name in folder.split("/"))


@dataclass(frozen=True)
class Chunk:
    """One stored piece of an entry: ``nbytes`` from byte ``start`` of ``file``.

    ``offsets`` is the place of a tensor's chunk in the whole tensor, in elements; None for an object that is no tensor.
    """

    offsets: tuple[int, ...] | None
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class WholeForm:
    """Metadata of a whole tensor: dtype (torch's name), shape, and the size of its chunk at each offset."""

    dtype: str
    shape: tuple[int, ...]
    sizes: Mapping[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class DcpMetadata:
    """Metadata of a save.

    ``entries``: the chunks of every fully qualified name, in the order of their offsets. ``paths``: the keys that lead
    to it in the state dict, if the writer recorded them. ``forms``: the forms of whole tensors. ``described``: all
    names that the writer described.
    """

    entries: Mapping[str, tuple[Chunk, ...]]
    paths: Mapping[str, tuple[Any, ...]]
    forms: Mapping[str, WholeForm]
    described: frozenset[str]


def read_metadata(files: TagFiles, places: DcpFiles | TieredFiles) -> DcpMetadata:
    """Read the metadata of the save that has its files in these places of a tag.

    Raises:
        UnsafePickle: the pickle names a class that no DCP metadata holds.
        MalformedFile: other content, or metadata that points outside the directory or to a missing file.
    """
    data = files.storage.read(files.key(places.metadata), DCP_METADATA)
    other = None if data[:1] == b"\x80" else instead_of_data(data)  # it is a pickle
    if other is not None:
        raise MalformedFile(f"{files.where(places.metadata)}: expected the metadata of torch DCP, found {other}")
    with parsing_metadata(files.where(places.metadata), "the metadata of torch DCP"):
        return _metadata(_Machine(data).load(), places, files)


@contextmanager
def parsing_metadata(where: str, what: str) -> Iterator[None]:
    """Wrap the parsing of the pickle ``where``, which should be ``what``: every error of it names the file."""
    try:
        with parsing(where, what):
            yield
    except UnsafePickle as error:
        raise UnsafePickle(f"{where}: {error}; it is refused even with trust_pickle=True") from error
    except EOFError as error:
        raise MalformedFile(f"{where}: not {what}: it ends too early") from error
    except (MalformedFile, UnsupportedState) as error:
        raise type(error)(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def _metadata(root: Any, places: DcpFiles | TieredFiles, files: TagFiles) -> DcpMetadata:
    entries: dict[str, list[Chunk]] = {}
    for index, info in root.fields["storage_data"].items():
        name = _name(index.fields["fqn"])
        offset = index.fields.get("offset")
        file = places.file(info.fields)
        start = info.fields["offset"]
        nbytes = info.fields["length"]
        if file is None or not files.has(file):
            place = info.fields.get("relative_path", file)
            raise MalformedFile(f"{shown(name)} should be in {shown(place)}, which does not exist")
        if info.fields.get("transform_descriptors"):
            raise MalformedFile(
                f"{shown(name)} was written through {shown(info.fields['transform_descriptors'])}; only uncompressed "
                "DCP files are read"
            )
        start, nbytes = check_sizes((start, nbytes), f"the place of {shown(name)} in {file}")
        at = None if offset is None else check_sizes(offset, f"the offsets of {shown(name)}")
        entries.setdefault(name, []).append(Chunk(at, file, start, nbytes))
    ordered = {name: tuple(sorted(chunks, key=lambda chunk: chunk.offsets or ())) for name, chunks in entries.items()}
    abouts = {_name(name): about.fields for name, about in root.fields["state_dict_metadata"].items()}
    forms = {name: _form(fields, shown(name)) for name, fields in abouts.items() if "chunks" in fields}
    planned = root.fields.get("planner_data") or {}
    paths = {_name(name): _keys(planned[name]) for name in planned}
    Keys().check(chain(*paths.values()))
    return DcpMetadata(ordered, paths, forms, frozenset(abouts))


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedFile(f"expected a name, found {shown(value)}")
    return value


_KEYS = (str, int, float, complex, bytes, tuple, frozenset, NoneType)


def _keys(path: Any) -> tuple[Any, ...]:
    """Check and return the keys that lead to an entry: keys of dicts or lists."""
    keys = tuple(path) if isinstance(path, (tuple, list)) else ()
    if not 0 < len(keys) <= TREE_DEPTH or not all(isinstance(key, _KEYS) for key in keys):
        raise MalformedFile(f"expected the keys that lead to an entry, found {shown(path)}")
    return keys


def _form(fields: Mapping[str, Any], name: str) -> WholeForm:
    dtype = fields["properties"].fields["dtype"]
    if not isinstance(dtype, torch_class("dtype")):
        raise MalformedFile(f"{name}: expected a dtype, found {shown(dtype)}")
    chunks = [chunk.fields for chunk in fields["chunks"]]
    sizes = {check_sizes(chunk["offsets"], name): check_form(chunk["sizes"], 1, name) for chunk in chunks}
    return WholeForm(dtype_name(dtype), check_form(fields["size"], itemsize(dtype_name(dtype)), name), sizes)


def _inside(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


class _Record(Inert):
    """Stand-in for an object of an allowed class: its fields by name, without constructor arguments."""

    __slots__ = ("fields",)

    def __init__(self, *args: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        # The state of TensorProperties is a tuple.
        self.fields = {"dtype": state[0]} if isinstance(state, tuple) and state else state
        if not isinstance(self.fields, dict):
            raise MalformedFile(f"expected the fields of an object, found {shown(state)}")


_TIERED = "amzn_sagemaker_checkpointing.checkpointing.filesystem"
_METADATA_CLASSES = {
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
}
_ALLOWED = {("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"),
    (f"{_TIERED}.filesystem", "_SageMakerStorageInfo"),
    (f"{_TIERED}.storage_info", "_SageMakerStorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
}
_RECORD = Call(_Record)
_INERT_MODULES = (
    *("torch", "torch.serialization", "pathlib", "pathlib._local", "collections"),
    *("builtins", "__builtin__", "_codecs"),  # of keys: sets, complex numbers, and bytes in protocol 2
)


class _Machine(Machine):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _RECORD
        stand_in = global_of(module, name) if module in _INERT_MODULES else None
        if stand_in is not None:
            return stand_in
        raise UnsafePickle(f"its pickle asks for {module:.100}.{name:.100}, which no metadata of torch DCP holds")


_STEP = re.compile(r"step_\d+")


def tiered_saves(storage: Storage, folder: str) -> list[str]:
    """Return the first rank's directory (a key of the storage) of each save in the directory, or of its own save."""
    if is_of_rank(storage, folder):
        return [of_rank(folder, 0)]
    inside = [f"{folder}/{name}" if folder else name for name in _below(storage, folder)]
    rank_dirs = [key for key in inside if is_of_rank(storage, key)]
    for key in (key for key in inside if key not in rank_dirs):
        rank_dirs += [below for name in _below(storage, key) if is_of_rank(storage, below := f"{key}/{name}")]
    return sorted({of_rank(key, 0) for key in rank_dirs})


def holds_ranks(directory: str) -> bool:
    """Return whether a directory of that name belongs to one rank, with all its steps."""
    return TIERED_RANK.fullmatch(directory) is not None


def is_of_rank(storage: Storage, folder: str) -> bool:
    """Return whether it has one rank's files of one step.

    A script may use such names itself: some rank must have the metadata of all.
    """
    parts = folder.split("/")
    named = any(TIERED_RANK.fullmatch(name) for name in parts[-2:]) or _STEP.fullmatch(parts[-1]) is not None
    has_files = named and any(storage.is_file(f"{folder}/{name}") for name in (TIERED_DATA, TIERED_METADATA))
    return has_files and any(storage.is_file(f"{key}/{TIERED_METADATA}") for key in _of_all_ranks(storage, folder))


def _of_all_ranks(storage: Storage, folder: str) -> Iterator[str]:
    """Yield the directories of all ranks for the step of ``folder``.

    The first rank's, which should have the metadata, comes first.
    """
    yield of_rank(folder, 0)
    parts = folder.split("/")
    for at in range(max(len(parts) - 2, 0), len(parts)):
        if TIERED_RANK.fullmatch(parts[at]):
            matches = (TIERED_RANK.fullmatch(entry.name) for entry in storage.list("/".join(parts[:at])))
            yield from ("/".join((*parts[:at], match[0], *parts[at + 1 :])) for match in matches if match)


def _below(storage: Storage, folder: str) -> list[str]:
    """Return the steps there, and one rank."""
    names = [entry.name for entry in storage.list(folder) if entry.is_dir]
    ranks = sorted((int(match[1]), match[0]) for match in map(TIERED_RANK.fullmatch, names) if match is not None)
    return [*(name for _, name in ranks[:1]), *(name for name in names if _STEP.fullmatch(name))]
