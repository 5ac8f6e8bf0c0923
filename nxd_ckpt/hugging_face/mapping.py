"""A model's mapping between Hugging Face tensors and NxD tensors, as data. Pure.

A mapping is a list of rules. A rule names one NxD tensor, by a pattern, and the Hugging Face tensors that lie side by
side in it, in order; a placeholder such as ``{layer}`` stands for a number::

    {"nxd": "model.layers.{layer}.mlp.gate_up_proj.weight", "dim": 0,
     "hf": ["model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"]}

Both directions use the same rule (`nxd_ckpt.hugging_face.hf_slice`). docs/mappings.md describes the format.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from nxd_ckpt.core.heads import HARDWARE, Hardware
from nxd_ckpt.core.name_patterns import Numbers, Pattern, PatternIndex
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import InvalidArgument, KeyMismatch, ShapeMismatch
from nxd_ckpt.hugging_face.packing import Packed
from nxd_ckpt.hugging_face.sizes import CONFIG_KEYS, LayerKind, ModelOption, Sizes, checked_count

Shape = tuple[str | None, ...]
"""The lengths of a tensor's dimensions, as `Sizes.length` reads them; None for one that config.json does not decide."""


def _agree(expected: int | None, actual: int) -> bool:
    return expected is None or expected == actual


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
class MappingRule:
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
        return [member.name.fill(each) for each in sizes.stack(self.stacked, numbers) for member in self.members]


@dataclass(frozen=True)
class Match:
    """An NxD tensor, its rule, and the numbers in its name."""

    name: str
    rule: MappingRule
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
        shapes: shapes of Hugging Face tensors in files, by the pattern of their names.
        options: keys of config.json that decide whether the model has some tensors.
    """

    name: str
    rules: tuple[MappingRule, ...]
    model_types: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    ties: bool = False
    ignored: tuple[Pattern, ...] = ()
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: tuple[Packed, ...] = ()
    base_prefix: str = ""
    layer_kinds: tuple[LayerKind, ...] = ()
    prediction: tuple[str, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    options: Mapping[str, ModelOption] = field(default_factory=dict)

    def sizes(self, config: Mapping[str, Any], kv_size_multiplier: int, hardware: Hardware) -> Sizes:
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
        required = [rule for rule in self.rules if not rule.optional]  # some name the same tensors
        names = self._filled((member.name for rule in required for member in rule.members), sizes)
        left_out = self.tied if self.are_tied(sizes) else ()
        return [name for name in names if name not in left_out]

    def _filled(self, patterns: Iterable[Pattern], sizes: Sizes) -> list[str]:
        """Return the names of these patterns in all layers that have them, each once."""
        names: dict[str, None] = {}
        for pattern in dict.fromkeys(patterns):
            counts = [sizes.find(key) for key in pattern.placeholders]
            if None not in counts:
                checked_count(len(names) + prod(count or 0 for count in counts), pattern.text)
                for each in product(*(range(count or 0) for count in counts)):
                    numbers = dict(zip(pattern.placeholders, each, strict=True))
                    if self._kind_without(pattern, numbers, sizes) is None:
                        names[pattern.fill(numbers)] = None
        return list(names)

    def refuse_options(self, names: Collection[str], sizes: Sizes, where: str) -> None:
        """Raise KeyMismatch if the Hugging Face tensors ``names`` contradict an option of config.json.

        transformers fills what files lack with random numbers, and leaves out what the model lacks. Without config.json
        nothing is known.
        """
        for option in self.options.values() if sizes.config else ():
            index = PatternIndex(option.tensors)
            means = f"by config.json ({option.text(sizes.config)})"
            remedy = f'; if {option.key} means something else there, use a mapping with other "options"'
            if option.is_set(sizes.config):
                lacking = [name for name in self._filled(option.tensors, sizes) if name not in names]
                if lacking:
                    raise KeyMismatch(
                        f"{where} lacks {first_of(lacking)}, which {means} this model has; pass the model's own "
                        f"config.json: one in which {option.key} is false, if it has none of them{remedy}"
                    )
                continue
            unexpected = sorted(name for name in names if any(index.matches(name)))
            if unexpected:
                raise KeyMismatch(
                    f"{where} holds {first_of(unexpected)}, which {means} this model does not have; pass the model's "
                    f"own config.json: one in which {option.key} is true{remedy}"
                )

    def predicting(self, names: Iterable[str], sizes: Sizes) -> list[str]:
        """Return those of the Hugging Face tensors that serve only the prediction of several tokens at once.

        A layer after the model's own does so if it has tensors that the model's do not have; otherwise config.json is
        that of a model with fewer layers.
        """
        groups: dict[tuple[str, int], list[str]] = {}
        for name in names:
            for beginning in self.prediction:
                before, placeholder, _ = beginning.partition("{layer}")
                match = re.match(rf"{re.escape(before)}(\d{{1,18}})\." if placeholder else re.escape(before), name)
                if match is not None and not (placeholder and int(match[1]) < sizes.get("layer")):
                    groups.setdefault((beginning, int(match[1]) if placeholder else 0), []).append(name)
                    break
        return [
            name
            for (beginning, _), group in groups.items()
            if "{layer}" not in beginning or not all(map(self._has_rule, group))
            for name in group
        ]

    def _has_rule(self, name: str) -> bool:
        return self.has_tensor(name) or self.packed_as(name) is not None

    def refuse_misplaced(self, names: Iterable[str], sizes: Sizes) -> None:
        """Raise KeyMismatch for a Hugging Face tensor that by config.json the model, or its layer, does not have."""
        patterns = [member.name for rule in self.rules for member in rule.members if member.name.placeholders]
        keys = dict.fromkeys(key for pattern in patterns for key in pattern.placeholders)
        counts = {key: sizes.find(key) for key in keys}
        index = PatternIndex(patterns)
        for name in names:
            for pattern, numbers in index.matches(name):
                self._refuse_misplaced(name, pattern, numbers, counts, sizes)

    def _refuse_misplaced(
        self, name: str, pattern: Pattern, numbers: Numbers, counts: Mapping[str, int | None], sizes: Sizes
    ) -> None:
        for key, number in numbers.items():
            count = counts[key]
            if count is not None and number >= count:
                raise KeyMismatch(
                    f"{name}: by {sizes.key(key)} in config.json, its number should be below {count}; pass the "
                    "model's own config.json"
                )
        kind = self._kind_without(pattern, numbers, sizes)
        if kind is not None:
            raise KeyMismatch(
                f"{name}: by {kind.keys} in config.json, this layer has no such tensor; pass the model's own "
                "config.json"
            )

    def whole_lengths(self, names: Iterable[str], sizes: Sizes) -> dict[str, tuple[int, int]]:
        """Return the dimension that ranks cut, and its whole length, of what NxD may have gathered into each file."""
        return {}

    def refuse_shapes(
        self,
        rule: MappingRule,
        tensors: Sequence[tuple[str, tuple[int, ...]]],
        sizes: Sizes,
        where: str,
        check: str = "",
    ) -> None:
        """Raise ShapeMismatch if a Hugging Face tensor of ``rule`` has another shape than config.json says.

        ``tensors`` are their names and shapes, in the order of `MappingRule.names`; ``check`` ends the message.
        """
        for number, member in enumerate(rule.members):
            terms = self.shapes.get(member.name.text, ())
            lengths = [None if each is None else sizes.length(each) for each in terms]
            for name, shape in tensors[number :: len(rule.members)] if terms else ():
                if len(shape) == len(terms) and all(map(_agree, lengths, shape)):
                    continue
                expected = ", ".join("any" if length is None else str(length) for length in lengths)
                keys = re.sub(r"[a-z]\w*", lambda size: sizes.key(size[0]), ", ".join(each or "-" for each in terms))
                raise ShapeMismatch(
                    f"{where}: {name} has shape {shape}, but by config.json ({keys}) it should be ({expected}); pass "
                    f"the model's own config.json{check}"
                )

    def in_files(self, names: Iterable[str]) -> list[str]:
        """Return the names in files of the Hugging Face tensors that rules call ``names``, each once."""
        return list(dict.fromkeys(self._in_file(name) for name in names))

    def has_tensor(self, name: str) -> bool:
        """Return whether a rule has this Hugging Face tensor."""
        return any(member.name.match(name) is not None for rule in self.rules for member in rule.members)

    def of_base(self, name: str) -> str:
        """Return the name of a tensor in a file of the base model alone, with the prefix that it lacks."""
        whole = self.base_prefix + name
        ignored = any(pattern.match(whole) is not None for pattern in self.ignored)
        known = ignored or self.has_tensor(whole) or self.packed_as(whole) is not None
        return whole if known and not self.has_tensor(name) else name

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


FORMAT_VERSION = 1
_TERMS = re.compile(r"[\w.]+(?: [*+] [\w.]+)*")

VARIANTS = ("qkv_linear", "fuse_qkv", "coalesce_qkv", "split_gate_up")
"""Options of an import that rules may depend on."""


def load_mapping(document: Any, where: str, shipped: Mapping[str, ModelMapping] | None = None) -> ModelMapping:
    """Return the mapping that a JSON document describes; it may extend one of ``shipped``.

    Raises:
        InvalidArgument: the document is invalid; the message names ``where`` and the fault.
    """
    reader = _Fields(document, where)
    version = reader.take("format_version", int)
    if version != FORMAT_VERSION:
        raise InvalidArgument(f"{where}: format_version {version}, expected {FORMAT_VERSION}")
    base = _base(reader, where, shipped or {})
    keys = {size: _strings(names, f"{where}: config") for size, names in reader.take("config", dict, {}).items()}
    if not set(keys) <= set(CONFIG_KEYS):
        unknown = sorted(set(keys) - set(CONFIG_KEYS))
        raise InvalidArgument(f"{where}: config names {unknown}, expected only {[*CONFIG_KEYS]}")
    rules = [_rule(rule, f"{where}: rule {number}") for number, rule in enumerate(reader.take("rules", list))]
    packed = reader.take("packed", list, [])
    kinds = reader.take("layer_kinds", list, None)
    prefix = reader.take("base_model_prefix", str, "")
    mapping = ModelMapping(
        name=reader.take("name", str),
        rules=_extended(base.rules, rules),
        model_types=_strings(reader.take("model_types", list, []), f"{where}: model_types"),
        tied={**base.tied, **_tied(reader.take("tied", dict, {}), f"{where}: tied")},
        ties=reader.take("tie_word_embeddings", bool, base.ties),
        ignored=base.ignored + tuple(map(Pattern, _strings(reader.take("ignored", list, []), f"{where}: ignored"))),
        keys={**base.keys, **keys},
        packed=base.packed + tuple(_packed(each, f"{where}: packed {number}") for number, each in enumerate(packed)),
        base_prefix=f"{prefix}." if prefix else base.base_prefix,
        layer_kinds=base.layer_kinds
        if kinds is None
        else tuple(_kind(each, f"{where}: layer_kinds {number}") for number, each in enumerate(kinds)),
        prediction=reader.strings("prediction"),
        shapes={**base.shapes, **_shapes(reader.take("shapes", list, []), f"{where}: shapes")},
        options={**base.options, **_options(reader.take("options", list, []), f"{where}: options")},
    )
    reader.done()
    named = {member.name.text for rule in mapping.rules for member in rule.members}
    unused = [name for name in mapping.shapes if name not in named and name not in base.shapes]
    if unused:
        raise InvalidArgument(f"{where}: shapes names {first_of(unused)}, which no rule has")
    return mapping


def _shapes(entries: Sequence[Any], where: str) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for number, entry in enumerate(entries):
        at = f"{where} {number}"
        reader = _Fields(entry, at)
        names = reader.strings("hf", _REQUIRED)
        shape = reader.take("shape", list)
        reader.done()
        if not all(terms is None or (isinstance(terms, str) and _TERMS.fullmatch(terms)) for terms in shape):
            raise InvalidArgument(f"{at}: shape must have a sum of products of sizes, or null, for each dimension")
        shapes |= dict.fromkeys(names, tuple(shape))
    return shapes


def _options(entries: Sequence[Any], where: str) -> dict[str, ModelOption]:
    options: dict[str, ModelOption] = {}
    for number, entry in enumerate(entries):
        at = f"{where} {number}"
        reader = _Fields(entry, at)
        key = reader.take("key", str)
        names = _strings(reader.take("hf", (str, list)), f"{at}: hf")
        options[key] = ModelOption(key, tuple(map(Pattern, names)), **reader.some(default=bool))
        reader.done()
    return options


def _base(reader: _Fields, where: str, shipped: Mapping[str, ModelMapping]) -> ModelMapping:
    """Return the mapping that the document extends, without the rules that it leaves out."""
    name = reader.take("extends", str, None)
    left_out = reader.strings("without")
    if name is not None and name not in shipped:
        raise InvalidArgument(f"{where}: extends {name!r}, expected one of {', '.join(shipped)}")
    base = ModelMapping("", ()) if name is None else shipped[name]
    patterns = {rule.nxd.text for rule in base.rules}
    for prefix in left_out:
        if not any(pattern.startswith(prefix) for pattern in patterns):
            raise InvalidArgument(f"{where}: without {prefix!r}, with which no rule of {name!r} begins")
    return replace(base, rules=tuple(rule for rule in base.rules if not rule.nxd.text.startswith(left_out)))


def _extended(base: Sequence[MappingRule], own: Sequence[MappingRule]) -> tuple[MappingRule, ...]:
    """Return the rules of ``base`` with ``own``, which replace those for the same NxD tensors.

    Others come after the last rule with placeholders, so that layers' rules stay together.
    """
    mine = {rule.nxd.text: rule for rule in own}
    rules = [mine.pop(rule.nxd.text, rule) for rule in base]
    end = max((place + 1 for place, rule in enumerate(rules) if rule.nxd.placeholders), default=len(rules))
    return (*rules[:end], *mine.values(), *rules[end:])


def _kind(document: Any, where: str) -> LayerKind:
    reader = _Fields(document, where)
    kind = LayerKind(
        tensors=reader.strings("tensors"),
        others=reader.strings("others"),
        **reader.some(start=str, every=str, excluded=str, listed=str, layer_type=str, option=str),
    )
    reader.done()
    if not kind.keys or not kind.tensors + kind.others:
        raise InvalidArgument(f"{where}: needs a condition, and tensors or others")
    for prefix in kind.tensors + kind.others:
        if "{layer}" not in prefix:
            raise InvalidArgument(f"{where}: {prefix!r} must have the placeholder {{layer}}")
    return kind


def _rule(document: Any, where: str) -> MappingRule:
    reader = _Fields(document, where)
    nxd = Pattern(reader.take("nxd", str))
    where = reader.where = f"{where} ({nxd.text})"
    names = reader.strings("hf", _REQUIRED)
    heads = reader.strings("heads") or (None,) * len(names)
    rows = reader.take("rows", str, None)
    if len(heads) != len(names):
        raise InvalidArgument(f"{where}: heads must have one entry for each of {len(names)} tensors, found {heads}")
    rule = MappingRule(
        nxd,
        tuple(RuleMember(Pattern(name), kind, rows) for name, kind in zip(names, heads, strict=True)),
        **reader.some(dim=int, transposed=bool, interleaved=bool, stacked=str, units=str, optional=bool, variant=str),
    )
    reader.done()
    _check_rule(rule, where)
    return rule


def _check_rule(rule: MappingRule, where: str) -> None:
    if not rule.members:
        raise InvalidArgument(f"{where}: hf names no tensor; list NxD's own tensors under 'ignored'")
    if rule.variant not in (None, *VARIANTS):
        raise InvalidArgument(f"{where}: variant must be one of {[*VARIANTS]}, found {rule.variant!r}")
    for member in rule.members:
        if member.heads not in (None, "query", "kv"):
            raise InvalidArgument(f"{where}: heads must be 'query' or 'kv', found {member.heads!r}")
        if member.rows is not None and member.rows not in CONFIG_KEYS:
            raise InvalidArgument(f"{where}: rows must be one of {[*CONFIG_KEYS]}, found {member.rows!r}")
    if rule.units is not None and (rule.units not in CONFIG_KEYS or rule.dim is None or rule.members[0].heads):
        raise InvalidArgument(f"{where}: units must be one of {[*CONFIG_KEYS]}, with dim and without heads")
    if rule.interleaved and not all(member.heads for member in rule.members):
        raise InvalidArgument(f"{where}: interleaved tensors need heads, 'query' or 'kv' for each")
    if rule.dim is not None and rule.dim < (rule.stacked is not None):
        raise InvalidArgument(f"{where}: dim must be a dimension of the tensor, and not the stacked one")
    if rule.dim is None and (len(rule.members) > 1 or rule.members[0].heads or rule.members[0].rows):
        raise InvalidArgument(f"{where}: several tensors, heads and rows need dim, the dimension along which they lie")
    if len(rule.members) > 1 and any(member.rows for member in rule.members):
        raise InvalidArgument(f"{where}: rows is only for a rule with a single tensor")
    _check_placeholders(rule.nxd, rule.stacked, [member.name for member in rule.members], where)


def _packed(document: Any, where: str) -> Packed:
    reader = _Fields(document, where)
    hf = Pattern(reader.take("hf", str))
    where = reader.where = f"{where} ({hf.text})"
    parts = tuple(map(Pattern, reader.strings("parts", _REQUIRED)))
    packed = Packed(
        hf,
        parts,
        reader.strings("heads") or (None,) * len(parts),
        **reader.some(dim=int, alternating=bool, stacked=str, flat=bool),
    )
    reader.done()
    _check_packed(packed, where)
    return packed


def _check_packed(packed: Packed, where: str) -> None:
    own_dim = packed.stacked is not None and not packed.flat
    if not packed.parts or len(packed.heads) != len(packed.parts):
        raise InvalidArgument(f"{where}: parts must name tensors, and heads must have one entry for each of them")
    if not set(packed.heads) <= {None, "query", "kv"}:
        raise InvalidArgument(f"{where}: heads must be 'query' or 'kv', found {packed.heads}")
    if (packed.dim is None) != (len(packed.parts) == 1) or (packed.dim is not None and packed.dim < own_dim):
        raise InvalidArgument(f"{where}: several parts need dim, not the stacked one, and a single part has none")
    if packed.alternating and (packed.dim is None or any(packed.heads)):
        raise InvalidArgument(f"{where}: alternating parts need dim, and cannot have heads: their sizes are equal")
    if packed.flat and (packed.stacked is None or packed.dim is not None):
        raise InvalidArgument(f"{where}: flat needs stacked, a single part and no dim")
    _check_placeholders(packed.hf, packed.stacked, packed.parts, where)


def _check_placeholders(whole: Pattern, stacked: str | None, parts: Iterable[Pattern], where: str) -> None:
    """Raise InvalidArgument unless each part has the placeholders of the whole and the ``stacked`` one, all sizes."""
    expected = {*whole.placeholders, *([] if stacked is None else [stacked])}
    for pattern in parts:
        if set(pattern.placeholders) != expected:
            raise InvalidArgument(f"{where}: {pattern.text} must have the placeholders {sorted(expected)}")
    for key in expected - set(CONFIG_KEYS):
        raise InvalidArgument(f"{where}: placeholder {{{key}}} must be one of the sizes {[*CONFIG_KEYS]}")


def _strings(values: Any, where: str) -> tuple[str, ...]:
    values = [values] if isinstance(values, str) else values
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise InvalidArgument(f"{where}: expected strings, found {values!r}")
    return tuple(values)


def _tied(names: dict[str, Any], where: str) -> dict[str, str]:
    _strings(list(names.values()), where)
    return names


_REQUIRED: Any = object()


class _Fields:
    """The fields of a JSON object, taken one by one; `done` refuses the rest."""

    def __init__(self, document: Any, where: str) -> None:
        if not isinstance(document, dict):
            raise InvalidArgument(f"{where}: expected a JSON object, found {type(document).__name__}")
        self._left = dict(document)
        self.where = where

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        if name not in self._left:
            if default is _REQUIRED:
                raise InvalidArgument(f"{self.where}: {name!r} is missing")
            return default
        value = self._left.pop(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidArgument(f"{self.where}: {name!r} is {value!r}, which has the wrong type")
        return value

    def some(self, **kinds: type) -> dict[str, Any]:
        """Take those of the optional fields that are there."""
        return {name: self.take(name, kind) for name, kind in kinds.items() if name in self._left}

    def strings(self, name: str, default: Any = ()) -> tuple[str, ...]:
        """Take several strings, or one."""
        return _strings(self.take(name, (str, list), default), f"{self.where}: {name}")

    def done(self) -> None:
        if self._left:
            raise InvalidArgument(f"{self.where}: unknown {sorted(self._left)}")
