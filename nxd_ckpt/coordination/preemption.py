"""Requests to stop the training: a signal, or a function of the caller's, on any rank of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGTERM

from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.coordination.signal_flag import SignalFlag
from nxd_ckpt.coordination.stopping import Stopping
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.options.checkpointer_options import PreemptionOptions


class Preemption:
    """The requests to stop that one Checkpointer sees.

    Its signal is caught from the beginning; the other ranks are joined at the first step.
    """

    def __init__(self, options: PreemptionOptions) -> None:
        """Catch the signal. Raises InvalidArgument for invalid options."""
        options.validate()
        self._asked, self._grace = options.preemption, options.preemption_grace
        self._flag: SignalFlag | None = None
        self._stopping: Stopping | None = None
        if self._asked and not callable(self._asked):
            self._flag = SignalFlag(SIGTERM if self._asked is True else self._asked)
            self._flag.install()

    def step(self, number: int, meet: Callable[[], Agreement | None]) -> bool:
        """Return whether all ranks stop after step ``number``; at the first call ``meet`` joins the ranks.

        Raises as ``Checkpointer.step`` does.
        """
        if not self._asked:
            return False
        if self._stopping is None:
            self._stopping = self._joined(meet)
        return self._stopping.step(number)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Make no further step; after the block the signal has its former meaning. A later step would start again."""
        try:
            if self._stopping is not None:
                self._stopping.leave()
                self._stopping = None
            yield
        finally:
            if self._flag is not None:
                self._flag.remove()

    def _joined(self, meet: Callable[[], Agreement | None]) -> Stopping:
        agreement = meet()
        if agreement is None:
            raise CheckpointError(
                "preemption: no process group joins the ranks, so they cannot agree on a step to stop at; "
                "initialise torch.distributed, or leave preemption= out"
            )
        if self._flag is not None:
            self._flag.install()
        return Stopping(agreement, self._notice, self._grace)

    def _notice(self) -> str | None:
        """Return why this rank is to stop; None if it is not."""
        if self._flag is not None:
            return self._flag.name if self._flag.is_set else None
        return "preemption() is true" if callable(self._asked) and self._asked() else None
