"""Options of conversions: one set, whatever the source and the form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from nxd_ckpt.core.arguments import Count, Kind, plain_mapping
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.heads import Hardware
from nxd_ckpt.core.name_patterns import Renaming
from nxd_ckpt.core.option_classes import option
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.units import ShardSize
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.execution import ExecutionOptions, Names, OutputOptions, SavedNames
from nxd_ckpt.storage.urls import StrPath

MappingSpec = str | os.PathLike[str] | Annotated[Mapping[str, Any], Kind("a dict", plain_mapping)] | None
"""Name of a shipped mapping, path of a JSON file, the document itself, or None."""


Dtype = Literal["float32", "bfloat16", "float16"]

Release = Literal["0.3", "0.2.2"]
"""The releases of TorchTitan whose names are known."""


Form = Literal["tag", "hf", "dcp", "torchtitan", "files", "tar"]
NamesOf = Literal["own", "hf", "nxd"]
OptimizerForm = Literal["zero1", "zero1_full", "plain"]
StrategyName = Literal["one_file", "one_file_per_tensor", "chunks"]

_SIZES = ("dp", "tp", "pp", "ep")
_KEYS = DcpNames()


@dataclass(frozen=True)
class UnshardOptions(OutputOptions):
    """Plain files of whole tensors."""

    use_safetensors: bool = option(False, "write safetensors files, and JSON for values that are no tensors.")
    unshard_strategy: StrategyName = option("one_file", "files for each of model and optimizer.")
    sha256: bool = option(False, """write SHA256SUMS beside the files, a list that ``sha256sum -c`` and
        ``nxd-ckpt verify`` compare. Everything is read once more for it.""")
    size_per_shard: ShardSize = option("5GB", """maximum size of a weight file, or of one of "chunks", as 5GB or bytes;
        a larger tensor gets its own file.""")
    partitions: Mapping[str, Partition] | None = option(None, """cuts of parameters over ranks, by name, if the source
        does not record them (NxD's tags do not), or for the ranks of a tag that is made.""")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order, if the source does not record them (NxD's tags do not).""")


@dataclass(frozen=True)
class ConvertOptions(UnshardOptions, ExecutionOptions):
    """A conversion's form and sizes, and what the source does not record."""

    to: Form | None = option(None, """the form: "tag", "hf" (Hugging Face), "dcp", "torchtitan", "files" or "tar".
        None: what the output's name shows.""")
    names: NamesOf | None = option(None, """the tensors' names in a tag, in torch DCP or in files: "own" as in the
        source, "hf" those of transformers, "nxd" those of NxD's layers. Default: own.""")
    dp: Count | None = option(None, "data-parallel size of the tag; by default the source's, else 1.")
    tp: Count | None = option(None, "tensor-parallel size of the tag; by default as dp.")
    pp: Count | None = option(None, "pipeline-parallel size of the tag; by default as dp.")
    ep: Count | None = option(None, "expert-parallel size of the tag, which divides ``dp``; by default as dp.")
    stages: Names | None = option(None, "names of each pipeline stage. Default: layers are spread evenly, in order.")
    virtual_pp: Count = option(1, "model chunks of each rank in an interleaved pipeline (virtual_pipeline_size).")
    use_xser: bool | None = option(None, "write xser files; by default as the source.")
    optimizer: bool | None = option(None, """write the optimizer, which must be there. False leaves it out. Default:
        it is written if the source has one, but not to "hf".""")
    optimizer_form: OptimizerForm | None = option(None, """the optimizer's form in a tag: "zero1" (NxD's, sharded),
        "zero1_full" (one file, not sharded) or "plain". Default: the source's; from torch DCP "zero1" if it has master
        weights.""")
    optim_only: bool = option(False, """leave out all but the optimizer of a tag, in the form "zero1" or
        "zero1_full".""")
    model_key: str | None = option(None, """the model's key in a state dict: the source's (of torch DCP, or for tags
        and files of torch.save), or torch DCP's that is written; "" for the state dict itself. Default: "model", or
        what the source shows.""")
    optim_key: str | None = option(None, 'the optimizer\'s key, likewise. Default: "optim".')
    flatten_optimizer_state: bool = option(False, """param groups by parameter in torch DCP, as with torch's
        ``flatten_optimizer_state_dict=True``.""")
    torchtitan_release: Release = option("0.3", "TorchTitan's release whose names are written: 0.3, or AWS's 0.2.2.")
    config: StrPath | None = option(None, """the model's config.json, or a directory with one. It chooses the mapping,
        and is copied beside a model. Default: the one beside the source.""")
    mapping: MappingSpec = option(None, """a shipped mapping's name, or a JSON file. A document is taken too.
        Default: files beside the source decide, else config.json.""")
    prefix: str = option("", """beginning of names in Hugging Face's files that the mapping lacks, such as
        "language_model.".""")
    key_mapping: Mapping[str, str] | None = option(None, """maps Hugging Face's names in the mapping to whole names in
        files.""")
    kv_size_multiplier: Count | None = option(None, """copies of each key-value head in the job. Default: what the
        source records, else 1.""")
    hardware: Hardware | None = option(None, """the order of those copies; by default the one in which they are equal,
        in a new tag trn1's.""")
    pad_attn_heads: bool = option(False, "the job pads query heads with zeros to a multiple of tp (trn1).")
    dtype: Dtype | None = option(None, """cast the model's floating-point numbers to this; optimizer state is not
        cast.""")
    qkv_linear: bool = option(False, """the model has ``GQAQKVColumnParallelLinear`` (weight_q, weight_k, weight_v), not
        three layers.""")
    fuse_qkv: bool = option(False, """the model has that layer with ``fuse_qkv=True`` (weight_qkv). ``qkv_linear``
        may be set too.""")
    coalesce_qkv: bool = option(False, "the model has one ``ColumnParallelLinear`` for q, k and v.")
    split_gate_up: bool = option(False, "the model has gate_proj and up_proj, not gate_up_proj.")
    tokenizer: StrPath | None = option(None, """a directory whose files are copied to "hf", except weights and
        config.json: tokenizer, chat templates, custom code.""")
    master_weights: bool = option(False, "write the optimizer's master weights as the model, if it has them.")
    model: str | None = option(None, """the name of one of several models that were saved, such as "generator". Its part
        of the optimizers is written too.""")

    def __post_init__(self) -> None:
        """Raise InvalidArgument for contradictions, too."""
        super().__post_init__()
        if self.virtual_pp > 1 and self.stages is not None:
            raise InvalidArgument(f"virtual_pp is for stages=None; found {self.virtual_pp}")
        if self.optim_only and (self.optimizer_form not in ("zero1", "zero1_full") or set(self.sizes) - {"dp"}):
            raise InvalidArgument("optim_only is for optimizer_form='zero1' or 'zero1_full', and no size but dp")
        if self.coalesce_qkv and (self.qkv_linear or self.fuse_qkv):
            raise InvalidArgument("coalesce_qkv is for a model without qkv_linear and fuse_qkv: pass one or the other")

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that are set, by name."""
        return {name: getattr(self, name) for name in _SIZES if getattr(self, name) is not None}

    @property
    def topology(self) -> Topology:
        """Topology of these sizes, 1 if not set. Raises InvalidArgument if they contradict each other."""
        return Topology(self.dp or 1, self.tp or 1, self.pp or 1, self.ep or 1)

    @property
    def renaming(self) -> Renaming:
        """Names in files, where they are not those of the mapping's rules."""
        return Renaming(self.key_mapping or {}, self.prefix)

    @property
    def keys(self) -> DcpNames:
        """Keys of model and optimizer in a state dict."""
        model = _KEYS.model if self.model_key is None else self.model_key
        return DcpNames(model, _KEYS.optim if self.optim_key is None else self.optim_key, self.flatten_optimizer_state)

    @property
    def variants(self) -> tuple[str, ...]:
        """Variants of a mapping that the model uses."""
        variants = {
            "fuse_qkv": self.fuse_qkv,
            "qkv_linear": self.qkv_linear and not self.fuse_qkv,
            "coalesce_qkv": self.coalesce_qkv,
            "split_gate_up": self.split_gate_up,
        }
        return tuple(name for name, used in variants.items() if used)
