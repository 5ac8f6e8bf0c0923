"""The head of a model: the one in a mapping, another one (a reward model's), or none (a base model's). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.pattern import Pattern
from nxd_ckpt.hugging_face.mapping import ModelMapping, Rule, RuleMember

_OF_MAPPINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures whose head the mappings have."""


def with_head_of(mapping: ModelMapping, config: Mapping[str, Any], names: Iterable[str]) -> ModelMapping:
    """Return the mapping of a model of this config.json, with Hugging Face tensors of these ``names``.

    If its architecture has another head than the mapping's, tensors outside of the base model are taken as they are, by
    every rank, and those of the mapping need not be there.
    """
    architectures, prefix = config.get("architectures"), mapping.base_prefix
    named = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if not prefix or not named or any(name.endswith(_OF_MAPPINGS) for name in named):
        return mapping
    outside = sorted(name for name in {*names} if not name.startswith(prefix) and mapping.of_base(name) == name)
    head = [name for name in outside if not mapping.has_tensor(name) and mapping.packed_as(name) is None]
    own = [Rule(Pattern(name), (RuleMember(Pattern(name)),)) for name in head]
    return replace(mapping, rules=(*(_optional_outside(rule, prefix) for rule in mapping.rules), *own))


def _optional_outside(rule: Rule, prefix: str) -> Rule:
    inside = all(member.name.text.startswith(prefix) for member in rule.members)
    return rule if inside else replace(rule, optional=True)
