"""torch's ZeroRedundancyOptimizer: each rank steps whole parameters of its own, and alone has their state.

Its ``optim`` is an optimizer of these parameters, whose param groups are updated at each step. Its ``state_dict()``
needs a collective, which no save may make; so each rank saves its own state, as with ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.optimizer_names import parameter_names
from nxd_ckpt.live.optimizer_state import Keeps, LeafSource, keeps_nothing, options_of
from nxd_ckpt.live.plain import PlainOptimizer
from nxd_ckpt.live.state import State

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_torch_zero(optimizer: Any) -> bool:
    return any(kind.__module__ == _MODULE for kind in type(optimizer).__mro__)


class TorchZeroOptimizer(PlainOptimizer):
    """The OptimizerAdapter of torch's ZeroRedundancyOptimizer. It loads on as many ranks as it was saved on."""

    def __init__(
        self,
        optimizer: Any,
        model: ModelAdapter | None,
        param_names: Sequence[Sequence[str]] | None,
        topology: Topology,
    ) -> None:
        """Raise UnsupportedState if it has not divided the parameters yet, or steps during the backward pass."""
        if getattr(optimizer, "_overlap_with_ddp", False) or not hasattr(optimizer, "optim"):
            raise UnsupportedState(
                "optimizer: ZeroRedundancyOptimizer with overlap_with_ddp=True has state that is spread over buckets "
                "of DistributedDataParallel: make it without that option"
            )
        all_names = parameter_names(optimizer.param_groups, model, param_names)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        name_of = {id(parameter): name for parameter, name in zip(parameters, all_names, strict=True)}
        inner = optimizer.optim
        own = [name_of[id(parameter)] for group in inner.param_groups for parameter in group["params"]]
        super().__init__(inner, own, topology.tp, sharded=True)
        self.parameter_names = None  # they differ from rank to rank, and no rank knows the others'
        self._outer = optimizer

    def capture(self) -> State:
        _copy_options(self._outer.param_groups, self._optimizer.param_groups)  # as its next step would
        return super().capture()

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        super().load(saved, read, keeps)
        _copy_options(self._optimizer.param_groups, self._outer.param_groups)


def _copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for options, target_options in zip(source, target, strict=True):
        target_options.update(options_of(options))
