"""A model's mapping between Hugging Face tensors and NxD tensors, as data. Pure.

A mapping is a list of rules. A rule names one NxD tensor, by a pattern, and the Hugging Face tensors that lie side by
side in it, in order; a placeholder such as ``{layer}`` stands for a number::

    {"nxd": "model.layers.{layer}.mlp.gate_up_proj.weight", "dim": 0,
     "hf": ["model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"]}

Both directions use the same rule (`nxd_ckpt.hugging_face.hf_slice`). docs/hugging-face.md describes the format.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from nxd_ckpt.core.heads import HARDWARE
from nxd_ckpt.core.limits import MODEL_TENSORS
from nxd_ckpt.core.packing import Packed
from nxd_ckpt.core.pattern import Numbers, Pattern
from nxd_ckpt.core.sizes import LayerKind, Sizes
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import InvalidArgument, KeyMismatch


def _checked_count(count: int, what: str) -> int:
    """Return ``count``; raise InvalidArgument if no model can have so many tensors."""
    if count > MODEL_TENSORS:
        raise InvalidArgument(f"config.json describes {count} tensors with {what}; at most {MODEL_TENSORS} are allowed")
    return count


@dataclass(frozen=True)
class RuleMember:
    """A Hugging Face tensor in an NxD one.

    Along the rule's dimension it has the rows of ``heads`` ("query" or "kv", in NxD's order of heads), or as many as
    the size ``rows``, or an equal share of the NxD tensor.
    """

    name: Pattern
    heads: str | None = None
    rows: str | None = None


@dataclass(frozen=True)
class Rule:
    """One NxD tensor, by pattern, and the Hugging Face tensors in it.

    Attributes:
        nxd: pattern of its name.
        members: the Hugging Face tensors, side by side along ``dim``.
        dim: the dimension of the NxD tensor that is cut over tensor-parallel ranks, for each member separately; None if
            all ranks hold it whole.
        transposed: True if the last two dimensions are swapped.
        interleaved: True if members do not lie side by side, but head by head: for each key-value head, its part of
            each member.
        stacked: the placeholder that only ``members`` have. The NxD tensor has one more first dimension, with an index
            for each of its numbers, which is cut over expert-parallel ranks.
        units: size that counts the units along ``dim`` that must not be cut, such as heads of another length than
            head_dim.
        optional: True if not every model has it (a bias).
        variant: the option that selects this rule, if Hugging Face's tensors may become one of several; None if no
            option is needed.
    """

    nxd: Pattern
    members: tuple[RuleMember, ...]
    dim: int | None = None
    transposed: bool = False
    interleaved: bool = False
    stacked: str | None = None
    units: str | None = None
    optional: bool = False
    variant: str | None = None

    def names(self, numbers: Numbers, sizes: Sizes) -> list[str]:
        """Return the Hugging Face tensors in the NxD tensor with these numbers."""
        count = 0 if self.stacked is None else _checked_count(sizes.get(self.stacked), self.stacked)
        stack = [{}] if self.stacked is None else [{self.stacked: index} for index in range(count)]
        return [member.name.fill({**numbers, **index}) for index in stack for member in self.members]


@dataclass(frozen=True)
class Match:
    """An NxD tensor, its rule, and the numbers in its name."""

    name: str
    rule: Rule
    numbers: Numbers


@dataclass(frozen=True)
class ModelMapping:
    """The rules of a family of models.

    Attributes:
        name: name of the mapping, by which callers choose it.
        rules: one for each NxD tensor.
        model_types: values of ``model_type`` in config.json.
        tied: pairs of tied Hugging Face tensors: the one that files leave out, and the one that they hold.
        ties: True if files leave it out when config.json has no ``tie_word_embeddings``.
        ignored: NxD tensors that Hugging Face computes (rotary frequencies, masks).
        keys: keys of sizes in config.json that differ from `CONFIG_KEYS`.
        packed: Hugging Face tensors that hold several of the tensors in rules.
        base_prefix: prefix of the base model's names, which files of the base model alone lack; "" if there is none.
        layer_kinds: kinds of layers that have other tensors than the rest.
        prediction: beginnings of the names of Hugging Face tensors that only predict several tokens at once. With
            ``{layer}`` they are those of layers after the model's own. They are left out.
    """

    name: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    ties: bool = False
    ignored: tuple[Pattern, ...] = ()
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: tuple[Packed, ...] = ()
    base_prefix: str = ""
    layer_kinds: tuple[LayerKind, ...] = ()
    prediction: tuple[str, ...] = ()

    def sizes(self, config: Mapping[str, Any], kv_size_multiplier: int, hardware: str) -> Sizes:
        """Return the sizes of one model.

        Raises InvalidArgument for unknown hardware, or copies of heads if no rule has heads.
        """
        if hardware not in HARDWARE:
            raise InvalidArgument(f"hardware must be one of {', '.join(HARDWARE)}, found {hardware!r}")
        if kv_size_multiplier != 1 and not any(member.heads for rule in self.rules for member in rule.members):
            raise InvalidArgument(
                f"kv_size_multiplier={kv_size_multiplier}, but mapping {self.name!r} has no rule with heads that could "
                "be kept several times; leave it out, or pass a mapping file of your own whose rules have heads"
            )
        return Sizes(config, kv_size_multiplier, hardware, self.keys)

    def matches(self, names: Iterable[str]) -> list[Match]:
        """Return the rule of each NxD tensor, without tensors that Hugging Face computes.

        Raises:
            KeyMismatch: no rule maps a name; the message lists such names with the closest rules.
        """
        matches_, unknown = self.split(names)
        if unknown:
            raise KeyMismatch(self._unmapped_text(unknown))
        return matches_

    def split(self, names: Iterable[str]) -> tuple[list[Match], list[str]]:
        """Return the rule of each NxD tensor, and separately the names that no rule maps."""
        matches: list[Match] = []
        unknown: list[str] = []
        for name in names:
            match = self._match(name)
            if match is not None:
                matches.append(match)
            elif not any(pattern.match(name) is not None for pattern in self.ignored):
                unknown.append(name)
        return matches, unknown

    def closest(self, name: str) -> list[str]:
        """Return the NxD patterns of rules that are most like ``name``, at most two."""
        patterns = [rule.nxd.text for rule in self.rules]
        return difflib.get_close_matches(re.sub(r"\b\d+\b", "{layer}", name), patterns, n=2)

    def required(self, sizes: Sizes) -> list[str]:
        """Return the Hugging Face tensors that every such model has, as far as config.json has the number of layers."""
        names: dict[str, None] = {}
        required = [rule for rule in self.rules if not rule.optional]  # some name the same tensors
        for pattern in dict.fromkeys(member.name for rule in required for member in rule.members):
            counts = [sizes.find(key) for key in pattern.placeholders]
            if None not in counts:
                _checked_count(len(names) + prod(count or 0 for count in counts), pattern.text)
                for each in product(*(range(count or 0) for count in counts)):
                    numbers = dict(zip(pattern.placeholders, each, strict=True))
                    if self._kind_without(pattern, numbers, sizes) is None:
                        names[pattern.fill(numbers)] = None
        left_out = self.tied if self.are_tied(sizes) else ()
        return [name for name in names if name not in left_out]

    def predicts(self, name: str, sizes: Sizes) -> bool:
        """Return whether a Hugging Face tensor serves only the prediction of several tokens at once."""
        for beginning in self.prediction:
            before, placeholder, _ = beginning.partition("{layer}")
            if not placeholder and name.startswith(before):
                return True
            number = re.match(rf"{re.escape(before)}(\d{{1,18}})\.", name) if placeholder else None
            if number is not None and int(number[1]) >= sizes.get("layer"):
                return True
        return False

    def refuse_misplaced(self, names: Iterable[str], sizes: Sizes) -> None:
        """Raise KeyMismatch for a Hugging Face tensor in a layer that by config.json is of another kind."""
        kinds = self.layer_kinds
        members = {member.name for rule in self.rules for member in rule.members} if kinds else ()
        patterns = [pattern for pattern in members if any(kind.side(pattern.text) is not None for kind in kinds)]
        for name in names if patterns else ():
            for pattern in patterns:
                numbers = pattern.match(name)
                kind = None if numbers is None else self._kind_without(pattern, numbers, sizes)
                if kind is not None:
                    raise KeyMismatch(
                        f"{name}: by {kind.keys} in config.json, this layer has no such tensor; pass the model's own "
                        "config.json"
                    )

    def in_files(self, names: Iterable[str]) -> list[str]:
        """Return the names in files of the Hugging Face tensors that rules call ``names``, each once."""
        return list(dict.fromkeys(self._in_file(name) for name in names))

    def has_tensor(self, name: str) -> bool:
        """Return whether a rule has this Hugging Face tensor."""
        return any(member.name.match(name) is not None for rule in self.rules for member in rule.members)

    def packed_as(self, name: str) -> Packed | None:
        """Return the packing of a tensor in a file; None if it is not packed."""
        return next((packed for packed in self.packed if packed.hf.match(name) is not None), None)

    def _kind_without(self, pattern: Pattern, numbers: Numbers, sizes: Sizes) -> LayerKind | None:
        """Return the kind of layers because of which the layer of these numbers lacks the tensor; None if it has it."""
        for kind in self.layer_kinds:
            side = kind.side(pattern.text)
            if side is not None and kind.includes(numbers["layer"], sizes) is not side:
                return kind
        return None

    def _in_file(self, name: str) -> str:
        holders = (packed.holder(name) for packed in self.packed)
        return next((holder for holder in holders if holder is not None), name)

    def are_tied(self, sizes: Sizes) -> bool:
        """Return whether files leave out tied tensors."""
        return bool(sizes.config.get("tie_word_embeddings", self.ties))

    def ties_of(self, sizes: Sizes) -> dict[str, str]:
        """Return the other of two tied tensors, by the name of each: files may have either of them alone."""
        both = {**{kept: name for name, kept in self.tied.items()}, **self.tied}
        return both if self.are_tied(sizes) else {}

    def _match(self, name: str) -> Match | None:
        matches = ((rule, rule.nxd.match(name)) for rule in self.rules)
        return next((Match(name, rule, numbers) for rule, numbers in matches if numbers is not None), None)

    def _unmapped_text(self, unknown: list[str]) -> str:
        def text(name: str) -> str:
            close = self.closest(name)
            return f"{name!r}" + (f" (closest rules: {', '.join(close)})" if close else "")

        return (
            f"mapping {self.name!r} has no rule for {first_of(unknown, text)}; choose another mapping, or add rules "
            "to a mapping file of your own"
        )
