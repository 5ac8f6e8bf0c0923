"""The contents with which rank 0 completes a tag of torch DCP: trees, values and whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core import names as files
from nxd_ckpt.core.dcp_names import DcpNames, DcpPart, Path
from nxd_ckpt.core.manifest import ParameterSpec, Parts
from nxd_ckpt.core.mesh import WholeTensor
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.formats import xser
from nxd_ckpt.formats.tensors import Assembly, TensorReference, map_tensors
from nxd_ckpt.tag.foreign.dcp_directory import DcpTrees
from nxd_ckpt.torch_dcp.collected_save import Contents


class WrittenTensor(NamedTuple):
    """A tensor in files; ``ranks`` wrote parts of it."""

    dtype: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class CollectedState:
    """A state dict by DCP's names (see tag.foreign.dcp_directory.Entries).

    ``written`` are tensors in files; ``values`` are other values, also tensors that were sent to rank 0. ``paths`` are
    the keys that lead to each.
    """

    written: Mapping[str, WrittenTensor]
    values: Mapping[str, Any]
    paths: Mapping[str, Path]
    where: str = "the state dict"

    @property
    def names(self) -> list[str]:
        return [name for name in self.paths if name in self.written or name in self.values]

    def recorded(self, name: str) -> Path:
        return self.paths[name]

    def path(self, name: str) -> Path:
        return self.paths[name]

    def form(self, name: str) -> WrittenTensor | torch.Tensor | None:
        value = self.values.get(name)
        return value if isinstance(value, torch.Tensor) else self.written.get(name)

    def entry(self, name: str) -> Any:
        return self.leaves[name] if name in self.leaves else self.values[name]

    @cached_property
    def leaves(self) -> dict[str, Assembly]:
        """Stand-ins for tensors in files."""
        return {name: Assembly(tensor.dtype, tensor.shape, ()) for name, tensor in self.written.items()}


def contents_of(collected: CollectedState, names: DcpNames) -> Contents:
    """Return the contents that are left to be written.

    Raises KeyMismatch for an optimizer whose parameters are not all in a param group.
    """
    trees = DcpTrees(collected, names)
    structures = _Structures(collected, names)
    parameters = trees.parameters if trees.has_optimizer else None
    if trees.model:
        structures.add(files.MODEL_DIR, trees.model_tree())
    if parameters is not None:
        states = ((index, trees.state(parameter)) for index, parameter in enumerate(parameters))
        tree = {"state": {index: state for index, state in states if state}, "param_groups": trees.numbered_groups()}
        structures.add(files.OPTIMIZER_DIR, tree)
    objects = dict(structures.files)
    objects |= {files.SCHEDULER: trees.scheduler()} if trees.has_scheduler else {}
    objects |= {files.USER_CONTENT: trees.content()} if trees.has_content else {}
    written_names = replace(names, flat_optimizer=trees.has_flat_options, content="")
    return Contents(
        objects=objects,
        documents={files.DCP_NAMES: written_names.to_json()},
        tensors=structures.tensors,
        parts=Parts(
            model=bool(trees.model),
            optimizer=None if parameters is None else "plain",
            scheduler=trees.has_scheduler,
            user_content=trees.has_content,
        ),
        parameters=_parameters(trees, collected, parameters),
        optimizer_names=None if parameters is None else tuple(parameters),
    )


class _Structures:
    """State dicts with references for tensors in files, and these tensors, in the order of the references."""

    def __init__(self, collected: CollectedState, names: DcpNames) -> None:
        self._collected, self._names = collected, names
        self._names_by_leaf = {id(leaf): name for name, leaf in collected.leaves.items()}
        self.files: dict[str, Any] = {}
        self.tensors: list[WholeTensor] = []

    def add(self, directory: str, tree: Any) -> None:
        first = len(self.tensors)
        part = DcpPart.MODEL if directory == files.MODEL_DIR else DcpPart.STATE

        def refer(leaf: Assembly) -> TensorReference:
            name = self._names_by_leaf[id(leaf)]
            tensor = self._collected.written[name]
            tag_name = self._names.tag_name(name, part)
            self.tensors.append(WholeTensor(tag_name, tensor.dtype, tensor.shape, None, ranks=tensor.ranks))
            return TensorReference(len(self.tensors) - 1 - first)

        self.files[files.structure_file(directory, 0)] = map_tensors(xser.normalise(tree), refer, Assembly)


def _parameters(trees: DcpTrees, collected: CollectedState, trained: list[str] | None) -> dict[str, ParameterSpec]:
    """Return the model's tensors; tensors that the optimizer lacks count as frozen, or as buffers."""
    specs, trained_names = {}, None if trained is None else set(trained)
    for parameter, entries in trees.model.items():
        tensor = collected.written.get(entries.get((), ""))
        if tensor is not None:
            trainable = trained_names is None or parameter in trained_names
            specs[parameter] = ParameterSpec(tensor.dtype, tensor.shape, Partition(), trainable)
    return specs
