"""Options of the tools that exchange tags with torch: as torch DCP directories, or as plain files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from typing_extensions import TypedDict

from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.execution import NewJobKeywords, NewJobOptions, OutputKeywords, OutputOptions, SavedNames

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
    """Place of model and optimizer in a torch DCP state dict.

    Attributes:
        model_key: the key of the model in the state dict, "" for the state dict itself.
        optim_key: the key of the optimizer in the state dict, "" for the state dict itself.
    """

    model_key: str = "model"
    optim_key: str = "optim"


class DcpKeywords(TypedDict, total=False):
    model_key: str
    optim_key: str


@dataclass(frozen=True)
class FromDcpOptions(DcpOptions, NewJobOptions):
    """Tag made from a torch DCP directory.

    Attributes:
        optimizer: the form of the optimizer: "zero1" is NxD's sharded one.
        partitions: how to partition parameters, by name; all others are whole on each rank.
            ``Partition(partition_dim=0)`` divides over all tensor-parallel ranks, ``expert=True`` over expert-parallel
            ones.
    """

    optimizer: OptimizerForm = "zero1"
    partitions: Mapping[str, Partition] | None = None

    def validate(self) -> None:
        super().validate()
        if self.optimizer not in get_args(OptimizerForm):
            raise InvalidArgument(
                f"optimizer must be one of {', '.join(get_args(OptimizerForm))}, found {self.optimizer!r}"
            )

    @property
    def names(self) -> DcpNames:
        return DcpNames(self.model_key, self.optim_key)


class FromDcpKeywords(DcpKeywords, NewJobKeywords, total=False):
    optimizer: OptimizerForm
    partitions: Mapping[str, Partition] | None


@dataclass(frozen=True)
class ToDcpOptions(DcpOptions, OutputOptions):
    """Torch DCP directory made from a tag.

    Attributes:
        flatten_optimizer_state: param groups by parameter, as with torch's ``flatten_optimizer_state_dict=True``.
        partitions: how parameters were partitioned, by name, if the tag does not record it (NxD's do not, with tp or
            ep).
        saved_param_names: the optimizer's parameter names, for each pipeline stage, for each param group, in order, if
            the
            tag does not record them (NxD's do not).
        overwrite: replace an existing torch DCP directory.
    """

    flatten_optimizer_state: bool = False
    partitions: Mapping[str, Partition] | None = None
    saved_param_names: SavedNames | None = None

    @property
    def names(self) -> DcpNames:
        return DcpNames(self.model_key, self.optim_key, self.flatten_optimizer_state)


class ToDcpKeywords(DcpKeywords, OutputKeywords, total=False):
    flatten_optimizer_state: bool
    partitions: Mapping[str, Partition] | None
    saved_param_names: SavedNames | None


@dataclass(frozen=True)
class UnshardOptions(OutputOptions):
    """Plain files made from a tag.

    Attributes:
        optim: write the optimizer; by default if the tag has one.
        use_safetensors: write safetensors files instead of ``.pt``, and JSON for values that are no tensors.
        unshard_strategy: number of files for each of model and optimizer. Instead of a name it may be an
            `nxd_ckpt.convert.UnshardStrategy`, also OLMo-core's own.
        size_per_shard: with "chunks", maximum size of a file, e.g. 5GB, or bytes; a larger tensor has a file of its
            own.
        partitions: how parameters were partitioned over the ranks, by name, if the tag does not record it (NxD's do
            not).
        saved_param_names: the optimizer's parameter names, for each pipeline stage, for each param group, in order, if
            the
            tag does not record them (NxD's do not). Without them entries are called "#0", "#1", ... where that is
            enough.
        overwrite: replace an existing unsharded checkpoint.
    """

    optim: bool | None = None
    use_safetensors: bool = False
    unshard_strategy: StrategyName | Strategy = "one_file"
    size_per_shard: int | str = "5GB"
    partitions: Mapping[str, Partition] | None = None
    saved_param_names: SavedNames | None = None


class UnshardKeywords(OutputKeywords, total=False):
    optim: bool | None
    use_safetensors: bool
    unshard_strategy: StrategyName | Strategy
    size_per_shard: int | str
    partitions: Mapping[str, Partition] | None
    saved_param_names: SavedNames | None
