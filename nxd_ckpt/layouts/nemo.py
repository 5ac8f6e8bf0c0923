"""Checkpoints of neuronx-nemo-megatron: a directory of each model-parallel rank, with a file of one name in each.

==================================  ==============================================================================
``mp_rank_00/NAME.ckpt``            Lightning's dict; with pipeline stages in ``tp_rank_00_pp_rank_000``
``NAME.ckpt.tensors/tensor_N.pt``   beside it, where tensors were saved apart (xser)
``optim/dp_rank_000/NAME-opt...``   beside it, the ZeRO-1 optimizer of each data-parallel rank, in a list
==================================  ==============================================================================

Layers are numbered from 0 on in every pipeline stage; with virtual stages in every ``model0``, ``model1`` of a file.
Here they have the model's numbers. tests/migrate/sources.md has the sources. Only read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import count, takewhile
from typing import Any

from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.names import ParsedName, describe, holes, spanned
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.layouts.files import MissingTensor, TagFiles
from nxd_ckpt.layouts.payload import (
    Payload,
    PayloadFile,
    checked_model,
    checked_optimizer,
    payload_of,
    reading,
    refuse_other_counts,
)
from nxd_ckpt.storage.base import Storage

_RANK = re.compile(r"mp_rank_(\d{2,})|tp_rank_(\d{2,})_pp_rank_(\d{3,})")
_DP_RANK = re.compile(r"dp_rank_(\d{3,})")
_SUFFIX = ".ckpt"
_OPTIMIZERS = "optim"
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_AROUND = ("model.module.", "model.")
"""Prefixes of the model in the names of tensors."""
_BUFFERS = "untrained_buffer_names"
_HEADS = ("word_embeddings.weight", "word_embeddings_for_head.weight")
_HEAD = "language_model.output_layer.weight"
"""Name of the output layer. The last stage holds a copy of tied embeddings, under other names."""


def is_of_rank(key: str) -> bool:
    """Return whether a file of that name is one rank's."""
    parts = key.split("/")
    return len(parts) > 1 and is_rank(parts[-2]) and key.endswith(_SUFFIX)


def is_rank(folder: str) -> bool:
    """Return whether a directory of that name is one rank's."""
    return _parse(folder) is not None


def saves(storage: Storage, folder: str) -> list[str]:
    """Return the first rank's file, a key of the storage, of each checkpoint in the directory."""
    ranks = {parsed: entry.name for entry in storage.list(folder) if (parsed := _parse(entry.name)) and entry.is_dir}
    if not ranks:
        return []
    first = f"{folder}/{ranks[min(ranks, key=lambda rank: (rank.pp, rank.tp))]}".lstrip("/")
    return sorted(f"{first}/{entry.name}" for entry in storage.list(first) if entry.name.endswith(_SUFFIX))


def open_files(files: TagFiles, name: str) -> NemoFiles:
    """Open the checkpoint of that name.

    Raises PartNotFound if a rank's file is missing, MalformedFile for two layouts.
    """
    folders = [folder for folder, is_dir in files.names().items() if is_dir and _parse(folder)]
    ranks = {parsed: folder for folder in folders if (parsed := _parse(folder))}
    _refuse_several(folders, len(ranks), files.directory)
    missing = [*holes(ranks), *(rank for rank, folder in ranks.items() if not files.has(f"{folder}/{name}"))]
    if missing:
        raise PartNotFound(
            f"{files.directory}: no {name} of tp {missing[0].tp} pp {missing[0].pp}; found {describe(ranks)}"
        )
    return NemoFiles(files, name, ranks)


class NemoFiles(PayloadFile):
    """Layout (`TagLayout`) of the files called ``name`` in the directories of all ``ranks``.

    Content of neither model nor optimizer is the first rank's.
    """

    def __init__(self, files: TagFiles, name: str, ranks: dict[ParsedName, str]) -> None:
        self._name = name
        self._ranks = ranks
        first = self._file(Coordinates())
        self.files = files
        super().__init__(files, first, self._read_payload(first))

    @reading
    def topology(self) -> Topology:
        sizes = spanned([*self._ranks, *(ParsedName(dp, None, 0, 0) for dp in self._optimizers)])
        return Topology(dp=sizes.dp, tp=sizes.tp, pp=sizes.pp)

    @reading
    def parts(self) -> Parts:
        has_optimizer = self._optimizers or self._payload.optimizer is not None
        optimizer = self.optimizer_tree(Coordinates()) if has_optimizer else None
        return Parts(
            model=True,
            optimizer=None if optimizer is None else "zero1" if "base_state" in optimizer else "plain",
            scheduler=self._payload.scheduler is not None,
            user_content=bool(self._rest),
            use_xser=self.files.names(self._folder).get(f"{self._name}.tensors") is True,
            master_weights=optimizer is not None and "sharded_master_weights" in optimizer,
            lower_precision_weights=not any(iter_tensors(self.model_tree(Coordinates()), MissingTensor)),
        )

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        chunks = self._chunks(self._payload_of(at), at)
        return {
            _LAYER.sub(lambda match: str(int(match[0]) + first), name): leaf  # noqa: B023
            for chunk, first in zip(chunks, self._first_layers[at.pp_rank], strict=True)
            for name, leaf in chunk.items()
        }

    @reading
    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        if not self._optimizers:
            return self._optimizer(self._payload_of(at), self.files.where(self._file(at)))
        if at.dp_rank not in self._optimizers:
            raise PartNotFound(f"{self.files.where(self._folder)}: no optimizer of dp {at.dp_rank} for {self._name}")
        file = f"{self._ranks[_of(at)]}/{self._optimizers[at.dp_rank]}"
        state = self.files.joined(file)
        if not isinstance(state, list) or len(state) != 1:
            raise MalformedFile(f"{self.files.where(file)}: expected a list with one optimizer's state dict")
        tree = checked_optimizer(state[0], self.files.where(file))
        return {key: value for key, value in tree.items() if key != "untrained_buffers"}

    @property
    def _rest(self) -> dict[str, Any]:
        return {key: value for key, value in super()._rest.items() if key not in _virtual(self._payload.content)}

    @property
    def _folder(self) -> str:
        return self._ranks[_of(Coordinates())]

    @cached_property
    def _optimizers(self) -> dict[int, str]:
        """The file of each data-parallel rank with its own optimizer, below a rank's directory."""
        above = f"{self._folder}/{_OPTIMIZERS}"
        stem = self._name.removesuffix(_SUFFIX)
        base, last = (stem.removesuffix("-last"), "-last") if stem.endswith("-last") else (stem, "")
        names = (f"{base}-optimizer_states{last}{_SUFFIX}", f"{stem}.optimizer_states")  # the second is older
        folders = {match[0]: int(match[1]) for match in map(_DP_RANK.fullmatch, self.files.names(above)) if match}
        _refuse_several(folders, len(set(folders.values())), self.files.where(above))
        return {
            rank: f"{_OPTIMIZERS}/{folder}/{name}"
            for folder, rank in folders.items()
            for name in names
            if self.files.has(f"{above}/{folder}/{name}")
        }

    @cached_property
    def _first_layers(self) -> list[list[int]]:
        """The model's number of the layer that is called 0 there, by stage and virtual stage."""
        stages = [Coordinates(pp_rank) for pp_rank in range(self.topology().pp)]
        counts = [[_layers(chunk) for chunk in self._chunks(self._payload_of(at), at)] for at in stages]
        if len({len(chunks) for chunks in counts}) > 1:
            numbers = list(map(len, counts))
            raise MalformedFile(f"{self.where}: stages have {numbers} virtual stages; expected one number")
        first = 0
        numbers_by_stage = [[0] * len(chunks) for chunks in counts]
        for chunk in range(len(counts[0])):
            for stage, layers in enumerate(counts):
                numbers_by_stage[stage][chunk] = first
                first += layers[chunk]
        return numbers_by_stage

    def _chunks(self, payload: Payload, at: Coordinates) -> list[dict[str, Any]]:
        """Return the state dict of each virtual stage, or the only one."""
        where = self.files.where(self._file(at))
        virtual = _virtual(payload.content)
        if virtual:
            return [dict(_flat(payload.content[key], where)) for key in virtual]
        return [{_model_name(name): leaf for name, leaf in self._model(payload, where).items() if name != _BUFFERS}]

    def _file(self, at: Coordinates) -> str:
        return f"{self._ranks[_of(at)]}/{self._name}"

    def _payload_of(self, at: Coordinates) -> Payload:
        payload = self._read_payload(self._file(at))
        first = self._file(Coordinates())
        refuse_other_counts({first: self._payload, self._file(at): payload}, self.files.directory)
        return payload

    def _read_payload(self, file: str) -> Payload:
        return payload_of(self.files.joined(file), self.files.where(file))


def _parse(folder: str) -> ParsedName | None:
    match = _RANK.fullmatch(folder)
    return None if match is None else ParsedName(0, None, int(match[1] or match[2]), int(match[3] or 0))


def _refuse_several(folders: Collection[str], ranks: int, where: str) -> None:
    if ranks < len(folders):
        raise MalformedFile(
            f"{where} has several directories of one rank, {first_of(sorted(folders))}; move those of one save to "
            "a place of their own"
        )


def _of(at: Coordinates) -> ParsedName:
    return ParsedName(0, None, at.tp_rank, at.pp_rank)


def _virtual(content: dict[str, Any]) -> list[str]:
    """Return the keys of virtual pipeline stages."""
    return list(takewhile(content.__contains__, (f"model{number}" for number in count())))


def _flat(tree: Any, where: str, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested state dicts by whole names."""
    for name, leaf in checked_model(tree, where).items():
        if isinstance(leaf, dict):
            yield from _flat(leaf, where, f"{above}{name}.")
        elif name != _BUFFERS:
            yield _model_name(f"{above}{name}"), leaf


def _model_name(name: str) -> str:
    """Return its name in the model."""
    around = next((prefix for prefix in _AROUND if name.startswith(prefix)), "")
    inside = name.removeprefix(around)
    return _HEAD if inside in _HEADS else inside


def _layers(names: dict[str, Any]) -> int:
    return max((int(match[0]) for match in map(_LAYER.search, names) if match), default=-1) + 1
