"""``unshard_checkpoint``: model and optimizer of a tag as plain files of whole tensors by name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from nxd_ckpt.conversion.unsharded import (
    CHUNKS,
    INDEX,
    MODEL,
    ONE_FILE,
    OPTIM,
    Item,
    UnshardedFile,
    UnshardStrategy,
    files_of,
    index_of,
    items_of,
    json_of,
    split,
)
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.errors import PartNotFound, as_checkpoint_errors
from nxd_ckpt.formats.safetensors import TensorForm
from nxd_ckpt.formats.tensors import Assembly, TensorStub, iter_tensors, map_tensors
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.keywords import UnshardKeywords
from nxd_ckpt.options.torch_forms import Strategy, UnshardOptions
from nxd_ckpt.output.image_writer import write_images
from nxd_ckpt.output.locations import Location, locate_apart, locate_input
from nxd_ckpt.output.model_files import WeightFile
from nxd_ckpt.output.output import Kind, Output
from nxd_ckpt.output.source import open_source
from nxd_ckpt.reshard.unrecorded import checked_facts
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.storage.progress import Counter, report, watched
from nxd_ckpt.storage.urls import StrPath, is_url, join, local_path
from nxd_ckpt.tag.opened import OpenTag

_EXTENSIONS = ("pt", "safetensors")
_FILES = [f"{part}.{extension}" for part in (MODEL, OPTIM) for extension in (*_EXTENSIONS, "json")]
_FILES += [
    f"{part}/{name}"
    for part in (MODEL, OPTIM)
    for name in (INDEX, *(f"{stem}-*.{extension}" for stem in ("chunk", part) for extension in _EXTENSIONS))
]
_UNSHARDED = Kind("unsharded checkpoint", tuple(_FILES))


@dataclass(frozen=True)
class Unsharded:
    """The result: path (on a store, URL) of the model and of the optimizer, each a file or a directory, or None.

    ``files`` are all files with their bytes, by name below the output. Unpacks into ``model`` and ``optim``, like
    OLMo-core's result.
    """

    model: Any
    optim: Any
    files: Mapping[str, int] = field(repr=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optim))

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


@as_checkpoint_errors()
@takes(UnshardOptions)
def unshard_checkpoint(tag_dir: StrPath, output_dir: StrPath, **options: Unpack[UnshardKeywords]) -> Unsharded:
    """Make ``output_dir``: plain files of a tag, with whole tensors by name, in OLMo-core's layout.

    The tag may be of nxd_ckpt or NxD, of any sizes. ``model.pt`` is a state dict. ``optim.pt`` has the form of torch's
    distributed state dicts: ``{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [name, ...],
    ...}]}``, with ``master_weights`` among a parameter's entries if the tag has them. Both load with
    ``torch.load(weights_only=True)``. The input is only read, and its digests are verified; the directory appears when
    all of it is written. Extra memory: about 100 MiB, for tags of any size.

    With ``use_safetensors``, files are ``model.safetensors`` and ``optim.safetensors``, with names such as
    ``state.NAME.exp_avg``, and other values (steps, param groups) are in ``optim.json``. If a part has several files,
    they are in the directories ``model`` and ``optim``, whose ``index.json`` lists the file of each tensor.

    Args:
        tag_dir: a tag's directory or URL.
        output_dir: directory or URL of the result.

    Raises:
        InvalidArgument: invalid arguments, or ``output_dir`` may not be replaced.
        PartNotFound: neither model nor optimizer, or no optimizer though ``optim=True``; or a file is missing.
        TopologyMismatch, OptimizerMismatch: a tensor's cut, or its parameter's name, is not known.
        UnsupportedState: safetensors cannot hold a value.
        CheckpointNotFound: no such tag, an incomplete one, or ranks' files are missing.
        CorruptCheckpoint: its files are damaged, or from two saves.
    """
    started = time.monotonic()
    chosen = UnshardOptions(**options)
    strategy = _strategy(chosen.unshard_strategy, chosen.size_per_shard)
    source = locate_input(tag_dir, chosen.storage_options)
    target = locate_apart(output_dir, source, chosen.written_with)
    opened = open_source(source)
    with opened.guarded():
        cuts = checked_facts(opened, chosen.partitions, chosen.saved_param_names)
        tag = WholeTag(opened, partitions=cuts, saved_param_names=chosen.saved_param_names)
        parts = [_Part(opened, tag, part, strategy, chosen.use_safetensors) for part in _parts(opened, chosen.optim)]
    output = Output(target, overwrite=chosen.overwrite, durable=chosen.durable, kind=_UNSHARDED)
    nbytes = sum(part.nbytes for part in parts)
    files = {name: size for part in parts for name, size in part.sizes().items()}
    places = {part.name: _path(target, output_dir, part.place) for part in parts}
    done = Unsharded(places.get(MODEL), places.get(OPTIM), files)
    if chosen.dry_run:
        return done
    written = Counter()
    with output.writing(nbytes), opened.guarded(), watched("unshard", nbytes, lambda: written.nbytes, chosen.progress):
        for part in reversed(parts):  # on a store the model, which readers look for, comes last
            part.write(output, written)
    report("unsharded", f"{source.path} to {target.path}", nbytes, started)
    return done


class _Part:
    """Model or optimizer, planned: nothing is written yet, and everything that must be refused was."""

    def __init__(self, opened: OpenTag, tag: WholeTag, name: str, strategy: Strategy, safetensors: bool) -> None:
        self.name, self._opened = name, opened
        items, others = items_of(tag, name), list[Item]()
        if safetensors:
            items, others = split(items, name)
        files = files_of(name, items, strategy, _EXTENSIONS[safetensors])
        self._files = [_safetensors(file) if safetensors else _torch_file(file) for file in files]
        single = strategy.name == ONE_FILE
        self.place = files[0].key if single else name
        self._documents = _values(opened, others, name)
        if not single:
            self._documents[f"{name}/{INDEX}"] = index_of(files)

    @property
    def nbytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.image.nbytes for file in self._files)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file, by name."""
        sizes = {file.key: file.image.nbytes for file in self._files}
        return sizes | {name: len(content) for name, content in self._documents.items()}

    def write(self, output: Output, written: Counter) -> None:
        with self._opened.reader() as reader:
            write_images(reader, output.storage, output.folder, [self._files], written.add)
        for name, content in self._documents.items():
            output.storage.write(f"{output.folder}/{name}", content)
        if self.place == self.name:
            output.storage.sync_dir(f"{output.folder}/{self.place}")


def _values(opened: OpenTag, others: Sequence[Item], part: str) -> dict[str, bytes]:
    """Return the file of values that are no tensors, by name; empty without any."""

    def number(leaf: TensorStub | Assembly) -> Any:  # a tensor of one element, such as a learning rate
        return opened.read(leaf).item()

    plain = [Item(item.path, map_tensors(item.value, number)) for item in others]
    return {f"{part}.json": json_of(plain, part)} if plain else {}


def _strategy(strategy: str | Strategy, size_per_shard: int | str) -> Strategy:
    if isinstance(strategy, str):
        return UnshardStrategy(strategy, size_per_shard if strategy == CHUNKS else None)
    return UnshardStrategy(str(strategy.name), strategy.chunk_size_bytes)


def _parts(opened: OpenTag, optim: bool | None) -> list[str]:
    has_optimizer = opened.parts.optimizer is not None
    if optim and not has_optimizer:
        raise PartNotFound(f"{opened.where} was saved without an optimizer; pass optim=None to leave it out")
    parts = [MODEL] * opened.parts.model + [OPTIM] * (has_optimizer and optim is not False)
    if not parts:
        raise PartNotFound(f"{opened.where} holds no model, and no optimizer to include: nothing to unshard")
    return parts


def _torch_file(file: UnshardedFile) -> PlannedFile:
    """Plan a torch file. Raises UnsafePickle for values that cannot be pickled."""
    named = [(item.name, leaf) for item in file.items for _, leaf in iter_tensors(item.value)]
    image = image_of(file.tree())
    storage_of = {id(leaf): number for number, leaf in enumerate(image.tensors)}
    tensors = (NamedTensor(name, storage_of[id(leaf)], leaf.dtype, leaf.shape, None) for name, leaf in named)
    return PlannedFile(file.key, image, tuple(tensors))


def _safetensors(file: UnshardedFile) -> PlannedFile:
    """Plan a safetensors file. Raises UnsupportedState for a dtype that it cannot hold."""
    leaves = {item.name: Assembly.of(item.value) for item in file.items}
    forms = (TensorForm(name, leaf.dtype, tuple(leaf.shape)) for name, leaf in leaves.items())
    return WeightFile(file.key, tuple(forms)).planned(leaves.__getitem__)


def _path(target: Location, output_dir: StrPath, name: str) -> StrPath:
    return join(target.path, name) if is_url(output_dir) else Path(local_path(output_dir)) / name
