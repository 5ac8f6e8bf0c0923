"""A saved model as one rank of another job holds it: trees of assemblies instead of whole saved tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.reads import CutIndex
from nxd_ckpt.core.suggestions import ShapeProblems
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import ShapeMismatch, TopologyMismatch
from nxd_ckpt.formats.crc32 import digest_of_value
from nxd_ckpt.formats.tensors import Assembly, TensorStub, digest_of, form_of, is_tensor, iter_tensors, map_tensors
from nxd_ckpt.layouts.files import MissingTensor
from nxd_ckpt.reshard.reshard_context import ReshardContext, assembled


class ReshardedModel:
    """The model of a tag, for one rank. Reads trees only, each once."""

    def __init__(self, context: ReshardContext) -> None:
        self._context = context
        self._trees: dict[Coordinates, dict[str, Any]] = {}

    @cached_property
    def names(self) -> dict[int, list[str]]:
        """Names by pipeline stage, for each stage that may matter to this rank; empty if the tag has no model."""
        stages = self._context.stages if self._context.opened.parts.model else ()
        return {pp_rank: list(self._reference(pp_rank)) for pp_rank in stages}

    @cached_property
    def stages(self) -> dict[str, list[int]]:
        """Pipeline stages that saved each name, in the order of the names."""
        stages_by_name: dict[str, list[int]] = {}
        for pp_rank, names in self.names.items():
            stages_by_name |= {name: [*stages_by_name.get(name, ()), pp_rank] for name in names}
        return stages_by_name

    @cached_property
    def values(self) -> dict[str, Any]:
        """Values of a saving rank by name, from the first stage that saved the name."""
        values: dict[str, Any] = {}
        for pp_rank in self.names:
            values = {**values, **self._reference(pp_rank), **values}
        return values

    def form(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of a name on a saving rank; None if it is no tensor, or they are not recorded."""
        value: Any = self.values.get(name)
        is_described = is_tensor(value) and None not in (value.dtype, value.shape)
        return form_of(value) if is_described else None

    def value(self, name: str) -> Any:
        """Return a saving rank's value. Raises TopologyMismatch if stages saved different values under this name."""
        stages = self.stages[name]
        reference = self.values[name]
        if len(stages) == 1:
            return reference
        trees = [self._reference(pp_rank) for pp_rank in stages]
        digests = [_digests_of(tree[name]) for tree in trees]
        if any(digest != digests[0] for digest in digests):
            raise TopologyMismatch(
                f"model/{name}: pipeline stages {stages} saved different values under this name, so it is ambiguous"
            )
        return reference

    def tree(self, live: Mapping[str, ParameterSpec], names: Iterable[str]) -> dict[str, Any]:
        """Return the saved values of ``names`` for a rank whose tensors are ``live``; names without one are left out.

        A tensor that is in no model file stays a MissingTensor.

        Raises:
            ShapeMismatch, TopologyMismatch, IncompatibleState: a tensor cannot be recut; the message says why.
        """
        context = self._context
        specs = {name: context.live_spec(name, spec) for name, spec in live.items()} if context.partitions else live
        problems = ShapeProblems()
        tree = {}
        for name in names:
            try:
                if name in self.stages:
                    tree[name] = self.leaf(name, specs.get(name))
            except ShapeMismatch as error:
                problems.keep(name, error)
        problems.complain()
        return tree

    def leaf(self, name: str, live: ParameterSpec | None) -> Any:
        """Return the value of this name on a rank whose tensor is ``live`` (None if it is no tensor there).

        Raises ShapeMismatch, TopologyMismatch or IncompatibleState if it cannot be recut.
        """
        context = self._context
        reference = self.value(name)
        if isinstance(reference, MissingTensor) or context.is_as_saved(name, live):
            return reference
        if live is None or not is_tensor(reference):
            self._refuse_other_values(name)
            return reference
        dtype, shape = form_of(reference)
        saved = context.saved_spec(name, live, shape)
        pp_rank = self.stages[name][0]
        reads = context.reads(f"model/{name}", saved, live)
        self.refuse_unequal_replicas(name, pp_rank, saved)
        stubs = {read.holder: self.saved_by(pp_rank, read.holder)[name] for read in reads}
        lost = [stub for stub in stubs.values() if isinstance(stub, MissingTensor)]
        return lost[0] if lost else assembled(f"model/{name}", dtype, live.shape, reads, stubs, shape)

    def saved_by(self, pp_rank: int, place: CutIndex) -> Mapping[str, Any]:
        """Return the tree of the saving rank whose model file holds the cut at ``place`` of a stage."""
        return self._tree(Coordinates(pp_rank, place.ep_rank, place.tp_rank))

    def refuse_unequal_replicas(self, name: str, pp_rank: int, saved: ParameterSpec) -> None:
        """Compare digests of ranks that should hold equal, or different, values along a dimension that changes.

        Raises TopologyMismatch, with the attribute that ``partitions=`` has to give.
        """
        first = self._digests(name, pp_rank, CutIndex())
        for place, equal, attribute in self._context.suspects(name, saved):
            digests = self._digests(name, pp_rank, place)
            if None in (*first, *digests) or equal == (first == digests):
                continue
            if equal or not self._is_constant(name, pp_rank):
                expected, actual = ("equal", "other values than") if equal else ("different", "the same values as")
                raise TopologyMismatch(
                    f"model/{name}: expected to be {expected} on all ranks, but rank (tp {place.tp_rank}, ep "
                    f"{place.ep_rank}) saved {actual} rank 0. Its attributes were lost or incomplete; pass partitions= "
                    f"with its {attribute}{'' if equal else ' on these sizes, or Partition() if all ranks share it'}"
                )

    def _is_constant(self, name: str, pp_rank: int) -> bool:
        """Return whether all elements are equal, such as a bias that is still zero: then equal ranks prove nothing."""
        values = self._context.opened.read(self.saved_by(pp_rank, CutIndex())[name]).flatten()
        return bool((values == values[:1]).all())

    def _refuse_other_values(self, name: str) -> None:
        """Raise TopologyMismatch if extra state differs between ranks: nothing describes the cut of its tensors."""
        saved = self._context.saved
        pp_rank = self.stages[name][0]
        first = self._digests(name, pp_rank, CutIndex())
        for place in (CutIndex(tp_rank, ep_rank) for ep_rank in range(saved.ep) for tp_rank in range(saved.tp)):
            if self._digests(name, pp_rank, place) != first or None in first:
                raise TopologyMismatch(
                    f"model/{name}: nothing records how it is cut, and rank (tp {place.tp_rank}, ep {place.ep_rank}) "
                    "saved other values than rank 0; load it on the sizes that it was saved on, or leave it out with "
                    f"ignore_keys=['model/{name}']"
                )

    def _digests(self, name: str, pp_rank: int, place: CutIndex) -> list[Any]:
        return _digests_of(self.saved_by(pp_rank, place).get(name))

    def _reference(self, pp_rank: int) -> Mapping[str, Any]:
        """Return the tree of the reference rank of this stage."""
        return self._tree(self._context.near(pp_rank))

    def _tree(self, at: Coordinates) -> dict[str, Any]:
        if at not in self._trees:  # each name may need more trees than the tag caches
            self._trees[at] = self._context.model_tree(at)
        return self._trees[at]


_LEAVES = (TensorStub, Assembly, MissingTensor)


def _digests_of(value: Any) -> list[Any]:
    """Return the digest of each tensor in a value, None for one without, and that of everything else."""
    digests = [digest_of(leaf) for _, leaf in iter_tensors(value, _LEAVES)]
    return [*digests, digest_of_value(map_tensors(value, lambda leaf: None, _LEAVES))]
