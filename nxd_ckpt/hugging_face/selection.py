"""Which NxD tensors a Hugging Face model becomes: of rules that are alternatives, the one that is asked for. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from nxd_ckpt.core.mapping import Match, ModelMapping, Rule
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import InvalidArgument, KeyMismatch


@dataclass(frozen=True)
class Selection:
    """What becomes of a Hugging Face model.

    Attributes:
        matches: the NxD tensors, in the model's order.
        unknown: names that no rule maps.
        missing: Hugging Face tensors, as files name them, that ``matches`` need, or every such model has, and this one
            has not.
    """

    matches: tuple[Match, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


def selection(mapping: ModelMapping, names: Iterable[str], sizes: Sizes, variants: Collection[str] = ()) -> Selection:
    """What a model with the Hugging Face tensors ``names`` becomes; ``variants`` are the options that were asked for.

    Tensors that files leave out because they are tied count as there. Raises InvalidArgument if the mapping knows no
    such variant.
    """
    rules = _alternatives_settled(mapping, variants)
    held = set(names)
    unknown = _unknown(mapping, rules, held)
    if mapping.are_tied(sizes):
        held |= {name for name, other in mapping.tied.items() if other in held}
    found = tuple(_matches(rules, held, sizes))
    needed = [name for match in found for name in match.rule.names(match.numbers, sizes)]
    missing = [name for name in dict.fromkeys([*mapping.required(sizes), *needed]) if name not in held]
    return Selection(found, unknown, tuple(mapping.in_files(missing)))


def selected(mapping: ModelMapping, names: Iterable[str], sizes: Sizes, variants: Collection[str] = ()) -> list[Match]:
    """The NxD tensors of that model, of which nothing may be unknown or missing.

    Raises:
        InvalidArgument: the mapping knows no such variant.
        KeyMismatch: no rule maps a name, or tensors are missing that the model must have.
    """
    found = selection(mapping, names, sizes, variants)
    if found.unknown:
        close = ", ".join(closest(mapping, found.unknown[0])) or "none"
        raise KeyMismatch(
            f"mapping {mapping.name!r} has no rule for {first_of(found.unknown)}; the closest to the first: "
            f"{close}. Choose another mapping, or add rules to a mapping file of your own"
        )
    if found.missing:
        raise KeyMismatch(
            f"tensors are missing: {first_of(found.missing)}, which every model of mapping {mapping.name!r} has with "
            "this config.json; is the directory complete, and this its model's config.json?"
        )
    return list(found.matches)


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


def closest(mapping: ModelMapping, name: str) -> list[str]:
    """The Hugging Face patterns of rules that are most like ``name``, at most two."""
    texts = [member.name.text for rule in mapping.rules for member in rule.members]
    return difflib.get_close_matches(re.sub(r"\b\d+\b", "{layer}", name), dict.fromkeys(texts), n=2)


def _unknown(mapping: ModelMapping, rules: Iterable[Rule], names: Collection[str]) -> tuple[str, ...]:
    known = [*(member.name for rule in rules for member in rule.members), *mapping.ignored]
    return tuple(sorted(name for name in names if not any(pattern.match(name) is not None for pattern in known)))


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
