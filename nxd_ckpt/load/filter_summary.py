"""Whether all ranks filter alike, and which filters match nothing on any rank."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0
from nxd_ckpt.core.filtering import unmatched
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import KeyMismatch, RanksDisagree
from nxd_ckpt.live.ignoring import digest
from nxd_ckpt.load.filters import Filter
from nxd_ckpt.load.options import LoadOptions

logger = logging.getLogger("nxd_ckpt")

_LONG = 200
"""Characters of an option that ranks tell each other as they are."""

_NOTHING = ("None", "''", "[]", "{}")


class Unmatched:
    """The parts of a filter that match nothing on this rank. :meth:`complain` tells of those that match on none.

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
        # Ranks of one pipeline stage know the same tensors: one of them tells. Rank content is each rank's own.
        speaks = topology.dp_rank == topology.tp_rank == 0 or agreement.world_size == 1
        found = self.found if speaks else {"globs": self.found["globs"]}
        words = agreement.gather([self._choice, found])

        def decide() -> None:
            choices, said = zip(*(words or [[self._choice, self.found]]), strict=True)
            _refuse_different(choices)
            if agreement.world_size < topology.world_size and topology.pp > 1:
                return  # one process plays one of several stages: what matches nothing here may match on another
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


def refuse_unmatched(agreement: Agreement, topology: Topology, matches: bool, problem: str | None) -> None:
    """Raise KeyMismatch, with a rank's ``problem``, if there is one and no rank ``matches``: without strict too, a load
    that finds nothing is of another model."""
    words = agreement.gather([matches, problem])

    def decide() -> None:
        found, problems = zip(*(words or [[matches, problem]]), strict=True)
        one_of_several_stages = agreement.world_size < topology.world_size and topology.pp > 1
        if any(problems) and not any(found) and not one_of_several_stages:
            raise KeyMismatch(
                f"no name in the checkpoint is one of the model: {next(filter(None, problems))}. Is it this model's? "
                "key_mapping= and prefix= say what its tensors are called in the checkpoint"
            )

    decided_by_rank0(agreement, decide)


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


def _in_all(items: Sequence[str], words: Sequence[Sequence[str]]) -> list[str]:
    """Those of ``items`` that are in each of ``words``."""
    common = set(items).intersection(*words)
    return [item for item in dict.fromkeys(items) if item in common]


def filter_summary(options: LoadOptions) -> dict[str, str]:
    """What all ranks must give alike, as text."""
    given = {
        "key_mapping": options.key_mapping,
        "prefix": options.prefix,
        "ignore_keys": "a callable" if callable(options.ignore_keys) else options.ignore_keys,
        "load_weights_only": options.load_weights_only,
        "strict_model_weights": options.strict_model_weights,
        "fallback": options.fallback or None,
    }
    shown = {name: _value_text(value) for name, value in given.items()}  # of whatever type: nothing is validated yet
    return {name: text for name, text in shown.items() if text not in _NOTHING}


def _value_text(value: Any) -> str:
    """The same text for equal values; of a long one its beginning and a digest."""
    value = dict(sorted(value.items(), key=repr)) if isinstance(value, Mapping) else value
    text = repr(sorted(value, key=repr) if isinstance(value, (list, tuple, set, frozenset)) else value)
    return text if len(text) < _LONG else f"{text[:_LONG]}... ({digest(text)[:8]})"
