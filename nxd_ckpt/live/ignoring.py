"""What a load or a save leaves out, by names.

Names are those of the live side throughout: "model/<name>" of a parameter or buffer, "optim/<name>/<state>",
"optim/param_groups", "scheduler", "user_content" and "rank_content", of the last two also their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from nxd_ckpt.core.filtering import Ignored, paths, with_emptied_parents
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import InvalidArgument, KeyMismatch
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.random_state import is_random_state

IgnoreKeys = str | Collection[str] | Callable[[list[str]], Iterable[str]]

RANDOM_STATE = "rng"
"""What capture_random_state() gave, under whatever key of rank_content."""

Names = Iterable[str]


class Ignoring:
    """What ``ignore_keys`` says on one rank, and what is left out ``besides``, by name.

    Raises:
        InvalidArgument: what is no glob and no function.
    """

    def __init__(self, given: IgnoreKeys | None, besides: Sequence[str] = ()) -> None:
        self.globs = [] if given is None or callable(given) else _globs(given)
        self._choose = given if callable(given) else None
        self._besides = besides
        self._ignored = Ignored([*self.globs, *besides])
        self._aliases: Callable[[str], Sequence[str]] = lambda name: [name]
        self.choice: list[str] | None = None
        """Of what a callable was given, and of what it chose, digests: of names of the model and the optimizer."""

    def __bool__(self) -> bool:
        """Whether there are names to agree on."""
        return bool(self.globs or self._choose)

    @property
    def is_selective(self) -> bool:
        """Whether anything is left out."""
        return bool(self._ignored)

    def know_ties(self, model: ModelAdapter | None) -> None:
        """From here on, what is said of one of several tied names is said of all: they are one tensor."""
        if model is not None and (self or self.is_selective):
            self._aliases = model.aliases

    def know_apart(self, names: Collection[str]) -> None:
        """From here on, each of these tied ``names`` stands for itself: different tensors were saved under them."""
        aliases = self._aliases
        self._aliases = lambda name: [name] if name in names else aliases(name)

    def choose(self, names: Names) -> None:
        """Let a callable choose from ``names``. Raises KeyMismatch where it returns others."""
        if self._choose is None:
            return
        known = list(names)
        chosen = self._choose(list(known))
        if isinstance(chosen, str) or not isinstance(chosen, Iterable):
            raise InvalidArgument(
                f"ignore_keys= was called with a list of names and returned {chosen!r}: expected those to leave out"
            )
        chosen = list(chosen)
        among = paths(known)
        strange = [name for name in chosen if not isinstance(name, str) or name not in among]
        if strange:
            raise KeyMismatch(f"ignore_keys= returned names that it was not given: {listed(map(str, strange), known)}")
        self._ignored = Ignored(self._besides, with_emptied_parents(chosen, known))
        self.choice = [digest(sorted(filter(_is_state, names))) for names in (known, chosen)]

    def ignores(self, name: str) -> bool:
        """Whether the tensor, state or part with this name is left out."""
        return bool(self._ignored) and any(map(self._ignored.matches, self._names(name)))

    def ignores_model(self, name: str) -> bool:
        """The same for a name of the model."""
        return self.ignores(f"model/{name}")

    def covers(self, path: str) -> bool:
        """Whether all that could be below ``path`` is left out."""
        return bool(self._ignored) and any(map(self._ignored.covers, self._names(path)))

    def pruned(self, part: str, content: Any) -> Any:
        """User or rank content without the keys that are left out."""
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if not self.ignores_key(part, key, value)}

    def ignores_key(self, part: str, key: Any, value: Any) -> bool:
        """Whether the ``value`` under a key of user or rank content is left out."""
        return self.ignores(f"{part}/{key}") or (part == "rank_content" and self._is_rng(value))

    def _is_rng(self, value: Any) -> bool:
        return self.ignores(RANDOM_STATE) and is_random_state(value)

    def _names(self, name: str) -> Iterator[str]:
        part, slash, rest = name.partition("/")
        if part not in ("model", "optim") or not slash:
            yield name
            return
        parameter, slash, entry = rest.partition("/") if part == "optim" else (rest, "", "")
        yield from (f"{part}/{alias}{slash}{entry}" for alias in self._aliases(parameter))


def _globs(given: Any) -> list[str]:
    globs = [given] if isinstance(given, str) else given
    if not isinstance(globs, (list, tuple, set, frozenset)) or not all(isinstance(glob, str) for glob in globs):
        raise InvalidArgument(
            f"ignore_keys={given!r}: expected globs such as 'optim/*', or a function from a list of names to those "
            "that are left out"
        )
    return list(globs)


def _is_state(name: str) -> bool:
    return name.startswith(("model", "optim"))


def digest(value: object) -> str:
    """The same for equal values: what ranks compare."""
    return sha256(repr(value).encode()).hexdigest()
