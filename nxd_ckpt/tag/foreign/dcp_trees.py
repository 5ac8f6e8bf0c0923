"""Entries of a torch DCP state dict, assembled into the trees of a tag.

Entries of neither model nor optimizer are user content, except the part under "scheduler".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from nxd_ckpt.core.dcp_names import PARAMS, SCHEDULER, USER_CONTENT, DcpNames, DcpPart, Path, groups_of, nested
from nxd_ckpt.errors import KeyMismatch, PartNotFound
from nxd_ckpt.formats.tensors import by_digest


class Form(Protocol):
    """Facts about a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Entries(Protocol):
    """A flat state dict, with ``names`` in its order.

    For each name: the keys that lead to it (``recorded``, or ``path`` with a default), its form as a tensor (None for
    another value), and its ``entry`` in a tree.
    """

    @property
    def where(self) -> str: ...

    @property
    def names(self) -> Sequence[str]: ...

    def recorded(self, name: str) -> Path | None: ...

    def path(self, name: str) -> Path: ...

    def form(self, name: str) -> Form | None: ...

    def entry(self, name: str) -> Any: ...


class DcpTrees:
    """Trees of ``entries``, whose names follow the scheme ``names``."""

    def __init__(self, entries: Entries, names: DcpNames) -> None:
        self._entries = entries
        self.model: dict[str, dict[Path, str]] = {}
        """Entries' names, by name in the model and by the keys below that."""
        self.states: dict[str, dict[str, str]] = {}
        """Entries' names, by parameter and key."""
        self._options: list[tuple[str, str, str]] = []  # owner, option, entry
        self._scheduler: list[str] = []
        self._content: list[str] = []
        for name in entries.names:
            self._sort_in(name, names)

    def _sort_in(self, name: str, names: DcpNames) -> None:
        part = names.part_of(name, self._entries.recorded(name), self._entries.form(name) is not None)
        if part is DcpPart.STATE:
            parameter, key = names.state_key(name) or ("", "")
            self.states.setdefault(parameter, {})[key] = name
        elif part is DcpPart.OPTION:
            self._options.append((*(names.option_key(name) or ("", "")), name))
        elif part is DcpPart.MODEL:
            parameter, *below = names.model_path(self._entries.path(name))
            self.model.setdefault(parameter, {})[tuple(below)] = name
        else:
            (self._scheduler if part is DcpPart.SCHEDULER else self._content).append(name)

    @property
    def has_optimizer(self) -> bool:
        return bool(self.states or self._options)

    @property
    def has_flat_options(self) -> bool:
        """True if each parameter has its own options."""
        return any(not owner.isdecimal() for owner, _, _ in self._options)

    @property
    def has_scheduler(self) -> bool:
        return bool(self._scheduler)

    @property
    def has_content(self) -> bool:
        return bool(self._content)

    def model_tree(self) -> dict[str, Any]:
        """Return the model's state dict."""
        entries = (
            ((parameter, *below), self._entries.entry(name))
            for parameter, names in self.model.items()
            for below, name in names.items()
        )
        return dict(nested(entries))

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups, with names as "params". Raises KeyMismatch if a parameter is in none, or in two."""
        options = ((owner, option, self._option(option, name)) for owner, option, name in self._options)
        try:
            return groups_of(options, list(self.states), lambda a, b: by_digest(a) == by_digest(b))
        except KeyMismatch as error:
            raise KeyMismatch(f"{self._entries.where}: {error}") from None

    def _option(self, option: str, name: str) -> Any:
        value = self._entries.entry(name)
        return list(map(str, value)) if option == PARAMS and isinstance(value, (list, tuple)) else value

    @property
    def parameters(self) -> list[str]:
        """The optimizer's parameters, by index."""
        return [name for group in self.groups for name in group[PARAMS]]

    def numbered_groups(self) -> list[dict[str, Any]]:
        """Return the groups with the indices of their parameters instead of names."""
        numbered, begin = [], 0
        for group in self.groups:
            end = begin + len(group[PARAMS])
            numbered.append({**group, PARAMS: list(range(begin, end))})
            begin = end
        return numbered

    def state(self, parameter: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter."""
        return {key: self._entries.entry(name) for key, name in self.states.get(parameter, {}).items()}

    def scheduler(self) -> Any:
        if not self._scheduler:
            raise PartNotFound(f"{self._entries.where} has nothing under {SCHEDULER!r}")
        return self._nested(self._scheduler)[SCHEDULER]

    def content(self) -> Any:
        """Return everything that belongs to no other part, by its keys in the state dict.

        Content under "user_content" is merged with the rest.
        """
        content = self._nested(self._content)
        saved = content.pop(USER_CONTENT, {})
        if content and isinstance(saved, dict):
            return {**content, **saved}
        return {**content, USER_CONTENT: saved} if content else saved

    def _nested(self, names: Sequence[str]) -> Any:
        return nested((self._entries.path(name), self._entries.entry(name)) for name in names)
