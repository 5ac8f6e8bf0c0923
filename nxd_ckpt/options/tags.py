"""Options of the tools that make a tag from a tag."""

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
    """Conversion of a ZeRO-1 optimizer, with the names of NxD's ``nxd_convert_zero_checkpoints``.

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
            raise InvalidArgument("give either convert_to_full or convert_to_sharded")
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
    """New sizes of a tag, and facts that it does not record.

    Attributes:
        dp: data-parallel size; by default the input's.
        tp: tensor-parallel size; by default the input's.
        pp: pipeline-parallel size; by default the input's.
        ep: expert-parallel size, which divides ``dp``; by default the input's.
        partitions: how parameters were partitioned over the input's ranks, by name, if it does not record it (NxD's
            tags do
            not).
        stages: the names of each new pipeline stage; by default layers are spread evenly, in their order.
        saved_param_names: the optimizer's parameter names, for each pipeline stage of the input, for each param group,
            in
            order, if it does not record them (NxD's tags do not; needed if more than dp changes).
        use_xser: write xser files; by default as the input.
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
        """Sizes that are set, by name."""
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
    """Copy of a tag.

    Attributes:
        overwrite: replace an existing checkpoint at the target. On file systems it stays until the copy is complete; on
            stores it is removed first.
        hard_links: link files instead of copying them, if possible: within one file system, and for tags of nxd_ckpt
            only, whose files nobody modifies.
        num_workers: number of files that are copied at once.
        max_bytes_per_second: maximum speed, as a number or such as "20MB", if others need the disk or the network too;
            by
            default unlimited. Existing files that are verified count as well.
        timeout: seconds after which a job that uses the target's directory, and is gone, counts as dead.
    """

    hard_links: bool = False
    num_workers: int = 4
    max_bytes_per_second: int | str | None = None
    timeout: float = DEFAULT_TIMEOUT

    def validate(self) -> None:
        """Raise InvalidArgument for options that no copy can honour."""
        check_workers(self.num_workers)


class CopyKeywords(OutputKeywords, total=False):
    hard_links: bool
    num_workers: int
    max_bytes_per_second: int | str | None
    timeout: float


@dataclass(frozen=True)
class PackOptions(OutputOptions):
    """Packing of a tag.

    Attributes:
        overwrite: replace an existing file.
        dry_run: plan everything, and write nothing. The reported bytes are then those before compression.
        durable: fsync the archive before it appears.
    """


class PackKeywords(OutputKeywords, total=False):
    pass


@dataclass(frozen=True)
class PruneOptions:
    """Removal of tags by rules.

    Attributes:
        dry_run: remove nothing, and show what would be removed.
        storage_options: storage options for URLs, named as in fsspec and s3fs.
        timeout: seconds after which a job that uses the directory, and is gone, counts as dead.
    """

    dry_run: bool = False
    storage_options: StorageOptions | None = field(default=None, repr=False)
    timeout: float = DEFAULT_TIMEOUT


class PruneKeywords(TypedDict, total=False):
    dry_run: bool
    storage_options: StorageOptions | None
    timeout: float
