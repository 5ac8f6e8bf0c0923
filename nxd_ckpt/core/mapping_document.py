"""Reading and checking of mappings as JSON documents. docs/hugging-face.md describes the format. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.mapping import ModelMapping, Rule, RuleMember
from nxd_ckpt.core.packing import Packed
from nxd_ckpt.core.pattern import Pattern
from nxd_ckpt.core.sizes import CONFIG_KEYS, LayerKind
from nxd_ckpt.errors import InvalidArgument

FORMAT_VERSION = 1

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
        prediction=_strings(reader.take("prediction", (str, list), []), f"{where}: prediction"),
    )
    reader.done()
    return mapping


def _base(reader: _Fields, where: str, shipped: Mapping[str, ModelMapping]) -> ModelMapping:
    """Return the mapping that the document extends, without the rules that it leaves out."""
    name = reader.take("extends", str, None)
    left_out = _strings(reader.take("without", (str, list), []), f"{where}: without")
    if name is not None and name not in shipped:
        raise InvalidArgument(f"{where}: extends {name!r}, expected one of {', '.join(shipped)}")
    base = ModelMapping("", ()) if name is None else shipped[name]
    patterns = {rule.nxd.text for rule in base.rules}
    for prefix in left_out:
        if not any(pattern.startswith(prefix) for pattern in patterns):
            raise InvalidArgument(f"{where}: without {prefix!r}, with which no rule of {name!r} begins")
    return replace(base, rules=tuple(rule for rule in base.rules if not rule.nxd.text.startswith(left_out)))


def _extended(base: Sequence[Rule], own: Sequence[Rule]) -> tuple[Rule, ...]:
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
        tensors=_strings(reader.take("tensors", (str, list), []), f"{where}: tensors"),
        others=_strings(reader.take("others", (str, list), []), f"{where}: others"),
        start=reader.take("start", str, None),
        every=reader.take("every", str, None),
        excluded=reader.take("excluded", str, None),
        listed=reader.take("listed", str, None),
        layer_type=reader.take("layer_type", str, None),
        option=reader.take("option", str, None),
    )
    reader.done()
    if not kind.keys or not kind.tensors + kind.others:
        raise InvalidArgument(f"{where}: needs a condition, and tensors or others")
    for prefix in kind.tensors + kind.others:
        if "{layer}" not in prefix:
            raise InvalidArgument(f"{where}: {prefix!r} must have the placeholder {{layer}}")
    return kind


def _rule(document: Any, where: str) -> Rule:
    reader = _Fields(document, where)
    nxd = Pattern(reader.take("nxd", str))
    where = f"{where} ({nxd.text})"
    names = _strings(reader.take("hf", (str, list)), f"{where}: hf")
    heads = _strings(reader.take("heads", (str, list), []), f"{where}: heads") or (None,) * len(names)
    rows = reader.take("rows", str, None)
    if len(heads) != len(names):
        raise InvalidArgument(f"{where}: heads must have one entry for each of {len(names)} tensors, found {heads}")
    rule = Rule(
        nxd,
        tuple(RuleMember(Pattern(name), kind, rows) for name, kind in zip(names, heads, strict=True)),
        dim=reader.take("dim", int, None),
        transposed=reader.take("transposed", bool, False),
        interleaved=reader.take("interleaved", bool, False),
        stacked=reader.take("stacked", str, None),
        units=reader.take("units", str, None),
        optional=reader.take("optional", bool, False),
        variant=reader.take("variant", str, None),
    )
    reader.done()
    _check_rule(rule, where)
    return rule


def _check_rule(rule: Rule, where: str) -> None:
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
    expected = {*rule.nxd.placeholders, *([] if rule.stacked is None else [rule.stacked])}
    for member in rule.members:
        if set(member.name.placeholders) != expected:
            raise InvalidArgument(f"{where}: {member.name.text} must have the placeholders {sorted(expected)}")
    for key in expected - set(CONFIG_KEYS):
        raise InvalidArgument(f"{where}: placeholder {{{key}}} must be one of the sizes {[*CONFIG_KEYS]}")


def _packed(document: Any, where: str) -> Packed:
    reader = _Fields(document, where)
    hf = Pattern(reader.take("hf", str))
    where = f"{where} ({hf.text})"
    parts = tuple(map(Pattern, _strings(reader.take("parts", (str, list)), f"{where}: parts")))
    heads = _strings(reader.take("heads", (str, list), []), f"{where}: heads")
    packed = Packed(
        hf,
        parts,
        heads or (None,) * len(parts),
        dim=reader.take("dim", int, None),
        alternating=reader.take("alternating", bool, False),
        stacked=reader.take("stacked", str, None),
        flat=reader.take("flat", bool, False),
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
    expected = {*packed.hf.placeholders, *([] if packed.stacked is None else [packed.stacked])}
    for pattern in packed.parts:
        if set(pattern.placeholders) != expected:
            raise InvalidArgument(f"{where}: {pattern.text} must have the placeholders {sorted(expected)}")
    for key in expected - set(CONFIG_KEYS):
        raise InvalidArgument(f"{where}: placeholder {{{key}}} must be one of the sizes {[*CONFIG_KEYS]}")


def _strings(values: Any, where: str) -> tuple[str, ...]:
    values = [values] if isinstance(values, str) else values
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
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
        self._left, self._where = dict(document), where

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        if name not in self._left:
            if default is _REQUIRED:
                raise InvalidArgument(f"{self._where}: {name!r} is missing")
            return default
        value = self._left.pop(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidArgument(f"{self._where}: {name!r} is {value!r}, which has the wrong type")
        return value

    def done(self) -> None:
        if self._left:
            raise InvalidArgument(f"{self._where}: unknown {sorted(self._left)}")
