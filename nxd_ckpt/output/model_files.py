"""Other files of a Hugging Face directory than weights: config.json and the tokenizer's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from nxd_ckpt.core import document
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import StorageOptions, directory_and_name, open_storage, options_for
from nxd_ckpt.tag.foreign.hugging_face_directory import CONFIG
from nxd_ckpt.tag.foreign.quantization import without_quantization

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
