"""Selection of the NxD tensors that a Hugging Face model becomes; one of alternative rules is chosen. Pure."""

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
    """The NxD tensors that a Hugging Face model becomes, and obstacles.

    Attributes:
        matches: the NxD tensors, in the model's order.
        unknown: names that no rule maps.
        missing: Hugging Face tensors, by their names in files, that the model lacks, although ``matches`` or every such
            model needs them.
    """

    matches: tuple[Match, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


def selection(mapping: ModelMapping, names: Iterable[str], sizes: Sizes, variants: Collection[str] = ()) -> Selection:
    """Select the NxD tensors for a model with the Hugging Face tensors ``names``, and the options ``variants``.

    Tied tensors that files leave out count as present.

    Raises:
        InvalidArgument: the mapping has no such variant.
        KeyMismatch: a tensor is in a layer that by config.json is of another kind.
    """
    rules = _chosen_rules(mapping, variants)
    present = set(names)
    unknown = _unknown(mapping, rules, present)
    mapping.refuse_misplaced(present, sizes)
    present |= {name for name, other in mapping.ties_of(sizes).items() if other in present}
    matches = tuple(_matches(rules, present, sizes))
    needed = [name for match in matches for name in match.rule.names(match.numbers, sizes)]
    missing = [name for name in dict.fromkeys([*mapping.required(sizes), *needed]) if name not in present]
    return Selection(matches, unknown, tuple(mapping.in_files(missing)))


def complete(mapping: ModelMapping, selection_: Selection) -> tuple[Match, ...]:
    """Return the selected NxD tensors. Raises KeyMismatch if names are unknown, or tensors are missing."""
    if selection_.unknown:
        close = ", ".join(closest(mapping, selection_.unknown[0])) or "none"
        raise KeyMismatch(
            f"mapping {mapping.name!r} has no rule for {first_of(selection_.unknown)}; the closest to the first: "
            f"{close}. Choose another mapping, or add rules to a mapping file of your own"
        )
    if selection_.missing:
        raise KeyMismatch(
            f"tensors are missing: {first_of(selection_.missing)}, which every model of mapping {mapping.name!r} has "
            "with this config.json; the directory is incomplete, or this is another model's config.json"
        )
    return selection_.matches


def _chosen_rules(mapping: ModelMapping, variants: Collection[str]) -> list[Rule]:
    """Return one rule for each Hugging Face tensor: the one asked for, otherwise the first without a variant."""
    unknown = set(variants) - {rule.variant for rule in mapping.rules}
    if unknown:
        raise InvalidArgument(f"mapping {mapping.name!r} has no rules for {', '.join(sorted(unknown))}; leave it out")
    taken: set[str] = set()
    chosen: set[Rule] = set()
    for rule in sorted(mapping.rules, key=lambda rule: rule.variant is None):
        members = {member.name.text for member in rule.members}
        if rule.variant in (None, *variants) and not members & taken:
            chosen.add(rule)
            taken |= members
    return [rule for rule in mapping.rules if rule in chosen]


def closest(mapping: ModelMapping, name: str) -> list[str]:
    """Return the Hugging Face patterns of rules that are most similar to ``name``, at most two."""
    texts = [member.name.text for rule in mapping.rules for member in rule.members]
    return difflib.get_close_matches(re.sub(r"\b\d+\b", "{layer}", name), dict.fromkeys(texts), n=2)


def _unknown(mapping: ModelMapping, rules: Iterable[Rule], names: Collection[str]) -> tuple[str, ...]:
    patterns = [*(member.name for rule in rules for member in rule.members), *mapping.ignored]
    return tuple(sorted(name for name in names if not any(pattern.match(name) is not None for pattern in patterns)))


def _matches(rules: Iterable[Rule], names: Collection[str], sizes: Sizes) -> Iterator[Match]:
    """Yield matches layer by layer, for adjacent rules with the same placeholders."""
    for _, group in groupby(rules, key=lambda rule: rule.nxd.placeholders):
        numbered = [(numbers, place, rule) for place, rule in enumerate(group) for numbers in _numbers(rule, names)]
        for numbers, _, rule in sorted(numbered, key=lambda entry: entry[:2]):
            yield Match(rule.nxd.fill(dict(numbers)), rule, dict(numbers))


def _numbers(rule: Rule, names: Collection[str]) -> set[tuple[tuple[str, int], ...]]:
    """Return the numbers for which the model has at least one tensor of the rule."""
    matches = (member.name.match(name) for member in rule.members for name in names)
    return {
        tuple((key, numbers[key]) for key in rule.nxd.placeholders) for numbers in matches if numbers is not None
    }
