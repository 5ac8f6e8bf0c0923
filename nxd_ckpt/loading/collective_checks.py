"""Checks of names that all ranks make together: each may lack some that others hold.

All filter alike, every filter matches something on some rank, and the names of the ranks are those of the tag.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0
from nxd_ckpt.core.name_patterns import NOT_LIVE, unmatched
from nxd_ckpt.core.suggestions import first_of, left_out, listed, prefix_advice, renaming_advice
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import KeyMismatch, OptimizerMismatch, RanksDisagree
from nxd_ckpt.hugging_face.mappings import family_advice
from nxd_ckpt.live.ignoring import digest
from nxd_ckpt.loading.filters import Filter
from nxd_ckpt.loading.options import LoadOptions, LoadRequest

_LONG = 200
"""Characters of an option up to which ranks exchange it unabridged."""

_LOOSE = "load with strict=False to take the names that both have"

_NOTHING = ("None", "''", "[]", "{}")


class Unmatched:
    """Parts of a filter that match nothing on this rank. `complain` reports those that match on none.

    ``live`` are the names that this rank holds, ``saved`` those that it read in the tag, before they were renamed;
    ``names`` are all that a glob may match. If it is ``apart``, no other rank may have the same names.
    """

    def __init__(
        self,
        filtered: Filter,
        live: Collection[str] | None,
        saved: Collection[str],
        names: Collection[str],
        *,
        apart: bool,
    ) -> None:
        mapping = filtered.renaming.key_mapping
        prefix = filtered.renaming.prefix
        self._apart = apart
        self._live = live
        self._saved = saved
        self._names = names
        self._prefix = prefix
        self._choice = filtered.choice
        goes_by_prefix = bool(prefix) and (live is None or any(name not in mapping for name in live))
        self.parts: dict[str, list[str]] = {
            "globs": unmatched(filtered.globs, names),
            "live": [] if live is None else [name for name in mapping if name not in live],
            "saved": [name for name in mapping.values() if name not in saved],
            "prefix": [prefix] if goes_by_prefix and not any(name.startswith(prefix) for name in saved) else [],
        }

    def complain(self, request: LoadRequest) -> None:
        """Raise KeyMismatch on all ranks, or warn without ``strict``.

        Raises RanksDisagree if a callable chose differently among equal names.
        """
        # Ranks of one pipeline stage mostly have the same tensors: one reports. Rank content is each rank's own.
        agreement = request.agreement
        topology = request.topology
        reports = self._apart or topology.dp_rank == topology.tp_rank == 0 or agreement.world_size == 1
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


def _of_another_model(problem: str) -> KeyMismatch:
    return KeyMismatch(
        f"no name in the checkpoint is one of the model: {problem}. Is it this model's? If its names differ in the "
        "checkpoint, pass key_mapping= or prefix="
    )


@dataclass(frozen=True)
class ComparedNames:
    """Names of the model, or of the optimizer's parameters, on one rank and in the tag.

    Attributes:
        present: names that this rank has or takes from the tag.
        missing: those of them that the tag should have, and has not.
        unknown: names in the tag that this rank lacks; another may hold them.
        matches: True if any name is on both sides.
    """

    present: Sequence[str] = ()
    missing: Sequence[str] = ()
    unknown: Sequence[str] = ()
    matches: bool = False


class Differences(NamedTuple):
    """Names of all ranks that are missing from the tag, and names in it that no rank holds."""

    missing: list[str]
    unexpected: list[str]
    matches: bool


def _differences(agreement: Agreement, names: ComparedNames) -> Differences:
    """Return the differences between all ranks and the tag. Lists are exchanged only if there may be some. Collective.

    Of ranks with the same names one speaks for all.
    """
    differs = bool(names.missing or names.unknown)
    digest = sha256(repr((names.present, names.missing, names.unknown)).encode()).hexdigest()
    gathered = agreement.gather([differs, digest, names.matches])

    def choose() -> tuple[list[int], bool]:
        differ, digests, matches = zip(*(gathered or [[differs, digest, names.matches]]), strict=True)
        first_ranks = [digests.index(own) for own in dict.fromkeys(digests)]
        return (first_ranks if any(differ) else []), any(matches)

    speakers, matches = decided_by_rank0(agreement, choose)
    if not speakers:
        return Differences([], [], matches)
    own = [names.present, names.missing, names.unknown]
    lists = agreement.gather(own if agreement.rank in speakers else [[], [], []])

    def combine() -> list[list[str]]:
        present, missing, unknown = (dict.fromkeys(chain(*part)) for part in zip(*(lists or [own]), strict=True))
        return [list(missing), [name for name in unknown if name not in present]]

    all_missing, unexpected = decided_by_rank0(agreement, combine)
    return Differences(all_missing, unexpected, matches)


def judge_model(request: LoadRequest, names: ComparedNames, where: str) -> tuple[Sequence[str], Sequence[str]]:
    """Raise KeyMismatch under ``strict`` if the model's names are not those of the tag; without it warn. Collective.

    Raises it also if no name is on both sides. Returns this rank's missing names, and the unexpected ones.
    """
    missing, unexpected, matches = _differences(request.agreement, names)
    if not (missing or unexpected):
        return (), ()
    prefixed = prefix_advice(missing, unexpected, not matches) or family_advice(missing, unexpected)
    advice = list(filter(None, [prefixed or renaming_advice(missing, unexpected)]))
    if request.options.strict_names:
        lines = ["the names in the checkpoint and in the model differ"]
        lines += [f"missing from the checkpoint: {listed(missing, unexpected)}"] if missing else []
        lines += [f"unexpected in the checkpoint: {listed(unexpected, missing)}"] if unexpected else []
        raise KeyMismatch("; ".join([*lines, *advice, *([] if prefixed else [_loose(missing)])]))
    if missing and not matches and not request.acts_for_one_stage:
        raise _of_another_model(
            f"{where} holds {listed(map(_as_saved, unexpected), missing)}; the model has {listed(missing, unexpected)}"
        )
    if request.reports_progress:
        lines = [f"left as they are: {first_of(missing, repr)}"] if missing else []
        lines += [f"not in the model: {first_of(unexpected, repr)}"] if unexpected else []
        logger.warning("loading with strict=False: %s", "; ".join([*lines, *advice]))
    return names.missing, unexpected


def _loose(missing: Collection[str]) -> str:
    return _LOOSE + (f"; tensors of the model that would keep their initial values: {len(missing)}" if missing else "")


def _as_saved(name: str) -> str:
    return name.removeprefix(NOT_LIVE)


def judge_optimizer(request: LoadRequest, names: ComparedNames, where: str) -> None:
    """Raise OptimizerMismatch under ``strict`` if the tag has state that no rank's optimizer takes. Collective.

    Without it warn, also of parameters that start fresh.
    """
    missing, unexpected, _ = _differences(request.agreement, names)
    if unexpected and request.options.strict:
        raise OptimizerMismatch(
            f"optimizer: {where} has state for {first_of(unexpected)} ({len(unexpected)} parameters), which the live "
            "optimizer does not hold; build param_groups as when it was saved (with the same frozen parameters). To go "
            f"on with other parameters, leave that state out with {left_out(unexpected)}"
        )
    if missing and request.reports_progress:
        logger.warning(
            "loading with strict=False: %s has no optimizer state of %s: they start fresh, with the options of their "
            "live param groups",
            where,
            first_of(missing),
        )
    if unexpected and request.reports_progress:
        logger.warning(
            "loading with strict=False: the optimizer state of %s is left out, as the live optimizer does not hold "
            "them",
            first_of(unexpected),
        )


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


def filter_summary(options: LoadOptions) -> dict[str, str]:
    """Return the options that all ranks must pass alike, as text."""
    options_to_compare = {
        "key_mapping": options.key_mapping,
        "prefix": options.prefix,
        "ignore_keys": "a callable" if callable(options.ignore_keys) else options.ignore_keys,
        "weights_only": options.loads_weights_only,
        "strict_model_weights": options.strict_model_weights,
        "fallback": options.fallback or None,
        "tag_values": options.tag_values,
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
