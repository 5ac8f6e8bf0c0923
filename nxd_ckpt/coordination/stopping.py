"""The steps at which a job saves, and stops: a rank that is asked to stop tells the others.

All ranks stop at the first step that no rank has passed yet. Ranks are at different steps at that moment, and a rank
may wait in a collective of its training until others join. So the protocol does not wait for anybody's training. Each
rank reports how many calls of step it has passed, and passes no more until it knows where to stop: at the call after
the last that any rank has passed. A rank that waits in an earlier call then continues, so collectives in the training
of others complete.

Words go over the connections of `nxd_ckpt.coordination.peers`, and are answered on their thread. While no rank is asked
to stop, none are sent: a step costs a look at a flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.peers import new_channel
from nxd_ckpt.core.suggestions import ranks_of
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, InvalidArgument, PeerTimeout
from nxd_ckpt.options.checkpointer_options import ScheduleOptions


@dataclass
class RankProgress:
    """The state of one rank. Its calls of step are counted from 1."""

    passed: int = 0
    held: bool = False
    """True if it must learn where to stop before it passes another call."""
    stop_at: int | None = None

    def may_go_on(self) -> bool:
        """Return whether the next call can return now."""
        return not self.held or self.stop_at is not None

    def pass_on(self) -> bool:
        """Count the next call as passed; return whether all ranks stop there. Only after `may_go_on`."""
        self.passed += 1
        return self.stop_at is not None and self.passed >= self.stop_at

    def hold(self) -> int:
        """Pass no more calls for now; return how many were passed, which the other ranks must know."""
        self.held = True
        return self.passed


@dataclass
class JobProgress:
    """Rank 0's view of all ranks."""

    world_size: int
    asked: bool = False
    passed: dict[int, int] = field(default_factory=dict)
    """Passed calls by rank, for the ranks that pass no more."""

    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.passed]

    def stop_at(self) -> int | None:
        """Return the call at which all ranks stop; None until all were asked and have answered."""
        return max(self.passed.values()) + 1 if self.asked and not self.missing() else None


_SLICE = 1.0
"""Seconds of a wait, after which to check whether rank 0 is still there."""


class Stopping:
    """One rank's part in stopping together. Its calls are those of one thread."""

    def __init__(
        self, agreement: Agreement, notice: Callable[[], str | None], grace: float, *, goes_on: bool = False
    ) -> None:
        """Join the other ranks; all ranks call this at once.

        Args:
            notice: returns why this rank is to stop; None if it is not.
            grace: seconds within which all ranks must have agreed.
            goes_on: they stop to save and go on, which is nothing to warn of.

        Raises:
            CheckpointError: on all ranks, if one has no connection to rank 0.
        """
        self._rank = agreement.rank
        self._world_size = agreement.world_size
        self._peers = agreement.peers
        self._notice = notice
        self._grace = grace
        self._changed = effects.Condition()
        self._own = RankProgress()
        self._tally = JobProgress(agreement.world_size)
        self._source: tuple[int, str] | None = None
        """The rank that was asked to stop, and the reason."""
        self._since = 0.0
        self._lost: list[int] = []
        self._goes_on = self._is_announced = goes_on
        self._channel: int = decided_by_rank0(agreement, new_channel)
        on_all(agreement, self._listen)

    def step(self, number: int) -> bool:
        """Return whether all ranks stop after step ``number``. Raises PeerTimeout if no common step can be found."""
        why = None if self._source else self._notice()
        with self._changed:
            if why is not None:
                self._learn(self._rank, why)
                self._tell_rank0("preempted", why)
            while not self._own.may_go_on():
                self._changed.wait(min(self._left(), _SLICE))
                self._require_others()
            stops = self._own.pass_on()
            if stops and not self._is_announced:
                self._announce(number)
            return stops

    def leave(self) -> None:
        """Declare that this rank makes no further step, so that the others need not wait for its answer."""
        with self._changed:
            self._tell_rank0("passed", self._own.hold())
            if self._rank > 0 and self._peers is not None:
                self._peers.listen(self._channel, None)

    def _listen(self) -> None:
        if self._world_size == 1:
            return
        if self._peers is None:
            option = "every_minutes" if self._goes_on else "preemption"
            raise CheckpointError(
                f"{option}: rank {self._rank} has no connection to rank 0, over which it would hear of a rank that has "
                "to stop; check whether a firewall keeps the hosts' processes from connecting to each other"
            )
        self._peers.listen(self._channel, self._receive)

    def _receive(self, rank: int, word: list[Any] | None) -> None:
        """Handle a word of ``rank``, or None once it is gone. Runs on the thread of the connections."""
        with self._changed:
            if self._rank == 0:
                self._count(rank, word)
            elif word is not None:
                self._obey(word)

    def _count(self, rank: int, word: list[Any] | None) -> None:
        """Update, on rank 0, the tally with one rank's word, and tell all ranks."""
        tally = self._tally
        if self._own.stop_at is not None:
            return  # the step is known, and does not change
        match word:
            case ["preempted", str(why)] if not tally.asked:
                tally.asked = True
                self._tell_all("asked", rank, why)
            case ["passed", int(calls)]:
                tally.passed[rank] = calls
        stop_at = tally.stop_at()
        if stop_at is not None and self._own.stop_at is None:
            self._tell_all("stop_at", stop_at)
        elif tally.asked and self._peers is not None:
            gone = [missing for missing in tally.missing() if self._peers.is_gone(missing)]
            if gone:
                self._tell_all("lost", gone)
        if not tally.missing() and self._peers is not None:
            self._peers.listen(self._channel, None)  # all have said what they had to say

    def _obey(self, word: list[Any]) -> None:
        """Handle a word of rank 0 to all ranks."""
        match word:
            case ["asked", int(rank), str(why)]:
                self._learn(rank, why)
                self._tell_rank0("passed", self._own.passed)
            case ["stop_at", int(call)]:
                self._own.stop_at = call
            case ["lost", list(ranks)]:
                self._lost = ranks
        self._changed.notify_all()

    def _learn(self, rank: int, why: str) -> None:
        if self._source is None:
            self._source = (rank, why)
            self._since = effects.monotonic()
            self._own.hold()

    def _tell_rank0(self, *word: Any) -> None:
        if self._rank == 0:
            self._count(0, list(word))
        elif self._peers is not None:
            self._peers.tell(self._channel, list(word))

    def _tell_all(self, *word: Any) -> None:
        if self._peers is not None:
            self._peers.tell(self._channel, list(word))
        self._obey(list(word))

    def _require_others(self) -> None:
        """Raise PeerTimeout if the step to stop at is unknown, and will stay so."""
        if self._own.may_go_on():
            return
        if self._rank > 0 and self._peers is not None and self._peers.is_gone(0):
            raise PeerTimeout(f"{self._cause()}, but rank 0, which chooses the step, ended; look at its log")
        if self._lost:
            lost = ranks_of(self._lost)
            raise PeerTimeout(f"{self._cause()}, but no step is common to all: {lost} ended; see its log")
        if self._left() == 0:
            option = "timeout" if self._goes_on else "preemption_grace"
            missing = "rank 0 did not say where" if self._rank else f"no answer from {ranks_of(self._tally.missing())}"
            raise PeerTimeout(f"{self._cause()}, but {missing} within {self._grace:g} s ({option})")

    def _left(self) -> float:
        """Return the seconds of grace that are left."""
        return max(self._since + self._grace - effects.monotonic(), 0.0)

    def _cause(self) -> str:
        assert self._source is not None
        return f"rank {self._source[0]} was told to {'save' if self._goes_on else 'stop'} ({self._source[1]})"

    def _announce(self, number: int) -> None:
        self._is_announced = True
        if self._rank == 0:
            logger.warning(
                "nxd_ckpt: %s: all ranks stop after step %d, and save it; %.0f s of grace are left",
                self._cause(),
                number,
                self._left(),
            )


class Schedule:
    """The schedule of one Checkpointer's saves.

    For saves by time the ranks are joined at the first step, and again after each such save, to wait for the next.
    """

    def __init__(self, options: ScheduleOptions, timeout: float) -> None:
        self._options = options
        self._timeout = timeout
        self._interval: Stopping | None = None
        self._since: float | None = None
        """The time of the last save, or of the first step."""
        self._last: int | None = None
        self._saved: int | None = None

    def is_due(self, step: int, meet: Callable[[], Agreement | None]) -> bool:
        """Return whether to save after ``step``, on all ranks alike. Raises as ``Checkpointer.should_save`` does."""
        every = self._options.every
        minutes = self._options.every_minutes
        if every is None and minutes is None:
            raise InvalidArgument("should_save() needs Checkpointer(..., every=100), or every_minutes=30, to know when")
        self._last = step
        return self._is_over(step, meet) | (every is not None and step > 0 and step % every == 0)

    def saved(self, step: int | None) -> None:
        """Count the time until the next save from now: ``step`` is saved."""
        self._saved = step
        self._since = effects.monotonic()

    def warn_if_not_asked(self) -> None:
        """Warn, at the end of a run that saved, of options that had no effect."""
        if self._last is None and self._options != ScheduleOptions():
            logger.warning(
                "nxd_ckpt: every=, every_minutes= and final_save= had no effect: Checkpointer.should_save(step), which "
                "goes by them, was not called; call it after every step"
            )

    def finish(self) -> None:
        """Let the caller save the last step, if that was asked for and is not done."""
        final = self._options.final_save
        last = self._last
        if final is not None and last is not None and last != self._saved:
            self._last = None
            final(last)

    def leave(self) -> None:
        """Make no further step. A later one would join the ranks again."""
        if self._interval is not None:
            self._interval.leave()
            self._interval = None

    def _is_over(self, step: int, meet: Callable[[], Agreement | None]) -> bool:
        """Return whether so many minutes are over: after the same step on all ranks, the first that none had passed."""
        if self._options.every_minutes is None:
            return False
        if self._since is None:
            self._since = effects.monotonic()
        if self._interval is None:
            self._interval = self._joined(meet)
        is_over = self._interval.step(step)
        if is_over:
            self.leave()
            self._since = effects.monotonic()
        return is_over

    def _joined(self, meet: Callable[[], Agreement | None]) -> Stopping:
        agreement = meet()
        if agreement is None:
            raise CheckpointError(
                "every_minutes: no process group joins the ranks, so they cannot agree on a step to save; initialise "
                "torch.distributed, or pass every= in its place"
            )
        notice = self._notice if agreement.rank == 0 else lambda: None
        return Stopping(agreement, notice, self._timeout, goes_on=True)

    def _notice(self) -> str | None:
        minutes = self._options.every_minutes
        since = self._since
        if minutes is None or since is None or effects.monotonic() - since < 60 * minutes:
            return None
        return f"{minutes:g} minutes are over"
