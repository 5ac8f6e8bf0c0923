"""A tag's model and optimizer as one rank of another job holds them: by name, a weight that is in no file as its master
weights have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import PartLost, PartNotFound
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.live.state import MASTER_WEIGHTS
from nxd_ckpt.reshard.optimizer_names import OptimizerNames, is_number
from nxd_ckpt.reshard.recorded_parameters import recorded_parameters
from nxd_ckpt.reshard.reshard_context import ReshardContext
from nxd_ckpt.reshard.resharded_model import ReshardedModel
from nxd_ckpt.reshard.resharded_optimizer import ReshardedOptimizer
from nxd_ckpt.tag.files import MissingTensor
from nxd_ckpt.tag.opened import OpenTag


class ReshardedState:
    """Both parts of the tag of ``context``, for its rank. A part that the tag has not is empty.

    Reads trees only, each once, and those of a part when that is asked for.
    """

    def __init__(self, context: ReshardContext, names: OptimizerNames) -> None:
        self.context, self._names = context, names
        self.model = ReshardedModel(context)
        self.optimizer = self.optimizer_by(names)

    def seen_from(self, live: Topology) -> ReshardedState:
        """The same for another rank."""
        return ReshardedState(self.context.seen_from(live), self._names)

    def optimizer_by(self, names: OptimizerNames) -> ReshardedOptimizer:
        """The optimizer, whose parameters other ``names`` tell."""
        return ReshardedOptimizer(self.context, names, self.model)

    def weight(self, name: str, leaf: Any, live: ParameterSpec | None = None) -> Any:
        """``leaf``, which is this rank's of the model's name; of one that is in no file its master weights, cast.

        ``live`` is how the rank holds it, by default as recorded. Where there are no master weights of it either, it
        stays a MissingTensor.
        """
        if not isinstance(leaf, MissingTensor) or leaf.dtype is None:
            return leaf
        if live is None and leaf.shape is not None:
            live = self.context.as_recorded(name, leaf.dtype, leaf.shape)
        return leaf if live is None else self.master_weight(name, replace(live, dtype=leaf.dtype)) or leaf

    def required_weight(self, name: str, leaf: Any) -> Any:
        """The same for a rank of which nothing live is known.

        Raises PartNotFound where there is none, and PartLost where no master weights could have stood for it.
        """
        found = self.weight(name, leaf)
        if isinstance(found, MissingTensor):
            unnamed = any(map(is_number, self.optimizer.slots))
            hint = ", as far as the tag tells: pass saved_param_names=" if unnamed else ""
            kind = PartNotFound if self.context.opened.parts.master_weights else PartLost
            raise kind(
                f"{self.context.opened.where}: no file holds model/{name} ({found.file} is missing), nor its master "
                f"weights{hint}"
            )
        return found

    def master_weight(self, name: str, live: ParameterSpec) -> Assembly | None:
        """The parameter as its master weights have it, cast to its dtype; None where there are none."""
        has_any = self.context.opened.parts.master_weights
        return self.optimizer.entry(name, MASTER_WEIGHTS, live) if has_any else None


def recorded_state(
    opened: OpenTag,
    live: Topology,
    *,
    partitions: Mapping[str, Partition] | None = None,
    saved_names: Sequence[Sequence[Sequence[str]]] | None = None,
) -> ReshardedState:
    """What the rank that ``live`` is seen from would hold, by what was recorded; for tools, without a live model.

    Args:
        partitions: how parameters of the tag were cut, by name, where it does not say.
        saved_names: the optimizer's parameter names as saved, by stage and group, where it does not say; parameters
            that nobody names have numbers.
    """
    recorded = recorded_parameters(opened, partitions or {})
    context = ReshardContext(opened, live, recorded=recorded, every_stage=True)
    return ReshardedState(context, OptimizerNames(saved_names, numbered=True))
