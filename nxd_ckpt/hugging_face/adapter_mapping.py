"""The mapping of a model's LoRA adapters to PEFT's names, derived from the model's mapping. Pure.

A B of rank r is cut, ordered and fused along its rows like the weight that it is added to, an A along its columns. So
if several Hugging Face tensors lie side by side in one of NxD's, each has its part of B, and all have the same A.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nxd_ckpt.core.name_patterns import Pattern
from nxd_ckpt.core.parameter_names import CONFIG, is_adapter, without_base_layer
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.hugging_face.mapping import Match, ModelMapping, Rule, RuleMember
from nxd_ckpt.hugging_face.sizes import Sizes

PREFIX = "base_model.model."
"""Prefix of names in PEFT's files."""

_WEIGHT = ".weight"


@dataclass(frozen=True)
class AdapterMapping(ModelMapping):
    """``rules`` of adapters, and ``base`` for other trained tensors; ``settings`` are NxD's ``LoraConfig``."""

    base: ModelMapping = field(default_factory=lambda: ModelMapping("", ()))
    settings: Mapping[str, Any] = field(default_factory=dict)

    def split(self, names: Iterable[str]) -> tuple[list[Match], list[str]]:
        matches_: list[Match] = []
        unknown: list[str] = []
        for name in names:
            if is_adapter(name) and name != CONFIG:
                numbers = [(rule, rule.nxd.match(name)) for rule in self.rules]
                matches = [Match(name, rule, values) for rule, values in numbers if values is not None]
            elif name != CONFIG and self._is_trained(name):
                matches = [self._as_peft(name, match) for match in self.base.split([without_base_layer(name)])[0]]
            else:
                continue  # a tensor of the base, which is not exported
            matches_ += matches
            unknown += [] if matches else [name]
        return matches_, unknown

    def required(self, sizes: Sizes) -> list[str]:
        return []

    def whole_lengths(self, names: Iterable[str], sizes: Sizes) -> dict[str, tuple[int, int]]:
        """Return the dimension that ranks cut, and its length in the whole model, of adapters with these names.

        Raises InvalidArgument if config.json does not say it: a tag of NxD may hold them whole in each file.
        """
        lengths: dict[str, tuple[int, int]] = {}
        if "peft_type" in self.settings:  # of optimum-neuron, which gathers nothing
            return lengths
        for match in self.split(filter(is_adapter, names))[0]:
            dim = match.rule.dim
            if dim is not None:
                lengths[match.name] = dim, sum(self._length(member, dim, sizes) for member in match.rule.members)
        return lengths

    def _length(self, member: RuleMember, dim: int, sizes: Sizes) -> int:
        if member.heads:
            return sizes.attention().length(member.heads)
        terms = self.shapes.get(member.name.text, (None, None))[dim]
        length = None if terms is None else sizes.length(terms)
        if length is None:
            raise InvalidArgument(
                f"whether each file holds all of {member.name.text}, or a part, is not known; pass the model's "
                "config.json"
            )
        return length

    def _is_trained(self, name: str) -> bool:
        modules = self.settings.get("modules_to_save") or ()
        return any(key in name for key in modules) or (self.settings.get("bias") == "all" and "bias" in name)

    def _as_peft(self, name: str, match: Match) -> Match:
        """Return the match for PEFT, where a bias of a wrapped layer also belongs to the base layer."""
        wrapped = without_base_layer(name) != name

        def named(text: str) -> str:
            layer, _, last = text.rpartition(".")
            return f"{PREFIX}{layer}.base_layer.{last}" if wrapped else f"{PREFIX}{text}"

        return Match(name, _renamed(match.rule, match.rule.nxd.text, named), match.numbers)


def adapter_mapping(base: ModelMapping, settings: Mapping[str, Any]) -> AdapterMapping:
    """Return the mapping of a model's adapters that were saved with these settings.

    Raises UnsupportedState for a model whose files pack several layers into one tensor: PEFT has one adapter for it.
    """
    if base.packed:
        raise UnsupportedState(
            f"LoRA adapters of {base.name!r} models cannot be exported: {base.packed[0].hf.text} is one layer for "
            "PEFT, but several for NxD; save with merge_lora, and export that tag"
        )
    rules = {(rule.nxd.text, rule.members): rule for base_rule in base.rules for rule in _rules_of(base_rule)}
    shapes = {
        f"{PREFIX}{text.removesuffix(_WEIGHT)}.lora_{letter}{_WEIGHT}": shape
        for text, terms in base.shapes.items()
        if len(terms) == 2
        for letter, shape in (("A", (None, terms[1])), ("B", (terms[0], None)))
    }
    return AdapterMapping(base.name, tuple(rules.values()), keys=base.keys, shapes=shapes, base=base, settings=settings)


def _rules_of(rule: Rule) -> Iterator[Rule]:
    """Yield the rules of A and B for a linear layer's weight; none for other rules."""
    layer, separator, which = rule.nxd.text.rpartition(_WEIGHT)
    if not separator or rule.stacked is not None or rule.transposed:
        return

    def as_peft(letter: str) -> Any:
        return lambda text: f"{PREFIX}{text.removesuffix(_WEIGHT)}.lora_{letter}.weight"

    names = {"A": f"{layer}.lora_A.weight", "B": f"{layer}.lora_B.weight{which}"}
    cut = "A" if rule.dim == 1 else "B"
    for letter, name in names.items():
        whole = replace(_renamed(rule, name, as_peft(letter)), variant=None)
        if letter == cut:
            yield whole
            continue
        for member in whole.members:
            yield replace(whole, members=(RuleMember(member.name),), dim=None, interleaved=False)


def _renamed(rule: Rule, nxd: str, name: Any) -> Rule:
    members = tuple(replace(member, name=Pattern(name(member.name.text))) for member in rule.members)
    return replace(rule, nxd=Pattern(nxd), members=members)
