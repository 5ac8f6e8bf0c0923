"""Options of the tools: reading, copying and removing tags without a job, creation of output, and resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nxd_ckpt.core.arguments import Count
from nxd_ckpt.core.option_classes import Options, option
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.units import Seconds, Size
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.storage.urls import StorageOptions, StrPath, is_url

Names = Sequence[Sequence[str]]
"""Names of the parameters of each pipeline stage."""
SavedNames = Sequence[Sequence[Sequence[str]]]
"""Names of the parameters of each param group, in order, for each pipeline stage."""

Verify = bool | Literal["reading"]
"""When a load compares digests: before anything changes (True), while it reads, or never."""

BLANK = "?"
"""The beginning of a value in a template that is to be replaced."""


@dataclass(frozen=True)
class OutputOptions(Options):
    """Creation of an output."""

    overwrite: bool = option(False, "replace an existing output once the conversion has succeeded.")
    dry_run: bool = option(False, "plan everything, and write nothing.")
    storage_options: StorageOptions | None = option(None, """storage options for URLs, as in fsspec and s3fs; secrets
        stay in memory.""", repr=False)
    output_options: StorageOptions | None = option(
        None, "storage options for the output, if it needs others.", repr=False
    )
    durable: bool = option(True, "fsync everything before the output becomes visible.")
    progress: bool = option(False, "show a bar on the terminal for work of more than two seconds.")

    @property
    def written_with(self) -> StorageOptions | None:
        """Storage options of the output."""
        return self.storage_options if self.output_options is None else self.output_options


@dataclass(frozen=True)
class ExecutionOptions(OutputOptions):
    """Options of work that the ranks of a job, or processes of a host, may share."""

    all_ranks: bool = option(False, """share the work among all ranks of the job or of torchrun, each of which makes
        the same call. Without it this process works alone.""")
    timeout: Seconds = option(DEFAULT_TIMEOUT, """seconds without progress after which another rank counts as lost, or
        a time such as "10m".""")
    num_workers: Count = option(1, """processes on this host. More than one import the main module again: call below
        ``if __name__ == "__main__":``.""")


@dataclass(frozen=True)
class OpenOptions(Options):
    """Opening of a tag. ``storage_options`` may hold secrets: no repr shows them."""

    partitions: Mapping[str, Partition] | None = option(None, """cuts of parameters over ranks, by name, if the tag
        does not record them (NxD's do not).""")
    saved_param_names: SavedNames | None = option(None, """the optimizer's parameter names, by pipeline stage and
        param group, in order, if the tag does not record them (NxD's do not).""")
    trust_pickle: bool = option(False, "allow objects of any class in it.")
    storage_options: StorageOptions | None = option(None, "storage options for URLs, as in fsspec and s3fs.", repr=False
    )


@dataclass(frozen=True)
class DownloadOptions(Options):
    """Copies of files on a local disk, to read from."""

    pre_download: bool = option(False, """first download whole files to a local disk, once for each host. The files of
        the last loaded tag stay there.""")
    work_dir: StrPath | None = option(None, """directory for ``pre_download``. Default: below the system's temporary
        directory.""")

    def __post_init__(self) -> None:
        """Raise InvalidArgument for contradictions, too."""
        super().__post_init__()
        if self.work_dir is not None and not self.pre_download:
            raise InvalidArgument("work_dir= is the place for the copies of pre_download=True: pass both, or neither")
        if self.work_dir is not None and is_url(self.work_dir):
            raise InvalidArgument(f"work_dir={self.work_dir!r} is a URL, expected a directory on a disk of this host")


@dataclass(frozen=True)
class CopyOptions(OutputOptions):
    """Copy of a tag."""

    num_workers: Count = option(4, "number of files that are copied at once.")
    max_bytes_per_second: Size | None = option(None, """bandwidth limit, as bytes or "20MB" (10^6 bytes each);
        existing files that are verified count too. Default: unlimited.""")
    timeout: Seconds = option(DEFAULT_TIMEOUT, """seconds without a sign of life after which another job in the
        directory counts as dead, or a time such as "10m".""")
    overwrite: bool = option(False, """replace an existing checkpoint. On file systems it stays until the copy is
        complete; on stores it is removed first.""")


@dataclass(frozen=True)
class PruneOptions(Options):
    """Removal of tags by rules."""

    dry_run: bool = option(False, "remove nothing, and show what would be removed.")
    verify: bool | None = option(None, """read every tag that stays, if any goes, and do not count one whose bytes
        changed. By default so much is asked of the newest tag, or of the next one if that is damaged; False reads none.
        Of other tags, those that lost files, or have one of another size, are not counted.""")
    storage_options: StorageOptions | None = option(None, "storage options for URLs, as in fsspec and s3fs.", repr=False
    )
    timeout: Seconds = option(DEFAULT_TIMEOUT, """seconds without a sign of life after which another job in the
        directory counts as dead, or a time such as "10m".""")
    progress: bool = option(False, "show a bar on the terminal for work of more than two seconds.")
