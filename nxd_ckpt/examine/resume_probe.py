"""Whether a run that was just loaded goes on as the one that was saved: its state at once, then its first loss."""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import Any

from typing_extensions import Unpack

from nxd_ckpt.checkpoint import Checkpoint
from nxd_ckpt.coordination.environment import default_topology
from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.option_classes import options_of, takes
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import as_checkpoint_errors
from nxd_ckpt.examine.doctor import Examination
from nxd_ckpt.examine.live_findings import live_findings
from nxd_ckpt.load.options import LoadKeywords, LoadOptions
from nxd_ckpt.storage.progress import Counter

logger = logging.getLogger("nxd_ckpt")

_LOSSES = 32
_ENOUGH = 4
"""Losses at least by which the next one is judged."""
_BEYOND = 2.0
"""How far beyond the last losses the next one may lie, in units of their range."""


class ResumeProbe:
    """Proves that a resume took what was saved: weights, optimizer, scheduler, and the loss of the first step.

    ::

        probe = ResumeProbe()
        content = load_checkpoint("run", None, model, optimizer, scheduler)
        found = probe.check(open_checkpoint("run"), model, optimizer, scheduler, losses=content["losses"])
        for finding in found.findings:
            print(finding)
        for batch in batches:
            ...
            probe.saw(loss.item())
            save_checkpoint("run", tag, model, optimizer, scheduler, {"losses": probe.losses})

    The fingerprints are the digests that every save records anyway, so a save costs nothing more but for the last 32
    losses. Each rank checks what it holds, and no rank waits for another.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._is_first = False

    @property
    def losses(self) -> list[float]:
        """The last ones that were seen, at most 32, oldest first: for ``user_content=``."""
        return list(self._losses)

    @as_checkpoint_errors()
    @takes(LoadOptions)
    def check(
        self,
        checkpoint: Checkpoint,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        losses: list[float] | None = None,
        topology: Topology | None = None,
        **options: Unpack[LoadKeywords],
    ) -> Examination:
        """Compare live objects, right after the load and before the first step, with what ``checkpoint`` holds.

        Every bit counts. Where a tag has the tensor as this rank holds it, its digest is compared; on other sizes its
        bytes are read again. A problem is found in a model that the load did not reach (a copy, weights made anew
        after it), in an optimizer or scheduler that was not loaded, and in learning rates that were set otherwise.

        Args:
            checkpoint: the tag that was loaded, opened by :func:`open_checkpoint`.
            model, optimizer, scheduler: as they were given to the load; None is not compared.
            losses: what :attr:`losses` were at the save; the next one that :meth:`saw` is given is compared with them.
            topology: this rank's place; by default as a load finds it.
            options: as of the load.

        Raises:
            CheckpointError: as a load of these objects.
        """
        chosen, compared = options_of(LoadOptions, options), Counter()
        where = topology or default_topology()
        found = list(live_findings(checkpoint.opened, where, model, optimizer, scheduler, chosen, compared))
        for one in found:
            logger.warning("%s: %s: %s", checkpoint.opened.where, one.what, one.message)
        if losses is not None:
            self._losses, self._is_first = deque(losses, maxlen=_LOSSES), True
        return Examination(checkpoint.opened.where, None, None, None, tuple(found), 0, compared.nbytes, ())

    def saw(self, loss: float) -> Finding | None:
        """Tell the probe the loss of a step. The first one after :meth:`check` is compared with those before the save.

        Returns what is wrong with it, which is also logged: a problem if it is no number, a doubt if it lies outside of
        the range of the last losses by more than twice that range.
        """
        found = self._judged(loss) if self._is_first else None
        if found is not None:
            logger.warning("the first loss after the load: %s", found.message)
        self._is_first = False
        self._losses.append(float(loss))
        return found

    def _judged(self, loss: float) -> Finding | None:
        known = [one for one in self._losses if math.isfinite(one)]
        if not math.isfinite(loss):
            return problem("loss", "loss", f"expected a number, found {loss}") if known else None
        if len(known) < _ENOUGH:
            return None
        low, high = min(known), max(known)
        slack = _BEYOND * (high - low)
        if low - slack <= loss <= high + slack:
            return None
        return doubt(
            "loss",
            "loss",
            f"found {loss:g}, and the last {len(known)} before the save were from {low:g} to {high:g}: the run may not "
            "go on from what was saved, or on other data; a batch that is unlike the others explains this",
        )
