"""Options of a checkpoint directory, for all its saves and loads. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGTERM, Signals
from typing import Any, Literal, NamedTuple, get_args

from nxd_ckpt.core.option_classes import option, split_options
from nxd_ckpt.core.retention import Rule, rules_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.urls import StorageOptions

DEFAULT_TIMEOUT = 600.0
"""Seconds without any progress of a rank after which it counts as lost."""

OnFailure = Literal["raise", "warn"]


@dataclass(frozen=True)
class DirectoryOptions:
    """Participants of a directory, and access to it."""

    topology: Topology | None = option(None, """this rank's place among all ranks. Default: neuronx_distributed's
        parallel state, else one data-parallel group of all ranks, else a single process. With it, one process can
        load any rank's state.""")
    process_group: Any = option(None, "the ranks that save and load together, if they are not the whole job.",
        repr=False)
    timeout: float = option(DEFAULT_TIMEOUT, """seconds without progress after which a rank counts as lost. An ended
        process is noticed in about five.""")
    storage_options: StorageOptions | None = option(None, """storage options for URLs, as in fsspec and s3fs. They are
        neither logged nor saved.""", repr=False)


@dataclass(frozen=True)
class CheckpointerOptions(DirectoryOptions):
    """Options of a directory that is saved to. They take effect from the first save on."""

    run_id: str | None = option(None, """joins ranks without a process group: one string on all ranks, new for every
        launch.""")
    durable: bool = option(True, "fsync everything before a tag becomes visible. Use False for scratch space only.")
    memory_cap: int | None = option(None, """bytes of host memory for staging, of the process. Default: a share of
        the free memory.""")
    progress: bool = option(True, "show a bar on rank 0's terminal when the caller waits longer than two seconds.")
    on_save_failure: OnFailure = option("raise", """"raise" or "warn". "warn" logs a failed save on every rank, and
        training continues.""")
    max_failed_saves: int = option(3, """with "warn", the number of failed saves in a row after which one is raised.""")

    def validate(self) -> None:
        """Raise InvalidArgument for meaningless values."""
        if self.on_save_failure not in get_args(OnFailure):
            raise InvalidArgument(f"on_save_failure must be 'raise' or 'warn', found {self.on_save_failure!r}")
        limit = self.max_failed_saves
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise InvalidArgument(f"max_failed_saves must be an int of at least 1, found {limit!r}")


@dataclass(frozen=True)
class RetentionOptions:
    """Complete tags to keep, for the saves that are passed neither of both options."""

    num_kept_ckpts: int | None = option(None, """complete tags to keep, for saves without ``num_kept_ckpts`` and
        ``retain`` of their own.""")
    retain: Sequence[Rule] | int | None = option(None, "the same: a number, or rules such as ``[Last(3)]``.")

    @property
    def rules(self) -> tuple[Rule, ...] | None:
        """Rules for the complete tags to keep; None keeps all. Raises InvalidArgument."""
        return rules_of(self.num_kept_ckpts, self.retain)


Notice = bool | Signals | int | Sequence[Signals | int] | Callable[[], bool]
"""Source of the news that a rank is about to be stopped."""


@dataclass(frozen=True)
class PreemptionOptions:
    """Stopping training from outside without losing a step."""

    preemption: Notice = option(False, """sign that this rank will be stopped: True for SIGTERM, another signal, several
        such as ``(SIGINT, SIGTERM)``, or a function that each `Checkpointer.step` calls.""")
    preemption_grace: float = option(30.0, """seconds in which all ranks must agree on the step to save. If this
        process has not called `Checkpointer.step` by then, the signal ends it.""")

    @property
    def signals(self) -> tuple[int, ...]:
        """The signals to catch, none for a function; none, too, if ``preemption`` is meaningless."""
        notice = self.preemption
        if isinstance(notice, bool):
            return (SIGTERM,) if notice else ()
        numbers = tuple(notice) if isinstance(notice, (list, tuple, set, frozenset)) else (notice,)
        are_signals = all(isinstance(one, int) and not isinstance(one, bool) and one in [*Signals] for one in numbers)
        return tuple(dict.fromkeys(numbers)) if are_signals else ()

    def validate(self) -> None:
        """Raise InvalidArgument for meaningless values."""
        notice = self.preemption
        if not callable(notice) and not isinstance(notice, bool) and not self.signals:
            raise InvalidArgument(f"preemption must be True, a signal, several signals or a function, found {notice!r}")
        if not self.preemption_grace > 0:
            raise InvalidArgument(f"preemption_grace must be more than 0 seconds, found {self.preemption_grace!r}")


@dataclass(frozen=True)
class ScheduleOptions:
    """The steps after which `Checkpointer.should_save` says to save."""

    every: int | None = option(None, """save after each step that is a multiple of it.""")
    every_minutes: float | None = option(None, """save when so many minutes are over since the last save or the first
        step, by rank 0's clock. With `every`, whichever comes first.""")
    final_save: Callable[[int], object] | None = option(None, """a function that saves a step. Closing calls it for
        the last step passed to `should_save`, if that is not saved; not after an exception.""")

    def validate(self) -> None:
        """Raise InvalidArgument for meaningless values."""
        every, minutes = self.every, self.every_minutes
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise InvalidArgument(f"every must be a number of steps, at least 1, found {every!r}")
        if minutes is not None and not (isinstance(minutes, (int, float)) and 0 < minutes < math.inf):
            raise InvalidArgument(f"every_minutes must be a number of minutes above 0, found {minutes!r}")


class JobOptions(NamedTuple):
    """All options of a Checkpointer."""

    shared: CheckpointerOptions
    retention: RetentionOptions
    preemption: PreemptionOptions
    schedule: ScheduleOptions

    @staticmethod
    def kinds() -> tuple[type[Any], ...]:
        return CheckpointerOptions, RetentionOptions, PreemptionOptions, ScheduleOptions

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> JobOptions:
        """Return the options with these values, which are their fields. Raises InvalidArgument."""
        job = cls(*(kind(**split_options(kind, values)[0]) for kind in cls.kinds()))
        for options in (job.shared, job.preemption, job.schedule):
            options.validate()
        return job

    @property
    def meant_for_saves(self) -> list[str]:
        """Names of given options that show that the Checkpointer is going to save."""
        warns = self.shared.on_save_failure == "warn"
        chosen = {"preemption": self.preemption.preemption or None, "on_save_failure": warns or None}
        chosen |= {**vars(self.schedule), **vars(self.retention)}
        return [name for name, value in chosen.items() if value is not None]
