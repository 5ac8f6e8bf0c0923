"""What rank 0 completes a tag with that torch DCP writes: trees, values and whole tensors, of what was collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core import names as files
from nxd_ckpt.core.dcp_names import DcpNames, DcpPart, Path
from nxd_ckpt.core.manifest import ParameterSpec, Parts
from nxd_ckpt.core.mesh_record import WholeTensor
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.formats import xser
from nxd_ckpt.formats.tensors import Assembly, TensorReference, map_tensors
from nxd_ckpt.tag.foreign.dcp_trees import DcpTrees
from nxd_ckpt.torch_dcp.collected_save import Contents


class Written(NamedTuple):
    """A tensor that is in files: ``ranks`` wrote parts of it."""

    dtype: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Collected:
    """A state dict by DCP's names (see tag.foreign.dcp_trees.Entries): tensors that were ``written``, and ``values``,
    tensors too, that were not. ``paths`` are the keys that lead to each."""

    written: Mapping[str, Written]
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

    def form(self, name: str) -> Written | torch.Tensor | None:
        value = self.values.get(name)
        return value if isinstance(value, torch.Tensor) else self.written.get(name)

    def entry(self, name: str) -> Any:
        return self.leaves[name] if name in self.leaves else self.values[name]

    @cached_property
    def leaves(self) -> dict[str, Assembly]:
        """What stands for tensors in files."""
        return {name: Assembly(tensor.dtype, tensor.shape, ()) for name, tensor in self.written.items()}


def contents_of(collected: Collected, names: DcpNames) -> Contents:
    """What is left to be written. Raises KeyMismatch for an optimizer whose parameters are not all in a param group."""
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
    told = replace(names, flat_optimizer=trees.has_flat_options, content="")
    return Contents(
        objects=objects,
        documents={files.DCP_NAMES: told.to_json()},
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
    """State dicts with references for the tensors in files, and those, in the order of the references."""

    def __init__(self, collected: Collected, names: DcpNames) -> None:
        self._collected, self._names = collected, names
        self._called = {id(leaf): name for name, leaf in collected.leaves.items()}
        self.files: dict[str, Any] = {}
        self.tensors: list[WholeTensor] = []

    def add(self, directory: str, tree: Any) -> None:
        first = len(self.tensors)
        part = DcpPart.MODEL if directory == files.MODEL_DIR else DcpPart.STATE

        def refer(leaf: Assembly) -> TensorReference:
            name = self._called[id(leaf)]
            tensor = self._collected.written[name]
            told = self._names.tag_name(name, part)
            self.tensors.append(WholeTensor(told, tensor.dtype, tensor.shape, None, ranks=tensor.ranks))
            return TensorReference(len(self.tensors) - 1 - first)

        self.files[files.structure_file(directory, 0)] = map_tensors(xser.normalise(tree), refer, Assembly)


def _parameters(trees: DcpTrees, collected: Collected, trained: list[str] | None) -> dict[str, ParameterSpec]:
    """The model's tensors. Those that an optimizer does not have count as frozen, or buffers."""
    found, known = {}, None if trained is None else set(trained)
    for parameter, held in trees.model.items():
        tensor = collected.written.get(held.get((), ""))
        if tensor is not None:
            trainable = known is None or parameter in known
            found[parameter] = ParameterSpec(tensor.dtype, tensor.shape, Partition(), trainable)
    return found
