"""A saved model as one rank of another job holds it: trees of assemblies in place of whole saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nxd_ckpt.adapters.parameters import form_of, is_tensor
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.plan import CutIndex
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import TopologyMismatch
from nxd_ckpt.formats.tensors import TensorStub, iter_tensors
from nxd_ckpt.layout.files import MissingTensor
from nxd_ckpt.runtime.views.reshard_context import ReshardContext, assembled


class ReshardedModel:
    """The model's part of a tag. Reads trees only, each once."""

    def __init__(self, context: ReshardContext) -> None:
        self._context = context
        self._trees: dict[Coordinates, dict[str, Any]] = {}

    def stages(self) -> dict[int, list[str]]:
        """The names that each pipeline stage saved that may matter to this rank."""
        return {pp_rank: list(self._tree(self._context.near(pp_rank))) for pp_rank in self._context.stages}

    def reference(self, pp_rank: int) -> Mapping[str, Any]:
        """The tree of a saving rank of that stage."""
        return self._tree(self._context.near(pp_rank))

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
        tree: dict[str, Any] = {}
        for pp_rank, names in self.stages().items():
            for name in names:
                if ignores(name):
                    continue
                if name in tree:
                    self.refuse_another_of_the_name(name)
                elif context.holds_all or name in wanted:
                    tree[name] = self.leaf(name, pp_rank, specs.get(name), wanted=name in wanted)
        return tree

    def leaf(self, name: str, pp_rank: int, live: ParameterSpec | None, *, wanted: bool = True) -> Any:
        """What a rank whose tensor is ``live`` (None for what is no tensor) makes of this name on a saved stage.

        Raises as :meth:`tree`.
        """
        context = self._context
        reference = self.reference(pp_rank)[name]
        if isinstance(reference, MissingTensor):
            return reference
        if live is None or not is_tensor(reference):
            if wanted:
                self._refuse_other_values(name, pp_rank, reference)
            return reference
        dtype, shape = form_of(reference)
        saved = context.saved_spec(name, live, shape)
        reads = context.reads(f"model/{name}", saved, live)
        self.refuse_unequal_replicas(name, pp_rank, saved)
        stubs = {read.holder: self._tree(_at(pp_rank, read.holder))[name] for read in reads}
        return assembled(f"model/{name}", dtype, live.shape, reads, stubs, shape)

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
                    f"with its {attribute}"
                )

    def _is_constant(self, name: str, pp_rank: int) -> bool:
        """Whether all elements are the same (a bias that is zero yet): then equal ranks tell nothing, and need not."""
        leaf = self._tree(_at(pp_rank, CutIndex()))[name]
        values = self._context.opened.read(leaf).flatten()
        return bool((values == values[:1]).all())

    def _refuse_other_values(self, name: str, pp_rank: int, reference: Any) -> None:
        """Tensors in extra state, or in a dict of the state dict, say nothing of a cut: only equal ones are taken."""
        saved, live = self._context.saved, self._context.live
        leaves = list(iter_tensors(reference))
        if not leaves or (saved.tp, saved.ep) == (live.tp, live.ep):
            return
        first = self._digests(name, pp_rank, CutIndex())
        for place in (CutIndex(tp_rank, ep_rank) for ep_rank in range(saved.ep) for tp_rank in range(saved.tp)):
            if self._digests(name, pp_rank, place) != first or None in first:
                raise TopologyMismatch(
                    f"model/{name}: holds tensors whose cut nothing describes, and rank (tp {place.tp_rank}, ep "
                    f"{place.ep_rank}) saved other values than rank 0; load it on the sizes that it was saved on"
                )

    def refuse_another_of_the_name(self, name: str) -> None:
        """Of a name on several stages (a tied embedding) one is taken: all must be equal, or TopologyMismatch."""
        stages = [stage for stage, names in self.stages().items() if name in names]
        digests = [[_digest(leaf) for _, leaf in iter_tensors(self.reference(stage)[name])] for stage in stages]
        if any(one != digests[0] for one in digests):
            raise TopologyMismatch(
                f"model/{name}: pipeline stages {stages} saved other values under this name; which of them is meant?"
            )

    def _digests(self, name: str, pp_rank: int, place: CutIndex) -> list[Any]:
        value = self._tree(_at(pp_rank, place)).get(name)
        return [_digest(leaf) for _, leaf in iter_tensors(value, (TensorStub, MissingTensor))]

    def _tree(self, at: Coordinates) -> dict[str, Any]:
        if at not in self._trees:
            self._trees[at] = self._context.opened.model_tree(at)
        return self._trees[at]


def _at(pp_rank: int, place: CutIndex) -> Coordinates:
    """The saving rank whose model file holds what is at ``place``."""
    return Coordinates(pp_rank, place.ep_rank, place.tp_rank)


def _digest(leaf: Any) -> tuple[Any, ...] | None:
    """None where it is not known."""
    crc = leaf.storage.crc32 if isinstance(leaf, TensorStub) else None
    return None if crc is None else (leaf.dtype, leaf.shape, crc)
