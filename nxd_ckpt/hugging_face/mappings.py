"""Lookup of a mapping (shipped, a file of the user's, or a document), with a model's own head, and with its adapters.

The mapping of a model's LoRA adapters to PEFT's names is derived from the model's. A B of rank r is cut, ordered and
fused along its rows like the weight that it is added to, an A along its columns. So if several Hugging Face tensors lie
side by side in one of NxD's, each has its part of B, and all have the same A.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from nxd_ckpt.core.limits import MAPPING
from nxd_ckpt.core.name_patterns import Pattern
from nxd_ckpt.core.parameter_names import CONFIG, is_adapter, without_base_layer
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.hugging_face.mapping import MappingRule, Match, ModelMapping, RuleMember, load_mapping
from nxd_ckpt.hugging_face.sizes import Sizes
from nxd_ckpt.options.conversion import MappingSpec
from nxd_ckpt.storage.urls import local_path

NEMO = "nemo_llama"
"""Name of the mapping with the names of a Llama of neuronx-nemo-megatron."""


def find_mapping(spec: MappingSpec, config: Mapping[str, Any]) -> ModelMapping:
    """Return the mapping; None chooses by the ``model_type`` of config.json.

    Raises:
        InvalidArgument: there is none of that name, for such models, or at that path; or it is malformed.
    """
    shipped = shipped_mappings()
    if isinstance(spec, Mapping):
        return load_mapping(dict(spec), "mapping", shipped)
    if spec is None:
        return _for_model_type(config.get("model_type"), shipped)
    if not isinstance(spec, (str, os.PathLike)):
        raise InvalidArgument(f"mapping: expected a name, a path or a JSON object, found {type(spec).__name__}")
    name = os.fspath(spec)
    if name in shipped:
        # The names are this mapping's; how keys of config.json are read is decided by its model_type.
        if "model_type" not in config:
            return shipped[name]
        family = _of_model_type(config["model_type"], shipped)
        return replace(shipped[name], options={} if family is None else family.options)
    path = Path(local_path(name))
    if not path.is_file():
        raise InvalidArgument(
            f"mapping {listed([name], list(shipped))}: neither one of {', '.join(shipped)} nor the path of a file"
        )
    return load_mapping(_json(path), name, shipped)


def _json(path: Path) -> Any:
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size  # read(limit) would allocate the limit first
        if nbytes > MAPPING:
            raise InvalidArgument(
                f"mapping {path} has {nbytes} bytes: at most {MAPPING} are allowed; let placeholders stand for numbers"
            )
        raw = file.read(nbytes)
    try:
        return json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"mapping {path}: not JSON: {error}") from error


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the text model: a multimodal model has it as a section."""
    section = config.get("text_config")
    model_types = {kind for mapping in shipped_mappings().values() for kind in mapping.model_types}
    if not isinstance(section, Mapping) or config.get("model_type") in model_types:
        return config
    ties = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**ties, **section}


@cache
def shipped_mappings() -> dict[str, ModelMapping]:
    """Return the mappings of the package, by name."""
    folder = resources.files("nxd_ckpt") / "mappings"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    documents = {file.name.removesuffix(".json"): json.loads(file.read_text()) for file in files}
    mappings: dict[str, ModelMapping] = {}

    def add(name: str) -> None:
        base = documents[name].get("extends")
        if base is not None and base not in mappings:
            add(base)
        mappings[name] = load_mapping(documents[name], f"mappings/{name}.json", mappings)

    for name in documents:
        add(name)
    return dict(sorted(mappings.items()))


def family_advice(missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """Return advice if the live model has the names of Hugging Face's layers and the checkpoint those of NxD's.

    Or the reverse: ``missing`` are live names, ``unexpected`` saved ones. None if no shipped mapping has all of them.
    """
    for mapping in shipped_mappings().values() if missing and unexpected else ():
        for own, others in ((unexpected, missing), (missing, unexpected)):
            matches, unknown = mapping.split(own)
            if matches and not unknown and all(map(mapping.has_tensor, others)):
                saved = "NxD's" if own is unexpected else "Hugging Face's"
                return (
                    f"the names in the checkpoint are those of {saved} layers of a model of mapping {mapping.name!r}, "
                    "the live ones are not: convert it first, with nxd-ckpt convert TAG OUT --to hf --config "
                    "CONFIG_JSON, and load OUT"
                )
    return None


def own_names(cuts: Mapping[str, int | None]) -> MappingSpec:
    """Return the mapping of a model whose tensors have the same names on both sides.

    ``cuts`` has the dimension along which each is cut over tensor-parallel ranks, None if it is not.
    """
    rules = [
        {"nxd": name, "hf": [name]} if dim is None else {"nxd": name, "hf": [name], "dim": dim}
        for name, dim in cuts.items()
    ]
    return {"format_version": 1, "name": "the model's own names", "rules": rules}


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether there is a mapping for models of this config.json."""
    return _of_model_type(config.get("model_type"), shipped_mappings()) is not None


def _of_model_type(model_type: Any, shipped: Mapping[str, ModelMapping]) -> ModelMapping | None:
    return next((mapping for mapping in shipped.values() if model_type in mapping.model_types), None)


def _for_model_type(model_type: Any, shipped: Mapping[str, ModelMapping]) -> ModelMapping:
    mapping = _of_model_type(model_type, shipped)
    if mapping is not None:
        return mapping
    if model_type is None:
        raise InvalidArgument(
            "the model type is not known. Pass the model's config.json, or a Hugging Face directory with one, as "
            "config= of convert; or pass mapping=, a mapping file or the name of a shipped one"
        )
    supported = sorted(name for mapping in shipped.values() for name in mapping.model_types)
    raise InvalidArgument(
        f"config.json: no mapping for model_type {model_type!r} (there are some for {', '.join(supported)}); pass "
        "mapping=, a mapping file for this model"
    )


_OF_MAPPINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures whose head the mappings have."""


def with_head_of(mapping: ModelMapping, config: Mapping[str, Any], names: Iterable[str]) -> ModelMapping:
    """Return the mapping of a model of this config.json, with Hugging Face tensors of these ``names``.

    If its architecture has another head than the mapping's, tensors outside of the base model are taken as they are, by
    every rank, and those of the mapping need not be there.
    """
    architectures = config.get("architectures")
    prefix = mapping.base_prefix
    named = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if not prefix or not named or any(name.endswith(_OF_MAPPINGS) for name in named):
        return mapping
    outside = sorted(name for name in {*names} if not name.startswith(prefix) and mapping.of_base(name) == name)
    head = [name for name in outside if not mapping.has_tensor(name) and mapping.packed_as(name) is None]
    own = [MappingRule(Pattern(name), (RuleMember(Pattern(name)),)) for name in head]
    return replace(mapping, rules=(*(_optional_outside(rule, prefix) for rule in mapping.rules), *own))


def _optional_outside(rule: MappingRule, prefix: str) -> MappingRule:
    inside = all(member.name.text.startswith(prefix) for member in rule.members)
    return rule if inside else replace(rule, optional=True)


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


def _rules_of(rule: MappingRule) -> Iterator[MappingRule]:
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


def _renamed(rule: MappingRule, nxd: str, name: Any) -> MappingRule:
    members = tuple(replace(member, name=Pattern(name(member.name.text))) for member in rule.members)
    return replace(rule, nxd=Pattern(nxd), members=members)
