"""Options of the tools that make a tag from a tag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nxd_ckpt.core.option_classes import option
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.options.execution import ExecutionOptions, Names, OutputOptions, SavedNames, check_sizes, check_workers
from nxd_ckpt.storage.urls import StorageOptions


@dataclass(frozen=True)
class Zero1Options(ExecutionOptions):
    """Conversion of a ZeRO-1 optimizer, with the names of NxD's ``nxd_convert_zero_checkpoints``."""

    convert_to_full: bool = option(False, """one file ``optim/full_tp_rank_XX_pp_rank_XX.pt`` for each tp, pp and ep
        rank, not padded.""")
    convert_to_sharded: bool = option(False, """one file for each rank, from full files or from shards of another
        ``dp_size``.""")
    dp_size: int | None = option(None, """the result's data-parallel size, a multiple of its ep; for
        ``convert_to_sharded``.""")
    optim_only: bool = option(False, "leave out everything but the optimizer.")

    def validate(self) -> None:
        super().validate()
        if self.convert_to_full == self.convert_to_sharded:
            raise InvalidArgument("give either convert_to_full or convert_to_sharded")
        if self.dp_size is not None:
            check_sizes({"dp_size": self.dp_size})
        if self.convert_to_sharded and self.dp_size is None:
            raise InvalidArgument("convert_to_sharded needs dp_size, the new data-parallel size")
        if self.convert_to_full and self.dp_size is not None:
            raise InvalidArgument(f"dp_size={self.dp_size} has no meaning with convert_to_full: leave it out")


@dataclass(frozen=True)
class ReshardOptions(ExecutionOptions):
    """New sizes of a tag, and facts that it does not record."""

    dp: int | None = option(None, "data-parallel size; by default the input's.")
    tp: int | None = option(None, "tensor-parallel size; by default the input's.")
    pp: int | None = option(None, "pipeline-parallel size; by default the input's.")
    ep: int | None = option(None, "expert-parallel size, which divides ``dp``; by default the input's.")
    partitions: Mapping[str, Partition] | None = option(None, """cuts of parameters over ranks, by name, if the tag
        does not record them (NxD's do not).""")
    stages: Names | None = option(None, """names of each new pipeline stage. Default: layers are spread evenly, in
        order.""")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order. Needed if more than dp changes and the tag does not record them (NxD's do not).""")
    use_xser: bool | None = option(None, "write xser files; by default as the input.")

    def validate(self) -> None:
        super().validate()
        check_sizes(self.sizes)

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
    num_workers: int = option(4, "number of files that are copied at once.")
    max_bytes_per_second: int | str | None = option(None, """maximum speed, as bytes or "20MB"; existing files that
        are verified count too. Default: unlimited.""")
    timeout: float = option(DEFAULT_TIMEOUT, """seconds without a sign of life after which another job in the
        directory counts as dead.""")
    overwrite: bool = option(False, """replace an existing checkpoint. On file systems it stays until the copy is
        complete; on stores it is removed first.""")

    def validate(self) -> None:
        """Raise InvalidArgument for options that no copy can honour."""
        check_workers(self.num_workers)


@dataclass(frozen=True)
class PackOptions(OutputOptions):
    """Packing of a tag."""

    overwrite: bool = option(False, "replace an existing file.")
    dry_run: bool = option(False, "plan everything, and write nothing. Reported bytes are those before compression.")
    durable: bool = option(True, "fsync the archive before it appears.")


@dataclass(frozen=True)
class PruneOptions:
    """Removal of tags by rules."""

    dry_run: bool = option(False, "remove nothing, and show what would be removed.")
    verify: bool = option(False, """read every tag that stays by its place in a rule, and do not count one whose bytes
        changed. Without it, tags that lost files, or have one of another size, are not counted.""")
    storage_options: StorageOptions | None = option(None, "storage options for URLs, as in fsspec and s3fs.", repr=False
    )
    timeout: float = option(DEFAULT_TIMEOUT, """seconds without a sign of life after which another job in the
        directory counts as dead.""")
