"""Reading one tag: from coordinates to trees whose tensors are still on disk.

`layout_of` determines the layout of a tag. Our tags are plain NxD tags with an index beside the files, so that the same
reader serves both. Facts that a foreign tag does not record (its sizes, its parts) are derived from file names, or
else from the structure of one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import Manifest, Parts
from nxd_ckpt.core.names import describe, spanned
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.formats.optimizer_trees import MASTERS, restore_types
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.layouts import legacy
from nxd_ckpt.layouts.files import MissingTensor, TagFiles
from nxd_ckpt.layouts.payload import checked_dict, checked_model, checked_optimizer, is_model, is_optimizer, reading
from nxd_ckpt.layouts.zero1_dcp import Zero1Dcp


class TagLayout(Protocol):
    """One tag, whatever version wrote it.

    Trees are state dicts as the rank held them, with a TensorStub (or a MissingTensor) for each tensor; ``files.read``
    reads one tensor. All methods raise PartNotFound if the tag lacks the part, MalformedFile for a damaged file.
    """

    files: TagFiles

    def topology(self) -> Topology:
        """Return the sizes, with the standard order of ranks if the files do not record it.

        Without ZeRO-1 nothing shows dp; it is assumed to be ``ep``, its least value.
        """

    def parts(self) -> Parts:
        """Return the parts that the tag holds."""

    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        """Return the model's state dict of the rank at these coordinates."""

    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the optimizer's state dict of the rank at these coordinates, with restored types.

        ``param_names``, the parameters by index, are needed if entries are stored by name (``use_zero1_dcp``).
        """

    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        """Return the parameter behind each optimizer index, if the files have names (``use_zero1_dcp``), else None."""

    def scheduler(self) -> Any:
        """Return the scheduler's state dict, tensors included."""

    def user_content(self) -> Any:
        """Return the user content, tensors included."""


def layout_of(files: TagFiles, manifest: Manifest | None) -> TagLayout:
    """Return the layout of the tag of these files; with a ``manifest`` nothing is asked that it tells.

    Raises:
        PartNotFound: the directory holds none of the files of any layout.
    """
    if manifest is not None:
        return NxdTag(files, manifest)
    listing = files.names()
    parts = {*_STATE_DIRS, names.SCHEDULER, names.USER_CONTENT, names.MARKER, names.DONE}
    if parts & listing.keys():
        return NxdTag(files)
    if any(legacy.parse(name) or legacy.parse_zero1(name) for name in listing):
        return legacy.LegacyTag(files)
    raise PartNotFound(
        f"{files.storage.url}/{files.tag}: no checkpoint of nxd_ckpt or neuronx_distributed; expected "
        f"{names.MODEL_DIR}/, {names.OPTIMIZER_DIR}/ or tp_rank_* files, found "
        f"{first_of(sorted(listing)) or 'nothing'}"
    )


class NxdTag:
    """Tag of NxD 0.6 or newer, or of ours; also the directories that NxD's converter writes.

    A ``manifest`` has the sizes, dp without ZeRO-1 and the order of ranks included, and the kind of the optimizer.
    """

    def __init__(self, files: TagFiles, manifest: Manifest | None = None) -> None:
        self.files: TagFiles = files
        self._manifest = manifest
        self._fixed_topology = None if manifest is None else manifest.topology

    @reading
    def topology(self) -> Topology:
        return self._topology

    @reading
    def parts(self) -> Parts:
        model = self._first_model
        return Parts(
            model=model is not None,
            optimizer=self._optimizer_kind,
            scheduler=self.files.has(names.SCHEDULER),
            user_content=self.files.has(names.USER_CONTENT),
            rank_content=names.RANK_CONTENT_DIR in self.files.names(),
            use_xser=any(name.endswith(".tensors") for part in _STATE_DIRS for name in self.files.names(part)),
            master_weights=self._has_master_weights,
            lower_precision_weights=model is None or not any(iter_tensors(model, MissingTensor)),
        )

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        file = names.model_file(self._topology, at)
        return self._state(file, names.model_file(self._topology, _without_expert_rank(at)))

    @reading
    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        if self._dcp is not None:
            return restore_types(self._dcp.tree(at, param_names))
        kind = self._optimizer_kind or "plain"
        file = names.optimizer_file(self._topology, at, kind)
        shared = names.optimizer_file(self._topology, _without_expert_rank(at), kind) if kind == "plain" else None
        return restore_types(self._state(file, shared))

    @reading
    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        return None if self._dcp is None else self._dcp.names(at)

    @reading
    def scheduler(self) -> Any:
        tree = self.files.tree(names.SCHEDULER)
        kind = "an optimizer" if is_optimizer(tree) else "a model" if is_model(tree) else None
        if kind is not None:
            raise MalformedFile(
                f"{self.files.where(names.SCHEDULER)} holds the state of {kind}, not of a scheduler: files were "
                "swapped; restore it, or load without scheduler="
            )
        if self._manifest is None:  # an index verifies what was saved, of whatever class the scheduler was
            for state in tree if isinstance(tree, list) and tree else [tree]:
                checked_dict(state, f"{self.files.where(names.SCHEDULER)}: expected a scheduler's state dict")
        return self._with_tensors(names.SCHEDULER, tree)

    @reading
    def user_content(self) -> Any:
        if self._manifest is not None:  # an index verifies what is in the file
            return self.files.object(names.USER_CONTENT)
        tree = self.files.tree(names.USER_CONTENT)
        self._refuse_exchanged(tree)
        return self._with_tensors(names.USER_CONTENT, tree)

    def _refuse_exchanged(self, content: Any) -> None:
        """Raise MalformedFile if the user content is the model's state dict, or an optimizer's."""
        model = self._first_model if is_model(content) else None
        of_model = model is not None and list(model) == list(content)
        if (of_model or is_optimizer(content)) and not self.files.trust_pickle:
            kind = "the model" if of_model else "an optimizer"
            raise MalformedFile(
                f"{self.files.where(names.USER_CONTENT)} holds the state of {kind}: "
                "files were swapped; restore it, or pass trust_pickle=True if that is what the user saved"
            )

    def _with_tensors(self, file: str, tree: Any) -> Any:
        """Return ``tree``, the structure of ``file``, with its tensors."""
        has_tensors = self.files.trust_pickle or any(True for _ in iter_tensors(tree))  # trusted objects hide them
        return self.files.object(file) if has_tensors else tree

    @cached_property
    def _topology(self) -> Topology:
        if self._fixed_topology is not None:
            return self._fixed_topology
        model, optimizer = (spanned(self._ranks(part)) for part in _STATE_DIRS)
        tp = max(model.tp, optimizer.tp)
        pp = max(model.pp, optimizer.pp)
        dp = optimizer.dp
        ep = max(model.ep or 1, optimizer.ep or 1)
        if self._dcp is not None:
            dp = self._dcp.dp
            tp = max(tp, self._dcp.tp)
            pp = max(pp, self._dcp.pp)
        if dp == 1:
            dp = ep
        if dp % ep:
            raise MalformedFile(
                f"{self.files.key(names.OPTIMIZER_DIR)}: files of {dp} data-parallel ranks, but the model's "
                f"are of {ep} expert-parallel ranks, which must divide them; files are missing, or of two saves"
            )
        return Topology(dp=dp, tp=tp, pp=pp, ep=ep)

    @cached_property
    def _dcp(self) -> Zero1Dcp | None:
        if self._manifest is None:
            exists = self.files.has(names.DCP_METADATA)
        else:
            exists = self._manifest.parts.optimizer == "zero1_dcp"
        return Zero1Dcp(self.files, names.OPTIMIZER_DIR, self._fixed_topology) if exists else None

    @cached_property
    def _first_model(self) -> dict[str, Any] | None:
        return self._first_state(names.MODEL_DIR)

    @cached_property
    def _first_optimizer(self) -> dict[str, Any] | None:
        return self._first_state(names.OPTIMIZER_DIR)

    @property
    def _has_master_weights(self) -> bool:
        return MASTERS in (self._first_optimizer or ()) if self._dcp is None else self._dcp.has_master_weights

    @cached_property
    def _optimizer_kind(self) -> str | None:
        if self._manifest is not None:
            return self._manifest.parts.optimizer
        if self._dcp is not None:
            return "zero1_dcp"
        files = self._rank_files(names.OPTIMIZER_DIR)
        if any(ranks.dp for ranks in files.values()):
            return "zero1"
        if any(names.parse_full(file) for file in files):
            self._refuse_merged_experts()
            return "zero1_full"
        if self._first_optimizer is None:
            return None
        return "zero1" if "base_state" in self._first_optimizer else "plain"

    def _refuse_merged_experts(self) -> None:
        """Raise MalformedFile for an unsharded optimizer of experts that NxD's converter wrote.

        The converter does not handle experts: it unshards them over all data-parallel ranks, including those of other
        experts, and keeps one rank's. Our unsharded files of experts have the rank in their names.
        """
        if any(ranks.ep is not None for ranks in self._ranks(names.OPTIMIZER_DIR)):
            return
        tree = self._first_optimizer or {}
        groups = tree.get("param_groups")
        listed = [tuple(group.get("params", ())) for group in groups or () if isinstance(group, dict)]
        indices = [index for params in listed for index in params]
        restarted = len(set(indices)) < len(indices)  # experts count from 0 again
        named = any(ranks.ep is not None for ranks in self._ranks(names.MODEL_DIR))
        if named or restarted or "ep_param_group_offset" in tree:
            raise MalformedFile(
                f"{self.files.where(names.OPTIMIZER_DIR)}: an unsharded optimizer of an expert-parallel job, which "
                "neuronx_distributed's converter writes wrongly: experts are mixed, or lost. Convert the sharded "
                "checkpoint that it was made of, with nxd_ckpt"
            )

    def _first_state(self, part: str) -> dict[str, Any] | None:
        """Return the state of the lowest rank that has a file, for facts that are equal on all ranks."""
        files = self._rank_files(part)
        if not files:
            return None
        lowest = min(files, key=lambda file: [rank or 0 for rank in files[file]])
        return self._state(f"{part}/{lowest}")

    def _ranks(self, part: str) -> list[names.ParsedName]:
        return list(self._rank_files(part).values())

    def _rank_files(self, part: str) -> dict[str, names.ParsedName]:
        parsed = {name: names.parse(name) or names.parse_full(name) for name in self.files.names(part)}
        return {name: ranks for name, ranks in parsed.items() if ranks is not None}

    def _state(self, file: str, shared: str | None = None) -> dict[str, Any]:
        if not self.files.has(file):
            part = file.partition("/")[0]
            raise PartNotFound(
                f"{self.files.storage.url}/{self.files.key(file)} does not exist; "
                f"{self.files.key(part)}/ holds {describe(self._ranks(part))}"
            )
        tree = self.files.joined(file, shared)
        check = checked_model if file.startswith(names.MODEL_DIR) else checked_optimizer
        return check(tree, self.files.key(file))


_STATE_DIRS = (names.MODEL_DIR, names.OPTIMIZER_DIR)


def _without_expert_rank(at: Coordinates) -> Coordinates:
    return Coordinates(pp_rank=at.pp_rank, dp_rank=0, tp_rank=at.tp_rank)
