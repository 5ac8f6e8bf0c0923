"""Names of tensors by pattern: globs of filters, renamed names, and names with placeholders for numbers. Pure.

Renaming replaces all names at once: ``{"a": "b", "b": "a"}`` swaps two tensors, and in ``{"a": "b", "b": "c"}`` the
live ``b`` is the saved ``c``. So chains and cycles are unambiguous; two live names for one saved tensor are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property

from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import InvalidArgument

IgnoreKeys = str | Collection[str] | Callable[[list[str]], Iterable[str]]
"""A choice of names to leave out: a glob, several, or a function from all names to those left out."""

OPTIMIZER = "optim"
"""Name of all of an optimizer."""

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
        self._exact = {*names, *globs}  # a name may have a bracket
        wild = [glob for glob in globs if _WILD.search(glob)]
        self._globs = [re.compile(translate(glob)) for glob in wild]
        # Such a glob that matches "optim/" matches everything that follows.
        self._open_ended = [re.compile(translate(glob)) for glob in wild if glob.endswith("*")]

    def __bool__(self) -> bool:
        return bool(self._exact or self._globs)

    def matches(self, name: str) -> bool:
        """Return whether the name is left out."""
        return any(path in self._exact or any(glob.match(path) for glob in self._globs) for path in lineage(name))

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
    return {path for name in names for path in lineage(name)}


def with_emptied_parents(chosen: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return ``chosen`` with all paths above it that keep none of ``names``."""
    chosen = {*chosen}
    kept = paths(name for name in names if chosen.isdisjoint(lineage(name)))
    return chosen | (paths(chosen) - kept)


def filtered_name(name: str) -> str:
    """Return the name that filters know for a value of this name."""
    part, *rest = name.split("/")
    if part == "optim":
        return PARAM_GROUPS if rest[:1] == ["param_groups"] else "/".join((part, *rest[:2]))
    return part if part == "scheduler" else "/".join((part, *rest[:1]))


def how_to_leave_out(names: Iterable[str]) -> str:
    """Return what to do about values that no other job can take."""
    filtered = dict.fromkeys(map(filtered_name, names))
    in_model = any(name.startswith("model/") for name in filtered)
    values = "; what is live stays, and open_checkpoint(...).model_state(rank) has that rank's" if in_model else ""
    left_out = f"leave out what differed with ignore_keys=[{first_of(filtered, repr)}]{values}"
    return f"Load on the ranks and meshes of the save, or {left_out}"


def lineage(name: str) -> Iterator[str]:
    """Yield the name, and the paths above it."""
    yield name
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


Numbers = Mapping[str, int]
"""Values of placeholders."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"(?:\{\w+\}|\d)+")


@dataclass(frozen=True)
class Pattern:
    """A name with placeholders for numbers: ``model.layers.{layer}.mlp.down_proj.weight``."""

    text: str

    @cached_property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._keys))

    def match(self, name: str) -> dict[str, int] | None:
        match_ = self._regex.fullmatch(name)
        return None if match_ is None else {key: int(value) for key, value in match_.groupdict().items()}

    def fill(self, numbers: Numbers) -> str:
        return self._template % tuple([numbers[key] for key in self._keys])

    @cached_property
    def _keys(self) -> list[str]:
        """The placeholders, each as often as it occurs."""
        return _PLACEHOLDER.findall(self.text)

    @cached_property
    def _template(self) -> str:
        """A template for ``%``, because half a million names are filled for one model."""
        return "%d".join(part.replace("%", "%%") for part in _PLACEHOLDER.split(self.text)[::2])

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        regex = ""
        for number, part in enumerate(_PLACEHOLDER.split(self.text)):  # every second one is a placeholder
            group = f"(?P={part})" if f"(?P<{part}>" in regex else rf"(?P<{part}>0|[1-9]\d{{0,17}})"
            regex += group if number % 2 else re.escape(part)
        return re.compile(regex)


class PatternIndex:
    """Patterns by what a name that they match is without its numbers: there are thousands of names, and few matches."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._patterns: dict[str, list[Pattern]] = {}
        for pattern in dict.fromkeys(patterns):
            self._patterns.setdefault(_NUMBER.sub("#", pattern.text), []).append(pattern)

    def matches(self, name: str) -> Iterator[tuple[Pattern, Numbers]]:
        """Yield the patterns that match ``name``, with the values of their placeholders."""
        for pattern in self._patterns.get(_NUMBER.sub("#", name), ()):
            numbers = pattern.match(name)
            if numbers is not None:
                yield pattern, numbers


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
