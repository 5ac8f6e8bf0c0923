"""Hugging Face directories: config.json, and tensors in the files that `weight_files` finds. Only read.

Files of torch.save are read as plain data: no code in them is run.

Headers are read when a tensor of their file is used: a rank opens the files that hold its slices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import KeyMismatch, MalformedFile, UnsafePickle, UnsupportedState
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.layouts.files import TagFiles, require_directory
from nxd_ckpt.layouts.payload import Payload, PayloadFile, reading
from nxd_ckpt.layouts.quantization import (
    BLOCKS,
    FP8_SCALES,
    SCALES,
    DequantizedStorage,
    Fp8Weight,
    Mxfp4Weight,
    Quantization,
    QuantizedWeight,
    quantization_of,
    refuse_companions,
    refuse_quantized_dtype,
)
from nxd_ckpt.layouts.weight_files import WeightFiles, find_weights, tensors_of
from nxd_ckpt.layouts.whole_files import content_in, optimizer_in, scheduler_in
from nxd_ckpt.storage.base import Storage

CONFIG = "config.json"


class HuggingFaceDirectory:
    """Directory ``folder`` of ``storage``; "" is its root.

    ``model_key`` is the key of the state dict in files of torch.save, if they hold more than that.

    Raises:
        PartNotFound: it has no weights, or a file of theirs is missing.
        MalformedFile: index or config.json are malformed, or files contradict each other.
        UnsafePickle: a file of torch.save holds more than plain data.
    """

    def __init__(self, storage: Storage, folder: str = "", model_key: str = "model") -> None:
        self._model_key = model_key
        self._storage = DequantizedStorage(storage)
        self.files: TagFiles = TagFiles(self._storage, folder)
        self._shards: dict[str, Mapping[str, TensorStub]] = {}
        self._weights = self._find()
        self._places = self._weights.places
        self._quantization: Quantization | None = None
        self._scales: dict[str, str] = {}
        self._dropped: set[str] = set()
        self.live_dtypes: Collection[str] = ()
        """Dtypes of the model that is filled: what has one of them is no quantized weight."""

    def _find(self) -> WeightFiles:
        return find_weights(self.files, self._read)

    @property
    def where(self) -> str:
        """Name of the directory in errors."""
        return self.files.directory

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of config.json; empty without one."""
        return self._document(CONFIG) if self.files.has(CONFIG) else {}

    @property
    def strays(self) -> str | None:
        """Warning about files that look like the model's weights, and are not read; None without any."""
        weights = self._weights
        if not weights.strays:
            return None
        return (
            f"{self.where}: {first_of(weights.strays)} not read, since {weights.source} says that the model is in "
            f"{first_of(sorted({*self._places.values()}))}. Other programs may choose otherwise: move away what is old"
        )

    @property
    def names(self) -> list[str]:
        """All tensors, sorted; after `dequantize` a quantized one has its own name, not those of its parts."""
        return sorted({*self._places}.difference(self._dropped).union(self._scales))

    def dequantize(self, quantization: Quantization | None) -> None:
        """Take quantized weights for plain ones from now on: MXFP4 by their names, FP8 as ``quantization`` says.

        Scales of activations are left out. Raises UnsupportedState for tensors that only other methods have, and for
        scales without a weight; MalformedFile for a weight in both forms.
        """
        self._quantization = quantization
        stems = (name.removesuffix(BLOCKS) for name in self._places if name.endswith(BLOCKS))
        self._scales = {stem: f"{stem}{SCALES}" for stem in stems if f"{stem}{SCALES}" in self._places}
        self._dropped = {f"{name}{BLOCKS}" for name in self._scales}
        twice = sorted(self._scales.keys() & self._places.keys())
        if twice:
            raise MalformedFile(
                f"{self.where} holds {twice[0]} itself and quantized, as {twice[0]}{BLOCKS}; the directory mixes files "
                "of two models, or of two versions of one"
            )
        if quantization is not None:
            scales = {name: f"{name}{FP8_SCALES}" for name in self._places}
            self._scales |= {name: scale for name, scale in scales.items() if scale in self._places}
            self._dropped |= set(filter(quantization.is_of_activations, self._places))
        self._dropped |= {*self._scales.values()}
        refuse_companions(self.names, self.where)

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub:
        """Return the stub of a tensor that is not quantized.

        Raises the errors of `stub`, and UnsupportedState for a dtype that only quantized weights have.
        """
        stub = self.stub(name, tied)
        if stub.dtype not in self.live_dtypes:
            refuse_quantized_dtype(name, stub.dtype, self.where, self._quantization is not None)
        return stub

    def stub(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub:
        """Return the place of a tensor's bytes.

        ``tied`` maps tensors that files may leave out to those that they are tied to.

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
        numbers = weight.numbers.file
        scales = weight.scales.file
        key = self.files.key
        file = f"{numbers}, {name}"
        self._storage.add(key(file), key(numbers), key(scales), weight)
        return weight.stub(file)

    def _weight(self, name: str) -> QuantizedWeight:
        scales = self._stored(self._scales[name])
        if name not in self._places:
            return Mxfp4Weight(name, self._stored(f"{name}{BLOCKS}"), scales)
        described = self._quantization
        assert described is not None  # else it had no scales
        return Fp8Weight(name, self._stored(name), scales, described.block, described.dtype)

    def _shard(self, file: str) -> Mapping[str, TensorStub]:
        if file not in self._shards:
            tensors = self._read(file)
            listed = {name for name, place in self._places.items() if place == file}
            if listed != set(tensors):
                shown = first_of(sorted(listed ^ set(tensors)))
                raise MalformedFile(
                    f"{self.files.where(file)} does not hold the tensors that {self._weights.source} says ({shown}); "
                    "the directory mixes files of two models, or of two versions of one"
                )
            self._shards[file] = tensors
        return self._shards[file]

    def _read(self, file: str) -> Mapping[str, TensorStub]:
        return tensors_of(self.files, file, self._model_key)

    def _document(self, file: str) -> dict[str, Any]:
        return document.small(self.files.storage.read(self.files.key(file)), self.files.where(file))


class WholeModelFile(HuggingFaceDirectory):
    """The model in ``file`` of ``storage``; torch.save wrote it unless the name ends in .safetensors.

    From a pickle only plain data is read. ``model_key`` is the key of the state dict, if the file holds more than that.

    Raises:
        MalformedFile: it is neither.
        UnsafePickle: it holds more than plain data.
    """

    def __init__(self, storage: Storage, file: str, model_key: str = "model") -> None:
        self._file = file
        super().__init__(storage, model_key=model_key)

    @property
    def where(self) -> str:
        return self.files.where(self._file)

    def _find(self) -> WeightFiles:
        return WeightFiles(dict.fromkeys(self._read(self._file), self._file), "its header")


def open_weights(storage: Storage, key: str, model_key: str = "model") -> HuggingFaceDirectory:
    """Open the directory ``key``, or the file of that name with a whole model. Raises the errors of opening it."""
    if storage.is_file(key):
        return WholeModelFile(storage, key, model_key)
    require_directory(storage, key, "input")
    return HuggingFaceDirectory(storage, key, model_key)


class WeightsLayout(PayloadFile):
    """Layout (`TagLayout`) of a model in Hugging Face's form as it is: its own names and dtypes, on one rank.

    The optimizer, the scheduler and the trainer's state that lie beside it are read when they are asked for.
    """

    def __init__(self, directory: HuggingFaceDirectory) -> None:
        self.directory = directory
        directory.dequantize(quantization_of(directory.config, directory.where))
        super().__init__(directory.files, "", Payload({}))
        self._beside = None if isinstance(directory, WholeModelFile) else directory.files

    @reading
    def parts(self) -> Parts:
        try:
            return replace(super().parts(), model=True)
        except (UnsafePickle, UnsupportedState):  # as long as only the model is read, nothing of it is needed
            has_scheduler = self._beside is not None and scheduler_in(self._beside) is not None
            return Parts(model=True, optimizer="plain", scheduler=has_scheduler, user_content=bool(self._rest))

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        return {name: self.directory.stub(name) for name in self.directory.names}

    @cached_property
    def _payload(self) -> Payload:
        files = self._beside
        reads = {} if files is None else {"optimizer": optimizer_in(files), "scheduler": scheduler_in(files)}
        return Payload({part: read() for part, read in reads.items() if read is not None})

    @property
    def _rest(self) -> dict[str, Any]:
        return {} if self._beside is None else content_in(self._beside)
