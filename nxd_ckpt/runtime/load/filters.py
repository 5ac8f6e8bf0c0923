"""What a load leaves out, and under which names it looks for the rest.

Names are those of the live side throughout: "model/<name>" of a parameter or buffer, "optim/<name>/<state>",
"optim/param_groups", "scheduler", "user_content" and "rank_content", of the last two also their keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from nxd_ckpt.adapters.model import ModelAdapter
from nxd_ckpt.adapters.random_state import is_random_state
from nxd_ckpt.adapters.state import MASTER_WEIGHTS
from nxd_ckpt.core.filtering import Ignored, paths, with_wholes
from nxd_ckpt.core.renaming import Renaming
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import InvalidArgument, KeyMismatch
from nxd_ckpt.runtime.load.options import LoadOptions

logger = logging.getLogger("nxd_ckpt")

RANDOM_STATE = "rng"
"""What capture_random_state() gave, under whatever key of rank_content."""

_BESIDE_THE_MODEL = ("optim", "scheduler", "user_content", "rank_content")

Names = Iterable[str]


class Filter:
    """The filters of one load on one rank. Without any, it ignores nothing and every name stays.

    Raises:
        InvalidArgument: options that are no filters, or that take one saved tensor for two live ones.
    """

    def __init__(self, options: LoadOptions) -> None:
        given = options.ignore_keys
        self.renaming = Renaming(options.key_mapping or {}, options.prefix)
        self.renaming.validate()
        self._is_given = bool(self.renaming)
        self.globs = [] if given is None or callable(given) else _globs(given)
        self._choose = given if callable(given) else None
        self._weights_only = _BESIDE_THE_MODEL if options.load_weights_only else ()
        self._ignored = Ignored([*self.globs, *self._weights_only])
        self._aliases: Callable[[str], Sequence[str]] = lambda name: [name]
        self._has_shards = False
        self.choice: list[str] | None = None
        """Of what a callable was given, and of what it chose, digests: of names of the model and the optimizer."""

    def __bool__(self) -> bool:
        """Whether there are names to agree on."""
        return bool(self._is_given or self.globs or self._choose)

    @property
    def is_selective(self) -> bool:
        """Whether anything is left out."""
        return bool(self._ignored)

    def know_base_names(self, live_to_base: Mapping[str, str], saved: Collection[str]) -> None:
        """From here on, those of the live names that a tag with these ``saved`` names lacks are looked for under their
        base names, if it has those; what ``key_mapping`` says counts more."""
        mapping, prefix = self.renaming.key_mapping, self.renaming.prefix
        found = {
            live: prefix + base
            for live, base in live_to_base.items()
            if live not in mapping and prefix + live not in saved and prefix + base in saved
        }
        if found:
            self.renaming = Renaming({**found, **mapping}, prefix)

    def know_ties(self, model: ModelAdapter | None) -> None:
        """From here on, what is said of one of several tied names is said of all: they are one tensor."""
        if model is not None and (self or self.is_selective):
            self._aliases = model.aliases

    def know_shards(self) -> None:
        """From here on, a weight that is left out is so with its ZeRO-1 shard: that is a copy of it, and the next step
        would put what was loaded there into the weight."""
        self._has_shards = True

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
        self._ignored = Ignored(self._weights_only, with_wholes(chosen, known))
        self.choice = [digest(sorted(filter(_is_state, names))) for names in (known, chosen)]

    def renamed(self, options: LoadOptions) -> LoadOptions:
        """The options with live names where they tell saved ones."""
        names = options.saved_param_names
        if names is None:
            return options
        live = [[[self.renaming.live(name) for name in group] for group in stage] for stage in names]
        return replace(options, saved_param_names=live)

    def refuse_collisions(self, names: Names) -> None:
        """Raise InvalidArgument if two of the live ``names`` would be loaded from one saved tensor."""
        wanted = (name for name in names if not self.ignores_model(name))
        self.renaming.refuse_collisions(wanted, self._aliases)

    def ignores(self, name: str) -> bool:
        """Whether the tensor, state or part with this name is left out."""
        if not self._ignored:
            return False
        return any(map(self._ignored.matches, self._names(name))) or self._ignores_weight_of(name)

    def ignores_model(self, name: str) -> bool:
        """The same for a name of the model."""
        return self.ignores(f"model/{name}")

    def covers(self, path: str) -> bool:
        """Whether all that could be below ``path`` is left out."""
        return bool(self._ignored) and any(map(self._ignored.covers, self._names(path)))

    def keeps(self, loaded: Collection[str]) -> Callable[[str], bool]:
        """What the optimizer is to keep, when the model's names ``loaded`` have been.

        A ZeRO-1 shard that is left out follows the weights that it is a copy of.
        """
        followed = {f"optim/{alias}/{MASTER_WEIGHTS}" for name in loaded for alias in self._aliases(name)}

        def follows(name: str) -> bool:
            # Of what weight a shard without a name is, nobody knows: it is cut anew if any was loaded.
            unnamed = name.startswith("optim/#") and name.endswith(f"/{MASTER_WEIGHTS}")
            return name in followed or (unnamed and bool(followed))

        return lambda name: self.ignores(name) and not follows(name)

    def pruned(self, part: str, content: Any) -> Any:
        """User or rank content without the keys that are left out."""
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if not self._ignores_key(part, key, value)}

    def kept(self, part: str, content: Mapping[Any, Any], saved: Mapping[Any, Any]) -> dict[Any, Any]:
        """What stays of live content: under keys that are left out by their names, or by what was saved there."""
        return {
            key: value
            for key, value in content.items()
            if self._ignores_key(part, key, value) or (key in saved and self._ignores_key(part, key, saved[key]))
        }

    def _ignores_key(self, part: str, key: Any, value: Any) -> bool:
        return self.ignores(f"{part}/{key}") or (part == "rank_content" and self._is_rng(value))

    def _is_rng(self, value: Any) -> bool:
        return self.ignores(RANDOM_STATE) and is_random_state(value)

    def _ignores_weight_of(self, name: str) -> bool:
        parameter = name.removeprefix("optim/").removesuffix(f"/{MASTER_WEIGHTS}")
        is_shard = self._has_shards and name == f"optim/{parameter}/{MASTER_WEIGHTS}"
        return is_shard and self.ignores_model(parameter)

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
