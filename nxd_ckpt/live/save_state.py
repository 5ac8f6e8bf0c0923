"""Everything that one call saves, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.live.state import ModelState, State
from nxd_ckpt.live.zero1 import EXPERT_KEYS


@dataclass(frozen=True)
class SaveState:
    """Everything that one call saves, in this rank's form.

    ``optimizer_kind`` as in core.manifest.Parts; ``left_out`` says in words what is not saved.

    Without ``lower_precision_weights``, weights that the optimizer's master weights represent are left out, if NxD
    would leave them out too: only then can it load the rest. If it ``is_of_rank``, no tensors of model and optimizer
    are copies of other ranks'.
    """

    model: ModelState | None = None
    optimizer: State | None = None
    optimizer_kind: str | None = None
    optimizer_names: tuple[str, ...] | None = None
    scheduler: Any = None
    user_content: Any = None
    rank_content: Any = None
    use_xser: bool = False
    lower_precision_weights: bool = True
    left_out: Sequence[str] = ()
    is_of_rank: bool = False

    @property
    def is_placed(self) -> bool:
        """True if there are DTensors in it."""
        return any(state.is_placed for state in self.trees().values())

    def trees(self) -> dict[str, State]:
        """Return the saved ones of model and optimizer, by field."""
        both: dict[str, State | None] = {"model": self.model, "optimizer": self.optimizer}
        return {part: state for part, state in both.items() if state is not None}

    def has_master_weights(self) -> bool:
        return self.optimizer is not None and bool(self.optimizer.master_weight_entries())

    def parts(self, master_weights: bool) -> Parts:
        """Return the parts to save; ``master_weights`` is the result of `has_master_weights`."""
        return Parts(
            model=self.model is not None,
            optimizer=self.optimizer_kind,
            scheduler=self.scheduler is not None,
            user_content=self.user_content is not None,
            rank_content=self.rank_content is not None,
            use_xser=self.use_xser,
            master_weights=master_weights,
            lower_precision_weights=self.lower_precision_weights or bool(self.needs_all_weights(master_weights)),
        )

    def needs_all_weights(self, master_weights: bool) -> str | None:
        """Return why no weights of the model can be left out; None if they can."""
        if not self.use_xser:
            return "without use_xser=True NxD loads every weight from the model's files"
        if not master_weights:
            return "the optimizer holds no master weights that could stand for them (save_master_weights=True)"
        if self.optimizer is not None and EXPERT_KEYS[0] in self.optimizer.tree:
            return "with expert parallelism NxD loads no master weights"
        return None
