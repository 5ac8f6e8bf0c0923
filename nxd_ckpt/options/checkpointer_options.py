"""Options of a checkpoint directory, for all its saves and loads. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from signal import SIGTERM, Signals
from typing import Annotated, Any, Literal, NamedTuple

from nxd_ckpt.core.arguments import Count, Kind, read, whole_number
from nxd_ckpt.core.option_classes import Options, option, split_options
from nxd_ckpt.core.retention_rules import NumKept, Retain, Rule, rules_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.units import Minutes, Seconds, Size
from nxd_ckpt.storage.urls import StorageOptions

DEFAULT_TIMEOUT = 600.0
"""Seconds without any progress of a rank after which it counts as lost."""

OnFailure = Literal["raise", "warn"]


@dataclass(frozen=True)
class DirectoryOptions(Options):
    """Participants of a directory, and access to it."""

    topology: Topology | None = option(None, """this rank's place among all ranks. Default: neuronx_distributed's
        parallel state, else one data-parallel group of all ranks, else a single process. With it, one process can
        load any rank's state.""")
    process_group: Any = option(None, "the ranks that save and load together, if they are not the whole job.",
        repr=False)
    timeout: Seconds = option(DEFAULT_TIMEOUT, """seconds without progress after which a rank counts as lost, or a time
        such as "10m". An ended process is noticed in about five seconds.""")
    storage_options: StorageOptions | None = option(None, """storage options for URLs, as in fsspec and s3fs. They are
        neither logged nor saved.""", repr=False)


@dataclass(frozen=True)
class CheckpointerOptions(DirectoryOptions):
    """Options of a directory that is saved to. They take effect from the first save on."""

    run_id: str | None = option(None, """joins ranks without a process group: one string on all ranks, new for every
        launch.""")
    durable: bool = option(True, "fsync everything before a tag becomes visible. Use False for scratch space only.")
    memory_cap: Size | None = option(None, """bytes of host memory that the process stages in, or a size such as "4GB".
        Default: a share of the free memory.""")
    progress: bool = option(True, "show a bar on rank 0's terminal when the caller waits longer than two seconds.")
    on_save_failure: OnFailure = option("raise", """"raise" or "warn". "warn" logs a failed save on every rank, and
        training continues.""")
    max_failed_saves: Count = option(3, """with "warn", the number of failed saves in a row after which one is
        raised.""")


@dataclass(frozen=True)
class RetentionOptions(Options):
    """Complete tags to keep, for the saves that are passed neither of both options."""

    num_kept_ckpts: NumKept = option(None, """complete tags to keep, for saves without ``num_kept_ckpts`` and
        ``retain`` of their own.""")
    retain: Retain = option(None, "the same: a number, or rules such as ``[Last(3)]``.")

    @property
    def rules(self) -> tuple[Rule, ...] | None:
        """Rules for the complete tags to keep; None keeps all."""
        return rules_of(self.num_kept_ckpts, self.retain)


def _signal(value: Any) -> Signals:
    if isinstance(value, str):
        return Signals[value.strip().upper()]
    return value if isinstance(value, Signals) else Signals(whole_number(value))


def _signals(value: Any) -> Collection[Signals]:
    signals: Collection[Signals] = read(Collection[Signal], value)
    if not signals:
        raise ValueError
    return signals


Signal = Annotated[Signals | int, Kind("a signal", _signal)]
Notice = bool | Signal | Annotated[Collection[Signal], Kind("several signals", _signals)] | Callable[[], bool]
"""Source of the news that a rank is about to be stopped."""


@dataclass(frozen=True)
class PreemptionOptions(Options):
    """Stopping training from outside without losing a step."""

    preemption: Notice = option(False, """sign that this rank will be stopped: True for SIGTERM, another signal, several
        such as ``(SIGINT, SIGTERM)``, or a function that each `Checkpointer.step` calls.""")
    preemption_grace: Seconds = option(30.0, """seconds in which all ranks must agree on the step to save. If this
        process has not called `Checkpointer.step` by then, the signal ends it.""")

    @property
    def signals(self) -> tuple[int, ...]:
        """The signals to catch, none for a function."""
        notice = self.preemption
        if callable(notice):
            return ()
        if isinstance(notice, bool):
            return (SIGTERM,) if notice else ()
        return (notice,) if isinstance(notice, int) else tuple(dict.fromkeys(notice))


@dataclass(frozen=True)
class ScheduleOptions(Options):
    """The steps after which `Checkpointer.should_save` says to save."""

    every: Count | None = option(None, """save after each step that is a multiple of it.""")
    every_minutes: Minutes | None = option(None, """save when so many minutes, or a time such as "2h", are over since
        the last save or the first step, by rank 0's clock. With `every`, whichever comes first.""")
    final_save: Callable[[int], object] | None = option(None, """a function that saves a step. Closing calls it for
        the last step passed to `should_save`, if that is not saved; not after an exception.""")


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
        return cls(*(kind(**split_options(kind, values)[0]) for kind in cls.kinds()))

    @property
    def meant_for_saves(self) -> list[str]:
        """Names of given options that show that the Checkpointer is going to save."""
        warns = self.shared.on_save_failure == "warn"
        chosen = {"preemption": self.preemption.preemption or None, "on_save_failure": warns or None}
        chosen |= {**vars(self.schedule), **vars(self.retention)}
        return [name for name, value in chosen.items() if value is not None]
