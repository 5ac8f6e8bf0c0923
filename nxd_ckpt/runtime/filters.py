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
from nxd_ckpt.core.filtering import Ignored, paths, unmatched, with_wholes
from nxd_ckpt.core.renaming import Renaming
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument, KeyMismatch, RanksDisagree
from nxd_ckpt.runtime.agreement import Agreement, decided_by_rank0
from nxd_ckpt.runtime.load_options import LoadOptions

logger = logging.getLogger("nxd_ckpt")

RANDOM_STATE = "rng"
"""What capture_random_state() gave, under whatever key of rank_content."""

_BESIDE_THE_MODEL = ("optim", "scheduler", "user_content", "rank_content")

_LONG = 200
"""Characters of an option that ranks tell each other as they are."""

_NOTHING = ("None", "''", "[]", "{}")

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
        return bool(self.renaming or self.globs or self._choose)

    @property
    def is_selective(self) -> bool:
        """Whether anything is left out."""
        return bool(self._ignored)

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
        self.choice = [_digest(sorted(filter(_is_state, names))) for names in (known, chosen)]

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


class Unmatched:
    """What of a filter this rank has nothing for. Of what no rank has anything for, :meth:`complain` says so.

    ``live`` are the names that this rank holds, ``saved`` those that it saw in the tag, before they were renamed;
    ``names`` are all that a glob may stand for.
    """

    def __init__(
        self, filtered: Filter, live: Collection[str] | None, saved: Collection[str], names: Collection[str]
    ) -> None:
        mapping, prefix = filtered.renaming.key_mapping, filtered.renaming.prefix
        self._live, self._saved, self._names = live, saved, names
        self._prefix, self._choice = prefix, filtered.choice
        goes_by_prefix = bool(prefix) and (live is None or any(name not in mapping for name in live))
        self.found = {
            "globs": unmatched(filtered.globs, names),
            "live": [] if live is None else [name for name in mapping if name not in live],
            "saved": [name for name in mapping.values() if name not in saved],
            "prefix": [prefix] if goes_by_prefix and not any(name.startswith(prefix) for name in saved) else [],
        }

    def complain(self, agreement: Agreement, topology: Topology, strict: bool) -> None:
        """Raise KeyMismatch on all ranks, or warn without ``strict``.

        Raises RanksDisagree where a callable chose differently among the same names.
        """
        # Ranks of one pipeline stage know the same tensors: one of each says them. Rank content is each rank's own.
        speaks = topology.dp_rank == topology.tp_rank == 0 or agreement.world_size == 1
        found = self.found if speaks else {"globs": self.found["globs"]}
        words = agreement.gather([self._choice, found])

        def decide() -> None:
            choices, said = zip(*(words or [[self._choice, self.found]]), strict=True)
            _refuse_different(choices)
            if agreement.world_size < topology.world_size and topology.pp > 1:
                return  # one process plays one stage of several, and what it has nothing for the others may have
            nowhere = {
                kind: _in_all(found, [word[kind] for word in said if kind in word])
                for kind, found in self.found.items()
            }
            problems = list(self._problems(nowhere))
            if problems and strict:
                raise KeyMismatch("; ".join(problems) + "; strict=False loads all the same")
            for problem in problems:
                logger.warning("loading with strict=False: %s", problem)

        decided_by_rank0(agreement, decide)

    def _problems(self, nowhere: Mapping[str, Sequence[str]]) -> Iterator[str]:
        if nowhere["globs"]:
            yield f"ignore_keys= matches nothing with {listed(nowhere['globs'], self._names)}"
        if nowhere["live"]:
            yield f"key_mapping= names no live tensor with {listed(nowhere['live'], self._live or ())}"
        if nowhere["saved"]:
            yield f"key_mapping= names nothing in the checkpoint with {listed(nowhere['saved'], self._saved)}"
        if nowhere["prefix"]:
            shown = ", ".join(map(repr, sorted(self._saved)[:3]))
            yield f"prefix={self._prefix!r}: no name in the checkpoint begins with it; there are {shown or 'none'}"


def _refuse_different(choices: Iterable[Sequence[str] | None]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, choice in enumerate(choices):
        if choice is not None:
            other, chosen = first.setdefault(choice[0], (rank, choice[1]))
            if chosen != choice[1]:
                raise RanksDisagree(
                    f"ignore_keys=: of the same names rank {other} and rank {rank} chose different ones to leave out; "
                    "all ranks must filter alike"
                )


def _is_state(name: str) -> bool:
    return name.startswith(("model", "optim"))


def _digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()


def _in_all(items: Sequence[str], words: Sequence[Sequence[str]]) -> list[str]:
    """Those of ``items`` that are in each of ``words``."""
    common = set(items).intersection(*words)
    return [item for item in dict.fromkeys(items) if item in common]


def word_of(options: LoadOptions) -> dict[str, str]:
    """What all ranks must give alike, as text."""
    given = {
        "key_mapping": options.key_mapping,
        "prefix": options.prefix,
        "ignore_keys": "a callable" if callable(options.ignore_keys) else options.ignore_keys,
        "load_weights_only": options.load_weights_only,
        "strict_model_weights": options.strict_model_weights,
    }
    shown = {name: _shown(value) for name, value in given.items()}  # of whatever type: nothing is validated yet
    return {name: text for name, text in shown.items() if text not in _NOTHING}


def _shown(value: Any) -> str:
    """The same text for equal values; of a long one its beginning and a digest."""
    value = dict(sorted(value.items(), key=repr)) if isinstance(value, Mapping) else value
    text = repr(sorted(value, key=repr) if isinstance(value, (list, tuple, set, frozenset)) else value)
    return text if len(text) < _LONG else f"{text[:_LONG]}... ({_digest(text)[:8]})"


def _globs(given: Any) -> list[str]:
    globs = [given] if isinstance(given, str) else given
    if not isinstance(globs, (list, tuple, set, frozenset)) or not all(isinstance(glob, str) for glob in globs):
        raise InvalidArgument(
            f"ignore_keys={given!r}: expected globs such as 'optim/*', or a function from a list of names to those "
            "that are left out"
        )
    return list(globs)
