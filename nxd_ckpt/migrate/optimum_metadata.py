"""What optimum-neuron says of the model beside a checkpoint (``mp_metadata_pp_rank_P.json``), as a mapping. Pure.

One file for each pipeline stage: ``parameters``, each with whether and along which dimension tensor-parallel ranks cut
it, and ``model_weight_transformation_specs``, which say of which Hugging Face layers a layer was made. docs/rescue.md
names the sources. Versions up to 0.2.0 pickled how each parameter is cut, and what became of q, k and v; 0.2.0 does
either, depending on the model. So no mapping file is needed for models that optimum-neuron trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.core.entries import checked
from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.hugging_face.adapter_mapping import PREFIX
from nxd_ckpt.live.lora_names import is_adapter, without_base_layer

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_WHOLE = "modules_to_save"
"""What is trained as a whole beside an adapter."""
_ADAPTED = re.compile(rf"\.original_module|\.{_WHOLE}\.[^.]+(?=\.)|\.{_WHOLE}")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Optimum-neuron pads these to a multiple of the ranks."""
TIED_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Of tied ones, the name that is not listed, and the one that is."""
SHARDED_METADATA = "sharded_metadata"
"""The key of each rank's dict under which versions before 0.0.22 say how parameters are cut."""


@dataclass
class OptimumMetadata:
    """All stages' metadata.

    Attributes:
        document: the mapping, as a mapping file has it.
        stages: the parameters of each stage, in the model's order.
        tp: tensor-parallel ranks; None where nothing was cut or made of several.
        heads, kv_heads, kv_size_multiplier: of the attention layers; None where they were not changed.
        adapter: which adapter of the model was saved, in place of the model itself; then ``document`` is about the
            base, under the names that it has there, and ``stages`` are of that adapter.
    """

    document: dict[str, Any]
    stages: list[list[str]]
    tp: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    kv_size_multiplier: int | None = None
    adapter: str | None = None
    _rules: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)


def read_metadata(files: Mapping[str, Mapping[str, Any]], adapter: str | None = None) -> OptimumMetadata:
    """What the files say, by name in order of their stages; of a model, or of that ``adapter`` of one.

    Raises:
        MalformedFile: they are not such metadata, or contradict each other.
        UnsupportedState: they describe what no rule can.
    """
    found = OptimumMetadata({}, [], adapter=adapter)
    for where, content in files.items():
        try:
            _add_stage(found, content, where)
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedFile(
                f"{where}: not the metadata of optimum-neuron 0.2.0 to 0.4 ({type(error).__name__}: {error})"
            ) from error
    found.document = _document(found._rules)
    return found


def read_pickled_metadata(files: Mapping[str, Any], adapter: str | None = None) -> OptimumMetadata:
    """The same of ``mp_metadata_pp_rank_P.pt``: how each parameter is cut, and what became of q, k and v. The names of
    adapters were left out of names.

    Raises MalformedFile as :func:`read_metadata`.
    """
    found = OptimumMetadata({}, [], adapter=adapter)
    for where, content in files.items():
        try:
            cuts, heads = checked(dict, content["sharded_metadata"]), checked(dict, content["gqa_qkv_metadata"])
            if adapter is None:
                found.stages.append(list(cuts))
            else:
                found.stages.append([name.replace(f".{_WHOLE}", "") for name in cuts if _is_of_adapter(name)])
                cuts = {_in_base(name): cut for name, cut in cuts.items() if not is_adapter(name)}
            for key, size in (
                ("heads", "num_attention_heads"),
                ("kv_heads", "num_key_value_heads"),
                ("kv_size_multiplier", "kv_size_multiplier"),
            ):
                if heads[size] is not None:
                    _agree(found, key, checked(int, heads[size]), where)
            for rule in _pickled_rules(cuts, heads):
                _add(found, rule, where)
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedFile(
                f"{where}: not the metadata of optimum-neuron 0.0.22 to 0.2.0 ({type(error).__name__}: {error})"
            ) from error
    found.document = _document(found._rules)
    return found


def _pickled_rules(cuts: Mapping[str, Any], heads: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    made_of: dict[str, list[str]] = {}
    for name, holder in checked(dict, heads["original_names_to_gqa_qkv_names"]).items():
        made_of.setdefault(holder, []).append(name)
    outputs = checked(set, heads["output_projections_names"])
    for name, cut in cuts.items():
        names = made_of.get(name, [])
        if len(names) > 1:
            yield {"nxd": name, "hf": names, "heads": ["query", "kv", "kv"], "dim": 0}
        elif names:
            yield {"nxd": name, "hf": names, "heads": ["query" if name.endswith("_q") else "kv"], "dim": 0}
        elif name in outputs and cut["kind"] == "sharded":
            yield {"nxd": name, "hf": [name], "heads": ["query"], "dim": checked(int, cut["partition_dim"])}
        else:
            yield _old_rule(name, cut)


def old_mapping(cuts: Mapping[str, Any], computed: Sequence[str], where: str) -> dict[str, Any]:
    """The mapping that ``sharded_metadata`` of all stages says: nothing was fused, renamed or repeated. What is
    ``computed`` is left out.

    Raises MalformedFile for another structure.
    """
    try:
        rules = {name: _old_rule(name, cut) for name, cut in checked(dict, cuts).items()}
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedFile(
            f"{where}: expected sharded_metadata of optimum-neuron before 0.0.22 ({type(error).__name__}: {error})"
        ) from error
    return _document(rules, computed)


def _document(rules: dict[str, dict[str, Any]], computed: Sequence[str] = ()) -> dict[str, Any]:
    if TIED_HEAD not in rules and _EMBEDDING in rules:  # tied: one parameter under two names
        rules[TIED_HEAD] = {**rules[_EMBEDDING], "nxd": TIED_HEAD, "hf": [TIED_HEAD], "optional": True}
    return {
        "format_version": 1,
        "name": "optimum-neuron",
        "tied": {TIED_HEAD: _EMBEDDING},
        "ignored": list(computed),
        "rules": list(rules.values()),
    }


def _old_rule(name: str, cut: Mapping[str, Any]) -> dict[str, Any]:
    if cut["kind"] != "sharded":
        return {"nxd": name, "hf": [name]}
    heads = {"heads": ["kv"]} if ".k_proj." in name or ".v_proj." in name else {}  # their number is compared
    rows = {"rows": "vocab"} if name.endswith(_VOCABULARY) else {}
    return {"nxd": name, "hf": [name], "dim": checked(int, cut["partition_dim"]), **heads, **rows}


def _add_stage(found: OptimumMetadata, content: Mapping[str, Any], where: str) -> None:
    parameters: Mapping[str, Mapping[str, Any]] = checked(dict, content["parameters"])
    found.stages.append(_saved(found, parameters))
    parameters = {_in_base(name): cut for name, cut in parameters.items() if not is_adapter(name)}
    made: set[str] = set()
    for module in content["model_weight_transformation_specs"]:
        for kind, spec in module["specs"]:
            peft_type = checked(dict, spec).get("peft_type")  # since 0.2.1
            if peft_type is not None and (found.adapter is None or peft_type != "lora"):
                raise UnsupportedState(
                    f"{where}: {module['module_fully_qualified_name']} has {peft_type} adapters, which are "
                    "not carried; merge them into the model with optimum-neuron first"
                )
            rules = _MAKERS.get(kind, _unknown)(found, module["module_fully_qualified_name"], kind, spec, where)
            for rule in rules:
                if rule["nxd"] in parameters:
                    made.add(rule["nxd"])
                    _add(found, rule, where)
    for name, cut in parameters.items():
        if name not in made:
            _add(found, _plain(name, cut, where), where)
        if cut["tensor_model_parallel"]:
            _agree(found, "tp", checked(int, cut["num_partitions"]), where)


def _saved(found: OptimumMetadata, parameters: Mapping[str, Any]) -> list[str]:
    """The names in the tag of those of a model, or of the adapter."""
    if found.adapter is None:
        return list(parameters)
    name_alone = rf"{re.escape(found.adapter)}(?=\.|$)"
    own = re.compile(rf"(?<=lora_[AB])\.{name_alone}|\.{_WHOLE}\.{name_alone}")
    return [own.sub("", name) for name in parameters if own.search(name)]


def _is_of_adapter(name: str) -> bool:
    return is_adapter(name) or _WHOLE in name.split(".")


def _in_base(name: str) -> str:
    """What a tensor was called before the model got adapters."""
    return _ADAPTED.sub("", without_base_layer(name))


def _plain(name: str, cut: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A parameter that is one of Hugging Face's too."""
    if not checked(bool, cut["tensor_model_parallel"]):
        return {"nxd": name, "hf": [name]}
    if cut["partition_stride"] != 1:
        raise UnsupportedState(
            f"{where}: {name} was cut with partition_stride {cut['partition_stride']}, and no transformation says of "
            "which tensors it was made"
        )
    rows = {"rows": "vocab"} if name.endswith(_VOCABULARY) else {}
    return {"nxd": name, "hf": [name], "dim": checked(int, cut["partition_dim"]), **rows}


def _fused(found: OptimumMetadata, module: str, kind: str, spec: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """FusedLinearsSpec: layers side by side in one."""
    _agree(found, "tp", checked(int, spec["tp_size"]), where)
    names, dims = spec["linear_names"], spec["original_dims"]
    if spec["fuse_axis"] not in (0, "column") or len(set(dims)) != 1 or len(dims) != len(names):
        raise UnsupportedState(
            f"{where}: {module}.{spec['fused_linear_name']} was made of {', '.join(names)} with {dims} rows along axis "
            f"{spec['fuse_axis']}; only layers of equal size along axis 0 are carried"
        )
    return [
        {
            "nxd": f"{module}.{spec['fused_linear_name']}.{part}",
            "hf": [f"{module}.{name}.{part}" for name in names],
            "dim": 0,
        }
        for part in _tensors(spec)
    ]


def _heads(found: OptimumMetadata, module: str, kind: str, spec: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """GQAQKVColumnParallelLinearSpec: q, k and v, these several times, and the output layer in the order of q."""
    for mine, theirs in (
        ("tp", "tp_size"),
        ("heads", "num_attention_heads"),
        ("kv_heads", "num_key_value_heads"),
        ("kv_size_multiplier", "kv_size_multiplier"),
    ):
        _agree(found, mine, checked(int, spec[theirs]), where)
    at = f"{module}.{spec['gqa_qkv_projection_name']}"
    layers = [spec[f"{name}_projection_name"] for name in ("query", "key", "value")]
    kinds = ["query", "kv", "kv"]
    rules: list[dict[str, Any]] = []
    for part in _tensors(spec):
        hf = [f"{module}.{layer}.{part}" for layer in layers]
        if spec["fuse_qkv"]:
            rules.append({"nxd": f"{at}.{part}_qkv", "hf": hf, "heads": kinds, "dim": 0})
        else:
            rules += [
                {"nxd": f"{at}.{part}_{letter}", "hf": [name], "heads": [heads], "dim": 0}
                for letter, name, heads in zip("qkv", hf, kinds, strict=True)
            ]
    output = f"{module}.{spec['output_projection_name']}.weight"
    return [*rules, {"nxd": output, "hf": [output], "heads": ["query"], "dim": 1}]


def _unknown(
    found: OptimumMetadata, module: str, kind: str, spec: Mapping[str, Any], where: str
) -> list[dict[str, Any]]:
    raise UnsupportedState(f"{where}: {module} was made by {kind}, which this version does not know")


_MAKERS = {"FusedLinearsSpec": _fused, "GQAQKVColumnParallelLinearSpec": _heads}


def _tensors(spec: Mapping[str, Any]) -> Sequence[str]:
    return ("weight", "bias") if checked(bool, spec["bias"]) else ("weight",)


def _add(found: OptimumMetadata, rule: dict[str, Any], where: str) -> None:
    """The rule for all layers at once. They are alike."""
    names = [_any_layer(name.removeprefix(PREFIX)) for name in rule["hf"]]
    general = {**rule, "nxd": _any_layer(rule["nxd"]), "hf": names}
    known = found._rules.setdefault(general["nxd"], general)
    if known != general:
        raise MalformedFile(
            f"{where}: {rule['nxd']} is described in another way than the same parameter of other layers: {general} "
            f"and {known}"
        )


def _any_layer(name: str) -> str:
    return _NUMBER.sub("{layer}", name, count=1)


def _agree(found: OptimumMetadata, name: str, value: int, where: str) -> None:
    known = getattr(found, name)
    if known not in (None, value):
        raise MalformedFile(f"{where}: says {name}={value}, and elsewhere {name}={known}; files of two saves are mixed")
    setattr(found, name, value)
