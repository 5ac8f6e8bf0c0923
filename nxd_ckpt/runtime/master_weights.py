"""The optimizer's master weights of a tag, in place of the model's own: more exact, or all that was saved."""

from __future__ import annotations

from collections.abc import Sequence

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.runtime.crossing import Crossing
from nxd_ckpt.runtime.opening import OpenTag
from nxd_ckpt.runtime.resharded_optimizer import ReshardedOptimizer


class MasterWeights:
    """Those of the tag ``opened``, put together from the shards of data-parallel ranks. Reads trees only.

    ``param_names`` are the optimizer's as saved, by pipeline stage and param group, where the tag does not say.
    """

    def __init__(self, opened: OpenTag, param_names: Sequence[Sequence[Sequence[str]]] | None) -> None:
        self._opened, self._param_names = opened, param_names
        self._sources: dict[Coordinates, ReshardedOptimizer] = {}
        self._recorded = {} if opened.manifest is None else opened.manifest.parameters

    def find(self, name: str, at: Coordinates, dtype: str, shape: tuple[int, ...]) -> Assembly | None:
        """The parameter that the rank at these coordinates holds with ``shape``, cast to ``dtype``; None without."""
        if self._opened.parts.optimizer is None or not self._opened.parts.master_weights:
            return None
        if at not in self._sources:
            here = self._opened.topology.at(self._opened.topology.rank_of(at))
            crossing = Crossing(self._opened, here, recorded=self._recorded, every_stage=True)
            self._sources[at] = ReshardedOptimizer(crossing, saved_names=self._param_names)
        recorded = self._recorded.get(name)
        partition = Partition(known=False) if recorded is None else recorded.partition
        return self._sources[at].master_weight(name, ParameterSpec(dtype, shape, partition))
