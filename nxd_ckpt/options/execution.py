"""Options that all writing tools share: creation of their output, and resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import TypedDict

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.storage.urls import StorageOptions

Names = Sequence[Sequence[str]]
"""Names of the parameters of each pipeline stage."""
SavedNames = Sequence[Sequence[Sequence[str]]]
"""Names of the parameters of each param group, in order, for each pipeline stage."""


@dataclass(frozen=True)
class OutputOptions:
    """Creation of an output.

    Attributes:
        overwrite: replace an existing output, once the conversion has succeeded.
        dry_run: plan everything, and write nothing.
        storage_options: storage options for URLs, named as in fsspec and s3fs; secrets stay in memory.
        output_options: storage options for the output, if it needs others.
        durable: fsync everything before the output becomes visible.
        progress: show a bar on standard error, if that is a terminal, for work that takes longer than two seconds.
    """

    overwrite: bool = False
    dry_run: bool = False
    storage_options: StorageOptions | None = field(default=None, repr=False)
    output_options: StorageOptions | None = field(default=None, repr=False)
    durable: bool = True
    progress: bool = False

    @property
    def written_with(self) -> StorageOptions | None:
        """Storage options of the output."""
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
    """Options of work that the ranks of a job may share.

    Attributes:
        all_ranks: share the work among all ranks of the job, or all processes that torchrun started; each of them makes
            the same call. Without it this process converts alone, also if it is one rank of a running job.
        timeout: seconds without progress after which another rank counts as lost.
    """

    all_ranks: bool = False
    timeout: float = DEFAULT_TIMEOUT


class SharedKeywords(OutputKeywords, total=False):
    all_ranks: bool
    timeout: float


@dataclass(frozen=True)
class ExecutionOptions(SharedOptions):
    """Options of work that processes of a host may share, too.

    Attributes:
        num_workers: number of processes on this host. More than one import the caller's main module again: call below
            ``if __name__ == "__main__":``.
    """

    num_workers: int = 1

    def validate(self) -> None:
        """Raise InvalidArgument for contradictions."""
        check_workers(self.num_workers)


class ExecutionKeywords(SharedKeywords, total=False):
    num_workers: int


@dataclass(frozen=True)
class NewJobOptions(ExecutionOptions):
    """Options for a tag that is made from another form of checkpoint.

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
        """Topology of these sizes. Raises InvalidArgument if they contradict each other."""
        return Topology(self.dp, self.tp, self.pp, self.ep)


class NewJobKeywords(ExecutionKeywords, total=False):
    dp: int
    tp: int
    pp: int
    ep: int
    stages: Names | None
    use_xser: bool


def check_workers(num_workers: object) -> None:
    """Raise InvalidArgument unless it is a number of workers."""
    if not isinstance(num_workers, int) or num_workers < 1:
        raise InvalidArgument(f"num_workers must be an int of at least 1, found {num_workers!r}")
