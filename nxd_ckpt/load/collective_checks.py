"""Checks of names that all ranks make together: each may lack some that others hold.

All filter alike, every filter matches something on some rank, and no name is unknown to all.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0
from nxd_ckpt.core.filtering import unmatched
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import KeyMismatch, OptimizerMismatch, RanksDisagree
from nxd_ckpt.live.ignoring import digest
from nxd_ckpt.load.filters import Filter
from nxd_ckpt.load.options import LoadOptions, LoadRequest

logger = logging.getLogger("nxd_ckpt")

_LONG = 200
"""Characters of an option up to which ranks exchange it unabridged."""

_NOTHING = ("None", "''", "[]", "{}")


class Unmatched:
    """Parts of a filter that match nothing on this rank. `complain` reports those that match on none.

    ``live`` are the names that this rank holds, ``saved`` those that it read in the tag, before they were renamed;
    ``names`` are all that a glob may match.
    """

    def __init__(
        self, filtered: Filter, live: Collection[str] | None, saved: Collection[str], names: Collection[str]
    ) -> None:
        mapping, prefix = filtered.renaming.key_mapping, filtered.renaming.prefix
        self._live, self._saved, self._names = live, saved, names
        self._prefix, self._choice = prefix, filtered.choice
        goes_by_prefix = bool(prefix) and (live is None or any(name not in mapping for name in live))
        self.parts = {
            "globs": unmatched(filtered.globs, names),
            "live": [] if live is None else [name for name in mapping if name not in live],
            "saved": [name for name in mapping.values() if name not in saved],
            "prefix": [prefix] if goes_by_prefix and not any(name.startswith(prefix) for name in saved) else [],
        }

    def complain(self, request: LoadRequest) -> None:
        """Raise KeyMismatch on all ranks, or warn without ``strict``.

        Raises RanksDisagree if a callable chose differently among equal names.
        """
        # Ranks of one pipeline stage have the same tensors: one of them reports. Rank content is each rank's own.
        agreement, topology = request.agreement, request.topology
        reports = topology.dp_rank == topology.tp_rank == 0 or agreement.world_size == 1
        parts = self.parts if reports else {"globs": self.parts["globs"]}
        gathered = agreement.gather([self._choice, parts])

        def decide() -> None:
            choices, parts_of_ranks = zip(*(gathered or [[self._choice, self.parts]]), strict=True)
            _refuse_different(choices)
            if request.acts_for_one_stage:
                return
            nowhere = {
                kind: _in_all(own, [parts[kind] for parts in parts_of_ranks if kind in parts])
                for kind, own in self.parts.items()
            }
            problems = list(self._problems(nowhere))
            if problems and request.options.strict:
                raise KeyMismatch("; ".join(problems) + "; use strict=False to ignore this")
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


def refuse_unmatched(request: LoadRequest, matches: bool, problem: str | None) -> None:
    """Raise KeyMismatch, with a rank's ``problem``, if there is one and no rank ``matches``.

    Without strict too, a load that matches nothing is of another model.
    """
    gathered = request.agreement.gather([matches, problem])

    def decide() -> None:
        matches_of_ranks, problems = zip(*(gathered or [[matches, problem]]), strict=True)
        if any(problems) and not any(matches_of_ranks) and not request.acts_for_one_stage:
            raise KeyMismatch(
                f"no name in the checkpoint is one of the model: {next(filter(None, problems))}. Is it this model's? "
                "If its names differ in the checkpoint, pass key_mapping= or prefix="
            )

    decided_by_rank0(request.agreement, decide)


def refuse_unknown_names(agreement: Agreement, unknown_names: Sequence[str], where: str) -> None:
    """Raise on all ranks if a global name is unknown to each. Digests are exchanged first, lists if needed. Collective.

    Raises:
        KeyMismatch: a name of the model.
        OptimizerMismatch: a parameter that the optimizer has state for.
    """
    digests = agreement.gather(sha256("\n".join(unknown_names).encode()).hexdigest() if unknown_names else None)
    reporters = decided_by_rank0(agreement, lambda: _first_ranks(digests or []))
    if not reporters:
        return
    lists = agreement.gather(unknown_names if agreement.rank in reporters else None)

    def decide() -> None:
        common = set.intersection(*(set(names) for names in lists or () if names is not None))
        model = sorted(name for name in common if name.startswith("model/"))
        if model:
            raise KeyMismatch(
                "the names in the checkpoint and in the model differ; unexpected in the checkpoint: "
                f"{listed(model, ())}; load with strict=False to take the names that both have"
            )
        if common:
            raise OptimizerMismatch(
                f"optimizer: {where} has state for {listed(sorted(common), ())}, which no rank's optimizer holds; "
                "build param_groups as when it was saved (with the same frozen parameters)"
            )

    decided_by_rank0(agreement, decide)


def _refuse_different(choices: Iterable[Sequence[str] | None]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, choice in enumerate(choices):
        if choice is not None:
            first_rank, chosen = first.setdefault(choice[0], (rank, choice[1]))
            if chosen != choice[1]:
                raise RanksDisagree(
                    f"ignore_keys=: rank {first_rank} and rank {rank} left out different ones of the same names; "
                    "all ranks must filter alike"
                )


def _in_all(items: Sequence[str], lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the ``items`` that are in each of ``lists``."""
    common = set(items).intersection(*lists)
    return [item for item in dict.fromkeys(items) if item in common]


def _first_ranks(digests: Sequence[str | None]) -> list[int]:
    """Return one rank for each distinct list.

    None if a rank has no unknown names, because then none is unknown to all.
    """
    return [] if None in digests else [digests.index(digest) for digest in dict.fromkeys(digests)]


def filter_summary(options: LoadOptions) -> dict[str, str]:
    """Return the options that all ranks must pass alike, as text."""
    options_to_compare = {
        "key_mapping": options.key_mapping,
        "prefix": options.prefix,
        "ignore_keys": "a callable" if callable(options.ignore_keys) else options.ignore_keys,
        "weights_only": options.loads_weights_only,
        "strict_model_weights": options.strict_model_weights,
        "fallback": options.fallback or None,
    }
    shown = {
        name: _value_text(value) for name, value in options_to_compare.items()
    }  # of whatever type: nothing is validated yet
    return {name: text for name, text in shown.items() if text not in _NOTHING}


def _value_text(value: Any) -> str:
    """Return equal text for equal values; for a long one its beginning and a digest."""
    value = dict(sorted(value.items(), key=repr)) if isinstance(value, Mapping) else value
    text = repr(sorted(value, key=repr) if isinstance(value, (list, tuple, set, frozenset)) else value)
    return text if len(text) < _LONG else f"{text[:_LONG]}... ({digest(text)[:8]})"
