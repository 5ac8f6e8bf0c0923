"""A saved model as one rank of another job holds it: trees of assemblies in place of whole saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.reads import CutIndex
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import TopologyMismatch
from nxd_ckpt.formats.tensors import Assembly, TensorStub, digest_of, iter_tensors
from nxd_ckpt.live.parameters import form_of, is_tensor
from nxd_ckpt.reshard.reshard_context import ReshardContext, assembled
from nxd_ckpt.tag.files import MissingTensor


class ReshardedModel:
    """The model's part of a tag. Reads trees only, each once."""

    def __init__(self, context: ReshardContext) -> None:
        self._context = context
        self._trees: dict[Coordinates, dict[str, Any]] = {}

    @cached_property
    def names(self) -> dict[int, list[str]]:
        """The names that each pipeline stage saved that may matter to this rank; none of a tag without a model."""
        stages = self._context.stages if self._context.opened.parts.model else ()
        return {pp_rank: list(self._reference(pp_rank)) for pp_rank in stages}

    @cached_property
    def stages(self) -> dict[str, list[int]]:
        """The stages that saved each name, in the order of the names."""
        found: dict[str, list[int]] = {}
        for pp_rank, names in self.names.items():
            for name in names:
                found.setdefault(name, []).append(pp_rank)
        return found

    @cached_property
    def values(self) -> dict[str, Any]:
        """What a saving rank has under each name, on the first stage that saved it."""
        return {name: self._reference(stages[0])[name] for name, stages in self.stages.items()}

    def form(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape of what a saving rank has there; None where that is no tensor, or nothing tells them."""
        value: Any = self.values.get(name)
        told = is_tensor(value) and None not in (value.dtype, value.shape)
        return form_of(value) if told else None

    def value(self, name: str) -> Any:
        """What a saving rank has under this name. Raises TopologyMismatch where stages have other values under it."""
        stages, held = self.stages[name], self.values[name]
        trees = [self._reference(pp_rank) for pp_rank in stages] if len(stages) > 1 else []
        digests = [[digest_of(leaf) for _, leaf in iter_tensors(tree[name])] for tree in trees]
        if any(one != digests[0] for one in digests):
            raise TopologyMismatch(
                f"model/{name}: pipeline stages {stages} saved different values under this name, so it is ambiguous"
            )
        return held

    def tree(
        self,
        live: Mapping[str, ParameterSpec],
        extra: Iterable[str] = (),
        ignores: Callable[[str], bool] = lambda name: False,
    ) -> dict[str, Any]:
        """The state dict of a rank whose tensors are ``live``; ``extra`` names what it holds beside tensors.

        Of the saved names those that are live, and where this rank holds all stages (or the same as when it was saved)
        the others too, for the caller to say that they are unexpected; none that ``ignores`` says. A tensor that is in
        no model file stays a MissingTensor.

        Raises:
            ShapeMismatch, TopologyMismatch, IncompatibleState: a tensor cannot be cut anew; says why.
        """
        context = self._context
        specs = {name: context.live_spec(name, spec) for name, spec in live.items()}
        wanted = {*specs, *extra}
        return {
            name: self.leaf(name, specs.get(name), wanted=name in wanted)
            for name in self.stages
            if not ignores(name) and (context.holds_all or name in wanted)
        }

    def leaf(self, name: str, live: ParameterSpec | None, *, wanted: bool = True) -> Any:
        """What a rank whose tensor is ``live`` (None for what is no tensor) makes of this name.

        Raises as :meth:`tree`.
        """
        context, reference = self._context, self.value(name)
        if isinstance(reference, MissingTensor):
            return reference
        if live is None or not is_tensor(reference):
            if wanted:
                self._refuse_other_values(name, reference)
            return reference
        dtype, shape = form_of(reference)
        saved, pp_rank = context.saved_spec(name, live, shape), self.stages[name][0]
        reads = context.reads(f"model/{name}", saved, live)
        self.refuse_unequal_replicas(name, pp_rank, saved)
        stubs = {read.holder: self.saved_by(pp_rank, read.holder)[name] for read in reads}
        return assembled(f"model/{name}", dtype, live.shape, reads, stubs, shape)

    def saved_by(self, pp_rank: int, place: CutIndex) -> Mapping[str, Any]:
        """The tree of the saving rank whose model file holds what is at ``place`` of a stage."""
        return self._tree(Coordinates(pp_rank, place.ep_rank, place.tp_rank))

    def refuse_unequal_replicas(self, name: str, pp_rank: int, saved: ParameterSpec) -> None:
        """Compare digests of what is taken for equal, or for different, on all ranks of a dimension that changes.

        Raises TopologyMismatch, naming what ``partitions=`` has to say.
        """
        first = self._digests(name, pp_rank, CutIndex())
        for place, equal, attribute in self._context.suspects(name, saved):
            other = self._digests(name, pp_rank, place)
            if None in (*first, *other) or equal == (first == other):
                continue
            if equal or not self._is_constant(name, pp_rank):
                taken, saw = ("the same", "other values than") if equal else ("another part", "the same values as")
                raise TopologyMismatch(
                    f"model/{name}: taken to be {taken} on each rank, but rank (tp {place.tp_rank}, ep "
                    f"{place.ep_rank}) saved {saw} rank 0: its attributes were lost, or do not tell; pass partitions= "
                    f"with its {attribute}{'' if equal else ' on these sizes, or Partition() if all ranks share it'}"
                )

    def _is_constant(self, name: str, pp_rank: int) -> bool:
        """Whether all elements are the same (a bias that is still zero): then equal ranks prove nothing, and need
        not."""
        values = self._context.opened.read(self.saved_by(pp_rank, CutIndex())[name]).flatten()
        return bool((values == values[:1]).all())

    def _refuse_other_values(self, name: str, reference: Any) -> None:
        """Tensors in extra state, or in a dict of the state dict, say nothing of a cut: only equal ones are taken."""
        saved, live = self._context.saved, self._context.live
        leaves = list(iter_tensors(reference))
        if not leaves or (saved.tp, saved.ep) == (live.tp, live.ep):
            return
        pp_rank = self.stages[name][0]
        first = self._digests(name, pp_rank, CutIndex())
        for place in (CutIndex(tp_rank, ep_rank) for ep_rank in range(saved.ep) for tp_rank in range(saved.tp)):
            if self._digests(name, pp_rank, place) != first or None in first:
                raise TopologyMismatch(
                    f"model/{name}: holds tensors whose cut nothing describes, and rank (tp {place.tp_rank}, ep "
                    f"{place.ep_rank}) saved other values than rank 0; load it on the sizes that it was saved on"
                )

    def _digests(self, name: str, pp_rank: int, place: CutIndex) -> list[Any]:
        value = self.saved_by(pp_rank, place).get(name)
        return [digest_of(leaf) for _, leaf in iter_tensors(value, (TensorStub, Assembly, MissingTensor))]

    def _reference(self, pp_rank: int) -> Mapping[str, Any]:
        """The tree of a saving rank of that stage."""
        return self._tree(self._context.near(pp_rank))

    def _tree(self, at: Coordinates) -> dict[str, Any]:
        if at not in self._trees:  # more of them than the tag keeps may be asked for each name
            self._trees[at] = self._context.model_tree(at)
        return self._trees[at]
