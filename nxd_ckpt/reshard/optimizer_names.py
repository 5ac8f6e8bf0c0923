"""What the parameters of a saved optimizer are called, whose state files keep by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.reshard.reshard_context import ReshardContext


def is_number(name: str) -> bool:
    """Whether it is the number of a parameter whose name is not known: "#3"."""
    return name.startswith("#")


@dataclass(frozen=True)
class OptimizerNames:
    """Where names come from: the first of these that tells.

    Attributes:
        saved: the names as they were saved, by pipeline stage and param group, as the caller gives them.
        live: the live optimizer's, by number: they name the entries of a tag that does not name them itself, as long as
            stages and experts are the same, by position.
        by_position: live parameters have no names but "#0", "#1", ...: entries go by position, names or not.
        numbered: there are no live ones, and what nobody names is "#0", "#1", ..., of several stages "#0.0", "#1.0".
    """

    saved: Sequence[Sequence[Sequence[str]]] | None = None
    live: Sequence[str] | None = None
    by_position: bool = False
    numbered: bool = False

    def of_rank(self, context: ReshardContext, at: Coordinates) -> list[str] | None:
        """The names by number of what the saving rank at these coordinates saved; None for :meth:`prefix` and number.

        Raises OptimizerMismatch where nothing tells, or the caller lists other stages than there are.
        """
        opened, saved, live = context.opened, context.saved, context.live
        if self.saved is not None:
            if len(self.saved) != saved.pp:
                raise OptimizerMismatch(
                    f"saved_param_names= must list the param groups of each of the {saved.pp} pipeline stages that "
                    f"{opened.where} was saved on, found {len(self.saved)}"
                )
            return [name for group in self.saved[at.pp_rank] for name in group]
        same_places = (saved.pp, saved.ep) == (live.pp, live.ep)
        names = None if self.by_position and same_places else opened.optimizer_names(at)
        if names is not None and not any(map(is_number, names)):
            return names
        if self.numbered or (same_places and self.live is None and not self.by_position):
            return None
        if saved.pp == live.pp and not same_places and context.experts is not None and self.live:
            # A ZeRO-1 optimizer of experts keeps them apart, behind the others.
            return sorted(self.live, key=context.is_expert) if context.is_sharded else list(self.live)
        # Of several stages each has an entry at every position.
        if same_places and len(context.stages) == 1:
            return None if self.live is None else list(self.live)
        raise OptimizerMismatch(
            f"{opened.where}, saved on {saved.describe()}, does not say which parameters the entries of its "
            f"optimizer belong to, and on {live.describe()} their order does not tell. Pass saved_param_names=: for "
            "each pipeline stage that it was saved on, for each param group (experts' last), the names in order"
        )

    def prefix(self, context: ReshardContext, at: Coordinates) -> str:
        """What comes before the number in the place of a name."""
        return f"#{at.pp_rank}." if self.numbered and context.saved.pp > 1 else "#"
