"""Options of a checkpoint directory, for all its saves and loads. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from signal import Signals
from typing import Any, Literal, get_args

from nxd_ckpt.core.option_classes import option
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.urls import StorageOptions

DEFAULT_TIMEOUT = 600.0
"""Seconds without any progress of a rank after which it counts as lost."""

OnFailure = Literal["raise", "warn"]


@dataclass(frozen=True)
class DirectoryOptions:
    """Participants of a directory, and access to it."""

    topology: Topology | None = option(None, """this rank's place among all ranks; by default it is read from
        neuronx_distributed's parallel state if that is initialised, else all ranks of the process group are one
        data-parallel group, else this process is alone. With it, a single process can load any rank's state.""")
    process_group: Any = option(None, """group of torch.distributed with the ranks that save and load together, if it is
        not the whole job: for example independent models, each on some of the ranks. By default all ranks.""",
        repr=False)
    timeout: float = option(DEFAULT_TIMEOUT, """seconds without any progress after which a rank counts as lost. A rank
        whose process ended is noticed in about five seconds.""")
    storage_options: StorageOptions | None = option(None, """storage options for URLs, named as in fsspec and s3fs. They
        may hold secrets: they are neither logged nor saved.""", repr=False)


@dataclass(frozen=True)
class CheckpointerOptions(DirectoryOptions):
    """Options of a directory that is saved to. They take effect from the first save on."""

    run_id: str | None = option(None, """joins ranks without a process group: a string that is the same on all ranks,
        and new for every launch.""")
    durable: bool = option(True, "fsync everything before a tag becomes visible. False is for scratch space only.")
    memory_cap: int | None = option(None, """bytes of host memory that this rank may use for staging; by default its
        share of the free memory.""")
    progress: bool = option(True, """show a bar on rank 0's standard error, if that is a terminal, when the caller waits
        for longer than two seconds.""")
    on_save_failure: OnFailure = option("raise", """"raise" or "warn". With "warn" a save that fails, for whatever
        reason, is logged on every rank, and training continues.""")
    max_failed_saves: int = option(3, """with "warn", this many saves in a row may fail; the last of them is raised, by
        the call itself, or if it was async, by the next save, ``wait`` or ``finalize_checkpoint``.""")

    def validate(self) -> None:
        """Raise InvalidArgument for meaningless values."""
        if self.on_save_failure not in get_args(OnFailure):
            raise InvalidArgument(f"on_save_failure must be 'raise' or 'warn', found {self.on_save_failure!r}")
        limit = self.max_failed_saves
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise InvalidArgument(f"max_failed_saves must be an int of at least 1, found {limit!r}")


Notice = bool | Signals | int | Callable[[], bool]
"""Source of the news that a rank is about to be stopped."""


@dataclass(frozen=True)
class PreemptionOptions:
    """Stopping training from outside without losing a step."""

    preemption: Notice = option(False, """source of the news that this rank is about to be stopped: True for SIGTERM,
        another signal, or a function without arguments that each `Checkpointer.step` calls. Until the Checkpointer is
        closed, the signal has no other effect, unless no step comes: see ``preemption_grace``.""")
    preemption_grace: float = option(30.0, """seconds between the signal and the end: within them all ranks must agree
        on the step to save. If this process has never called `Checkpointer.step` by then, the signal ends it.""")

    def validate(self) -> None:
        """Raise InvalidArgument for meaningless values."""
        notice = self.preemption
        if not callable(notice) and not (isinstance(notice, int) and (notice in (False, True) or notice in [*Signals])):
            raise InvalidArgument(f"preemption must be True, a signal or a function, found {notice!r}")
        if not self.preemption_grace > 0:
            raise InvalidArgument(f"preemption_grace must be more than 0 seconds, found {self.preemption_grace!r}")


@dataclass(frozen=True)
class ScheduleOptions:
    """The steps after which `Checkpointer.should_save` says to save."""

    every: int | None = option(None, """save after each step that is a multiple of it.""")
    every_minutes: float | None = option(None, """save once so many minutes are over since the last save, or the first
        step: after the same step on all ranks. Rank 0's clock counts. With `every` too, after whichever comes
        first.""")
    final_save: Callable[[int], object] | None = option(None, """a function of a step that saves it. Closing the
        Checkpointer calls it, but not after an exception, for the last step that was passed to `should_save`, if that
        is not saved.""")

    def validate(self) -> None:
        """Raise InvalidArgument for meaningless values."""
        every, minutes = self.every, self.every_minutes
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise InvalidArgument(f"every must be a number of steps, at least 1, found {every!r}")
        if minutes is not None and not (isinstance(minutes, (int, float)) and 0 < minutes < math.inf):
            raise InvalidArgument(f"every_minutes must be a number of minutes above 0, found {minutes!r}")
