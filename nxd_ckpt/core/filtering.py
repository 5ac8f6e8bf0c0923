"""Filters of names, for loads and saves that leave entries out: globs over paths. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import translate

IgnoreKeys = str | Collection[str] | Callable[[list[str]], Iterable[str]]
"""A choice of names to leave out: a glob, several, or a function from all names to those left out."""

PARAM_GROUPS = "optim/param_groups"
"""Name of the options of all param groups."""

_WILD = re.compile(r"[*?\[]")


class Ignored:
    """A filter of names such as "model/up.weight" or "optim/up.weight/exp_avg", by globs and exact names.

    ``*`` matches anything, slashes too. A match covers everything below it: "optim" is the whole optimizer,
    "optim/up.weight" the state of one parameter.
    """

    def __init__(self, globs: Iterable[str] = (), names: Iterable[str] = ()) -> None:
        globs = list(globs)
        self._exact = {*names, *(glob for glob in globs if not _WILD.search(glob))}
        wild = [glob for glob in globs if _WILD.search(glob)]
        self._globs = [re.compile(translate(glob)) for glob in wild]
        # Such a glob that matches "optim/" matches everything that follows.
        self._open_ended = [re.compile(translate(glob)) for glob in wild if glob.endswith("*")]

    def __bool__(self) -> bool:
        return bool(self._exact or self._globs)

    def matches(self, name: str) -> bool:
        """Return whether the name is left out."""
        return any(path in self._exact or any(glob.match(path) for glob in self._globs) for path in _lineage(name))

    def covers(self, path: str) -> bool:
        """Return whether everything that could be below ``path`` is left out."""
        return self.matches(path) or any(glob.match(f"{path}/") for glob in self._open_ended)


def unmatched(globs: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the globs that match none of ``names``, and nothing that could be below one."""
    all_paths = paths(names)
    below = [f"{path}/" for path in all_paths]

    def matches(glob: str) -> bool:
        pattern = re.compile(translate(glob))
        # The names below a part that is left out as a whole are not listed.
        return any(map(pattern.match, all_paths)) or (glob.endswith("*") and any(map(pattern.match, below)))

    return [glob for glob in globs if glob not in all_paths and not matches(glob)]


def paths(names: Iterable[str]) -> set[str]:
    """Return the names, and all paths above them."""
    return {path for name in names for path in _lineage(name)}


def with_emptied_parents(chosen: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return ``chosen`` with all paths above it that keep none of ``names``."""
    chosen = {*chosen}
    kept = paths(name for name in names if chosen.isdisjoint(_lineage(name)))
    return chosen | (paths(chosen) - kept)


def filtered_name(name: str) -> str:
    """Return the name that filters know for a value of this name."""
    part, *rest = name.split("/")
    if part == "optim":
        return PARAM_GROUPS if rest[0] == "param_groups" else "/".join((part, *rest[:2]))
    return part if part == "scheduler" else "/".join((part, *rest[:1]))


def how_to_leave_out(name: str) -> str:
    """Return what to do about a value that no other job can take."""
    return (
        f"Load on the ranks and meshes that it was saved on, or leave it out with ignore_keys=[{filtered_name(name)!r}]"
    )


def _lineage(name: str) -> Iterator[str]:
    """Yield the name, and the paths above it."""
    yield name
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name
