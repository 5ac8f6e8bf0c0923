"""Files of a Hugging Face model: config.json, the tokenizer's, and its tensors over safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core import document
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats.safetensors import SafetensorsImage, TensorForm, lay_out
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import StorageOptions, directory_and_name, open_storage, options_for
from nxd_ckpt.tag.foreign.hugging_face_directory import CONFIG
from nxd_ckpt.tag.foreign.quantization import without_quantization
from nxd_ckpt.tag.foreign.weight_files import SINGLE

_MODEL = (CONFIG, "generation_config.json")
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "processor_config.json",
    "preprocessor_config.json",
)


class ModelFile(NamedTuple):
    """A small file, by its name in the new directory."""

    name: str
    content: bytes


def read_config(path: str, options: StorageOptions | None) -> list[ModelFile]:
    """Read config.json, from that file or a Hugging Face directory, and other files of the model beside it.

    Raises:
        InvalidArgument: there is no config.json.
        MalformedFile: it is not a JSON object.
    """
    storage, name = _open(path, options)
    is_file = storage.is_file(name)
    files = [ModelFile(CONFIG, storage.read(name))] if is_file else list(_matching(storage, name, _MODEL))
    if not any(file.name == CONFIG for file in files):
        raise InvalidArgument(f"config {path}: expected config.json, or a directory that holds it")
    config_in(files, path)
    return files


def read_tokenizer(path: str, options: StorageOptions | None) -> list[ModelFile]:
    """Read the tokenizer's files of a directory. Raises InvalidArgument if there are none."""
    files = list(_matching(*_open(path, options), _TOKENIZER))
    if not files:
        raise InvalidArgument(f"tokenizer {path}: expected a directory with a tokenizer's files, found none there")
    return files


def config_in(files: Iterable[ModelFile], where: str = CONFIG) -> dict[str, Any]:
    """Return the config.json among the files; empty without one. Raises MalformedFile."""
    content = next((file.content for file in files if file.name == CONFIG), b"{}")
    return document.small(content, where)


def with_config(files: Iterable[ModelFile], config: Mapping[str, Any]) -> list[ModelFile]:
    """Return the files with this config.json."""
    content = json.dumps(config, indent=2).encode() + b"\n"
    return [ModelFile(file.name, content if file.name == CONFIG else file.content) for file in files]


def with_dtype(files: Iterable[ModelFile], dtype: str) -> list[ModelFile]:
    """Return the files with this dtype in config.json, if it has one, and without quantization.

    Of a quantized model plain numbers are written.
    """
    return [_retyped(file, dtype) if file.name == CONFIG else file for file in files]


def _retyped(file: ModelFile, dtype: str) -> ModelFile:
    config = config_in([file])
    dtypes = {key: dtype for key in ("torch_dtype", "dtype") if key in config}
    plain = without_quantization(config)
    if not dtypes and plain == config:
        return file
    return ModelFile(file.name, json.dumps({**plain, **dtypes}, indent=2).encode() + b"\n")


def _open(path: str, options: StorageOptions | None) -> tuple[Storage, str]:
    directory, name = directory_and_name(path)
    return open_storage(directory, storage_options=options_for(directory, options)), name


def _matching(storage: Storage, folder: str, patterns: Iterable[str]) -> Iterator[ModelFile]:
    for entry in storage.list(folder):
        if not entry.is_dir and any(fnmatchcase(entry.name, pattern) for pattern in patterns):
            key = f"{folder}/{entry.name}" if folder else entry.name
            yield ModelFile(entry.name, storage.read(key))


_METADATA = {"format": "pt"}
"""Metadata without which transformers refuses a file."""


@dataclass(frozen=True)
class WeightFile:
    """One file and the tensors in it."""

    name: str
    forms: tuple[TensorForm, ...]

    @cached_property
    def image(self) -> SafetensorsImage:
        return lay_out(self.forms, _METADATA)

    def planned(self, leaf: Callable[[str], Assembly | torch.Tensor]) -> PlannedFile:
        """Return the file to be written; ``leaf(name)`` returns a tensor, or the assembly that stands for it."""
        forms = self.image.forms
        values = [(form, leaf(form.name)) for form in forms]
        leaves = [value.cast(form.dtype) if isinstance(value, Assembly) else value for form, value in values]
        named = (NamedTensor(form.name, number, form.dtype, form.shape, None) for number, form in enumerate(forms))
        return PlannedFile(self.name, self.image.holding(leaves), tuple(named))


def plan_weight_files(forms: Sequence[TensorForm], size_per_shard: int, single: str = SINGLE) -> list[WeightFile]:
    """Return the files, in the order of the tensors, each of at most ``size_per_shard`` bytes or one tensor.

    ``single`` is the name of a single file. Raises UnsupportedState for a dtype that such files cannot hold.
    """
    groups: list[list[TensorForm]] = [[]]
    nbytes = 0
    for form in forms:
        if groups[-1] and nbytes + form.nbytes > size_per_shard:
            groups.append([])
            nbytes = 0
        groups[-1].append(form)
        nbytes += form.nbytes
    if len(groups) == 1:
        return [WeightFile(single, tuple(groups[0]))]
    stem, suffix = single.split(".")
    return [
        WeightFile(f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def index_of(files: Sequence[WeightFile]) -> bytes:
    """Return the index file: the file of each tensor."""
    total = sum(form.nbytes for file in files for form in file.forms)
    places = {form.name: file.name for file in files for form in file.forms}
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(document, indent=2).encode() + b"\n"
