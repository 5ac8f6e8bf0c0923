"""What becomes of saves that fail: each is raised, or they are warned of until too many in a row did."""

from __future__ import annotations

import logging

from nxd_ckpt.options.checkpointer_options import CheckpointerOptions

logger = logging.getLogger("nxd_ckpt")


class Failures:
    """Counts the saves of one Checkpointer that failed.

    Every rank counts for itself. A save fails on all ranks or on none, so they count the same, except where the outcome
    is unknown to one.
    """

    def __init__(self, options: CheckpointerOptions) -> None:
        self._warns, self._limit = options.on_save_failure == "warn", options.max_failed_saves
        self.in_a_row = 0

    @property
    def warns(self) -> bool:
        """Whether a failure need not be raised."""
        return self._warns

    def decided(self, error: BaseException | None, told: bool) -> bool:
        """A save is decided. Log ``error``, unless its caller was ``told``; whether nobody has to raise it."""
        if error is None:
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        tolerated = self._warns and self.in_a_row < self._limit
        if tolerated:
            logger.warning(
                "nxd_ckpt: a save failed, and training goes on (%d in a row; the %d. is raised): %s: %s",
                self.in_a_row,
                self._limit,
                type(error).__name__,
                error,
            )
        elif not told:
            logger.error("nxd_ckpt: %s: %s", type(error).__name__, error)
        return tolerated
