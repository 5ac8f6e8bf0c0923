"""Recognition of the writer of a checkpoint by the names in its directory, for every layout of the Neuron ecosystem.

Those that are no NxD tags are opened here too. tests/migrate/sources.md has the sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from nxd_ckpt.core import names
from nxd_ckpt.errors import CheckpointNotFound, MalformedFile, PartNotFound, UnsupportedState
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign import legacy, nemo, presharded, rank_items, torch_xla_files
from nxd_ckpt.tag.foreign.dcp_directory import DcpDirectory, DcpTensors
from nxd_ckpt.tag.foreign.rank_items import RankItems
from nxd_ckpt.tag.foreign.torch_dcp import METADATA, TIERED_DATA, TIERED_METADATA, DcpFiles, TieredFiles, tiered_saves
from nxd_ckpt.tag.foreign.weight_files import has_weights, refuse_part
from nxd_ckpt.tag.nxd_tag import TagLayout


def is_untagged(listing: Iterable[str]) -> bool:
    """Return whether a directory of these files, which is no tag, has a readable layout."""
    names = set(listing)
    return TIERED_DATA in names or bool(_layouts(names))


def open_untagged(storage: Storage, key: str) -> TagLayout:
    """Return the layout of the directory or file ``key``.

    Raises:
        PartNotFound: the directory holds none of the files of any layout.
        MalformedFile: it holds those of two layouts.
        UnsupportedState: it is a file of Hugging Face's form.
        CheckpointNotFound, MalformedFile: errors of opening its layout.
    """
    if storage.is_file(key):
        folder, _, file = key.rpartition("/")
        if key.endswith(".safetensors"):
            raise UnsupportedState(f"{storage.url}/{key} has Hugging Face's form: nxd-ckpt import makes a tag of it")
        if nemo.is_of_rank(key):
            return nemo.open_files(TagFiles(storage, folder.rpartition("/")[0]), file)
        return torch_xla_files.open_files(TagFiles(storage, folder), file)
    files = TagFiles(storage, key)
    listing = set(files.names())
    layouts = _layouts(listing)
    if len(layouts) > 1:
        both = " and ".join(layout.name for layout in layouts)
        raise MalformedFile(
            f"{files.where('').rstrip('/')} has the files of two layouts: {both}; move those of one to a place of "
            "their own"
        )
    if layouts:
        return layouts[0].open(files)
    if TIERED_DATA in listing:
        return _open_tiered(files)
    raise PartNotFound(f"{files.where('')}: no layout that is known; found {sorted(listing)[:8]}")


def _open_tiered(files: TagFiles) -> TagLayout:
    root = TagFiles(files.storage, "")
    return DcpDirectory(root, DcpTensors(root, TieredFiles(files.tag)))


class _Layout(NamedTuple):
    name: str
    is_present: Callable[[Set[str]], bool]
    """Returns whether a directory of these files has it."""
    open: Callable[[TagFiles], TagLayout]


_LAYOUTS = (
    _Layout("torch-xla", torch_xla_files.is_present, torch_xla_files.open_files),
    _Layout("NxD inference", presharded.is_present, presharded.PreshardedFiles),
    _Layout(
        "torch DCP",
        lambda listing: METADATA in listing,
        lambda files: DcpDirectory(files, DcpTensors(files, DcpFiles())),
    ),
    _Layout("torch_checkpointing", rank_items.is_present, lambda files: DcpDirectory(files, RankItems(files))),
    _Layout("SageMaker's tiered storage", lambda listing: TIERED_METADATA in listing, _open_tiered),
)


def _layouts(listing: Set[str]) -> list[_Layout]:
    return [layout for layout in _LAYOUTS if layout.is_present(listing)]


class Writer(Enum):
    """Program that wrote a checkpoint; the value is its name in messages."""

    NXD_CKPT = "nxd_ckpt"
    NXD = "neuronx-distributed"
    NXDT = "neuronx-distributed-training"
    NXD_LEGACY = "neuronx-distributed 0.1 to 0.5"
    OPTIMUM = "optimum-neuron"
    OPTIMUM_ADAPTER = "optimum-neuron, a PEFT adapter"
    OPTIMUM_OLD = "optimum-neuron before 0.0.22"
    NEMO = "neuronx-nemo-megatron"
    TIERED = "SageMaker's tiered storage"
    PRESHARDED = "NxD inference"
    TORCH_XLA = "torch-xla"
    TORCH_DCP = "torch DCP"
    TORCH_CHECKPOINTING = "torch_checkpointing"
    HUGGING_FACE = "Hugging Face transformers"


@dataclass(frozen=True)
class Recognised:
    """A checkpoint's writer and places.

    ``tag`` is the directory's NxD tag, a key of the storage; for layouts without tags the directory itself. ``beside``
    is the directory of the writer's other files.
    """

    writer: Writer
    tag: str
    beside: str


STAGE_METADATA = re.compile(r"mp_metadata_pp_rank_(\d+)\.(json|pt)")
"""Optimum-neuron's description of a pipeline stage."""
ADAPTER_SHARDS = "adapter_shards"
"""Optimum-neuron's tag of an adapter, beside PEFT's configuration of it."""

_SHARDS, _OLD_SHARDS = "shards", "tensor_parallel_shards"
_INSIDE = {Writer.OPTIMUM: _SHARDS, Writer.OPTIMUM_OLD: _OLD_SHARDS}
"""Subdirectory with the tensors, by writer."""
_PARTS = frozenset((names.MODEL_DIR, names.OPTIMIZER_DIR))

_Names = Mapping[str, bool]
"""Name -> whether it is a directory."""


def recognise(storage: Storage, folder: str) -> Recognised:
    """Return the writer of the checkpoint ``folder``, or of the one file of that name.

    Raises:
        CheckpointNotFound: no layout that is known, or a directory of several checkpoints.
        MalformedFile: it has two layouts at once.
        UnsupportedState: it is a file with a part of a model.
    """
    where = f"{storage.url}/{folder}" if folder else storage.url
    if storage.is_file(folder):
        parent, _, name = folder.rpartition("/")
        refuse_part(name, where)
        of_torch = Writer.NEMO if nemo.is_of_rank(folder) else Writer.TORCH_XLA
        return Recognised(Writer.HUGGING_FACE if name.endswith(".safetensors") else of_torch, folder, parent)
    listing = dict(storage.list(folder))
    writers = [writer for writer, test in _TESTS.items() if test(storage, folder, listing)]
    if not writers and has_weights(listing):  # without config.json
        writers = [Writer.HUGGING_FACE]
    if writers and writers[0] in _SEVERAL and len(writers) == 1:
        save = _only(_SEVERAL[writers[0]](storage, folder), where)
        return Recognised(writers[0], save, folder)
    if len(writers) > 1:
        both = " and ".join(writer.value for writer in writers)
        raise MalformedFile(f"{where} has the files of two layouts: {both}; move those of one to a place of their own")
    if not writers:
        below = sorted(name for name, is_dir in listing.items() if is_dir and _is_one(storage, f"{folder}/{name}"))
        if below:
            holds = "several checkpoints, expected one" if len(below) > 1 else "one checkpoint, and is none; pass that"
            raise CheckpointNotFound(f"{where} holds {holds}: {', '.join(below[:8])}")
        has_data = any(name.endswith(".distcp") for name in listing)
        raise CheckpointNotFound(
            f"{where} has none of the layouts that are known (docs/layouts.md lists them); it holds "
            f"{', '.join(sorted(listing)[:8]) or 'nothing'}"
            + (f", but not {METADATA}, which torch DCP writes last: the save was interrupted" if has_data else "")
        )
    return _located(writers[0], folder)


def _only(saves: Sequence[str], where: str) -> str:
    if len(saves) != 1:
        raise CheckpointNotFound(f"{where} holds several checkpoints, expected one: {', '.join(saves[:8])}")
    return saves[0]


def _located(writer: Writer, folder: str) -> Recognised:
    parent, _, name = folder.rpartition("/")
    if writer in _INSIDE:
        is_tag = name == _INSIDE[writer]
        return Recognised(writer, folder if is_tag else _in(folder, _INSIDE[writer]), parent if is_tag else folder)
    if writer is Writer.NXD and name.endswith(".ckpt"):
        return Recognised(Writer.NXDT, folder, folder)
    return Recognised(writer, folder, folder)


def _is_one(storage: Storage, folder: str) -> bool:
    listing = dict(storage.list(folder))
    return any(test(storage, folder, listing) for test in _TESTS.values())


def _is_tag(storage: Storage, folder: str, listing: _Names) -> bool:
    return bool(_directories(listing) & _PARTS)


def _is_ours(storage: Storage, folder: str, listing: _Names) -> bool:
    return _is_tag(storage, folder, listing) and names.MANIFEST in listing


def _is_nxd(storage: Storage, folder: str, listing: _Names) -> bool:
    return _is_tag(storage, folder, listing) and names.MANIFEST not in listing and not _has_metadata(listing)


def _is_optimum(storage: Storage, folder: str, listing: _Names) -> bool:
    if _is_tag(storage, folder, listing) and _has_metadata(listing):
        return not _is_in(folder, ADAPTER_SHARDS)
    if listing.get(_SHARDS) is not True:
        return False
    shards = dict(storage.list(_in(folder, _SHARDS)))
    return _has_metadata(shards) or ("config.json" in listing and _is_tag(storage, folder, shards))


def _adapters(storage: Storage, folder: str) -> list[str]:
    """Return the tag of each adapter in the directory, or the directory's own."""
    if _is_in(folder, ADAPTER_SHARDS):
        return [folder]
    inside = [entry.name for entry in storage.list(folder) if entry.is_dir and entry.name.startswith("adapter_")]
    if ADAPTER_SHARDS in inside:
        return [_in(folder, ADAPTER_SHARDS)]
    keys = (_in(folder, name, ADAPTER_SHARDS) for name in inside)
    return sorted(key for key in keys if storage.is_dir(key))


def _is_legacy(storage: Storage, folder: str, listing: _Names) -> bool:
    ranks = [name for name in listing if legacy.parse(name) or legacy.parse_zero1(name)]
    if nemo.saves(storage, folder):
        ranks = [name for name in ranks if not nemo.is_rank(name)]
    return bool(ranks) and not _is_in(folder, _OLD_SHARDS)


def _is_hugging_face(storage: Storage, folder: str, listing: _Names) -> bool:
    weights = has_weights(name for name in listing if not presharded.is_present([name]))
    others = _is_optimum(storage, folder, listing) or torch_xla_files.is_trainers(listing)
    return weights and "config.json" in listing and not others


_TESTS: Mapping[Writer, Callable[[Storage, str, _Names], bool]] = {
    Writer.NXD_CKPT: _is_ours,
    Writer.NXD: _is_nxd,
    Writer.OPTIMUM: _is_optimum,
    Writer.OPTIMUM_ADAPTER: lambda storage, folder, listing: bool(_adapters(storage, folder)),
    Writer.OPTIMUM_OLD: lambda _, folder, names: names.get(_OLD_SHARDS) is True or _is_in(folder, _OLD_SHARDS),
    Writer.NEMO: lambda storage, folder, listing: bool(nemo.saves(storage, folder)),
    Writer.NXD_LEGACY: _is_legacy,
    Writer.TIERED: lambda storage, folder, listing: bool(tiered_saves(storage, folder)),
    Writer.PRESHARDED: lambda storage, folder, listing: presharded.is_present(listing),
    Writer.TORCH_XLA: lambda storage, folder, listing: torch_xla_files.is_present(listing),
    Writer.TORCH_DCP: lambda storage, folder, listing: METADATA in listing,
    Writer.TORCH_CHECKPOINTING: lambda storage, folder, listing: rank_items.is_present(listing),
    Writer.HUGGING_FACE: _is_hugging_face,
}


_SEVERAL: Mapping[Writer, Callable[[Storage, str], list[str]]] = {
    Writer.OPTIMUM_ADAPTER: _adapters,
    Writer.TIERED: tiered_saves,
    Writer.NEMO: nemo.saves,
}
"""Writers that put several checkpoints into a directory, with a function that returns the key of each."""


def _has_metadata(listing: Iterable[str]) -> bool:
    return any(map(STAGE_METADATA.fullmatch, listing))


def _directories(listing: _Names) -> set[str]:
    return {name for name, is_dir in listing.items() if is_dir}


def _is_in(folder: str, name: str) -> bool:
    return folder.rpartition("/")[2] == name


def _in(*names: str) -> str:
    return "/".join(name for name in names if name)
