"""A saved model as one rank of another job holds it: trees of assemblies in place of whole saved tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nxd_ckpt.adapters.parameters import form_of, is_tensor
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import TopologyMismatch
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.layout.files import MissingTensor
from nxd_ckpt.runtime.crossing import Crossing, assembled


class ReshardedModel:
    """The model's part of a tag. Reads trees only, each once."""

    def __init__(self, crossing: Crossing) -> None:
        self._crossing = crossing
        self._trees: dict[Coordinates, dict[str, Any]] = {}

    def stages(self) -> dict[int, list[str]]:
        """The names that each pipeline stage saved that may matter to this rank."""
        return {pp_rank: list(self._tree(self._crossing.near(pp_rank))) for pp_rank in self._crossing.stages}

    def reference(self, pp_rank: int) -> Mapping[str, Any]:
        """The tree of a saving rank of that stage."""
        return self._tree(self._crossing.near(pp_rank))

    def tree(self, live: Mapping[str, ParameterSpec], extra: Iterable[str] = ()) -> dict[str, Any]:
        """The state dict of a rank whose tensors are ``live``; ``extra`` names what it holds beside tensors.

        Of the saved names those that are live, and where this rank holds all stages (or the same as when it was saved)
        the others too, for the caller to say that they are unexpected. A tensor that is in no model file stays a
        MissingTensor.

        Raises:
            ShapeMismatch, TopologyMismatch, IncompatibleState: a tensor cannot be cut anew; says why.
        """
        crossing = self._crossing
        specs = {name: crossing.live_spec(name, spec) for name, spec in live.items()}
        wanted = {*specs, *extra}
        all_here = crossing.live.pp == 1 or crossing.saved.pp == crossing.live.pp
        tree: dict[str, Any] = {}
        for pp_rank, names in self.stages().items():
            for name in names:
                if name not in tree and (all_here or name in wanted):
                    tree[name] = self._leaf(name, pp_rank, specs.get(name))
        return tree

    def _leaf(self, name: str, pp_rank: int, live: ParameterSpec | None) -> Any:
        crossing = self._crossing
        reference = self.reference(pp_rank)[name]
        if live is None or isinstance(reference, MissingTensor) or not is_tensor(reference):
            return reference
        dtype, shape = form_of(reference)
        saved = crossing.saved_spec(name, live, shape)
        reads = crossing.reads(f"model/{name}", saved, live)
        self._refuse_unequal_replicas(name, pp_rank, saved)
        stubs = {read.holder: self._tree(_at(pp_rank, read.holder))[name] for read in reads}
        return assembled(f"model/{name}", dtype, live.shape, reads, stubs, shape)

    def _refuse_unequal_replicas(self, name: str, pp_rank: int, saved: ParameterSpec) -> None:
        """Of what is believed equal on all ranks of a dimension that changes, compare a second rank's digest.

        Over tensor-parallel ranks the commit has done so for tags of ours.
        """
        sizes, live, partition = self._crossing.saved, self._crossing.live, saved.partition
        suspects = []
        if sizes.ep > 1 and sizes.ep != live.ep and not partition.expert:
            suspects.append((Coordinates(pp_rank, 1, 0), "expert-parallel", "expert=True"))
        replicated = partition.replicated_over_tp and name not in self._crossing.recorded
        if sizes.tp > 1 and sizes.tp != live.tp and replicated:
            suspects.append((Coordinates(pp_rank, 0, 1), "tensor-parallel", "partition_dim"))
        for at, dimension, attribute in suspects:
            pair = [self._tree(place).get(name) for place in (Coordinates(pp_rank, 0, 0), at)]
            digests = {leaf.storage.crc32 for leaf in pair if isinstance(leaf, TensorStub)}
            if len(digests) == 2 and None not in digests:
                raise TopologyMismatch(
                    f"model/{name}: taken for equal on all {dimension} ranks, but rank 1 of them saved other values "
                    f"than rank 0: its partition attributes were lost; pass partitions= with its {attribute}"
                )

    def _tree(self, at: Coordinates) -> dict[str, Any]:
        if at not in self._trees:
            self._trees[at] = self._crossing.opened.model_tree(at)
        return self._trees[at]


def _at(pp_rank: int, place: Any) -> Coordinates:
    """The saving rank whose model file holds what is at ``place``."""
    return Coordinates(pp_rank, place.ep_rank, place.tp_rank)
