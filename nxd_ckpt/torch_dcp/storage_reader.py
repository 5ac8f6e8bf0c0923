"""Storage reader of torch.distributed.checkpoint (DCP) for tags: DTensor, FSDP2, plain tensors.

Users import it from ``nxd_ckpt.adapters.dcp``. It imports torch.distributed.checkpoint, which nothing else of nxd_ckpt
needs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.dcp_names import DcpItem, DcpNames, names_of
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, InvalidArgument, UnsupportedState, as_checkpoint_errors
from nxd_ckpt.formats.assembly import box_of, cut_box
from nxd_ckpt.formats.memory import allocated, distinct, repeats, torch_dtype
from nxd_ckpt.formats.tensors import Assembly, dtype_name, itemsize
from nxd_ckpt.layouts.dcp_directory import DcpDirectory
from nxd_ckpt.live.dtensor import tell_autograd
from nxd_ckpt.live.parameters import refuse_short
from nxd_ckpt.options.execution import SavedNames
from nxd_ckpt.output.locations import Location, locate_input, location_of
from nxd_ckpt.output.source import open_source
from nxd_ckpt.reshard.dcp_state import DcpState
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.storage.urls import StorageOptions, StrPath
from nxd_ckpt.tag.choosing import find_by_path
from nxd_ckpt.tag.identity import require_one_save
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import refuse_per_rank
from nxd_ckpt.tag.reading import LeafReader
from nxd_ckpt.tag.recognise import Program

_TURN = 64 * 2**20
"""Bytes that are read at a time if they cannot be read directly into the target."""


class StorageReader(TorchStorageReader):
    """A reader of tags for ``torch.distributed.checkpoint.load(state_dict, storage_reader=...)``.

    What is read may be a tag of nxd_ckpt or NxD, or of any layout that a load reads, local or in a store, saved on any
    sizes. Every rank reads only the bytes of its shards, directly into their memory, and verifies them. Values are cast
    if dtypes differ.

    Names are those of `nxd_ckpt.core.dcp_names.DcpNames`: ``{"model": get_model_state_dict(...), "optim":
    get_optimizer_state_dict(...)}``, with or without ``flatten_optimizer_state_dict``, and ``scheduler.*`` and
    ``user_content.*`` if the tag has them. An entry that the tag lacks, such as an option that only this torch's
    optimizer has, is an error of DCP's planner; pass ``planner=DefaultLoadPlanner(allow_partial_load=True)`` to load
    the rest.

    Args:
        tag: a tag's directory or URL.
        model_key, optim_key: the keys of model and optimizer in the state dict, "" for the state dict itself; by
            default the keys of the StorageWriter that saved it, otherwise "model" and "optim".
        partitions: cuts of parameters, by name, where the tag does not record them (NxD's do not, with tp or ep).
        saved_param_names: the optimizer's parameter names as saved, for each pipeline stage, for each param group,
            where the tag has none (NxD's do not).
        verify: True to verify digests.
        storage_options: storage options of a URL.
    """

    @takes()
    def __init__(
        self,
        tag: StrPath,
        *,
        model_key: str | None = None,
        optim_key: str | None = None,
        partitions: Mapping[str, Partition] | None = None,
        saved_param_names: SavedNames | None = None,
        verify: bool = True,
        storage_options: StorageOptions | None = None,
    ) -> None:
        super().__init__()
        self._path = tag
        self._options = storage_options
        self._verify = verify
        self._keys = model_key, optim_key
        self._partitions = partitions
        self._saved_names = saved_param_names
        self._opened: tuple[OpenTag, _States] | None = None
        self.usual: DcpNames = DcpNames()
        """The keys where neither the caller nor the tag says them."""
        self.refusal: Exception | None = None
        """Why nothing can be loaded from here, which torch raises on all ranks in place of loading."""

    @property
    def checkpoint_id(self) -> str:
        """Path or URL of the tag, for logs."""
        return location_of(self._path, "tag", self._options).path

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Close the tag; with ``checkpoint_id``, read that one from now on."""
        self._opened = None
        if checkpoint_id:
            self._path = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Return the metadata of the tag, with each tensor as one chunk.

        Using it raises CheckpointNotFound, MalformedFile and so on if there is no tag, or a damaged one.
        """
        try:
            if self.refusal is not None:
                raise self.refusal
            return self._metadata(self._open()[1])
        except (CheckpointError, OSError) as error:
            return _Unreadable(error)

    def value(self, name: str) -> Any:
        """Return a value that is no tensor, by DCP's name, or None. Raises the errors of opening the tag."""
        return self._open()[1].holding(name).values.get(name, (None, None))[1]

    def _metadata(self, states: _States) -> Metadata:
        state = states.listed
        if state.unknown:
            logger.warning(
                "%d tensors are left out, because their cut over ranks is not known (pass partitions=): %s",
                len(state.unknown),
                ", ".join(state.unknown[:5]),
            )
        entries = _Entries(_entries(state), lambda: _entries(states.other))
        paths = {name: path for name, (path, _) in state.values.items()}
        paths |= {name: tensor.path for name, tensor in state.tensors.items()}
        return Metadata(entries, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: there is nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the save that this rank reads its own items from.

        Raises IncompatibleState for an item of which ranks saved their own values.
        """
        opened, states = self._open()
        items = (item.storage_index.fqn for item in plan.items)
        refuse_per_rank(opened, *(states.holding(name).source(name) for name in items))
        return replace(plan, storage_data=opened.save_name)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged.

        Raises RanksDisagree, which torch raises on all ranks, if they are of two saves.
        """
        require_one_save([plan.storage_data for plan in plans])
        return plans

    @as_checkpoint_errors
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan; all are read when this returns.

        Raises:
            DigestMismatch: bytes changed since they were saved; the message names the tensor.
            TagReplaced: the tag was removed, or saved again, since it was opened.
            PartNotFound, TopologyMismatch, OptimizerMismatch: a tensor cannot be assembled; the message says why.
        """
        opened, states = self._open()
        with opened.guarded():
            self._read(opened, states, plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, opened: OpenTag, states: _States, plan: LoadPlan, planner: LoadPlanner) -> None:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                planner.load_bytes(item, _pickled(states.holding(name).values[name][1]))
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        # Leaves first: making them reads trees, and a reader verifies by the trees that are there when it is made.
        leaves = [_requested(states.holding(item.storage_index.fqn), item) for item in tensors]
        with opened.reader() as reader:
            delivery = _Delivery(reader, planner, self._verify)
            for item, leaf in zip(tensors, leaves, strict=True):
                delivery.take(item, leaf)
            delivery.finish()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether it can be the path or URL of a tag."""
        try:
            location_of(checkpoint_id, "tag", None)
        except CheckpointError:
            return False
        return True

    def _open(self) -> tuple[OpenTag, _States]:
        if self._opened is None:
            place = locate_input(self._path, self._options)
            opened, names = _open(place)
            with opened.guarded():
                tag = WholeTag(opened, partitions=self._partitions, saved_param_names=self._saved_names)
                self._opened = opened, _States(tag, self._names(opened.dcp_names or names or self.usual))
        return self._opened

    def _names(self, names: DcpNames) -> DcpNames:
        """Return the names with the keys that were passed."""
        model, optim = self._keys
        return replace(
            names, model=names.model if model is None else model, optim=names.optim if optim is None else optim
        )


def _open(place: Location) -> tuple[OpenTag, DcpNames | None]:
    """Open what is at ``place``; with its names if it is a state dict that torch DCP or torch_checkpointing saved."""
    storage = place.open()
    checkpoint = find_by_path(storage, place.name)
    if checkpoint is None or Program(checkpoint.writer).writes_tags:
        return open_source(place), None
    opened = checkpoint.open(storage, checkpoint.key)
    layout = opened._layout
    if not isinstance(layout, DcpDirectory):
        return opened, None
    entries = layout.entries
    forms = {name: entries.form(name) for name in entries.names}
    items = [
        DcpItem(name, entries.path(name), None if form is None else prod(form.shape)) for name, form in forms.items()
    ]
    names = replace(names_of(items, 0), content="")
    return OpenTag(storage, checkpoint.key, DcpDirectory(layout.files, entries, names=names), None), names


class _States:
    """A tag in two forms: options by param group, and by parameter. One is ``listed``, the ``other`` is not."""

    def __init__(self, tag: WholeTag, names: DcpNames) -> None:
        self.listed = DcpState(tag, names)
        self.other = DcpState(tag, replace(names, flat_optimizer=not names.flat_optimizer))

    def holding(self, name: str) -> DcpState:
        """Return the form that has DCP's ``name``."""
        is_listed = name in self.listed.tensors or name in self.listed.values
        return self.listed if is_listed else self.other


class _Entries(dict[str, Any]):
    """Entries by name. A lookup by name also finds ``others``, but iteration yields only the listed form.

    So a planner for the other form, which looks up its names, works too.
    """

    def __init__(self, listed: Mapping[str, Any], others: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(listed)
        self._others = cache(others)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._others()

    def __missing__(self, name: str) -> Any:
        return self._others()[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _entries(state: DcpState) -> dict[str, Any]:
    """Return the metadata of each tensor and value, by name."""
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in state.values}
    for name, tensor in state.tensors.items():
        whole = ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape))
        properties = TensorProperties(dtype=torch_dtype(tensor.dtype))
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), [whole])
    return entries


class _Unreadable(Metadata):
    """A stand-in for metadata that cannot be read, which raises the error when it is used.

    Torch's load replaces an error of ``read_metadata`` (2.9: by an empty AssertionError), but reports an error on every
    rank if it is raised when the planner looks up names.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


class _Delivery:
    """Reads of leaves into the tensors that a planner has for them."""

    def __init__(self, reader: LeafReader, planner: LoadPlanner, verify: bool) -> None:
        self._reader = reader
        self._planner = planner
        self._verify = verify
        self._direct: list[tuple[ReadItem, torch.Tensor]] = []

    def take(self, item: ReadItem, leaf: Assembly | torch.Tensor) -> None:
        target = self._planner.resolve_tensor(item).detach()
        refuse_short(item.storage_index.fqn, target)
        if tuple(target.shape) != tuple(leaf.shape):
            raise InvalidArgument(
                f"{item.storage_index.fqn} has shape {tuple(leaf.shape)}, but the state dict has {tuple(target.shape)}"
            )
        if isinstance(leaf, Assembly):
            leaf = leaf.cast(dtype_name(target.dtype))
        if isinstance(leaf, Assembly) and target.device.type == "cpu" and target.is_contiguous():
            tell_autograd(target)
            self._read(leaf, target, item)
            self._direct.append((item, target))
            return
        self._copy(leaf, target, item)
        self._planner.commit_tensor(item, target)

    def finish(self) -> None:
        """Return when everything is read into its target."""
        self._reader.finish()
        for item, target in self._direct:
            self._planner.commit_tensor(item, target)

    def _read(self, leaf: Assembly, out: torch.Tensor, item: ReadItem) -> None:
        self._reader.read_into(leaf, out, item.storage_index.fqn, compare=self._verify, verified=not self._verify)

    def _copy(self, leaf: Assembly | torch.Tensor, target: torch.Tensor, item: ReadItem) -> None:
        """Copy the leaf through scratch memory, a part at a time."""
        if isinstance(leaf, torch.Tensor):
            target.copy_(leaf)
            return
        for window in cut_box(Box.whole(leaf.shape), _TURN // itemsize(leaf.dtype)):
            scratch = allocated(window.size, leaf.dtype)
            self._read(leaf.within(window), scratch, item)
            self._reader.wait()
            part = box_of(target, window)
            if not repeats(scratch, part):
                raise UnsupportedState(
                    f"{item.storage_index.fqn} is expanded (its elements share memory), and what was saved differs "
                    "between them; load into a contiguous() copy"
                )
            distinct(part, part).copy_(distinct(scratch, part))


def _requested(state: DcpState, item: ReadItem) -> Assembly | torch.Tensor:
    """Return the part of the leaf in the item's box."""
    leaf = state.leaf(item.storage_index.fqn)
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    return leaf.within(box) if isinstance(leaf, Assembly) else box_of(leaf, box)


def _pickled(value: Any) -> io.BytesIO:
    written = io.BytesIO()
    torch.save(value, written)
    written.seek(0)
    return written
