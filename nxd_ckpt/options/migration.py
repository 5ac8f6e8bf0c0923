"""Options of a migration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nxd_ckpt.core.heads import Hardware
from nxd_ckpt.core.option_classes import option
from nxd_ckpt.core.torchtitan_names import Release
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.execution import OutputOptions, SavedNames
from nxd_ckpt.options.hugging_face import Dtype, MappingSpec
from nxd_ckpt.storage.urls import StrPath

Form = Literal["hf", "dcp", "torchtitan", "tag"]


@dataclass(frozen=True)
class MigrateOptions(OutputOptions):
    """Form of the result, and facts that the checkpoint does not record."""

    to: Form = option("hf", """the form: a Hugging Face directory, torch DCP, TorchTitan's ``step-N``, or a tag of one
        rank.""")
    torchtitan_release: Release = option("0.3", """for the form torchtitan, the release whose names are written: 0.3,
        or AWS's 0.2.2.""")
    config: StrPath | None = option(None, """the model's config.json, or a directory with one. Default: the one beside
        the checkpoint.""")
    mapping: MappingSpec = option(None, """a shipped mapping's name, a JSON or YAML file, or a document. Default:
        files beside the checkpoint decide, else config.json.""")
    kv_size_multiplier: int | None = option(None, """copies of each key-value head in the job, if no file beside the
        checkpoint records it.""")
    hardware: Hardware | None = option(None, "the order of those copies; by default the one in which they are equal.")
    model_only: bool = option(False, "leave out optimizer, scheduler and user content.")
    dtype: Dtype | None = option(None, "cast the model's floating-point numbers to this; optimizer state is not cast.")
    size_per_shard: int | str = option("5GB", "for the form hf, maximum size of a weight file, as 5GB or bytes.")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order, if neither the tag nor its writer's param groups record them.""")

    def validate(self) -> None:
        """Raise InvalidArgument for an unknown form or dtype."""
        if self.to not in get_args(Form):
            raise InvalidArgument(f"to must be one of {', '.join(get_args(Form))}, found {self.to!r}")
        if self.torchtitan_release not in get_args(Release):
            releases = ", ".join(get_args(Release))
            raise InvalidArgument(f"torchtitan_release must be one of {releases}, found {self.torchtitan_release!r}")
        if self.dtype is not None and self.dtype not in get_args(Dtype):
            raise InvalidArgument(f"dtype must be one of {', '.join(get_args(Dtype))}, found {self.dtype!r}")
