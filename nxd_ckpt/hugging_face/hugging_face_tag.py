"""A tag translated to Hugging Face's names: the tag that a job on one rank with transformers' model would save.

So every conversion of a tag applies to it: to another tag, or to a torch DCP directory. Its optimizer is a plain one.
If NxD's optimizer kept master weights in float32, these become the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS, numbered, restore_types
from nxd_ckpt.formats.tensors import Assembly, DeferredAssembly, Fragment, ReshapedAssembly, cast_dtype
from nxd_ckpt.hugging_face.hf_slice import HfTensor
from nxd_ckpt.hugging_face.mapped_optimizer import MappedOptimizer
from nxd_ckpt.hugging_face.mapped_tag import MappedTag
from nxd_ckpt.hugging_face.mapping import ModelMapping
from nxd_ckpt.hugging_face.packed_tensors import PackedTensor
from nxd_ckpt.hugging_face.sizes import Sizes
from nxd_ckpt.hugging_face.torchtitan_names import TorchTitanNames
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import LeafReader


def laid_out(titan: TorchTitanNames, name: str, leaf: Assembly, sizes: Sizes) -> Assembly:
    """Return Hugging Face's tensor ``leaf`` as TorchTitan lays out ``name``."""
    if titan.has_pairs(name):
        half = sizes.get("head_dim") // 2
        heads = leaf.unflattened(0, (leaf.shape[0] // half // 2, 2, half))
        return ReshapedAssembly(leaf.shape, heads.permuted((0, 2, 1, 3)))
    if titan.is_swapped(name):
        first, second, *rest = range(len(leaf.base.shape))
        return ReshapedAssembly((leaf.shape[0], *leaf.shape[:0:-1]), leaf.base.permuted((first, *rest, second)))
    return leaf


def fused(titan: TorchTitanNames, names: Sequence[str], leaves: Sequence[Assembly], sizes: Sizes) -> Assembly:
    """Return q, k and v, from `laid_out`, as one tensor: for each key-value head its query heads, then k, then v."""
    groups = sizes.get("kv_heads")
    head_dim = sizes.get("head_dim")
    rows = (head_dim // 2, 2) if titan.has_pairs(names[0]) else (head_dim,)
    counts = [leaf.shape[0] // head_dim // groups for leaf in leaves]
    parts = []
    start = 0
    for leaf, count in zip(leaves, counts, strict=True):
        is_split = len(leaf.base.shape) > len(leaf.shape)
        heads = leaf.base.unflattened(0, (groups, count) if is_split else (groups, count, *rows))
        offset = (0, start, *(0 for _ in heads.shape[2:]))
        parts += [fragment.moved(offset) for fragment in heads.fragments]
        start += count
    columns = leaves[0].shape[1:]
    base = Assembly(leaves[0].dtype, (groups, start, *rows, *columns), tuple(parts))
    return ReshapedAssembly((groups * start * head_dim, *columns), base)


@dataclass(frozen=True)
class HuggingFaceTerms:
    """The translation of a tag, and its other contents. Plain data, because it is sent to worker processes.

    Attributes:
        mapping: mapping of the model.
        sizes: sizes of the model.
        param_names: the optimizer's parameter names as saved, by stage and group, where the tag has none.
        torchtitan: TorchTitan's names, to use instead of Hugging Face's.
        both_names: True to have tied tensors under both names, as in a module's state dict, unlike in files.
        dtype: dtype that the model's floating-point numbers are cast to; None keeps theirs.
        optimizer: True to include the optimizer, if there is one.
        master_weights: True to take its master weights, if there are any, for the model.
        scheduler: the scheduler's state dict, or None.
        content: the user content, or None.
    """

    mapping: ModelMapping
    sizes: Sizes
    param_names: Sequence[Sequence[Sequence[str]]] | None = None
    torchtitan: TorchTitanNames | None = None
    both_names: bool = False
    dtype: str | None = None
    optimizer: bool = True
    master_weights: bool = True
    scheduler: Any = field(default=None, repr=False)
    content: Mapping[str, Any] | None = field(default=None, repr=False)


class HuggingFaceTag(OpenTag):
    """The tag ``opened``, translated by ``terms``.

    Raises the errors of `MappedTag`, and with an optimizer those of `MappedOptimizer`.
    """

    def __init__(self, opened: OpenTag, terms: HuggingFaceTerms) -> None:
        super().__init__(opened.storage, opened.tag, opened._layout, None, opened.identity)
        self._opened = opened
        self.terms: HuggingFaceTerms = terms
        names = terms.param_names
        self.mapped: MappedTag = MappedTag(
            opened, terms.mapping, terms.sizes, master_weights=terms.master_weights, param_names=names
        )
        has_optimizer = terms.optimizer and opened.parts.optimizer is not None
        self.optimizer: MappedOptimizer | None = MappedOptimizer(opened, self.mapped) if has_optimizer else None
        self._latest: tuple[HfTensor | PackedTensor, Assembly] | None = None

    def require_all(self) -> None:
        """Check that all of it can be translated, by the checks of `MappedTag` and `MappedOptimizer`.

        Also raises PartNotFound without a model.
        """
        if not self._opened.parts.model:
            raise PartNotFound(f"{self.where} was saved without a model, so there is nothing to translate")
        self.mapped.require_all()
        if self.optimizer is not None:
            self.optimizer.require_all()

    @property
    def state_tensors(self) -> list[HfTensor | PackedTensor]:
        """States of the optimizer that are shaped like a tensor of the model; none without an optimizer."""
        return [] if self.optimizer is None else self.optimizer.tensors

    @property
    def general(self) -> bool:
        """True if the optimizer has state that belongs to no parameter."""
        return self.optimizer is not None and "general" in self.optimizer.document

    @property
    def steps(self) -> int | None:
        """Number of steps that the optimizer has made; None if it does not count them."""
        return None if self.optimizer is None else self.optimizer.steps

    @cached_property
    def topology(self) -> Topology:
        return Topology()

    @cached_property
    def parts(self) -> Parts:
        return Parts(
            model=True,
            optimizer=None if self.optimizer is None else "plain",
            scheduler=self.terms.scheduler is not None,
            user_content=self.terms.content is not None,
        )

    def scheduler(self) -> Any:
        return self.terms.scheduler

    def user_content(self) -> Any:
        return self.terms.content

    def optimizer_names(self, at: Coordinates) -> list[str]:
        return [name for group in self.param_groups for name in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of the optimizer's param groups, with the names of their parameters; empty without an optimizer."""
        groups = [] if self.optimizer is None else self.optimizer.document["param_groups"]
        named = [{**group, "params": [self._name(name) for name in group["params"]]} for group in groups]
        titan = self.terms.torchtitan
        return named if titan is None else [titan.group(group) for group in named]

    def reader(self) -> LeafReader:
        return self._opened.reader()

    def _model_tree(self, at: Coordinates) -> dict[str, Any]:
        dtype = self.terms.dtype
        tensors = {tensor.name: tensor for tensor in self.mapped.file_tensors}
        if self.terms.both_names:
            ties = self.mapped.ties.items()
            tensors |= {name: tensors[kept] for name, kept in ties if kept in tensors and name not in tensors}
        names = {self._name(name): each for name, each in tensors.items()}
        tree = {name: self._leaf(name, each, cast_dtype(each.dtype, dtype)) for name, each in names.items()}
        titan = self.terms.torchtitan
        for name, each in names.items():
            if titan is not None and (balance := titan.balance(name)) is not None:
                tree.setdefault(balance, Assembly("float32", each.shape[:1], ()))
        return tree

    def _optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None) -> dict[str, Any]:
        if self.optimizer is None:
            raise PartNotFound(f"{self.where}: it was opened without an optimizer")
        document = self.optimizer.document
        groups = self.param_groups
        by_name = {self._name(name): dict(entries) for name, entries in document["state"].items()}
        for tensor in self.state_tensors:
            if tensor.entry is not None and tensor.entry != MASTER_WEIGHTS:
                name = self._name(tensor.weight)
                by_name.setdefault(name, {})[tensor.entry] = self._leaf(name, tensor, tensor.dtype)
        titan = self.terms.torchtitan
        if titan is not None:
            listed = {name for group in groups for name in group["params"]}
            together = [each for each in titan.fused(by_name) if each[0] in listed]  # not in different param groups
            by_name |= {name: self._fused(parts, by_name) for name, parts in together}
        state = {**by_name, **document.get("general", {})}
        return restore_types(numbered({"state": state, "param_groups": groups}))

    def _name(self, name: str) -> str:
        titan = self.terms.torchtitan
        return name if titan is None else titan.name(name)

    def _leaf(self, name: str, tensor: HfTensor | PackedTensor, dtype: str) -> Assembly:
        layout = self._laid_out(name, tensor.layout)
        leaf = DeferredAssembly(dtype, layout.base.shape, partial(self._fragments_of, name, tensor))
        return leaf if layout.base is layout else ReshapedAssembly(layout.shape, leaf)

    def _fragments_of(self, name: str, tensor: HfTensor | PackedTensor, box: Box) -> tuple[Fragment, ...]:
        # The parts of a tensor are asked for one after the other, and that of all experts of a layer has hundreds.
        latest = self._latest
        if latest is None or latest[0] is not tensor:
            latest = self._latest = tensor, self._laid_out(name, self.mapped.assembly(tensor))
        return latest[1].base.within(box).fragments

    def _laid_out(self, name: str, leaf: Assembly) -> Assembly:
        titan = self.terms.torchtitan
        return leaf if titan is None else laid_out(titan, name, leaf, self.terms.sizes)

    def _fused(self, names: tuple[str, str, str], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of q, k and v in one tensor, from that of each."""
        titan = self.terms.torchtitan
        sizes = self.terms.sizes
        assert titan is not None
        entries = dict(state[names[0]])
        for key, leaf in entries.items():
            if isinstance(leaf, Assembly):
                leaves = [state[name][key] for name in names]

                def find(box: Box, leaves: Sequence[Assembly] = leaves) -> tuple[Fragment, ...]:
                    return fused(titan, names, leaves, sizes).base.within(box).fragments

                layout = fused(titan, names, [leaf.holding(()) for leaf in leaves], sizes)
                entries[key] = ReshapedAssembly(layout.shape, DeferredAssembly(leaf.dtype, layout.base.shape, find))
        return entries
