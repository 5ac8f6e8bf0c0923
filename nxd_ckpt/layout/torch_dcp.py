"""Directories of torch.distributed.checkpoint: what ``.metadata`` says, read without torch.distributed.

``.metadata`` is a pickle of a few dataclasses (``torch.distributed.checkpoint.metadata``). It is unpickled
into inert records: a short list of classes is known, each of which becomes a :class:`_Record` of its fields;
nothing is called. Every entry, a tensor's chunk or a plain object, is a ``torch.save`` file of its own inside
``__{rank}_{n}.distcp``.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core.limits import DCP_METADATA
from nxd_ckpt.errors import MalformedFile, UnsafePickle
from nxd_ckpt.formats.inert import GLOBALS
from nxd_ckpt.formats.tensors import dtype_name
from nxd_ckpt.layout.files import TagFiles

METADATA = ".metadata"


@dataclass(frozen=True)
class Chunk:
    """One stored piece of an entry: ``nbytes`` from byte ``start`` of ``file``.

    ``offsets`` places a tensor's chunk in the whole tensor, in elements; it is None for an object that is no
    tensor.
    """

    offsets: tuple[int, ...] | None
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class WholeForm:
    """What the metadata says of a whole tensor: dtype (torch's name), shape, and where its chunks are how large."""

    dtype: str
    shape: tuple[int, ...]
    sizes: Mapping[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class DcpMetadata:
    """``entries``: the chunks of every fully qualified name, in the order of their offsets. ``paths``: the
    keys that lead to it in the state dict, where the writer recorded them. ``forms``: what tensors are, as wholes.
    ``described``: all names that the writer knew of."""

    entries: Mapping[str, tuple[Chunk, ...]]
    paths: Mapping[str, tuple[Any, ...]]
    forms: Mapping[str, WholeForm]
    described: frozenset[str]


def read_metadata(files: TagFiles, directory: str) -> DcpMetadata:
    """The metadata of the DCP directory ``directory`` of a tag; "" for ``files`` itself.

    Raises:
        UnsafePickle: the pickle names a class that no DCP metadata holds.
        MalformedFile: not such metadata, or one that points outside the directory or to a missing file.
    """
    where = _inside(directory, METADATA)
    root = _unpickle(files.storage.read(files.key(where), DCP_METADATA), f"{files.storage.url}/{files.key(where)}")
    try:
        return _metadata(root, directory, files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MalformedFile(f"{files.key(where)}: not the metadata of torch DCP ({error})") from error


def _metadata(root: Any, directory: str, files: TagFiles) -> DcpMetadata:
    entries: dict[str, list[Chunk]] = {}
    for index, info in root.fields["storage_data"].items():
        name, offset = index.fields["fqn"], index.fields.get("offset")
        relative, start, nbytes = (info.fields[key] for key in ("relative_path", "offset", "length"))
        file = _inside(directory, relative)
        if "/" in relative or not files.has(file):
            raise MalformedFile(
                f"{files.key(_inside(directory, METADATA))}: {name} lies in {relative!r}, which is not there"
            )
        if info.fields.get("transform_descriptors"):
            raise MalformedFile(
                f"{files.key(file)}: {name} was written through {info.fields['transform_descriptors']!r}; "
                "only uncompressed DCP files are read"
            )
        if start < 0 or nbytes < 0:
            raise ValueError(f"{name} lies at byte {start}, {nbytes} long")
        chunk = Chunk(None if offset is None else tuple(offset), file, int(start), int(nbytes))
        entries.setdefault(str(name), []).append(chunk)
    ordered = {
        name: tuple(sorted(chunks, key=lambda chunk: chunk.offsets or ())) for name, chunks in entries.items()
    }
    abouts = {str(name): about.fields for name, about in root.fields["state_dict_metadata"].items()}
    forms = {name: _form(fields) for name, fields in abouts.items() if "chunks" in fields}
    paths = {str(name): tuple(path) for name, path in (root.fields.get("planner_data") or {}).items()}
    for name, path in paths.items():
        if not path or hash(path) is None:  # raises TypeError for what can be no key
            raise ValueError(f"no keys lead to {name}")
    return DcpMetadata(ordered, paths, forms, frozenset(abouts))


def _form(fields: Mapping[str, Any]) -> WholeForm:
    chunks = [chunk.fields for chunk in fields["chunks"]]
    sizes = {_integers(chunk["offsets"]): _integers(chunk["sizes"]) for chunk in chunks}
    return WholeForm(dtype_name(fields["properties"].fields["dtype"]), _integers(fields["size"]), sizes)


def _integers(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, values))


def _inside(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


class _Record:
    """Stands for an object of an allowed class: its fields by name, without the arguments it was made with."""

    __slots__ = ("fields",)
    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state: Any) -> None:
        # A TensorProperties' is a tuple.
        self.fields = {"dtype": state[0]} if isinstance(state, tuple) and state else state


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
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
}
_INERT_MODULES = ("torch", "torch.serialization", "pathlib", "pathlib._local", "collections")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _Record
        if module in _INERT_MODULES and (module, name) in GLOBALS:
            return GLOBALS[module, name]
        raise UnsafePickle(f"its pickle asks for {module}.{name}, which no metadata of torch DCP holds")


def _unpickle(data: bytes, where: str) -> Any:
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except UnsafePickle as error:
        raise UnsafePickle(f"{where}: {error}; it is refused even with trust_pickle=True") from error
    except Exception as error:
        # An unpickler fed with garbage raises whatever the garbage leads to.
        raise MalformedFile(f"{where}: not torch DCP's metadata: {type(error).__name__}: {error}") from error
