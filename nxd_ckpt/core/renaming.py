"""What the live model calls a tensor, and what the checkpoint calls it. Pure.

All names are replaced at once: ``{"a": "b", "b": "a"}`` swaps two tensors, and in ``{"a": "b", "b": "c"}`` the live
``b`` is the saved ``c``. So chains and cycles mean one thing; only two live names for one saved tensor do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nxd_ckpt.errors import InvalidArgument

NOT_LIVE = "/"
"""What a saved name begins with, seen from the live side, if no live name stands for it."""

_POSITION = "#"  # an optimizer's parameter without a name: "#3"


@dataclass(frozen=True)
class Renaming:
    """``key_mapping``: live names to whole names in the checkpoint. Before all others stands ``prefix`` there."""

    key_mapping: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def __bool__(self) -> bool:
        """Whether any name changes."""
        return bool(self.prefix or self.key_mapping)

    def validate(self) -> None:
        """Raise InvalidArgument for what is no mapping of names, or takes one saved tensor for two live ones."""
        if not isinstance(self.prefix, str):
            raise InvalidArgument(f"prefix={self.prefix!r}: expected what names in the checkpoint begin with, a string")
        if not isinstance(self.key_mapping, Mapping):
            raise InvalidArgument(
                f"key_mapping must be a dict of live names to names in the checkpoint, found {self.key_mapping!r}"
            )
        for live, saved in self.key_mapping.items():
            if not (isinstance(live, str) and isinstance(saved, str) and live and saved):
                raise InvalidArgument(f"key_mapping must map names to names, found {live!r}: {saved!r}")
            other = self._live_by_saved[saved]
            if other != live:
                raise _collision(other, live, saved, "map each to a tensor of its own")

    def saved(self, live: str) -> str:
        """What the checkpoint calls it."""
        if live.startswith(NOT_LIVE):
            return live.removeprefix(NOT_LIVE)
        return live if live.startswith(_POSITION) else self.key_mapping.get(live, self.prefix + live)

    def live(self, saved: str) -> str:
        """What the live model calls it, or would; with :data:`NOT_LIVE` in front if that name stands for another."""
        if saved.startswith(_POSITION):
            return saved
        found = self._live_by_saved.get(saved)
        if found is None and saved.startswith(self.prefix):
            found = saved.removeprefix(self.prefix)
            found = None if found in self.key_mapping else found
        return found or NOT_LIVE + saved

    def concerns(self, saved: str) -> bool:
        """Whether a saved name is of what is loaded: others do not begin with the prefix."""
        return saved.startswith(self.prefix) or saved in self._live_by_saved

    def refuse_collisions(self, names: Iterable[str], aliases: Callable[[str], Sequence[str]]) -> None:
        """Raise InvalidArgument if one of the live ``names`` is, by its own name, what is mapped to another one.

        ``aliases`` gives all names of a parameter: tied ones are one tensor.
        """
        for name in names:
            other = None if name in self.key_mapping else self._live_by_saved.get(self.saved(name))
            if other is not None and other not in aliases(name):
                found = self.saved(name)
                raise _collision(other, name, found, f"map {name!r} to another one, or leave it out with ignore_keys=")

    @cached_property
    def _live_by_saved(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for live, saved in self.key_mapping.items():
            found.setdefault(saved, live)
        return found


def _collision(first: str, second: str, saved: str, advice: str) -> InvalidArgument:
    return InvalidArgument(
        f"key_mapping: the live {first!r} and {second!r} would both be loaded from {saved!r}; {advice}"
    )
