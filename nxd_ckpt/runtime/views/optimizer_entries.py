"""The optimizer of a tag as the ranks that saved it held it, before ZeRO-1: its state by parameter.

Master weights are among it: in place of the model's own more exact, or all that was saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nxd_ckpt.adapters.state import MASTER_WEIGHTS
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import OptimizerMismatch, PartNotFound
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.views.reshard_context import ReshardContext
from nxd_ckpt.runtime.views.resharded_optimizer import ReshardedOptimizer
from nxd_ckpt.runtime.views.saved_optimizer import SavedSlot


class OptimizerEntries:
    """Those of the tag ``opened``, put together from the shards of data-parallel ranks. Reads trees only.

    ``param_names`` are the optimizer's as saved, by pipeline stage and param group, where the tag does not say.
    """

    def __init__(self, opened: OpenTag, param_names: Sequence[Sequence[Sequence[str]]] | None) -> None:
        self._opened, self._param_names = opened, param_names
        self._sources: dict[Coordinates, ReshardedOptimizer] = {}
        self._recorded = {} if opened.manifest is None else opened.manifest.parameters

    def require(self) -> None:
        """Raise PartNotFound without an optimizer, OptimizerMismatch if its parameters have no names."""
        if self._opened.parts.optimizer is None:
            raise PartNotFound(f"{self._opened.where} was saved without an optimizer")
        if any(name.startswith("#") for name in self.names):
            raise OptimizerMismatch(
                f"{self._opened.where} does not say which parameters the entries of its optimizer belong to; pass "
                "param_names=: for each pipeline stage, for each param group (experts' last), the names in order"
            )

    @property
    def names(self) -> list[str]:
        """The parameters that the optimizer was saved with."""
        return self._source(Coordinates()).names()

    def slot(self, name: str, at: Coordinates, dtype: str, shape: tuple[int, ...]) -> SavedSlot | None:
        """What the rank at these coordinates saved for the parameter that it holds with ``shape``; None without.

        Raises IncompatibleState where those that hold its other shards saved more.
        """
        return self._source(at).slot(name, self._spec(name, dtype, shape))

    def general(self) -> dict[str, Any]:
        """State that is no parameter's."""
        return self._source(Coordinates()).general()

    def find(self, name: str, key: str, at: Coordinates, dtype: str, shape: tuple[int, ...]) -> Assembly | None:
        """The state ``key`` of a parameter, as :meth:`slot`, cast to ``dtype``; None without."""
        parts = self._opened.parts
        if parts.optimizer is None or (key == MASTER_WEIGHTS and not parts.master_weights):
            return None
        return self._source(at).entry(name, key, self._spec(name, dtype, shape))

    def _source(self, at: Coordinates) -> ReshardedOptimizer:
        if at not in self._sources:
            here = self._opened.topology.at(self._opened.topology.rank_of(at))
            context = ReshardContext(self._opened, here, recorded=self._recorded, every_stage=True)
            self._sources[at] = ReshardedOptimizer(context, saved_names=self._param_names)
        return self._sources[at]

    def _spec(self, name: str, dtype: str, shape: tuple[int, ...]) -> ParameterSpec:
        recorded = self._recorded.get(name)
        return ParameterSpec(dtype, shape, Partition(known=False) if recorded is None else recorded.partition)
