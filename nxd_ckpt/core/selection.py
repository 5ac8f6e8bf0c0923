"""Which NxD tensors a Hugging Face model becomes: of rules that are alternatives, the one that is asked for. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby

from nxd_ckpt.core.mapping import Match, ModelMapping, Rule
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.errors import InvalidArgument, KeyMismatch

_SHOWN = 8


def selected(mapping: ModelMapping, names: Iterable[str], sizes: Sizes, variants: Collection[str] = ()) -> list[Match]:
    """The NxD tensors of a model with the Hugging Face tensors ``names``, in the model's order.

    ``variants`` are the options that were asked for. Tensors that files leave out because they are tied count as there.

    Raises:
        InvalidArgument: the mapping knows no such variant.
        KeyMismatch: no rule maps a name, or tensors are missing that the model must have.
    """
    rules = _alternatives_settled(mapping, variants)
    held = set(names)
    _refuse_unknown(mapping, rules, held)
    if mapping.are_tied(sizes):
        held |= {name for name, other in mapping.tied.items() if other in held}
    found = list(_matches(rules, held, sizes))
    needed = [name for match in found for name in match.rule.names(match.numbers, sizes)]
    missing = [name for name in dict.fromkeys([*mapping.required(sizes), *needed]) if name not in held]
    if missing:
        raise KeyMismatch(
            f"tensors are missing: {_shown(missing)}, which every model of mapping {mapping.name!r} has with this "
            "config.json; is the directory complete, and this its model's config.json?"
        )
    return found


def _alternatives_settled(mapping: ModelMapping, variants: Collection[str]) -> list[Rule]:
    """Of the rules that map the same Hugging Face tensors, one: asked for, else the first that need not be."""
    absent = set(variants) - {rule.variant for rule in mapping.rules}
    if absent:
        raise InvalidArgument(f"mapping {mapping.name!r} has no rules for {', '.join(sorted(absent))}: leave that out")
    taken: set[str] = set()
    chosen: set[Rule] = set()
    for rule in sorted(mapping.rules, key=lambda rule: rule.variant is None):
        members = {member.name.text for member in rule.members}
        if rule.variant in (None, *variants) and not members & taken:
            chosen.add(rule)
            taken |= members
    return [rule for rule in mapping.rules if rule in chosen]


def _refuse_unknown(mapping: ModelMapping, rules: Iterable[Rule], names: Collection[str]) -> None:
    patterns = [member.name for rule in rules for member in rule.members]
    known = [*patterns, *mapping.ignored]
    unknown = sorted(name for name in names if not any(pattern.match(name) is not None for pattern in known))
    if unknown:
        texts = [pattern.text for pattern in patterns]
        close = difflib.get_close_matches(re.sub(r"\b\d+\b", "{layer}", unknown[0]), texts, n=2)
        raise KeyMismatch(
            f"mapping {mapping.name!r} has no rule for {_shown(unknown)}; the closest to the first: "
            f"{', '.join(close) or 'none'}. Choose another mapping, or add rules to a mapping file of your own"
        )


def _matches(rules: Iterable[Rule], names: Collection[str], sizes: Sizes) -> Iterator[Match]:
    """Layer by layer, as far as rules for the same numbers stand together."""
    for _, group in groupby(rules, key=lambda rule: rule.nxd.placeholders):
        numbered = [(numbers, place, rule) for place, rule in enumerate(group) for numbers in _numbers(rule, names)]
        for numbers, _, rule in sorted(numbered, key=lambda found: found[:2]):
            yield Match(rule.nxd.fill(dict(numbers)), rule, dict(numbers))


def _numbers(rule: Rule, names: Collection[str]) -> set[tuple[tuple[str, int], ...]]:
    """The numbers for which the model has a tensor of the rule, or several."""
    found = (member.name.match(name) for member in rule.members for name in names)
    return {
        tuple((key, numbers[key]) for key in rule.nxd.placeholders) for numbers in found if numbers is not None
    }


def _shown(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more
