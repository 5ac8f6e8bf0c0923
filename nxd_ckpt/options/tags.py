"""Options of the tools that make a tag from a tag, or exchange it with torch: as DCP directory, or plain files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from nxd_ckpt.core.arguments import Count
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.option_classes import Options, option
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.units import AnySize, Seconds, ShardSize, Size
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.options.execution import (
    ExecutionOptions,
    Names,
    NewJobOptions,
    OutputOptions,
    SavedNames,
)
from nxd_ckpt.storage.urls import StorageOptions


@dataclass(frozen=True)
class Zero1Options(ExecutionOptions):
    """Conversion of a ZeRO-1 optimizer, with the names of NxD's ``nxd_convert_zero_checkpoints``."""

    convert_to_full: bool = option(False, """one file ``optim/full_tp_rank_XX_pp_rank_XX.pt`` for each tp, pp and ep
        rank, not padded.""")
    convert_to_sharded: bool = option(False, """one file for each rank, from full files or from shards of another
        ``dp_size``.""")
    dp_size: Count | None = option(None, """the result's data-parallel size, a multiple of its ep; for
        ``convert_to_sharded``.""")
    optim_only: bool = option(False, "leave out everything but the optimizer.")

    def __post_init__(self) -> None:
        """Raise InvalidArgument for contradictions, too."""
        super().__post_init__()
        if self.convert_to_full == self.convert_to_sharded:
            raise InvalidArgument("give either convert_to_full or convert_to_sharded")
        if self.convert_to_sharded and self.dp_size is None:
            raise InvalidArgument("convert_to_sharded needs dp_size, the new data-parallel size")
        if self.convert_to_full and self.dp_size is not None:
            raise InvalidArgument(f"dp_size={self.dp_size} has no meaning with convert_to_full: leave it out")


@dataclass(frozen=True)
class ReshardOptions(ExecutionOptions):
    """New sizes of a tag, and facts that it does not record."""

    dp: Count | None = option(None, "data-parallel size; by default the input's.")
    tp: Count | None = option(None, "tensor-parallel size; by default the input's.")
    pp: Count | None = option(None, "pipeline-parallel size; by default the input's.")
    ep: Count | None = option(None, "expert-parallel size, which divides ``dp``; by default the input's.")
    partitions: Mapping[str, Partition] | None = option(None, """cuts of parameters over ranks, by name, if the tag
        does not record them (NxD's do not).""")
    stages: Names | None = option(None, """names of each new pipeline stage. Default: layers are spread evenly, in
        order.""")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order. Needed if more than dp changes and the tag does not record them (NxD's do not).""")
    use_xser: bool | None = option(None, "write xser files; by default as the input.")

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that are set, by name."""
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class CopyOptions(OutputOptions):
    """Copy of a tag."""

    hard_links: bool = option(False, """link files instead of copying them, within one file system, for tags of
        nxd_ckpt whose files nobody modifies.""")
    num_workers: Count = option(4, "number of files that are copied at once.")
    max_bytes_per_second: Size | None = option(None, """bandwidth limit, as bytes or "20MB" (10^6 bytes each);
        existing files that are verified count too. Default: unlimited.""")
    timeout: Seconds = option(DEFAULT_TIMEOUT, """seconds without a sign of life after which another job in the
        directory counts as dead, or a time such as "10m".""")
    overwrite: bool = option(False, """replace an existing checkpoint. On file systems it stays until the copy is
        complete; on stores it is removed first.""")


@dataclass(frozen=True)
class PackOptions(OutputOptions):
    """Packing of a tag."""

    overwrite: bool = option(False, "replace an existing file.")
    dry_run: bool = option(False, "plan everything, and write nothing. Reported bytes are those before compression.")
    durable: bool = option(True, "fsync the archive before it appears.")


@dataclass(frozen=True)
class PruneOptions(Options):
    """Removal of tags by rules."""

    dry_run: bool = option(False, "remove nothing, and show what would be removed.")
    verify: bool | None = option(None, """read every tag that stays, if any goes, and do not count one whose bytes
        changed. By default so much is asked of the newest tag, or of the next one if that is damaged; False reads none.
        Of other tags, those that lost files, or have one of another size, are not counted.""")
    pinned_only: bool = option(False, """in place of rules: keep the pinned tags only. The newest goes too, unless it is
        pinned. Refused if no undamaged tag is pinned.""")
    storage_options: StorageOptions | None = option(None, "storage options for URLs, as in fsspec and s3fs.", repr=False
    )
    timeout: Seconds = option(DEFAULT_TIMEOUT, """seconds without a sign of life after which another job in the
        directory counts as dead, or a time such as "10m".""")
    progress: bool = option(False, "show a bar on the terminal for work of more than two seconds.")


OptimizerForm = Literal["zero1", "plain"]
StrategyName = Literal["one_file", "one_file_per_tensor", "chunks"]


class Strategy(Protocol):
    """Distribution of tensors over files. OLMo-core's ``UnshardStrategy`` is one too."""

    @property
    def name(self) -> str: ...

    @property
    def chunk_size_bytes(self) -> AnySize | None: ...


@dataclass(frozen=True)
class DcpOptions(Options):
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
    size_per_shard: ShardSize = option("5GB", """with "chunks", maximum size of a file, as 5GB or bytes; a larger
        tensor gets its own file.""")
    partitions: Mapping[str, Partition] | None = option(None, """cuts of parameters over ranks, by name, if the tag
        does not record them (NxD's do not).""")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order, if the tag does not record them (NxD's do not). Without them entries are "#0", "#1",
        ... where that is enough.""")
    overwrite: bool = option(False, "replace an existing unsharded checkpoint.")
