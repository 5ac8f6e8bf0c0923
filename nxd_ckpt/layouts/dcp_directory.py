"""A directory with a state dict of model and optimizer, read as a tag that a single rank saved.

``torch.distributed.checkpoint.save`` writes such directories, and so do OLMo-core's ``save_model_and_optim_state`` and
torch_checkpointing. Entries of neither model nor optimizer are user content, except the part under "scheduler".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Protocol

from nxd_ckpt.core.box import Box, is_tiling
from nxd_ckpt.core.dcp_names import (
    MASTER_WEIGHTS,
    PARAMS,
    SCHEDULER,
    USER_CONTENT,
    DcpNames,
    DcpPart,
    Path,
    groups_of,
    nested,
)
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, KeyMismatch, MalformedFile, PartNotFound
from nxd_ckpt.formats.optimizer_trees import numbered
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub, by_digest
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.payload import masters_apart, reading
from nxd_ckpt.layouts.torch_dcp import Chunk, DcpFiles, TieredFiles, WholeForm, read_metadata


class Form(Protocol):
    """Facts about a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Entries(Protocol):
    """A flat state dict, with ``names`` in its order.

    For each name: the keys that lead to it (``recorded``, or ``path`` with a default), its form as a tensor (None for
    another value), and its ``entry`` in a tree.
    """

    @property
    def where(self) -> str: ...

    @property
    def names(self) -> Sequence[str]: ...

    def recorded(self, name: str) -> Path | None: ...

    def path(self, name: str) -> Path: ...

    def form(self, name: str) -> Form | None: ...

    def entry(self, name: str) -> Any: ...


class DcpTrees:
    """Trees of ``entries``, whose names follow the scheme ``names``."""

    def __init__(self, entries: Entries, names: DcpNames) -> None:
        self._entries = entries
        self._names = names
        self.model: dict[str, dict[Path, str]] = {}
        """Entries' names, by name in the model and by the keys below that."""
        self.states: dict[str, dict[str, str]] = {}
        """Entries' names, by parameter and key."""
        self._below: dict[str, Path] = {}  # keys in a parameter's state, by entry
        self._options: list[tuple[str, str, str]] = []  # owner, option, entry
        self._scheduler: list[str] = []
        self._content: list[str] = []
        for name in entries.names:
            self._sort_in(name)

    def _sort_in(self, name: str) -> None:
        names = self._names
        part = names.part_of(name, self._entries.recorded(name), self._entries.form(name) is not None)
        if part is DcpPart.STATE:
            parameter, key = names.state_key(name) or ("", "")
            self.states.setdefault(parameter, {})[key] = name
            self._below[name] = (key,)
        elif part is DcpPart.OPTION:
            self._options.append((*(names.option_key(name) or ("", "")), name))
        elif part is DcpPart.MODEL:
            parameter, *below = names.model_path(self._entries.path(name))
            self.model.setdefault(parameter, {})[tuple(below)] = name
        else:
            (self._scheduler if part is DcpPart.SCHEDULER else self._content).append(name)

    @property
    def has_optimizer(self) -> bool:
        return bool(self.states or self._options)

    @property
    def has_flat_options(self) -> bool:
        """True if each parameter has its own options."""
        return any(not owner.isdecimal() for owner, _, _ in self._options)

    @property
    def has_scheduler(self) -> bool:
        return bool(self._scheduler)

    @property
    def has_content(self) -> bool:
        return bool(self._content)

    def model_tree(self) -> dict[str, Any]:
        """Return the model's state dict."""
        entries = (
            ((parameter, *below), self._entries.entry(name))
            for parameter, names in self.model.items()
            for below, name in names.items()
        )
        return dict(nested(entries))

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups, with names as "params". Raises KeyMismatch if a parameter is in none, or in two."""
        options = [(owner, option, self._option(option, name)) for owner, option, name in self._options]
        listed = {name for _, option, value in options if option == PARAMS for name in value}
        self._settle(listed or {owner for owner, _, _ in options} or {*self.model})
        try:
            return groups_of(options, list(self.states), lambda a, b: by_digest(a) == by_digest(b))
        except KeyMismatch as error:
            raise KeyMismatch(f"{self._entries.where}: {error}") from None

    def _settle(self, parameters: set[str]) -> None:
        """Give these parameters what lies in dicts of their state: DCP's names do not tell where a parameter's ends."""
        for owner in [owner for owner in self.states if owner not in parameters]:
            parameter = max((name for name in parameters if owner.startswith(f"{name}.")), key=len, default=None)
            if parameter is not None:
                for name in self.states.pop(owner).values():
                    self._below[name] = self._names.keys_of_state(parameter, self._entries.path(name))
                    self.states.setdefault(parameter, {})[".".join(map(str, self._below[name]))] = name

    def _option(self, option: str, name: str) -> Any:
        value = self._entries.entry(name)
        return list(map(str, value)) if option == PARAMS and isinstance(value, (list, tuple)) else value

    @property
    def parameters(self) -> list[str]:
        """The optimizer's parameters, by index."""
        return [name for group in self.groups for name in group[PARAMS]]

    def optimizer_tree(self) -> dict[str, Any]:
        """Return the optimizer's state dict, with parameters by number."""
        groups = self.groups  # which settle what belongs to which parameter
        states = {name: self._state(name) for name in self.parameters if self.states.get(name)}
        return numbered({"state": states, "param_groups": groups})

    def _state(self, parameter: str) -> dict[str, Any]:
        entries = ((self._below[name], self._entries.entry(name)) for name in self.states[parameter].values())
        return dict(nested(entries))

    def scheduler(self) -> Any:
        if not self._scheduler:
            raise PartNotFound(f"{self._entries.where} has nothing under {SCHEDULER!r}")
        return self._nested(self._scheduler)[SCHEDULER]

    def content(self) -> Any:
        """Return everything that belongs to no other part, by its keys in the state dict.

        Content under "user_content" is merged with the rest.
        """
        content = self._nested(self._content)
        saved = content.pop(USER_CONTENT, {})
        if content and isinstance(saved, dict):
            return {**content, **saved}
        return {**content, USER_CONTENT: saved} if content else saved

    def _nested(self, names: Sequence[str]) -> Any:
        return nested((self._entries.path(name), self._entries.entry(name)) for name in names)


class DcpTensors:
    """Content of ``files`` at these ``places``. A chunk's header is read when its tensor is first used.

    Raises:
        CheckpointNotFound: it has no metadata: no such directory, or its save was interrupted.
        UnsafePickle, MalformedFile: its metadata holds other objects, points elsewhere, or to a missing file.
    """

    def __init__(self, files: TagFiles, places: DcpFiles | TieredFiles) -> None:
        self._files = files
        self.where: str = files.directory
        self._where = files.where(places.metadata)
        if not files.has(places.metadata):
            raise CheckpointNotFound(
                f"{self.where} is not a torch DCP directory: it has no {places.metadata}, which is written last; found "
                f"{sorted(files.names())[:5]}"
            )
        self._metadata = read_metadata(files, places)
        self._leaves: dict[str, TensorStub | Assembly] = {}
        self._refuse_unpaired()

    @property
    def names(self) -> list[str]:
        """All names, in the order of the state dict as far as it is recorded."""
        metadata = self._metadata
        return [name for name in {**metadata.paths, **metadata.entries, **metadata.forms} if name in metadata.described]

    def recorded(self, name: str) -> tuple[Any, ...] | None:
        """Return the keys that lead to it in the state dict, if the writer recorded them."""
        path = self._metadata.paths.get(name)
        return None if path is None else tuple(path)

    def path(self, name: str) -> tuple[Any, ...]:
        """Return the keys that lead to it in the state dict; if they are not recorded, the parts of its name."""
        return self.recorded(name) or tuple(name.split("."))

    def form(self, name: str) -> WholeForm | None:
        """Return dtype and shape of the whole tensor; None for another value."""
        return self._metadata.forms.get(name)

    def entry(self, name: str) -> Any:
        """Return the stub or assembly of the tensor, or the value itself.

        Raises:
            MalformedFile: the chunks are not all of the tensor, or do not match the metadata.
            UnsafePickle: the value is more than plain data.
        """
        form = self.form(name)
        if form is None:
            return self._read(name, self._metadata.entries[name][0])
        if name not in self._leaves:
            self._leaves[name] = self._tensor(name, form)
        return self._leaves[name]

    def _refuse_unpaired(self) -> None:
        """Raise MalformedFile for names without files, or files without names.

        A tensor without elements needs no file.
        """
        entries = self._metadata.entries
        forms = self._metadata.forms
        empty = {name for name, form in forms.items() if not prod(form.shape)}
        lost = sorted(self._metadata.described - entries.keys() - empty)
        if lost or not self._metadata.described.issuperset(entries):
            names = lost or sorted(entries.keys() - self._metadata.described)
            what = "names no file that holds" if lost else "names a file for, but does not describe,"
            raise MalformedFile(f"{self._where} {what} {', '.join(names[:5])}: damaged, or of two saves")

    def _tensor(self, name: str, form: WholeForm) -> TensorStub | Assembly:
        whole = Box.whole(form.shape)
        chunks = self._metadata.entries.get(name, ())
        boxes = [self._box(name, form, chunk) for chunk in chunks]
        if not is_tiling(whole, boxes):
            raise MalformedFile(
                f"{self._where}: the chunks of {name} must cover its shape {form.shape}, each element "
                f"once; found {', '.join(map(str, boxes[:5]))}"
            )
        stubs = [self._stub(name, form, box, chunk) for box, chunk in zip(boxes, chunks, strict=True)]
        if boxes == [whole]:
            return stubs[0]
        fragments = (Fragment(stub, Box.whole(box.size), box) for stub, box in zip(stubs, boxes, strict=True))
        return Assembly(form.dtype, form.shape, tuple(fragments))

    def _box(self, name: str, form: WholeForm, chunk: Chunk) -> Box:
        offsets = chunk.offsets or (0,) * len(form.shape)
        size = form.sizes.get(offsets, ())
        if not len(offsets) == len(size) == len(form.shape):
            raise MalformedFile(
                f"{self._where}: the chunk of {name} at {list(offsets)} does not fit a tensor of {form.shape}"
            )
        return Box(offsets, size)

    def _stub(self, name: str, form: WholeForm, box: Box, chunk: Chunk) -> TensorStub:
        stub = self._read(name, chunk)
        if not isinstance(stub, TensorStub) or (stub.dtype, stub.shape) != (form.dtype, box.size):
            actual = f"{stub.dtype} {stub.shape}" if isinstance(stub, TensorStub) else type(stub).__name__
            raise MalformedFile(
                f"{self._files.where(chunk.file)}: the metadata say {form.dtype} {box.size} of {name}, found {actual}; "
                "the directory mixes files of two saves"
            )
        return stub

    def _read(self, name: str, chunk: Chunk) -> Any:
        try:
            return self._files.tree(chunk.file, chunk.start, chunk.nbytes)
        except CheckpointError as error:
            raise type(error)(f"{error} (in {name})") from error


NO_KEYS: Mapping[str, str] = {}


class DcpDirectory:
    """Layout (`TagLayout`) of the directory in ``files``, whose state dict has these ``entries``.

    ``keys`` are those of "model" and "optimizer" in it, as far as the caller names them. Without them the optimizer is
    under "optim" or "optimizer", whichever exists. The model is under "model"; if there is none, it is the tensors at
    the top, as with TorchTitan.
    """

    def __init__(
        self, files: TagFiles, entries: Entries, keys: Mapping[str, str] = NO_KEYS, names: DcpNames | None = None
    ) -> None:
        self.files = files
        self.entries = entries
        self._trees = DcpTrees(entries, names or _usual_names(entries.names, keys))

    def topology(self) -> Topology:
        return Topology()

    def parts(self) -> Parts:
        return Parts(
            model=bool(self._trees.model),
            optimizer="zero1_full" if self._trees.has_optimizer else None,
            scheduler=self._trees.has_scheduler,
            user_content=self._trees.has_content,
            master_weights=any(MASTER_WEIGHTS in keys for keys in self._trees.states.values()),
        )

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        return self._trees.model_tree()

    @reading
    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        tree = self._trees.optimizer_tree()
        shapes = {index: self._shape(parameter) for index, parameter in enumerate(self._trees.parameters)}
        return masters_apart(tree, shapes)

    @reading
    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        """Return the parameters by index; None if the optimizer's own state dict was saved, which has numbers."""
        names = self._trees.parameters
        return None if names and all(map(str.isdecimal, names)) else names

    @reading
    def scheduler(self) -> Any:
        return self._trees.scheduler()

    @reading
    def user_content(self) -> Any:
        return self._trees.content()

    def _shape(self, parameter: str) -> tuple[int, ...]:
        """Return the whole shape of a parameter: the model's, else the one that spans its largest entries."""
        for names in (self._trees.model.get(parameter, {}).values(), self._trees.states.get(parameter, {}).values()):
            shapes = [form.shape for form in map(self.entries.form, names) if form is not None]
            if shapes:
                dims = max(map(len, shapes))
                return tuple(map(max, zip(*(shape for shape in shapes if len(shape) == dims), strict=True)))
        return ()


def _usual_names(names: Iterable[str], keys: Mapping[str, str]) -> DcpNames:
    first = {name.partition(".")[0] for name in names}
    optim = "optimizer" if "optimizer" in first and "optim" not in first else "optim"
    return DcpNames(keys.get("model", "model" if "model" in first else ""), keys.get("optimizer", optim))
