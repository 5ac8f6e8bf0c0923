"""Hugging Face directories: config.json, and tensors in safetensors files, found by their index. Only read.

Headers are read when a tensor of their file is used: a rank opens the files that hold its slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.errors import KeyMismatch, MalformedFile, PartNotFound, UnsupportedState
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign.fp8_weight import Fp8Weight
from nxd_ckpt.tag.foreign.mxfp4_weight import BLOCKS, SCALES, Mxfp4Weight
from nxd_ckpt.tag.foreign.quantization import (
    Quantization,
    refuse_companions,
    refuse_quantized_dtype,
)
from nxd_ckpt.tag.foreign.quantized import DequantizedStorage, QuantizedWeight

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_INDEX = f"{OPTIMIZER}.index.json"
OPTIMIZER_DOCUMENT = "optimizer.json"
"""Exported beside a model, and no part of it: its readers look for other names."""

_SUFFIX = ".safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SHOWN = 5


def is_hugging_face(storage: Storage, folder: str = "") -> bool:
    """Return whether the directory holds a model in Hugging Face's form, including forms that we refuse to read."""
    names = {entry.name for entry in storage.list(folder) if not entry.is_dir}
    return CONFIG in names and any(name.endswith(_SUFFIX) or name in (INDEX, *_PICKLES) for name in names)


class HuggingFaceDirectory:
    """Directory ``folder`` of ``storage``; "" is its root.

    Raises:
        UnsupportedState: its weights are pickles.
        PartNotFound: it has no weights, or a file that its index names is missing.
        MalformedFile: index or config.json are malformed.
    """

    def __init__(self, storage: Storage, folder: str = "") -> None:
        self._storage = DequantizedStorage(storage)
        self.files = TagFiles(self._storage, folder)
        self._shards: dict[str, Mapping[str, TensorStub]] = {}
        self._places = self._find_places()
        self._quantization: Quantization | None = None
        self._scales: dict[str, str] = {}
        self._dropped: set[str] = set()

    @property
    def where(self) -> str:
        """Name of the directory in errors."""
        return self.files.where("").rstrip("/")

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of config.json; empty without one."""
        return self._document(CONFIG) if self.files.has(CONFIG) else {}

    @property
    def names(self) -> list[str]:
        """All tensors, sorted; after `dequantize` a quantized one has its own name, not those of its parts."""
        return sorted({*self._places}.difference(self._dropped).union(self._scales))

    def dequantize(self, quantization: Quantization | None) -> None:
        """Take quantized weights for plain ones from now on: MXFP4 by their names, FP8 as ``quantization`` says.

        Scales of activations are left out. Raises UnsupportedState for tensors that only other methods have, and for
        scales without a weight.
        """
        self._quantization = quantization
        stems = (name.removesuffix(BLOCKS) for name in self._places if name.endswith(BLOCKS))
        self._scales = {stem: f"{stem}{SCALES}" for stem in stems if f"{stem}{SCALES}" in self._places}
        self._dropped = {f"{name}{BLOCKS}" for name in self._scales}
        if quantization is not None:
            scales = {name: f"{name}{quantization.suffix}" for name in self._places}
            self._scales |= {name: scale for name, scale in scales.items() if scale in self._places}
            self._dropped |= set(filter(quantization.is_of_activations, self._places))
        self._dropped |= {*self._scales.values()}
        refuse_companions(self.names, self.where)

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub:
        """Return the stub of a tensor that is not quantized.

        Raises the errors of `stub`, and UnsupportedState for a dtype that only quantized weights have.
        """
        stub = self.stub(name, tied)
        refuse_quantized_dtype(name, stub.dtype, self.where)
        return stub

    def stub(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub:
        """Return the place of a tensor's bytes.

        ``tied`` maps tensors that files leave out to those that they are tied to.

        Raises:
            KeyMismatch: there is none of that name, nor the one that it is tied to.
            MalformedFile: its file is malformed, or does not match the index.
        """
        stored_name = name if name in self._places or name in self._scales else (tied or {}).get(name, name)
        if stored_name in self._scales:
            return self._dequantized(stored_name)
        if stored_name not in self._places:
            tie = f", nor {stored_name}, to which it is tied" if stored_name != name else ""
            raise KeyMismatch(f"{self.where} has no tensor {name}{tie}; is it a model of this mapping, and complete?")
        return self._stored(stored_name)

    def _stored(self, name: str) -> TensorStub:
        return self._shard(self._places[name])[name]

    def _dequantized(self, name: str) -> TensorStub:
        weight = self._weight(name)
        numbers, scales, key = weight.numbers.file, weight.scales.file, self.files.key
        file = f"{numbers}, {name}"
        self._storage.add(key(file), key(numbers), key(scales), weight)
        return weight.stub(file)

    def _weight(self, name: str) -> QuantizedWeight:
        scales = self._stored(self._scales[name])
        if name not in self._places:
            return Mxfp4Weight(name, self._stored(f"{name}{BLOCKS}"), scales)
        described = self._quantization
        assert described is not None  # else it had no scales
        rounds = described.rounds_products_of(name)
        return Fp8Weight(name, self._stored(name), scales, described.blocks, described.dtype, rounds)

    def _find_places(self) -> dict[str, str]:
        return self._places_in_index() if self.files.has(INDEX) else self._places_in_single_file()

    def _places_in_index(self) -> dict[str, str]:
        """Return the file of each tensor, by the index."""
        places = self._document(INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise MalformedFile(f"{self.files.where(INDEX)}: weight_map must name the file of each tensor")
        for file in sorted(set(places.values())):
            if "/" in file or not file.endswith(_SUFFIX):
                raise MalformedFile(f"{self.files.where(INDEX)}: {file!r} is not a safetensors file of this directory")
            if not self.files.has(file):
                count = list(places.values()).count(file)
                raise PartNotFound(
                    f"{self.files.where(file)} is missing, in which {INDEX} says {count} tensors are; download it again"
                )
        return dict(places)

    def _places_in_single_file(self) -> dict[str, str]:
        """Return the file of each tensor in a directory without an index, which has one file."""
        files = sorted(name for name, is_dir in self.files.names().items() if name.endswith(_SUFFIX) and not is_dir)
        if SINGLE in files:
            files = [SINGLE]
        if len(files) == 1:
            return dict.fromkeys(self._read(files[0]), files[0])
        if files:
            shown = ", ".join(files[:_SHOWN])
            raise PartNotFound(f"{self.files.where(INDEX)} is missing, which says what in {shown} is the model's")
        if any(self.files.has(name) for name in _PICKLES):
            raise UnsupportedState(
                f"{self.where} holds its weights as pickles (pytorch_model.bin), which can run code when read; save "
                "the model with transformers' save_pretrained(..., safe_serialization=True) and load that"
            )
        raise PartNotFound(f"{self.where} holds no weights: expected {SINGLE}, or {INDEX} and the files that it names")

    def _shard(self, file: str) -> Mapping[str, TensorStub]:
        if file not in self._shards:
            tensors = self._read(file)
            listed = {name for name, place in self._places.items() if place == file}
            if listed != set(tensors):
                shown = ", ".join(sorted(listed ^ set(tensors))[:_SHOWN])
                raise MalformedFile(
                    f"{self.files.where(file)} does not hold the tensors that {INDEX} says ({shown}); the directory "
                    "mixes files of two models, or of two versions of one"
                )
            self._shards[file] = tensors
        return self._shards[file]

    def _read(self, file: str) -> Mapping[str, TensorStub]:
        return self.files.safetensors(file)

    def _document(self, file: str) -> dict[str, Any]:
        return document.small(self.files.storage.read(self.files.key(file)), self.files.where(file))
