"""A call of load, as its phases need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.live.named import LiveObjects, with_state
from nxd_ckpt.load.options import LoadOptions
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT


@dataclass(frozen=True)
class LoadRequest:
    """One call of load, on one rank: the objects to load, None for those to skip, and the other ranks.

    Attributes:
        topology: sizes and the rank whose state is loaded.
        agreement: of all processes that make this call; a process alone may load any rank's state.
        state: the objects that were passed by name; `settled` adds them to the three before.
        timeout: seconds without progress after which another rank counts as lost.
    """

    topology: Topology
    agreement: Agreement
    model: Any
    optimizer: Any
    scheduler: Any = None
    options: LoadOptions = field(default_factory=LoadOptions)
    timeout: float = DEFAULT_TIMEOUT
    state: Mapping[str, Any] | None = None

    def settled(self) -> LoadRequest:
        """Return the request with the objects of ``state`` as models, optimizers, and in place of the scheduler.

        Raises InvalidArgument if they are not such objects.
        """
        objects = with_state(LiveObjects(self.model, self.optimizer, self.scheduler), self.state)
        return replace(self, **objects._asdict())

    @property
    def reports_progress(self) -> bool:
        """True on the rank that shows progress for all."""
        return self.agreement.rank == 0

    @property
    def acts_for_one_stage(self) -> bool:
        """True if a process loads one of several pipeline stages without the others: names may be in theirs."""
        return self.agreement.world_size < self.topology.world_size and self.topology.pp > 1
