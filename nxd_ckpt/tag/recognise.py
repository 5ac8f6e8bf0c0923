"""Recognition of the writer of a checkpoint by the names in its directory, for every layout of the Neuron ecosystem.

Those that are neither tags nor of Hugging Face's form are opened here too. tests/migrate/sources.md has the sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from nxd_ckpt.core import names
from nxd_ckpt.core.document import HEAD, instead_of_data, known_by_name
from nxd_ckpt.core.tags import TagInfo
from nxd_ckpt.errors import CheckpointNotFound, MalformedFile, UnsupportedState
from nxd_ckpt.formats.zip_directory import LOCAL_MARK
from nxd_ckpt.layouts import legacy, nemo, rank_items, torch_xla_files, whole_files
from nxd_ckpt.layouts.dcp_directory import NO_KEYS, DcpDirectory, DcpTensors
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.nxd_tag import TagLayout
from nxd_ckpt.layouts.other_kinds import holds_one_file
from nxd_ckpt.layouts.rank_items import RankItems
from nxd_ckpt.layouts.torch_dcp import METADATA, DcpFiles, TieredFiles, tiered_saves
from nxd_ckpt.layouts.weight_files import (
    WEIGHT_FILES,
    has_weights,
    refuse_part,
    torch_files,
)
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.directory import find_tag


class Program(Enum):
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
    TORCH_XLA = "torch.save or torch-xla"
    TORCH_DCP = "torch DCP"
    TORCH_CHECKPOINTING = "torch_checkpointing"
    WHOLE_FILES = "nxd_ckpt's form files, or ColossalAI"
    HUGGING_FACE = "Hugging Face transformers, or nxd_ckpt's form files"

    @property
    def writes_tags(self) -> bool:
        """True if it writes NxD's tags."""
        return self in (Program.NXD_CKPT, Program.NXD, Program.NXDT)

    @staticmethod
    def of_tag(info: TagInfo) -> Program:
        """Return the writer of a tag."""
        return Program.NXD_CKPT if info.ours else Program.NXD


@dataclass(frozen=True)
class Recognised:
    """A checkpoint's writer and places.

    ``tag`` is the directory's NxD tag, a key of the storage; for layouts without tags the directory itself. ``beside``
    is the directory of the writer's other files.
    """

    writer: Program
    tag: str
    beside: str


STAGE_METADATA = re.compile(r"mp_metadata_pp_rank_(\d+)\.(json|pt)")
"""Optimum-neuron's description of a pipeline stage."""
ADAPTER_SHARDS = "adapter_shards"
"""Optimum-neuron's tag of an adapter, beside PEFT's configuration of it."""

_SHARDS, _OLD_SHARDS = "shards", "tensor_parallel_shards"
_INSIDE = {Program.OPTIMUM: _SHARDS, Program.OPTIMUM_OLD: _OLD_SHARDS}
"""Subdirectory with the tensors, by writer."""


def recognise(storage: Storage, folder: str) -> Recognised | None:
    """Return the writer of the checkpoint ``folder``, or of the one file of that name; None if no layout is known.

    Raises:
        CheckpointNotFound: it is a directory of several checkpoints.
        MalformedFile: it has two layouts at once.
        UnsupportedState: it is a file with a part of a model, or another program's.
    """
    where = f"{storage.url}/{folder}" if folder else storage.url
    if storage.is_file(folder):
        parent, _, name = folder.rpartition("/")
        _refuse_file(storage, folder, where)
        of_torch = Program.NEMO if nemo.is_of_rank(folder) else Program.TORCH_XLA
        return Recognised(Program.HUGGING_FACE if name.endswith(".safetensors") else of_torch, folder, parent)
    if not storage.is_dir(folder):
        return None
    candidate = _Folder(storage, folder)
    listing = candidate.listing
    writers = candidate.writers()
    if not writers and has_weights(listing):  # without config.json
        writers = [Program.HUGGING_FACE]
    if len(writers) != 1:
        tag = find_tag(storage, folder) if folder else None
        if tag is not None and (tag.complete or tag.ours):  # whatever files of others are in it
            writers = [Program.of_tag(tag)]
    if len(writers) == 1 and writers[0] in _SEVERAL:
        return Recognised(writers[0], _only(_SEVERAL[writers[0]](candidate), where), folder)
    if len(writers) > 1:
        both = " and ".join(writer.value for writer in writers)
        raise MalformedFile(f"{where} has the files of two layouts: {both}; move those of one to a place of their own")
    if writers:
        return candidate.located(writers[0])
    files = {name for name, is_dir in listing.items() if not is_dir}
    return recognise(storage, candidate.below(*torch_files(files))) if holds_one_file(files) else None


_UNKNOWN = (
    "no checkpoint of a kind that is known; safetensors files and archives are known by their names, which end in "
    "lower case (.safetensors, .tar, .tar.gz)"
)


def _refuse_file(storage: Storage, key: str, where: str) -> None:
    """Raise UnsupportedState for a file that is, by its name or its beginning, no whole model and no script's dict."""
    name = key.rpartition("/")[2]
    refuse_part(name, where)
    other = known_by_name(name)
    if other is None and not name.endswith(WEIGHT_FILES):
        start = bytearray(min(HEAD, storage.size(key)))
        storage.read_into(key, 0, memoryview(start))
        if not start.startswith(LOCAL_MARK):
            other = instead_of_data(bytes(start)) or _UNKNOWN
    if other is not None:
        raise UnsupportedState(f"{where} is {other}")


def open_as(
    writer: Program, storage: Storage, key: str, trust_pickle: bool = False, part_keys: Mapping[str, str] = NO_KEYS
) -> TagLayout | None:
    """Open what `recognise` found to be of that ``writer``; None if it is read as tags are.

    ``part_keys`` are those of parts in a state dict, if the caller names them.

    Raises CheckpointNotFound, PartNotFound, MalformedFile: errors of opening its layout.
    """
    folder, _, file = key.rpartition("/")
    if writer is Program.NEMO:
        return nemo.open_files(TagFiles(storage, folder.rpartition("/")[0], trust_pickle=trust_pickle), file)
    if writer is Program.TORCH_XLA:
        above, name = (folder, file) if storage.is_file(key) else (key, None)
        return torch_xla_files.open_files(TagFiles(storage, above, trust_pickle=trust_pickle), name, part_keys)
    opens = _OPENS.get(writer)
    return None if opens is None else opens(TagFiles(storage, key, trust_pickle=trust_pickle), part_keys)


def _open_tiered(files: TagFiles, part_keys: Mapping[str, str]) -> TagLayout:
    root = TagFiles(files.storage, "")
    return DcpDirectory(root, DcpTensors(root, TieredFiles(files.tag)))


_OPENS: Mapping[Program, Callable[[TagFiles, Mapping[str, str]], TagLayout]] = {
    Program.TIERED: _open_tiered,
    Program.TORCH_DCP: lambda files, keys: DcpDirectory(files, DcpTensors(files, DcpFiles()), keys),
    Program.TORCH_CHECKPOINTING: lambda files, keys: DcpDirectory(files, RankItems(files), keys),
    Program.WHOLE_FILES: lambda files, keys: whole_files.open_files(files),
}


def _only(saves: Sequence[str], where: str) -> str:
    if len(saves) != 1:
        raise CheckpointNotFound(f"{where} holds several checkpoints, expected one: {', '.join(saves[:8])}")
    return saves[0]


@dataclass(frozen=True)
class _Folder:
    """The directory ``key`` of a storage, which may be a checkpoint, or hold several."""

    storage: Storage
    key: str

    @cached_property
    def listing(self) -> dict[str, bool]:
        """Its names, each with whether it is a directory."""
        return dict(self.storage.list(self.key))

    def writers(self) -> list[Program]:
        """Return the writers whose layout it has."""
        return [writer for writer, test in _TESTS.items() if test(self)]

    def located(self, writer: Program) -> Recognised:
        """Return it as a checkpoint of that writer."""
        parent, _, name = self.key.rpartition("/")
        if writer in _INSIDE:
            is_tag = name == _INSIDE[writer]
            tag = self.key if is_tag else self.below(_INSIDE[writer])
            return Recognised(writer, tag, parent if is_tag else self.key)
        if writer is Program.NXD and name.endswith(".ckpt"):
            writer = Program.NXDT
        return Recognised(writer, self.key, self.key)

    def below(self, *inner: str) -> str:
        """Return the key of a directory in it."""
        return "/".join(name for name in (self.key, *inner) if name)

    def is_called(self, name: str) -> bool:
        return self.key.rpartition("/")[2] == name

    @property
    def has_parts(self) -> bool:
        """True if it has a model's or an optimizer's directory, as NxD's tags have."""
        return any(self.listing.get(part) is True for part in (names.MODEL_DIR, names.OPTIMIZER_DIR))

    @property
    def has_metadata(self) -> bool:
        """True if it has optimum-neuron's description of a pipeline stage."""
        return any(map(STAGE_METADATA.fullmatch, self.listing))

    @cached_property
    def has_whole_files(self) -> bool:
        others = torch_xla_files.is_present(self.listing) or not {names.MANIFEST, METADATA}.isdisjoint(self.listing)
        return not others and whole_files.is_present(TagFiles(self.storage, self.key))

    @property
    def is_nxd(self) -> bool:
        others = names.MANIFEST in self.listing or self.has_metadata
        return self.has_parts and not others and not self.has_whole_files

    @property
    def is_optimum(self) -> bool:
        if self.has_parts and self.has_metadata:
            return not self.is_called(ADAPTER_SHARDS)
        if self.listing.get(_SHARDS) is not True:
            return False
        shards = _Folder(self.storage, self.below(_SHARDS))
        return shards.has_metadata or ("config.json" in self.listing and shards.has_parts)

    @property
    def adapters(self) -> list[str]:
        """The tag of each of optimum-neuron's adapters in it, or its own."""
        if self.is_called(ADAPTER_SHARDS):
            return [self.key]
        inside = [name for name, is_dir in self.listing.items() if is_dir and name.startswith("adapter_")]
        if ADAPTER_SHARDS in inside:
            return [self.below(ADAPTER_SHARDS)]
        return sorted(filter(self.storage.is_dir, (self.below(name, ADAPTER_SHARDS) for name in inside)))

    @property
    def is_legacy(self) -> bool:
        ranks = [name for name in self.listing if legacy.parse(name) or legacy.parse_zero1(name)]
        if nemo.saves(self.storage, self.key):
            ranks = [name for name in ranks if not nemo.is_rank(name)]
        return bool(ranks) and not self.is_called(_OLD_SHARDS)

    @property
    def is_hugging_face(self) -> bool:
        weights = has_weights(self.listing)
        others = self.is_optimum or torch_xla_files.is_trainers(self.listing)
        return weights and "config.json" in self.listing and not others


_TESTS: Mapping[Program, Callable[[_Folder], bool]] = {
    Program.NXD_CKPT: lambda one: one.has_parts and names.MANIFEST in one.listing,
    Program.NXD: lambda one: one.is_nxd,
    Program.OPTIMUM: lambda one: one.is_optimum,
    Program.OPTIMUM_ADAPTER: lambda one: bool(one.adapters),
    Program.OPTIMUM_OLD: lambda one: one.listing.get(_OLD_SHARDS) is True or one.is_called(_OLD_SHARDS),
    Program.NEMO: lambda one: bool(nemo.saves(one.storage, one.key)),
    Program.NXD_LEGACY: lambda one: one.is_legacy,
    Program.TIERED: lambda one: bool(tiered_saves(one.storage, one.key)),
    Program.TORCH_XLA: lambda one: torch_xla_files.is_present(one.listing),
    Program.TORCH_DCP: lambda one: METADATA in one.listing,
    Program.TORCH_CHECKPOINTING: lambda one: rank_items.is_present(one.listing),
    Program.WHOLE_FILES: lambda one: one.has_whole_files,
    Program.HUGGING_FACE: lambda one: one.is_hugging_face,
}


_SEVERAL: Mapping[Program, Callable[[_Folder], list[str]]] = {
    Program.OPTIMUM_ADAPTER: lambda one: one.adapters,
    Program.TIERED: lambda one: tiered_saves(one.storage, one.key),
    Program.NEMO: lambda one: nemo.saves(one.storage, one.key),
}
"""Writers that put several checkpoints into a directory, with a function that returns the key of each."""
