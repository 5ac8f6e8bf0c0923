"""What tools that write have in common: how their output is made, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import TypedDict

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.storage.urls import StorageOptions

Names = Sequence[Sequence[str]]
"""For each pipeline stage the names of its parameters."""
SavedNames = Sequence[Sequence[Sequence[str]]]
"""For each pipeline stage, for each param group, the names of its parameters in order."""


@dataclass(frozen=True)
class OutputOptions:
    """How an output is made.

    Attributes:
        overwrite: replace an existing output, once the conversion has succeeded.
        dry_run: plan everything, and write nothing.
        storage_options: what URLs are opened with, under the names that fsspec and s3fs use; secrets stay in memory.
        output_options: the same for the output alone, if it needs others.
        durable: fsync everything before the output becomes visible.
        progress: show a bar on standard error, if that is a terminal, for what takes longer than two seconds.
    """

    overwrite: bool = False
    dry_run: bool = False
    storage_options: StorageOptions | None = field(default=None, repr=False)
    output_options: StorageOptions | None = field(default=None, repr=False)
    durable: bool = True
    progress: bool = False

    @property
    def written_with(self) -> StorageOptions | None:
        """What the output is opened with."""
        return self.storage_options if self.output_options is None else self.output_options


class OutputKeywords(TypedDict, total=False):
    overwrite: bool
    dry_run: bool
    storage_options: StorageOptions | None
    output_options: StorageOptions | None
    durable: bool
    progress: bool


@dataclass(frozen=True)
class SharedOptions(OutputOptions):
    """The same for work that the ranks of a job may share.

    Attributes:
        all_ranks: share the work among all ranks of the job, or all processes that torchrun started: each of them makes
            the same call. Without it a conversion is this process's own business, on one rank of a running job too.
        timeout: seconds without progress after which another rank counts as lost.
    """

    all_ranks: bool = False
    timeout: float = DEFAULT_TIMEOUT


class SharedKeywords(OutputKeywords, total=False):
    all_ranks: bool
    timeout: float


@dataclass(frozen=True)
class ExecutionOptions(SharedOptions):
    """The same for work that processes of a host may share, too.

    Attributes:
        num_workers: processes on this host. More than one import the caller's main module again: call below
            ``if __name__ == "__main__":``.
    """

    num_workers: int = 1

    def validate(self) -> None:
        """Raises InvalidArgument for what contradicts itself."""
        check_workers(self.num_workers)


class ExecutionKeywords(SharedKeywords, total=False):
    num_workers: int


@dataclass(frozen=True)
class NewJobOptions(ExecutionOptions):
    """The same for a tag that is made of what is no tag.

    Attributes:
        dp: data-parallel size.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        ep: expert-parallel size, which divides ``dp``.
        stages: the names of each pipeline stage; by default layers are spread evenly, in their order.
        use_xser: write xser files.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    stages: Names | None = None
    use_xser: bool = False

    @property
    def topology(self) -> Topology:
        """Raises InvalidArgument for sizes that contradict each other."""
        return Topology(self.dp, self.tp, self.pp, self.ep)


class NewJobKeywords(ExecutionKeywords, total=False):
    dp: int
    tp: int
    pp: int
    ep: int
    stages: Names | None
    use_xser: bool


def check_workers(num_workers: object) -> None:
    """Raise InvalidArgument where that is no number of workers."""
    if not isinstance(num_workers, int) or num_workers < 1:
        raise InvalidArgument(f"num_workers must be an int of at least 1, found {num_workers!r}")
