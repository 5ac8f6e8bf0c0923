"""Options of the tools that exchange tags with torch: as torch DCP directories, or as plain files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.option_classes import option
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.execution import NewJobOptions, OutputOptions, SavedNames

OptimizerForm = Literal["zero1", "plain"]
StrategyName = Literal["one_file", "one_file_per_tensor", "chunks"]


class Strategy(Protocol):
    """Distribution of tensors over files. OLMo-core's ``UnshardStrategy`` is one too."""

    @property
    def name(self) -> str: ...

    @property
    def chunk_size_bytes(self) -> int | str | None: ...


@dataclass(frozen=True)
class DcpOptions:
    """Place of model and optimizer in a torch DCP state dict."""

    model_key: str = option("model", 'the key of the model in the state dict, "" for the state dict itself.')
    optim_key: str = option("optim", 'the key of the optimizer in the state dict, "" for the state dict itself.')


@dataclass(frozen=True)
class FromDcpOptions(DcpOptions, NewJobOptions):
    """Tag made from a torch DCP directory."""

    optimizer: OptimizerForm | None = option(None, """the form of the optimizer: "zero1" (NxD's, sharded) or "plain".
        None: "zero1" if the directory has master weights, else "plain".""")
    partitions: Mapping[str, Partition] | None = option(None, """cuts of parameters, by name; others are whole.
        ``Partition(partition_dim=0)`` divides over tensor-parallel ranks, ``expert=True`` over expert-parallel
        ones.""")

    def validate(self) -> None:
        super().validate()
        if self.optimizer not in (None, *get_args(OptimizerForm)):
            raise InvalidArgument(
                f"optimizer must be one of {', '.join(get_args(OptimizerForm))}, found {self.optimizer!r}"
            )

    @property
    def names(self) -> DcpNames:
        return DcpNames(self.model_key, self.optim_key)


@dataclass(frozen=True)
class ToDcpOptions(DcpOptions, OutputOptions):
    """Torch DCP directory made from a tag."""

    flatten_optimizer_state: bool = option(False, """param groups by parameter, as with torch's
        ``flatten_optimizer_state_dict=True``.""")
    partitions: Mapping[str, Partition] | None = option(None, """cuts of parameters over ranks, by name, if the tag
        does not record them (NxD's do not, with tp or ep).""")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order, if the tag does not record them (NxD's do not).""")
    overwrite: bool = option(False, "replace an existing torch DCP directory.")

    @property
    def names(self) -> DcpNames:
        return DcpNames(self.model_key, self.optim_key, self.flatten_optimizer_state)


@dataclass(frozen=True)
class UnshardOptions(OutputOptions):
    """Plain files made from a tag."""

    optim: bool | None = option(None, "write the optimizer; by default if the tag has one.")
    use_safetensors: bool = option(False, "write safetensors files, and JSON for values that are no tensors.")
    unshard_strategy: StrategyName | Strategy = option("one_file", """files for each of model and optimizer: a name,
        an `nxd_ckpt.convert.UnshardStrategy`, or OLMo-core's own.""")
    size_per_shard: int | str = option("5GB", """with "chunks", maximum size of a file, as 5GB or bytes; a larger
        tensor gets its own file.""")
    partitions: Mapping[str, Partition] | None = option(None, """cuts of parameters over ranks, by name, if the tag
        does not record them (NxD's do not).""")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order, if the tag does not record them (NxD's do not). Without them entries are "#0", "#1",
        ... where that is enough.""")
    overwrite: bool = option(False, "replace an existing unsharded checkpoint.")
