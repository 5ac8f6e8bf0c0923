"""Names of the parameters of a saved optimizer, whose files number them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.reshard.reshard_context import ReshardContext


def is_number(name: str) -> bool:
    """Return True for "#3" and the like: the number of a parameter whose name is not known."""
    return name.startswith("#")


@dataclass(frozen=True)
class OptimizerNames:
    """Sources of parameter names; the first one that applies wins.

    Attributes:
        saved: names as they were saved, by pipeline stage and param group, from the caller.
        live: names of the live optimizer's parameters, by number. They name the entries of a tag without names, by
            position, if pipeline stages and experts are the same.
        by_position: live parameters have no names but "#0", "#1", ...; entries match by position.
        numbered: there is no live optimizer; entries without names are "#0", "#1", ..., or with several stages "#0.0",
            "#1.0".
    """

    saved: Sequence[Sequence[Sequence[str]]] | None = None
    live: Sequence[str] | None = None
    by_position: bool = False
    numbered: bool = False

    def of_rank(self, context: ReshardContext, at: Coordinates) -> list[str] | None:
        """Return the names of the parameters that this saving rank saved, by number; None if numbers name them.

        Raises OptimizerMismatch if no source has them, or ``saved`` lists another number of stages than the tag has.
        """
        opened, saved, live = context.opened, context.saved, context.live
        if self.saved is not None:
            if len(self.saved) != saved.pp:
                raise OptimizerMismatch(
                    f"saved_param_names= must list the param groups of each of the {saved.pp} pipeline stages that "
                    f"{opened.where} was saved on, found {len(self.saved)} stages"
                )
            return [name for group in self.saved[at.pp_rank] for name in group]
        same_stages = (saved.pp, saved.ep) == (live.pp, live.ep)
        names = None if self.by_position and same_stages else opened.optimizer_names(at)
        if names is not None and not any(map(is_number, names)):
            return names
        if self.numbered or (same_stages and self.live is None and not self.by_position):
            return None
        if saved.pp == live.pp and not same_stages and context.experts is not None and self.live:
            # A ZeRO-1 optimizer of experts keeps them apart, behind the others.
            return sorted(self.live, key=context.is_expert) if context.is_sharded else list(self.live)
        # Of several stages each has an entry at every position.
        if same_stages and len(context.stages) == 1:
            return None if self.live is None else list(self.live)
        raise OptimizerMismatch(
            f"{opened.where}, saved on {saved.describe()}, does not name the parameters of its optimizer, and on "
            f"{live.describe()} their order does not identify them. Pass saved_param_names=: for each pipeline stage "
            "that it was saved on, for each param group (experts' last), the names in order"
        )

    def prefix(self, context: ReshardContext, at: Coordinates) -> str:
        """Return the text before the number, where a number stands for a name."""
        return f"#{at.pp_rank}." if self.numbered and context.saved.pp > 1 else "#"
