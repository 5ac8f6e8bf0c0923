"""Dict that a training script saved: the state of model, optimizer and scheduler under usual keys, and other content.

Lightning saves lists of optimizers and of schedulers.
"""

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
"""Keys of counters beside the model that distinguish saves."""


@dataclass(frozen=True)
class Payload:
    """Content of such a file: the dict, or the state dict of a model or of an optimizer itself."""

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
        """Everything else: step, epoch, arguments."""
        if is_optimizer(self.content) or self._is_bare_model:
            return {}
        part_keys = {*MODEL_KEYS, *OPTIMIZER_KEYS, *SCHEDULER_KEYS}

        def is_part(key: str, value: Any) -> bool:
            several = isinstance(value, list) and len(value) > 1  # only the script knows which one to use
            return key in part_keys and not several

        return {key: value for key, value in self.content.items() if not is_part(key, value)}

    @property
    def keys(self) -> list[str]:
        """The first few keys, for errors."""
        return [str(key) for key in self.content][:8]

    @property
    def _is_bare_model(self) -> bool:
        """True for a state dict itself: tensors at the top level, and no parts."""
        nested = any(self._part(keys) is not None for keys in (MODEL_KEYS, OPTIMIZER_KEYS))
        has_tensors = any(len(path) == 1 for path, _ in iter_tensors(self.content))
        return not nested and not is_optimizer(self.content) and has_tensors

    def _part(self, keys: tuple[str, ...]) -> dict[str, Any] | None:
        values = (self.content.get(key) for key in keys)
        alone = (value[0] if isinstance(value, list) and len(value) == 1 else value for value in values)
        return next((value for value in alone if isinstance(value, dict)), None)


def refuse_other_counts(ranks: Mapping[str, Payload], above: str) -> None:
    """Raise MalformedFile if files of ``ranks`` count other steps or epochs than the first that counts them.

    ``ranks`` are by name below the directory ``above``.
    """
    for key in _COUNTS:
        values = {name: payload.content.get(key) for name, payload in ranks.items()}
        counts = {name: number for name, number in values.items() if type(number) is int}
        first = next(iter(counts), "")
        for name, number in counts.items():
            if number != counts[first]:
                raise MalformedFile(
                    f"{above}/{name} is of {key} {shown(number)}, {first} of {shown(counts[first])}; files of two "
                    "saves are mixed"
                )
