"""Which names of a checkpoint a load or a save leaves out: globs over paths. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import translate

_WILD = re.compile(r"[*?\[]")


class Ignored:
    """Names such as "model/up.weight" or "optim/up.weight/exp_avg", given by globs and as they are.

    ``*`` stands for anything, slashes too. What is given stands for all that is below it as well: "optim" for the
    optimizer, "optim/up.weight" for the state of one parameter.
    """

    def __init__(self, globs: Iterable[str] = (), names: Iterable[str] = ()) -> None:
        globs = list(globs)
        self._exact = {*names, *(glob for glob in globs if not _WILD.search(glob))}
        wild = [glob for glob in globs if _WILD.search(glob)]
        self._globs = [re.compile(translate(glob)) for glob in wild]
        # What matches "optim/" matches whatever follows.
        self._open_ended = [re.compile(translate(glob)) for glob in wild if glob.endswith("*")]

    def __bool__(self) -> bool:
        return bool(self._exact or self._globs)

    def matches(self, name: str) -> bool:
        """Whether it is left out."""
        return any(path in self._exact or any(glob.match(path) for glob in self._globs) for path in _lineage(name))

    def covers(self, path: str) -> bool:
        """Whether all that could be below ``path`` is left out, whatever it is."""
        return self.matches(path) or any(glob.match(f"{path}/") for glob in self._open_ended)


def unmatched(globs: Iterable[str], names: Collection[str]) -> list[str]:
    """The globs that stand for none of ``names``, and for nothing that could be below one."""
    known = paths(names)
    below = [f"{path}/" for path in known]

    def matches(glob: str) -> bool:
        pattern = re.compile(translate(glob))
        # What is below a part that is left out as a whole, nobody looks at.
        return any(map(pattern.match, known)) or (glob.endswith("*") and any(map(pattern.match, below)))

    return [glob for glob in globs if glob not in known and not matches(glob)]


def paths(names: Iterable[str]) -> set[str]:
    """The names, and all paths above them."""
    return {path for name in names for path in _lineage(name)}


def with_wholes(chosen: Iterable[str], known: Iterable[str]) -> set[str]:
    """``chosen``, with the paths above of which nothing that is ``known`` stays."""
    chosen = {*chosen}
    stays = paths(name for name in known if chosen.isdisjoint(_lineage(name)))
    return chosen | (paths(chosen) - stays)


def _lineage(name: str) -> Iterator[str]:
    """The name, and the paths above it."""
    yield name
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name
