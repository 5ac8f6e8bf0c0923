"""What a migration takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nxd_ckpt.core.heads import Hardware
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.execution import OutputKeywords, OutputOptions, SavedNames
from nxd_ckpt.options.hugging_face import Dtype, MappingSpec
from nxd_ckpt.storage.urls import StrPath

Form = Literal["hf", "dcp", "torchtitan", "tag"]


@dataclass(frozen=True)
class MigrateOptions(OutputOptions):
    """What is made of a checkpoint, and what nothing beside it says.

    Attributes:
        to: the form: a Hugging Face directory, a torch DCP directory, TorchTitan's ``step-N`` in the given directory,
            or a tag of one rank.
        config: the model's config.json, or a Hugging Face directory with one; by default the one beside the
            checkpoint.
        mapping: the name of a shipped mapping, a JSON or YAML file, or its document; by default what is beside the
            checkpoint says it, else config.json.
        kv_size_multiplier: how often the job kept each key-value head, where nothing beside the checkpoint says so.
        hardware: the order of those copies; by default the one in which they are equal.
        model_only: leave out optimizer, scheduler and user content.
        dtype: cast the model's floating-point numbers to this; the optimizer's state stays as it is.
        size_per_shard: of the form hf, bytes of a weight file at most, as a number or such as "5GB".
        saved_param_names: the optimizer's parameter names, for each pipeline stage, for each param group, in order,
            where neither the tag nor its writer's param groups tell.
    """

    to: Form = "hf"
    config: StrPath | None = None
    mapping: MappingSpec = None
    kv_size_multiplier: int | None = None
    hardware: Hardware | None = None
    model_only: bool = False
    dtype: Dtype | None = None
    size_per_shard: int | str = "5GB"
    saved_param_names: SavedNames | None = None

    def validate(self) -> None:
        """Raises InvalidArgument."""
        if self.to not in get_args(Form):
            raise InvalidArgument(f"to must be one of {', '.join(get_args(Form))}, found {self.to!r}")
        if self.dtype is not None and self.dtype not in get_args(Dtype):
            raise InvalidArgument(f"dtype must be one of {', '.join(get_args(Dtype))}, found {self.dtype!r}")


class MigrateKeywords(OutputKeywords, total=False):
    to: Form
    config: StrPath | None
    mapping: MappingSpec
    kv_size_multiplier: int | None
    hardware: Hardware | None
    model_only: bool
    dtype: Dtype | None
    size_per_shard: int | str
    saved_param_names: SavedNames | None
