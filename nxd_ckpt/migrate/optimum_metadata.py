"""Optimum-neuron's metadata of the model beside a checkpoint (``mp_metadata_pp_rank_P.json``), as a mapping. Pure.

There is one file for each pipeline stage. Its ``parameters`` have the dimension along which tensor-parallel ranks cut
each of them, if any; its ``model_weight_transformation_specs`` have the Hugging Face layers of each fused layer.
tests/migrate/sources.md names the sources. Versions up to 0.2.0 pickled the cuts and the names of q, k and v; 0.2.0
does either, depending on the model. So models that optimum-neuron trained need no mapping file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.limits import checked
from nxd_ckpt.core.parameter_names import is_adapter, without_base_layer
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import MalformedFile, PartNotFound, UnsupportedState
from nxd_ckpt.hugging_face.mappings import PREFIX
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.reshard.saved_optimizer import COMPUTED
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.recognise import STAGE_METADATA

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_WHOLE = "modules_to_save"
"""The component of names of modules that are trained as a whole beside an adapter."""
_ADAPTED = re.compile(rf"\.original_module|\.{_WHOLE}\.[^.]+(?=\.)|\.{_WHOLE}")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Ends of names of weights that optimum-neuron pads to a multiple of the ranks."""
TIED_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Of tied weights, the name that is not listed, and the one that is."""
SHARDED_METADATA = "sharded_metadata"
"""Key of the parameters' cuts in each rank's dict, in versions before 0.0.22."""


_HEADS = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "kv_size_multiplier": "kv_size_multiplier",
}
"""Sizes of the attention layers, and their names in the metadata."""


@dataclass
class OptimumMetadata:
    """Metadata of all stages.

    Attributes:
        adapter: name of the adapter that was saved instead of the model, or None. With an adapter, ``document`` is the
            mapping of the base, with the base's names, and ``stages`` are the adapter's.
        stages: names of the parameters of each stage, in the model's order.
        tp: number of tensor-parallel ranks; None if nothing was cut or fused.
        heads: query heads of the attention layers; None if they were not changed.
        kv_heads: key-value heads of the attention layers; None if they were not changed.
        kv_size_multiplier: copies of each key-value head; None if they were not changed.
    """

    adapter: str | None = None
    stages: list[list[str]] = field(default_factory=list)
    tp: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    kv_size_multiplier: int | None = None
    _rules: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    _file: str = field(default="", repr=False)
    """The file that is being read, for errors."""

    @property
    def document(self) -> dict[str, Any]:
        """The mapping, as in a mapping file."""
        return _document(self._rules)

    def add(self, file: str, content: Mapping[str, Any], *, pickled: bool) -> None:
        """Add the next stage's ``file``. The pickled form has the cut of each parameter, and the names of q, k and v.

        Names in a pickled file do not contain adapters' names.

        Raises:
            MalformedFile: it is not such metadata, or contradicts the stages before.
            UnsupportedState: no rule can describe the model.
        """
        self._file = file
        try:
            for rule in self._pickled_rules(content) if pickled else self._rules_of(content):
                self._add(rule)
        except (KeyError, TypeError, ValueError) as error:
            versions = "0.0.22 to 0.2.0" if pickled else "0.2.0 to 0.4"
            raise MalformedFile(
                f"{file}: not the metadata of optimum-neuron {versions} ({type(error).__name__}: {error})"
            ) from error

    def _pickled_rules(self, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        cuts = checked(dict, content[SHARDED_METADATA])
        heads = checked(dict, content["gqa_qkv_metadata"])
        if self.adapter is None:
            self.stages.append(list(cuts))
        else:
            self.stages.append([name.replace(f".{_WHOLE}", "") for name in cuts if _is_of_adapter(name)])
            cuts = {_in_base(name): cut for name, cut in cuts.items() if not is_adapter(name)}
        for size, key in _HEADS.items():
            if heads[key] is not None:
                self._agree(size, heads[key])
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

    def _rules_of(self, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        parameters: Mapping[str, Mapping[str, Any]] = checked(dict, content["parameters"])
        self.stages.append(self._saved(parameters))
        parameters = {_in_base(name): cut for name, cut in parameters.items() if not is_adapter(name)}
        made: set[str] = set()
        for module in content["model_weight_transformation_specs"]:
            for kind, spec in module["specs"]:
                for rule in self._made_by(kind, module["module_fully_qualified_name"], checked(dict, spec)):
                    if rule["nxd"] in parameters:
                        made.add(rule["nxd"])
                        yield rule
        for name, cut in parameters.items():
            if name not in made:
                yield self._plain(name, cut)
            if cut["tensor_model_parallel"]:
                self._agree("tp", cut["num_partitions"])

    def _saved(self, parameters: Mapping[str, Any]) -> list[str]:
        """Return the names in the tag of a model's parameters, or of the adapter's."""
        if self.adapter is None:
            return list(parameters)
        name_alone = rf"{re.escape(self.adapter)}(?=\.|$)"
        own = re.compile(rf"(?<=lora_[AB])\.{name_alone}|\.{_WHOLE}\.{name_alone}")
        return [own.sub("", name) for name in parameters if own.search(name)]

    def _plain(self, name: str, cut: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rule of a parameter that is also one of Hugging Face's."""
        if not checked(bool, cut["tensor_model_parallel"]):
            return {"nxd": name, "hf": [name]}
        if cut["partition_stride"] != 1:
            raise UnsupportedState(
                f"{self._file}: {name} was cut with partition_stride {cut['partition_stride']}, but no transformation "
                "names the tensors that it was made of"
            )
        rows = {"rows": "vocab"} if name.endswith(_VOCABULARY) else {}
        return {"nxd": name, "hf": [name], "dim": checked(int, cut["partition_dim"]), **rows}

    def _made_by(self, kind: str, module: str, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rules of a module's layers that were made by a transformation."""
        peft_type = spec.get("peft_type")  # since 0.2.1
        if peft_type is not None and (self.adapter is None or peft_type != "lora"):
            raise UnsupportedState(
                f"{self._file}: {module} has {peft_type} adapters, which are not carried; merge them into the model "
                "with optimum-neuron first"
            )
        if kind == "FusedLinearsSpec":
            return self._fused(module, spec)
        if kind == "GQAQKVColumnParallelLinearSpec":
            return self._heads(module, spec)
        raise UnsupportedState(f"{self._file}: {module} was made by {kind}, which this version does not support")

    def _fused(self, module: str, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rules of layers side by side in one."""
        self._agree("tp", spec["tp_size"])
        layer = f"{module}.{spec['fused_linear_name']}"
        names = spec["linear_names"]
        dims = spec["original_dims"]
        if spec["fuse_axis"] not in (0, "column") or len(set(dims)) != 1 or len(dims) != len(names):
            raise UnsupportedState(
                f"{self._file}: {layer} was made of {', '.join(names)} with {dims} rows along axis "
                f"{spec['fuse_axis']}; only layers of equal size along axis 0 are carried"
            )
        return [
            {"nxd": f"{layer}.{part}", "hf": [f"{module}.{name}.{part}" for name in names], "dim": 0}
            for part in _tensors(spec)
        ]

    def _heads(self, module: str, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rules of q, copies of k and v, and the output layer in q's order."""
        for size, key in {"tp": "tp_size", **_HEADS}.items():
            self._agree(size, spec[key])
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

    def _add(self, rule: dict[str, Any]) -> None:
        """Add the rule for all layers, which must be alike."""
        names = [_any_layer(name.removeprefix(PREFIX)) for name in rule["hf"]]
        general = {**rule, "nxd": _any_layer(rule["nxd"]), "hf": names}
        first = self._rules.setdefault(general["nxd"], general)
        if first != general:
            raise MalformedFile(
                f"{self._file}: {rule['nxd']} has another description than the same parameter of other layers: "
                f"{general} and {first}"
            )

    def _agree(self, name: str, value: object) -> None:
        earlier = getattr(self, name)
        value = checked(int, value)
        if earlier not in (None, value):
            raise MalformedFile(
                f"{self._file}: has {name}={value}, elsewhere {name}={earlier}; files of two saves are mixed"
            )
        setattr(self, name, value)


def read_metadata(
    files: Mapping[str, Mapping[str, Any]], adapter: str | None = None, *, pickled: bool = False
) -> OptimumMetadata:
    """Read the files, by name in order of their stages; of a model, or of its ``adapter``.

    Raises the errors of `OptimumMetadata.add`.
    """
    metadata = OptimumMetadata(adapter)
    for file, content in files.items():
        metadata.add(file, content, pickled=pickled)
    return metadata


def old_mapping(cuts: Mapping[str, Any], computed: Sequence[str], where: str) -> dict[str, Any]:
    """Return the mapping for ``sharded_metadata`` of all stages: nothing was fused, renamed or repeated.

    Tensors in ``computed`` are left out. Raises MalformedFile for another structure.
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


def _is_of_adapter(name: str) -> bool:
    return is_adapter(name) or _WHOLE in name.split(".")


def _in_base(name: str) -> str:
    """Return a tensor's name before the model got adapters."""
    return _ADAPTED.sub("", without_base_layer(name))


def _tensors(spec: Mapping[str, Any]) -> Sequence[str]:
    return ("weight", "bias") if checked(bool, spec["bias"]) else ("weight",)


def _any_layer(name: str) -> str:
    return _NUMBER.sub("{layer}", name, count=1)


_SHOWN = 4
_PICKLED = ".pt"


def stage_metadata(files: TagFiles, opened: OpenTag, adapter: str | None = None) -> OptimumMetadata:
    """Read the metadata of all stages of the tag ``opened``; with ``adapter``, of that adapter of the model.

    Raises:
        PartNotFound: a stage has no metadata.
        MalformedFile: it belongs to another tag, or is no such metadata.
        UnsupportedState: no rule can describe the model.
        UnsafePickle: a pickle has more than plain data.
    """
    matches = map(STAGE_METADATA.fullmatch, files.names())
    by_stage = {int(match[1]): match[0] for match in matches if match is not None}
    missing = [number for number in range(opened.topology.pp) if number not in by_stage]
    if missing or len(by_stage) > opened.topology.pp:
        raise PartNotFound(
            f"{opened.where}: files of {opened.topology.pp} pipeline stages, but metadata "
            f"(mp_metadata_pp_rank_P.json, or .pt) of stages {sorted(by_stage)}; files are missing, or of two saves"
        )
    metadata = _read(files, [by_stage[stage] for stage in sorted(by_stage)], opened, adapter)
    if metadata.tp not in (None, opened.topology.tp):
        raise MalformedFile(
            f"{opened.where}: its metadata is of {metadata.tp} tensor-parallel ranks, its files are of "
            f"{opened.topology.tp}; files of ranks are missing, or of two saves"
        )
    _refuse_other_names(metadata, opened)
    return metadata


def refuse_other_model(metadata: OptimumMetadata, beside: TagFiles, opened: OpenTag) -> None:
    """Raise MalformedFile if config.json belongs to another model."""
    config = json_object(beside, "config.json")
    for key, expected in (("num_attention_heads", metadata.heads), ("num_key_value_heads", metadata.kv_heads)):
        if expected is not None and config.get(key, expected) != expected:
            raise MalformedFile(
                f"{beside.where('config.json')} has {key}={config[key]}, but the metadata of "
                f"{opened.where} has {expected}; they belong to two models"
            )


def json_object(files: TagFiles, file: str) -> dict[str, Any]:
    """Read the JSON object in the file; empty without one."""
    if not files.has(file):
        return {}
    return document.small(files.storage.read(files.key(file)), files.where(file))


def _read(files: TagFiles, names: list[str], opened: OpenTag, adapter: str | None) -> OptimumMetadata:
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if not pickled:
        return read_metadata({files.where(name): json_object(files, name) for name in names}, adapter)
    if len(pickled) < len(names):
        raise MalformedFile(
            f"{files.where(pickled[0])}: stages have metadata of two versions of optimum-neuron; files of two saves "
            "are mixed"
        )
    metadata = read_metadata({files.where(name): files.object(name) for name in names}, adapter, pickled=True)
    if opened.parts.model:
        metadata.stages = _of_each_stage(metadata, opened)
    return metadata


def _of_each_stage(metadata: OptimumMetadata, opened: OpenTag) -> list[list[str]]:
    """Return the names of each stage, without names of other stages, which the older form lists too."""
    names_by_stage = [set(opened.model_tree(Coordinates(stage))) for stage in range(opened.topology.pp)]
    anywhere = set().union(*names_by_stage)
    return [
        [name for name in names if name in own or name not in anywhere]
        for names, own in zip(metadata.stages, names_by_stage, strict=True)
    ]


def _refuse_other_names(metadata: OptimumMetadata, opened: OpenTag) -> None:
    for stage, names in enumerate(metadata.stages if opened.parts.model else []):
        tree = opened.model_tree(Coordinates(stage))
        absent = [name for name in names if name not in tree]
        unlisted = [name for name in tree if name not in {*names, TIED_HEAD} and not name.endswith(COMPUTED)]
        if metadata.adapter is not None:  # biases are listed with the base
            unlisted = []
        if absent or unlisted:
            raise MalformedFile(
                f"{opened.where}: metadata of stage {stage} lists {', '.join(absent[:_SHOWN]) or 'nothing'} that the "
                f"model's files do not have, and the files have {', '.join(unlisted[:_SHOWN]) or 'nothing'} that it "
                "does not list; files of two saves are mixed"
            )
