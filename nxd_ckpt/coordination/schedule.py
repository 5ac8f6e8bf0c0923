"""The steps after which a job saves: every so many steps, or once so much time is over, which rank 0 decides."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nxd_ckpt import effects
from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.coordination.stopping import Stopping
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from nxd_ckpt.options.checkpointer_options import ScheduleOptions

logger = logging.getLogger("nxd_ckpt")


class Schedule:
    """The schedule of one Checkpointer's saves.

    For saves by time the ranks are joined at the first step, and again after each such save, to wait for the next.
    """

    def __init__(self, options: ScheduleOptions, timeout: float) -> None:
        self._options, self._timeout = options, timeout
        self._interval: Stopping | None = None
        self._since: float | None = None
        """The time of the last save, or of the first step."""
        self._last: int | None = None
        self._saved: int | None = None

    def is_due(self, step: int, meet: Callable[[], Agreement | None]) -> bool:
        """Return whether to save after ``step``, on all ranks alike. Raises as ``Checkpointer.should_save`` does."""
        every, minutes = self._options.every, self._options.every_minutes
        if every is None and minutes is None:
            raise InvalidArgument("should_save() needs Checkpointer(..., every=100), or every_minutes=30, to know when")
        self._last = step
        return self._is_over(step, meet) | (every is not None and step > 0 and step % every == 0)

    def saved(self, step: int | None) -> None:
        """Count the time until the next save from now: ``step`` is saved."""
        self._saved, self._since = step, effects.monotonic()

    def warn_if_not_asked(self) -> None:
        """Warn, at the end of a run that saved, of options that had no effect."""
        if self._last is None and self._options != ScheduleOptions():
            logger.warning(
                "nxd_ckpt: every=, every_minutes= and final_save= had no effect: Checkpointer.should_save(step), which "
                "goes by them, was not called; call it after every step"
            )

    def finish(self) -> None:
        """Let the caller save the last step, if that was asked for and is not done."""
        final, last = self._options.final_save, self._last
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
        minutes, since = self._options.every_minutes, self._since
        if minutes is None or since is None or effects.monotonic() - since < 60 * minutes:
            return None
        return f"{minutes:g} minutes are over"
