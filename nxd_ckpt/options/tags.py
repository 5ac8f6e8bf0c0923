"""What the tools take that make a tag of a tag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import TypedDict

from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.options.execution import (
    ExecutionKeywords,
    ExecutionOptions,
    Names,
    OutputKeywords,
    OutputOptions,
    SavedNames,
    check_workers,
)
from nxd_ckpt.storage.urls import StorageOptions


@dataclass(frozen=True)
class Zero1Options(ExecutionOptions):
    """How a ZeRO-1 optimizer is converted; names are those of NxD's ``nxd_convert_zero_checkpoints``.

    Attributes:
        convert_to_full: one file ``optim/full_tp_rank_XX_pp_rank_XX.pt`` for each tp, pp (and ep) rank, not padded.
        convert_to_sharded: one file for each rank, from full files or from shards of another ``dp_size``.
        dp_size: data-parallel size of the result, a multiple of its expert-parallel size; for ``convert_to_sharded``.
        optim_only: leave out everything but the optimizer.
    """

    convert_to_full: bool = False
    convert_to_sharded: bool = False
    dp_size: int | None = None
    optim_only: bool = False

    def validate(self) -> None:
        super().validate()
        if self.convert_to_full == self.convert_to_sharded:
            raise InvalidArgument("give convert_to_full or convert_to_sharded, one of the two")
        if self.convert_to_sharded and self.dp_size is None:
            raise InvalidArgument("convert_to_sharded needs dp_size, the new data-parallel size")
        if self.convert_to_full and self.dp_size is not None:
            raise InvalidArgument(f"dp_size={self.dp_size} has no meaning with convert_to_full: leave it out")


class Zero1Keywords(ExecutionKeywords, total=False):
    convert_to_full: bool
    convert_to_sharded: bool
    dp_size: int | None
    optim_only: bool


@dataclass(frozen=True)
class ReshardOptions(ExecutionOptions):
    """How a tag is cut anew.

    Attributes:
        dp: data-parallel size; by default the input's.
        tp: tensor-parallel size; by default the input's.
        pp: pipeline-parallel size; by default the input's.
        ep: expert-parallel size, which divides ``dp``; by default the input's.
        partitions: how parameters were cut over the input's ranks, by name, where it does not say (NxD's tags do not).
        stages: the names of each new pipeline stage; by default layers are spread evenly, in their order.
        saved_param_names: the optimizer's parameter names, for each pipeline stage of the input, for each param group,
            in order, where it does not say (NxD's tags do not; needed where more than dp changes).
        use_xser: whether to write xser files; by default as the input's.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    partitions: Mapping[str, Partition] | None = None
    stages: Names | None = None
    saved_param_names: SavedNames | None = None
    use_xser: bool | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Those that are given."""
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep}
        return {name: size for name, size in sizes.items() if size is not None}


class ReshardKeywords(ExecutionKeywords, total=False):
    dp: int | None
    tp: int | None
    pp: int | None
    ep: int | None
    partitions: Mapping[str, Partition] | None
    stages: Names | None
    saved_param_names: SavedNames | None
    use_xser: bool | None


@dataclass(frozen=True)
class CopyOptions(OutputOptions):
    """How a tag is copied.

    Attributes:
        overwrite: replace an existing checkpoint at the target. On file systems it stays until the copy is complete; on
            stores it is removed first.
        hard_links: link files rather than copy them where that works: within one file system, and for tags of nxd_ckpt
            only, whose files nobody modifies.
        num_workers: files that are copied at once.
        max_bytes_per_second: how fast at most, as a number or such as "20MB", where others need the disk or the network
            too; by default as fast as it goes. Files that are there and are verified count as well.
        timeout: seconds after which a job that holds the target's directory, and is gone, counts as dead.
    """

    hard_links: bool = False
    num_workers: int = 4
    max_bytes_per_second: int | str | None = None
    timeout: float = DEFAULT_TIMEOUT

    def validate(self) -> None:
        """Raises InvalidArgument for what no copy could honour."""
        check_workers(self.num_workers)


class CopyKeywords(OutputKeywords, total=False):
    hard_links: bool
    num_workers: int
    max_bytes_per_second: int | str | None
    timeout: float


@dataclass(frozen=True)
class PackOptions(OutputOptions):
    """How a tag is packed.

    Attributes:
        overwrite: replace an existing file.
        dry_run: plan everything, and write nothing. The bytes are then those before compression.
        durable: fsync the archive before it appears.
    """


class PackKeywords(OutputKeywords, total=False):
    pass


@dataclass(frozen=True)
class PruneOptions:
    """How tags are removed by rules.

    Attributes:
        dry_run: remove nothing, and say what would be removed.
        storage_options: what a URL is opened with, under the names that fsspec and s3fs use.
        timeout: seconds after which a job that holds the directory, and is gone, counts as dead.
    """

    dry_run: bool = False
    storage_options: StorageOptions | None = field(default=None, repr=False)
    timeout: float = DEFAULT_TIMEOUT


class PruneKeywords(TypedDict, total=False):
    dry_run: bool
    storage_options: StorageOptions | None
    timeout: float
