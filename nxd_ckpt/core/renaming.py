"""Names of a tensor in the live model and in the checkpoint. Pure.

All names are replaced at once: ``{"a": "b", "b": "a"}`` swaps two tensors, and in ``{"a": "b", "b": "c"}`` the live
``b`` is the saved ``c``. So chains and cycles are unambiguous; two live names for one saved tensor are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nxd_ckpt.errors import InvalidArgument

NOT_LIVE = "/"
"""Start of a saved name on the live side if it has no live name."""

_POSITION = "#"  # an optimizer's parameter without a name: "#3"


@dataclass(frozen=True)
class Renaming:
    """Names in the checkpoint: ``key_mapping`` gives whole names by live name, ``prefix`` precedes all others."""

    key_mapping: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def __bool__(self) -> bool:
        """True if any name changes."""
        return bool(self.prefix or self.key_mapping)

    def validate(self) -> None:
        """Raise InvalidArgument unless it maps names to names, and no two live names to one saved tensor."""
        for live, saved in self.key_mapping.items():
            if not live or not saved:
                raise InvalidArgument(f"key_mapping must map names to names, found {live!r}: {saved!r}")
            first = self._live_by_saved[saved]
            if first != live:
                raise _collision(first, live, saved, "map each to a tensor of its own")

    def saved(self, live: str) -> str:
        """Return the name in the checkpoint."""
        if live.startswith(NOT_LIVE):
            return live.removeprefix(NOT_LIVE)
        return live if live.startswith(_POSITION) else self.key_mapping.get(live, self.prefix + live)

    def live(self, saved: str) -> str:
        """Return the live name, existing or not; with `NOT_LIVE` in front if that name means another tensor."""
        if saved.startswith(_POSITION):
            return saved
        name = self._live_by_saved.get(saved)
        if name is None and saved.startswith(self.prefix):
            name = saved.removeprefix(self.prefix)
            name = None if name in self.key_mapping else name
        return name or NOT_LIVE + saved

    def concerns(self, saved: str) -> bool:
        """Return whether a saved name can be loaded: it is mapped, or begins with the prefix."""
        return saved.startswith(self.prefix) or saved in self._live_by_saved

    def refuse_collisions(self, names: Iterable[str], aliases: Callable[[str], Sequence[str]]) -> None:
        """Raise InvalidArgument if one of the live ``names``, unmapped, equals a saved name that is mapped to another.

        ``aliases`` returns all names of a parameter: tied names are one tensor.
        """
        for name in names:
            mapped = None if name in self.key_mapping else self._live_by_saved.get(self.saved(name))
            if mapped is not None and mapped not in aliases(name):
                advice = f"map {name!r} to another one, or leave it out with ignore_keys="
                raise _collision(mapped, name, self.saved(name), advice)

    @cached_property
    def _live_by_saved(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for live, saved in self.key_mapping.items():
            names.setdefault(saved, live)
        return names


def _collision(first: str, second: str, saved: str, advice: str) -> InvalidArgument:
    return InvalidArgument(
        f"key_mapping: the live {first!r} and {second!r} would both be loaded from {saved!r}; {advice}"
    )
