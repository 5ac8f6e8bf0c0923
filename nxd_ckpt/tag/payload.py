"""What a training script saved as one dict: the state of model, optimizer and scheduler under the usual keys, and
whatever else it liked. What Lightning saves has lists of optimizers and of schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core.limits import shown
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.tag.state_dicts import is_optimizer

MODEL_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")
SCHEDULER_KEYS = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_schedulers")

_COUNTS = ("step", "global_step", "epoch")
"""What scripts keep beside the model that tells saves apart."""


@dataclass(frozen=True)
class Payload:
    """``content`` is what the file holds: such a dict, or the state dict of a model or of an optimizer itself."""

    content: dict[str, Any]

    @property
    def model(self) -> dict[str, Any] | None:
        """The model's state dict, None without one."""
        return self.content if self._is_bare_model else self._part(MODEL_KEYS)

    @property
    def optimizer(self) -> dict[str, Any] | None:
        return self.content if is_optimizer(self.content) else self._part(OPTIMIZER_KEYS)

    @property
    def scheduler(self) -> dict[str, Any] | None:
        return self._part(SCHEDULER_KEYS)

    @property
    def rest(self) -> dict[str, Any]:
        """Whatever else it holds: step, epoch, arguments."""
        if is_optimizer(self.content) or self._is_bare_model:
            return {}
        known = {*MODEL_KEYS, *OPTIMIZER_KEYS, *SCHEDULER_KEYS}

        def is_part(key: str, value: Any) -> bool:
            several = isinstance(value, list) and len(value) > 1  # which of them is meant only the script knows
            return key in known and not several

        return {key: value for key, value in self.content.items() if not is_part(key, value)}

    @property
    def keys(self) -> list[str]:
        """The first few, for errors."""
        return [str(key) for key in self.content][:8]

    @property
    def _is_bare_model(self) -> bool:
        """A state dict itself: tensors right below, or nothing but them."""
        nested = any(self._part(keys) is not None for keys in (MODEL_KEYS, OPTIMIZER_KEYS))
        has_tensors = any(len(path) == 1 for path, _ in iter_tensors(self.content))
        return not nested and not is_optimizer(self.content) and has_tensors

    def _part(self, keys: tuple[str, ...]) -> dict[str, Any] | None:
        values = (self.content.get(key) for key in keys)
        alone = (value[0] if isinstance(value, list) and len(value) == 1 else value for value in values)
        return next((value for value in alone if isinstance(value, dict)), None)


def refuse_other_counts(ranks: Mapping[str, Payload], above: str) -> None:
    """Raise MalformedFile where files of ``ranks``, by name below the directory ``above``, count other steps or epochs
    than the first that counts them."""
    for key in _COUNTS:
        said = {name: payload.content.get(key) for name, payload in ranks.items()}
        counts = {name: number for name, number in said.items() if type(number) is int}
        first = next(iter(counts), "")
        for name, number in counts.items():
            if number != counts[first]:
                raise MalformedFile(
                    f"{above}/{name} is of {key} {shown(number)}, {first} of {shown(counts[first])}; files of two "
                    "saves are mixed"
                )
