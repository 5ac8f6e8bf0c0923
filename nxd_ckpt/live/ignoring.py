"""Names that a load or a save leaves out.

All names are live ones: "model/<name>" of a parameter or buffer, "optim/<name>/<state>", "optim/param_groups",
"scheduler", "user_content" and "rank_content", and the keys of these two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from nxd_ckpt.core.name_patterns import Ignored, IgnoreKeys, paths, with_emptied_parents
from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.errors import InvalidArgument, KeyMismatch
from nxd_ckpt.live.data_position import is_random_state
from nxd_ckpt.live.model import ModelAdapter

RANDOM_STATE = "rng"
"""Name of the result of capture_random_state(), under any key of rank_content."""

Names = Iterable[str]


class Ignoring:
    """The names that ``ignore_keys`` leaves out on one rank, and those left out ``besides``.

    Raises:
        InvalidArgument: ``ignore_keys`` is neither globs nor a function.
    """

    def __init__(self, ignore_keys: IgnoreKeys | None, besides: Sequence[str] = ()) -> None:
        self.globs: list[str] = [] if ignore_keys is None or callable(ignore_keys) else _globs(ignore_keys)
        self._choose = ignore_keys if callable(ignore_keys) else None
        self._besides = besides
        self._ignored = Ignored([*self.globs, *besides])
        self._aliases: Callable[[str], Sequence[str]] = lambda name: [name]
        self.choice: list[str] | None = None
        """Digests of the names of model and optimizer that a callable was called with, and of those it chose."""

    def __bool__(self) -> bool:
        """Return whether ranks have to agree on names."""
        return bool(self.globs or self._choose)

    @property
    def is_selective(self) -> bool:
        """True if anything is left out."""
        return bool(self._ignored)

    def know_ties(self, model: ModelAdapter | None) -> None:
        """Treat all names of a tied tensor alike from now on: they are one tensor."""
        if model is not None and (self or self.is_selective):
            self._aliases = model.aliases

    def know_apart(self, names: Collection[str]) -> None:
        """Treat each of these tied ``names`` on its own from now on: different tensors were saved under them."""
        aliases = self._aliases
        self._aliases = lambda name: [name] if name in names else aliases(name)

    def choose(self, names: Names) -> None:
        """Let a callable choose from ``names``. Raises KeyMismatch if it returns others.

        A glob that is one of them means that name alone.
        """
        if self._choose is None:
            literal = paths(names).intersection(self.globs)
            self._ignored = Ignored([*{*self.globs} - literal, *self._besides], literal)
            return
        offered = list(names)
        try:
            chosen = self._choose(list(offered))
        except Exception as error:  # such as of Composer's functions, which change a state dict
            raise InvalidArgument(
                f"ignore_keys= raised {type(error).__name__}: {error}. It is called with a list of names such as "
                f"{first_of(map(repr, offered[:1])) or repr('model/weight')}, not with the state, and returns those to "
                "leave out"
            ) from error
        if isinstance(chosen, str) or not isinstance(chosen, Iterable):
            raise InvalidArgument(
                f"ignore_keys= was called with a list of names and returned {chosen!r}: expected the names to leave out"
            )
        chosen = list(chosen)
        parts = paths(offered)
        unknown = [name for name in chosen if not isinstance(name, str) or name not in parts]
        if unknown:
            raise KeyMismatch(
                f"ignore_keys= returned names that are not in its list: {listed(map(str, unknown), offered)}"
            )
        self._ignored = Ignored(self._besides, with_emptied_parents(chosen, offered))
        self.choice = [digest(sorted(filter(_is_state, names))) for names in (offered, chosen)]

    def ignores(self, name: str) -> bool:
        """Return whether the tensor, state or part with this name is left out."""
        return bool(self._ignored) and any(map(self._ignored.matches, self._names(name)))

    def ignores_model(self, name: str) -> bool:
        """Return whether the model's tensor with this name is left out."""
        return self.ignores(f"model/{name}")

    def of_model(self, names: Collection[str]) -> Collection[str]:
        """Return those of the model's ``names`` that are not left out."""
        return [name for name in names if not self.ignores_model(name)] if self.is_selective else names

    def covers(self, path: str) -> bool:
        """Return whether everything that could be below ``path`` is left out."""
        return bool(self._ignored) and any(map(self._ignored.covers, self._names(path)))

    def pruned(self, part: str, content: Any) -> Any:
        """Return user or rank content without the keys that are left out."""
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if not self.ignores_key(part, key, value)}

    def ignores_key(self, part: str, key: Any, value: Any) -> bool:
        """Return whether the ``value`` under a key of user or rank content is left out."""
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


def _globs(ignore_keys: Any) -> list[str]:
    globs = [ignore_keys] if isinstance(ignore_keys, str) else ignore_keys
    if not isinstance(globs, (list, tuple, set, frozenset)) or not all(isinstance(glob, str) for glob in globs):
        raise InvalidArgument(
            f"ignore_keys={ignore_keys!r}: expected globs such as 'optim/*', or a function that gets a list of names "
            "and returns those to leave out"
        )
    return list(globs)


def _is_state(name: str) -> bool:
    return name.startswith(("model", "optim"))


def digest(value: object) -> str:
    """Return a text that is equal for equal values, for ranks to compare."""
    return sha256(repr(value).encode()).hexdigest()
