"""Options of export to and import from Hugging Face, and of a migration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from nxd_ckpt.core.arguments import Count, Kind, plain_mapping
from nxd_ckpt.core.heads import Hardware
from nxd_ckpt.core.option_classes import Options, option
from nxd_ckpt.core.renaming import Renaming
from nxd_ckpt.core.torchtitan_names import Release
from nxd_ckpt.core.units import ShardSize
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.execution import NewJobOptions, OutputOptions, SavedNames, SharedOptions
from nxd_ckpt.storage.urls import StrPath

MappingSpec = str | os.PathLike[str] | Annotated[Mapping[str, Any], Kind("a dict", plain_mapping)] | None
"""Name of a shipped mapping, path of a JSON or YAML file, the document itself, or None."""


Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class RenamingOptions(Options):
    """Names in Hugging Face's files."""

    prefix: str = option("", """beginning of names in Hugging Face's files that the mapping lacks, such as
        "language_model.".""")
    key_mapping: Mapping[str, str] | None = option(None, """maps Hugging Face's names in the mapping to whole names in
        files.""")

    @property
    def renaming(self) -> Renaming:
        """Names in files, where they are not those of the mapping's rules."""
        return Renaming(self.key_mapping or {}, self.prefix)


@dataclass(frozen=True)
class MappingOptions(RenamingOptions):
    """Translation of names and shapes between Hugging Face and NxD."""

    config: StrPath | None = option(None, "the model's config.json, or a directory with one.")
    mapping: MappingSpec = option(None, """a shipped mapping's name, a JSON or YAML file, or a document. Default:
        config.json decides.""")
    kv_size_multiplier: Count = option(1, "copies of each key-value head in the job.")
    hardware: Hardware = option("trn1", "the order of those copies.")
    pad_attn_heads: bool = option(False, "the job pads query heads with zeros to a multiple of tp (trn1).")
    dtype: Dtype | None = option(None, "cast floating-point numbers to this. Default: no cast.")


@dataclass(frozen=True)
class ExportOptions(MappingOptions, SharedOptions):
    """Export of a tag's model."""

    tokenizer: StrPath | None = option(None, """a directory whose files are copied, except weights and config.json:
        tokenizer, chat templates, custom code.""")
    size_per_shard: ShardSize = option("5GB", """maximum size of a weight file, as 5GB or bytes; a larger tensor gets
        its own file.""")
    master_weights: bool = option(False, "export the optimizer's master weights, if it has them.")
    optimizer: bool = option(False, """write the optimizer's state too, without a cast: ``optimizer.safetensors`` (or
        shards), with tensors ``NAME/exp_avg`` and so on, and optimizer.json with param groups, steps and all other
        values.""")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order. Needed for master weights or state if the tag does not record them (NxD's do not).""")
    presharded: bool = option(False, """write the model for NxD inference: a safetensors file for each tensor-parallel
        rank, as the "weights" of a compiled Llama, Mistral, Qwen 2 or Qwen 3.""")
    tp: Count = option(1, "tensor-parallel ranks of presharded files.")
    model: str | None = option(None, """the name of one of several models: "generator" of ``model={"generator":
        ...}``. Its part of the optimizers is exported too.""")
    config: StrPath | None = option(None, """the model's config.json, or a directory with one. It decides the mapping
        and the numbers of heads and experts, and is copied, with generation_config.json beside it.""")
    overwrite: bool = option(False, "replace an existing Hugging Face directory.")
    dry_run: bool = option(False, """show the mapping of every name, and write nothing. Names without a mapping are no
        error.""")

    def __post_init__(self) -> None:
        """Raise InvalidArgument for contradictions, too."""
        super().__post_init__()
        if self.tp > 1 and not self.presharded:
            raise InvalidArgument(f"tp is for presharded=True; found {self.tp}")
        if self.presharded and (self.optimizer or self.tokenizer is not None or self.renaming):
            raise InvalidArgument(
                "presharded=True writes the model alone, by its own names: leave out optimizer=, tokenizer=, prefix= "
                "and key_mapping="
            )


@dataclass(frozen=True)
class ImportOptions(MappingOptions, NewJobOptions):
    """Import of a Hugging Face directory as a tag."""

    virtual_pp: Count = option(1, "model chunks of each rank in an interleaved pipeline (virtual_pipeline_size).")
    qkv_linear: bool = option(False, """the model has ``GQAQKVColumnParallelLinear`` (weight_q, weight_k, weight_v), not
        three layers.""")
    fuse_qkv: bool = option(False, """the model has it with ``fuse_qkv=True`` (weight_qkv), with or without
        ``qkv_linear``.""")
    coalesce_qkv: bool = option(False, "the model has one ``ColumnParallelLinear`` for q, k and v.")
    split_gate_up: bool = option(False, "the model has gate_proj and up_proj, not gate_up_proj.")
    model_key: str = option("model", "key of the state dict in a file that torch.save wrote, if it holds more.")
    config: StrPath | None = option(None, """the model's config.json, or a directory with one. Default: that of the
        Hugging Face directory.""")
    dry_run: bool = option(False, """show the mapping of every name, and write nothing. Unknown and missing names are no
        error.""")

    def __post_init__(self) -> None:
        """Raise InvalidArgument for contradictions, too."""
        super().__post_init__()
        if self.virtual_pp > 1 and self.stages is not None:
            raise InvalidArgument(f"virtual_pp is for stages=None; found {self.virtual_pp}")
        if self.coalesce_qkv and (self.qkv_linear or self.fuse_qkv):
            raise InvalidArgument("coalesce_qkv is for a model without qkv_linear and fuse_qkv: pass one or the other")

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


Form = Literal["hf", "dcp", "torchtitan", "tag"]


@dataclass(frozen=True)
class MigrateOptions(RenamingOptions, OutputOptions):
    """Form of the result, and facts that the checkpoint does not record."""

    to: Form = option("hf", """the form: a Hugging Face directory, torch DCP, TorchTitan's ``step-N``, or a tag of one
        rank.""")
    torchtitan_release: Release = option("0.3", """for the form torchtitan, the release whose names are written: 0.3,
        or AWS's 0.2.2.""")
    config: StrPath | None = option(None, """the model's config.json, or a directory with one. Default: the one beside
        the checkpoint.""")
    mapping: MappingSpec = option(None, """a shipped mapping's name, a JSON or YAML file, or a document. Default:
        files beside the checkpoint decide, else config.json.""")
    kv_size_multiplier: Count | None = option(None, """copies of each key-value head in the job, if no file beside the
        checkpoint records it.""")
    hardware: Hardware | None = option(None, "the order of those copies; by default the one in which they are equal.")
    model_only: bool = option(False, "leave out optimizer, scheduler and user content.")
    dtype: Dtype | None = option(None, "cast the model's floating-point numbers to this; optimizer state is not cast.")
    size_per_shard: ShardSize = option("5GB", "for the form hf, maximum size of a weight file, as 5GB or bytes.")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order, if neither the tag nor its writer's param groups record them.""")
