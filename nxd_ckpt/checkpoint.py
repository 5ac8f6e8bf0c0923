"""One tag opened for reading, without a process group: the way people and tools inspect a checkpoint.

There are two views of a tag: global tensors by name, assembled from the ranks' parts (``keys``, ``metadata``,
``read``), and the state dicts of one of its ranks (``model_state``, ``optimizer_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import Unpack

from nxd_ckpt.core.box import Box, box_of
from nxd_ckpt.core.manifest import Manifest, Parts
from nxd_ckpt.core.option_classes import split_options, takes
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import KeyMismatch, as_checkpoint_errors
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.keywords import LoadKeysKeywords, OpenKeywords
from nxd_ckpt.live.parameters import refuse_fake_mode
from nxd_ckpt.loading.load_attempt import download, open_cache
from nxd_ckpt.loading.rank_state import tree_of_rank
from nxd_ckpt.options.execution import DownloadOptions, OpenOptions
from nxd_ckpt.reshard.whole_tag import GlobalTensor, WholeTag, plain_values
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.cached import CachedStorage
from nxd_ckpt.storage.urls import StorageOptions, StrPath, absolute, open_storage
from nxd_ckpt.tag.choosing import choose_anything
from nxd_ckpt.tag.identity import of_latest
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import refuse_per_rank


@dataclass(frozen=True)
class _OpenArguments:
    """Arguments of `open_checkpoint`, except for the tag. A URL may hold secrets: no repr."""

    path: str = field(repr=False)
    options: OpenOptions

    def open(self, tag: Tag | None, copied: Callable[[Storage, str], Storage] | None = None) -> Checkpoint:
        """Open the tag; with ``copied``, through what that makes of its storage and name."""
        storage = open_storage(self.path, storage_options=self.options.storage_options)

        def opened() -> OpenTag:
            inside, found = choose_anything(storage, tag, (self.path, self.options.storage_options))
            read = copied(inside, found.key) if copied else inside
            return found.open(read, found.key, trust_pickle=self.options.trust_pickle)

        return Checkpoint(of_latest(tag is None, opened), self)


class Checkpoint:
    """A complete tag. Made by `open_checkpoint`; reads on demand and holds no file open.

    It can be pickled, and so sent to other processes, which open the same save. They raise CheckpointNotFound if it was
    replaced or removed since. The pickle holds all its arguments, ``storage_options`` included.
    """

    def __init__(self, opened: OpenTag, arguments: _OpenArguments) -> None:
        self._opened = opened
        self._arguments = arguments

    def __repr__(self) -> str:
        if self.manifest is None:  # its sizes are in its files, and no repr should read these
            return f"<Checkpoint {self._opened.where}, by another program>"
        sizes = " ".join(f"{name}={size}" for name, size in self.topology.sizes.items())
        return f"<Checkpoint {self._opened.where}, {sizes}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_again, (self._arguments, self.tag, self._opened.save)

    @property
    def tag(self) -> str:
        return self._opened.tag

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None for a tag that neuronx_distributed wrote."""
        return self._opened.manifest

    @property
    @as_checkpoint_errors
    def topology(self) -> Topology:
        """The sizes it was saved on, seen from rank 0."""
        return self._opened.topology

    @property
    @as_checkpoint_errors
    def parts(self) -> Parts:
        """The parts that it holds."""
        return self._opened.parts

    @property
    def opened(self) -> OpenTag:
        """The open tag that everything is read from, for tools."""
        return self._opened

    @property
    def as_recorded(self) -> bool:
        """True if it was opened without ``partitions`` and ``saved_param_names``."""
        return not (self._arguments.options.partitions or self._arguments.options.saved_param_names)

    @cached_property
    @as_checkpoint_errors
    def whole(self) -> WholeTag:
        """The tag as global tensors, for tools."""
        options = self._arguments.options
        return WholeTag(self._opened, partitions=options.partitions, saved_param_names=options.saved_param_names)

    @cached_property
    @as_checkpoint_errors
    def metadata(self) -> Mapping[str, GlobalTensor]:
        """Every tensor of model and optimizer by its name, with dtype, shape, bytes and partition. Reads no tensor.

        Names are such as "model/embed.weight" and "optim/embed.weight/exp_avg"; the master weights of a ZeRO-1
        optimizer are "optim/embed.weight/master_weights". If a tag does not record which parameter an optimizer entry
        belongs to (NxD's do not), the entry has a number: "optim/#3/exp_avg", or "optim/#1.3/exp_avg" if there are
        several pipeline stages.

        Raises:
            OptimizerMismatch: ``saved_param_names`` do not fit the optimizer.
        """
        with self._opened.guarded(verified=self.manifest is not None):
            return MappingProxyType(self.whole.tensors)

    def keys(self, *patterns: str) -> list[str]:
        """Return the names in `metadata`; with shell ``patterns``, those that match one of them."""
        return [
            name for name in self.metadata if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
        ]

    @property
    @as_checkpoint_errors
    def values(self) -> Mapping[str, Any]:
        """Values that are no tensors, by names of the same kind: steps that are Python numbers, extra state."""
        with self._opened.guarded():
            return MappingProxyType(self.whole.values)

    @property
    @as_checkpoint_errors
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of each of the optimizer's param groups, with the names of its parameters under "params"."""
        with self._opened.guarded():
            groups: list[dict[str, Any]] = self._read(self.whole.param_groups)
        return groups

    @as_checkpoint_errors
    def read(self, name: str, box: Box | slice | tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read the tensor of that name, or its part inside ``box``, to the CPU. Its digests are verified.

        ``box`` has a slice for each dimension; later ones may be left out. From files of nxd_ckpt only the bytes of the
        box are read, rounded up to blocks of 4 MiB, each of which has a digest. NxD's files have one digest for a whole
        tensor, so each rank's part is read whole.

        Raises:
            KeyMismatch: no such tensor; suggests the closest name.
            InvalidArgument: ``box`` does not fit its shape.
            TopologyMismatch: its partition is unknown; pass ``partitions=`` to `open_checkpoint`.
            OptimizerMismatch: its parameter is unknown; pass ``saved_param_names=``.
            PartNotFound: no file holds it.
            CorruptCheckpoint: its bytes are not those that were written.
            TagReplaced: the tag was removed, or saved again, since it was opened.
        """
        refuse_fake_mode()
        with self._opened.guarded(verified=self.manifest is not None) as files:
            leaf = self.whole.leaf(name)
            refuse_per_rank(self._opened, name, instead="model_state(rank) and optimizer_state(rank) are each rank's")
            if box is not None:
                leaf = Assembly.of(leaf).within(box_of(box, leaf.shape))
            files += [fragment.stub.file for fragment in Assembly.of(leaf).fragments]
            return self._opened.put_together(leaf, name)

    @as_checkpoint_errors
    def model_state(self, rank: int = 0) -> dict[str, Any]:
        """Return the model's state dict as the global ``rank`` held it, on the CPU.

        Raises:
            PartNotFound: it was saved without a model, or a tensor is in no file.
        """
        with self._opened.guarded():
            state: dict[str, Any] = self._read_of_rank("model", rank)
        return state

    @as_checkpoint_errors
    def optimizer_state(self, rank: int = 0) -> dict[str, Any]:
        """Return the optimizer's state dict as the global ``rank`` held it (its own shard under ZeRO-1), on the CPU."""
        with self._opened.guarded():
            state: dict[str, Any] = self._read_of_rank("optimizer", rank)
        return state

    @as_checkpoint_errors
    def scheduler_state(self, rank: int = 0) -> Any:
        """Return the scheduler's state dict as the global ``rank`` held it."""
        with self._opened.guarded():
            return self._read_of_rank("scheduler", rank)

    @as_checkpoint_errors
    def user_content(self) -> Any:
        """Return the user content; None if there is none."""
        with self._opened.guarded():
            return self._read(self._opened.user_content())

    @as_checkpoint_errors
    def rank_content(self, rank: int) -> Any:
        """Return the content that the global ``rank`` saved for itself."""
        with self._opened.guarded():
            return self._opened.rank_content(rank)

    def _read_of_rank(self, part: str, rank: int) -> Any:
        refuse_fake_mode()
        opened, tree = tree_of_rank(self._opened, part, rank)
        return opened.read_all(tree)

    def _read(self, tree: Any) -> Any:
        refuse_fake_mode()
        return self._opened.read_all(tree)


@as_checkpoint_errors
@takes(OpenOptions)
def open_checkpoint(path: StrPath, tag: Tag | None = None, **options: Unpack[OpenKeywords]) -> Checkpoint:
    """Open a checkpoint for reading. The keywords are the fields of `nxd_ckpt.options.execution.OpenOptions`.

    Args:
        path: a directory or URL; also one tag, or a file or directory of another program (``docs/convert.md``).
        tag: one of its tags; None takes the latest complete one.

    Raises:
        CheckpointNotFound: no directory, no complete tag, or no such tag.
    """
    return _open_arguments(path, OpenOptions(**options)).open(tag)


def checkpoint_of(opened: OpenTag, path: StrPath, storage_options: StorageOptions | None) -> Checkpoint:
    """Return a tag of the directory ``path`` that is open already as a Checkpoint."""
    return Checkpoint(opened, _open_arguments(path, OpenOptions(storage_options=storage_options)))


def _open_arguments(path: StrPath, options: OpenOptions) -> _OpenArguments:
    return _OpenArguments(absolute(path), options)


def _open_again(arguments: _OpenArguments, tag: str, save: str | None) -> Checkpoint:
    """Open it again, in the process that unpickles it."""
    checkpoint = arguments.open(tag or None)
    checkpoint.opened.require_save(save)
    return checkpoint


@takes(OpenOptions)
def get_checkpoint_metadata(
    path: StrPath, tag: Tag | None = None, **options: Unpack[OpenKeywords]
) -> Mapping[str, GlobalTensor]:
    """Return the `Checkpoint.metadata` of that tag.

    Args:
        path: a directory or URL.
        tag: one of its tags; None takes the latest complete one.
    """
    return of_latest(tag is None, lambda: open_checkpoint(path, tag, **options).metadata)


@as_checkpoint_errors
@takes(OpenOptions, DownloadOptions)
def load_keys(
    path: StrPath, keys: Iterable[str], tag: Tag | None = None, **options: Unpack[LoadKeysKeywords]
) -> Iterator[Any]:
    """Return the tensors or values of these names in a tag, in their order: tensors on the CPU, verified.

    Each tensor is read when the iterator reaches it. Needs no process group.

    Args:
        path: a directory or URL.
        keys: names in `Checkpoint.metadata`, for whose patterns there is `Checkpoint.keys`; and those of plain values,
            such as "user_content/epoch", "scheduler/last_epoch" and "optim/param_groups/0/lr".
        tag: one of its tags; None takes the latest complete one.

    Raises:
        KeyMismatch: there is no such name; suggests the closest one. Raised before any tensor is read.
        IncompatibleState: ranks saved other values of that name, each its own.
        CheckpointError: the errors of `Checkpoint.read`.
    """
    shared, opening = split_options(DownloadOptions, options)
    downloads = DownloadOptions(**shared)
    names = [keys] if isinstance(keys, str) else list(keys)

    def copied(storage: Storage, key: str) -> Storage:
        return copies.enter_context(open_cache(storage, key, downloads.work_dir))

    with ExitStack() as copies:
        checkpoint = _open_arguments(path, OpenOptions(**opening)).open(tag, copied if downloads.pre_download else None)
        values = _values_of(checkpoint, names)
        own = (name for name in names if name in values)
        refuse_per_rank(checkpoint.opened, *own, instead="a load on the ranks of the save gives each its own")
        kept = copies.pop_all()  # for as long as the iterator reads from them
    return _read_each(checkpoint, names, values, kept)


def _values_of(checkpoint: Checkpoint, names: Collection[str]) -> Mapping[str, Any]:
    """Return the plain values by name. Raises KeyMismatch unless each of ``names`` is one of them, or a tensor."""
    tensors = checkpoint.metadata
    values = checkpoint.values
    problems: dict[str, str] = {}
    if all(name in tensors or name in values for name in names):
        return values
    with checkpoint.opened.guarded():
        values = plain_values(checkpoint.whole, problems)
    unknown = [name for name in names if name not in tensors and name not in values]
    if unknown:
        raise KeyMismatch(
            f"{checkpoint.opened.where} has no tensor or value {listed(unknown, [*tensors, *values])}"
            + "".join(f"; {problem}" for problem in problems.values())
        )
    return values


def _read_each(
    checkpoint: Checkpoint, names: Iterable[str], values: Mapping[str, Any], copies: ExitStack
) -> Iterator[Any]:
    with copies:
        storage = checkpoint.opened.storage
        if isinstance(storage, CachedStorage):
            leaves = [checkpoint.whole.leaf(name) for name in names if name not in values]
            download(storage, checkpoint.opened, leaves, reports_progress=False, progress=False)
        yield from (values[name] if name in values else checkpoint.read(name) for name in names)
