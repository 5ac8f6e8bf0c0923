"""Options of the tools that copy and remove tags."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_ckpt.core.arguments import Count
from nxd_ckpt.core.option_classes import Options, option
from nxd_ckpt.core.units import Seconds, Size
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.options.execution import OutputOptions
from nxd_ckpt.storage.urls import StorageOptions


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
