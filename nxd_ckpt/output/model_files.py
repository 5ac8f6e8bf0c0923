"""Files of a Hugging Face model: config.json, the tokenizer's, custom code, and its tensors over safetensors files.

Of other files than weights, links are followed inside of the directory, and into the ``blobs`` of Hugging Face's cache,
where all files are links to these. Others are not copied: what they lead to may be no file of the model, and not meant
for whom the copy is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core import document
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.units import neighbours
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats.safetensors import SafetensorsImage, TensorForm, lay_out
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.layouts.hugging_face_directory import CONFIG
from nxd_ckpt.layouts.quantization import without_quantization
from nxd_ckpt.layouts.weight_files import SINGLE
from nxd_ckpt.layouts.whole_files import OPTIMIZER_DOCUMENT
from nxd_ckpt.output.output import matches
from nxd_ckpt.saving.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import StorageOptions, open_storage, options_for
from nxd_ckpt.tag.choosing import own_place

_MODEL = (CONFIG, "generation_config.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.pkl")
_COPIED = (
    *("*.json", "*.txt", "*.jinja", "*.py", "*.md", "*.model", "*.tiktoken", "*.spm", "*.bpe", "vocab.*", "LICENSE*"),
    "additional_chat_templates/*.jinja",
)
_NOT_COPIED = (
    *(CONFIG, "*.index.json", OPTIMIZER_DOCUMENT, "trainer_state.json", "adapter_config.json", "*quant*config.json"),
    ".*",
)
"""Files about the weights, their quantization, or a training; config.json is that of ``config=``."""
_TEMPLATES = "additional_chat_templates"
_LARGEST = 64 * 2**20
"""Bytes of a file that is copied; a tokenizer.json has up to 35 MiB."""
_TOKENIZER = (
    "tekken.json",
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
    """A small file, by its path in the new directory."""

    name: str
    content: bytes


def read_config(path: str, options: StorageOptions | None) -> list[ModelFile]:
    """Read config.json, from that file or a Hugging Face directory, and other files of the model beside it.

    Raises:
        InvalidArgument: there is no config.json.
        MalformedFile: it is not a JSON object.
    """
    storage, name = _open(path, options)
    if storage.is_file(name):
        files = [ModelFile(CONFIG, storage.read(name))]
    else:
        present = [entry.name for entry in storage.list(name) if not entry.is_dir and entry.name in _MODEL]
        files = [ModelFile(file, storage.read(_key(name, file))) for file in present]
    if not any(file.name == CONFIG for file in files):
        raise InvalidArgument(f"config {path}: expected config.json, or a directory that holds it")
    config_in(files, path)
    return files


def read_tokenizer(path: str, options: StorageOptions | None) -> list[ModelFile]:
    """Read the files of a model's directory that are neither weights nor config.json.

    Warns of files that are not copied: links out of the directory, and files that are too large. Raises InvalidArgument
    if there is no tokenizer.
    """
    storage, folder = _open(path, options)
    names = [name for name in _names(storage, folder) if _is_copied(name)]
    if not any(matches(name, _TOKENIZER) for name in names):
        raise InvalidArgument(f"tokenizer {path}: expected a directory with a tokenizer's files, found none there")
    outside = [name for name in names if _leads_out(storage, folder, name)]
    large = [name for name in names if name not in outside and storage.size(_key(folder, name)) > _LARGEST]
    for left_out, reason in ((outside, "links lead out of it"), (large, f"more than {_LARGEST} bytes")):
        if left_out:
            logger.warning("%s: not copied, because %s: %s", path, reason, first_of(left_out))
    return [ModelFile(name, storage.read(_key(folder, name))) for name in names if name not in {*outside, *large}]


def _names(storage: Storage, folder: str) -> Iterator[str]:
    """Yield the names of files in the directory, and of chat templates below it."""
    for entry in storage.list(folder):
        if not entry.is_dir:
            yield entry.name
        elif entry.name == _TEMPLATES:
            templates = storage.list(_key(folder, _TEMPLATES))
            yield from (f"{_TEMPLATES}/{each.name}" for each in templates if not each.is_dir)


def _is_copied(name: str) -> bool:
    return matches(name, (*_COPIED, *_TOKENIZER)) and not matches(name, (*_NOT_COPIED, *_WEIGHTS))


def _leads_out(storage: Storage, folder: str, name: str) -> bool:
    """Return whether a file is a link, or behind one, that leads out of the directory and its cache."""
    direct = storage.without_links()
    if direct is None:
        return False
    place = Path(direct.url, folder).resolve()
    target = Path(direct.url, folder, name).resolve()
    is_cache = place.parent.name == "snapshots"
    return not target.is_relative_to(place) and not (is_cache and target.parent == place.parents[1] / "blobs")


def config_in(files: Iterable[ModelFile], where: str = CONFIG) -> dict[str, Any]:
    """Return the config.json among the files; empty without one. Raises MalformedFile."""
    content = next((file.content for file in files if file.name == CONFIG), b"{}")
    return document.small(content, where)


def json_file(content: Any) -> bytes:
    """Return a JSON file for people. Raises TypeError, ValueError or RecursionError for values without a JSON form."""
    return json.dumps(content, indent=2).encode() + b"\n"


def with_config(files: Iterable[ModelFile], config: Mapping[str, Any]) -> list[ModelFile]:
    """Return the files with this config.json."""
    content = json_file(config)
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
    return ModelFile(file.name, json_file({**plain, **dtypes}))


def _open(path: str, options: StorageOptions | None) -> tuple[Storage, str]:
    opens = partial(open_storage, storage_options=options_for(path, options))
    directory, name = own_place(path, opens)
    return opens(directory), name


def _key(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


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
    groups = list(neighbours(forms, lambda form: form.nbytes, size_per_shard))
    if len(groups) < 2:
        return [WeightFile(single, tuple(forms))]
    stem, suffix = single.split(".")
    return [
        WeightFile(f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}", group)
        for number, group in enumerate(groups, 1)
    ]


def index_of(files: Sequence[WeightFile]) -> bytes:
    """Return the index file: the file of each tensor."""
    total = sum(form.nbytes for file in files for form in file.forms)
    places = {form.name: file.name for file in files for form in file.forms}
    return index_file(dict(sorted(places.items())), total)


def index_file(places: Mapping[str, str], nbytes: int) -> bytes:
    """Return Hugging Face's index of tensors of ``nbytes`` bytes: the file of each."""
    return json_file({"metadata": {"total_size": nbytes}, "weight_map": places})
