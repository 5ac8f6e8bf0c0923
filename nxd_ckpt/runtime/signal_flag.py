"""A signal that sets a flag, and does nothing else, as long as its handler is installed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from nxd_ckpt.errors import InvalidArgument


class SignalFlag:
    """Whether this process got the signal since the flag was made."""

    def __init__(self, number: int) -> None:
        self._number, self._pid = number, os.getpid()
        self._before: Any = signal.SIG_DFL
        self._installed = False
        self.is_set = False

    @property
    def name(self) -> str:
        return signal.Signals(self._number).name

    def install(self) -> None:
        """Take the place of the signal's handler. Raises InvalidArgument where this thread, or no handler, may not."""
        if self._installed:
            return
        try:
            before = signal.signal(self._number, self)
        except (ValueError, OSError) as error:
            raise InvalidArgument(
                f"preemption: the signal {self._number} cannot be handled here ({error}): make the Checkpointer on the "
                "main thread, or give a function that says whether to stop"
            ) from error
        self._before = signal.SIG_DFL if before is None else before  # None: it was not installed by Python
        self._installed = True

    def remove(self) -> None:
        """Put back the handler that was there before. Another that took this one's place does it, once it is removed.
        """
        self._installed = False
        present: Any = signal.getsignal(self._number)
        if present is self:
            with suppress(ValueError):  # not on the main thread: it stays
                signal.signal(self._number, self._former())

    def _former(self) -> Any:
        """What was there before, that is not removed itself."""
        before = self._before
        while isinstance(before, SignalFlag) and not before._installed:
            before = before._before
        return before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler. It may interrupt anything, so it takes no lock and logs nothing."""
        if os.getpid() != self._pid:  # a forked child: its parent ends it as if this handler were not there
            signal.signal(number, self._before)
            signal.raise_signal(number)
            return
        self.is_set = True
        if isinstance(self._before, SignalFlag):  # another Checkpointer's
            self._before(number, frame)
