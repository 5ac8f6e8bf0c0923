"""Policy for saves that fail: each is raised, or a warning is logged until too many in a row failed."""

from __future__ import annotations

import logging

from nxd_ckpt.options.checkpointer_options import CheckpointerOptions

logger = logging.getLogger("nxd_ckpt")


class Failures:
    """Counter of the failed saves of one Checkpointer.

    Every rank counts its own. A save fails on all ranks or on none, so the counts are equal, except if the outcome
    is unknown to one.
    """

    def __init__(self, options: CheckpointerOptions) -> None:
        self._warns, self._limit = options.on_save_failure == "warn", options.max_failed_saves
        self.in_a_row = 0

    @property
    def warns(self) -> bool:
        """True if a failure need not be raised."""
        return self._warns

    def decided(self, error: BaseException | None, informed: bool) -> bool:
        """Record the outcome of a save. Return whether its failure is tolerated.

        ``error`` is logged, unless its caller was ``informed``.
        """
        if error is None:
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        tolerated = self._warns and self.in_a_row < self._limit
        if tolerated:
            logger.warning(
                "nxd_ckpt: a save failed, and training continues (%d in a row; the %d. is raised): %s: %s",
                self.in_a_row,
                self._limit,
                type(error).__name__,
                error,
            )
        elif not informed:
            logger.error("nxd_ckpt: %s: %s", type(error).__name__, error)
        return tolerated
