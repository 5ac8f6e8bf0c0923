"""Checks that a loaded run continues the saved one: its state at once, then its first loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from typing_extensions import Unpack

from nxd_ckpt.checkpoint import Checkpoint
from nxd_ckpt.coordination.agreement import SingleProcessAgreement
from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.option_classes import options_of, takes
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import as_checkpoint_errors
from nxd_ckpt.examine.doctor import Examination
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.memory import allocated, byte_view
from nxd_ckpt.keywords import LoadKeywords
from nxd_ckpt.live.environment import default_topology
from nxd_ckpt.loading.comparison import recorded_digest
from nxd_ckpt.loading.load_attempt import LoadAttempt
from nxd_ckpt.loading.options import LoadOptions, LoadRequest
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import Leaf

_LOSSES = 32
_ENOUGH = 4
"""Number of losses needed to judge the next one."""
_BEYOND = 2.0
"""Allowed distance of the next loss from the last losses, in units of their range."""


class ResumeProbe:
    """Check that a resume took what was saved: weights, optimizer, scheduler, and the loss of the first step.

        probe = ResumeProbe()
        content = load_checkpoint("run", None, model, optimizer, scheduler)
        examination = probe.check(open_checkpoint("run"), model, optimizer, scheduler, losses=content["losses"])
        for finding in examination.findings:
            print(finding)
        for batch in batches:
            ...
            probe.saw(loss.item())
            save_checkpoint("run", tag, model, optimizer, scheduler, {"losses": probe.losses})

    The fingerprints are the digests that every save records anyway, so a save costs only the last 32 losses more. Each
    rank checks its own state, and no rank waits for another.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._is_first = False

    @property
    def losses(self) -> list[float]:
        """The last losses, at most 32, oldest first: for ``user_content=``."""
        return list(self._losses)

    @as_checkpoint_errors
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
        """Compare live objects, right after the load and before the first step, with ``checkpoint``.

        Every bit counts. Where a tag has the tensor as this rank holds it, its digest is compared; on other sizes its
        bytes are read again. A problem is reported for a model that the load did not reach (a copy, or weights created
        after it), an optimizer or scheduler that was not loaded, and learning rates that were changed.

        Args:
            checkpoint: the tag that was loaded, opened by `open_checkpoint`.
            model, optimizer, scheduler: the objects passed to the load; None is not compared.
            losses: `losses` at the save; the next loss passed to `saw` is compared with them.
            topology: this rank's place; by default as a load detects it.

        Raises:
            CheckpointError: the errors of a load of these objects.
        """
        chosen = options_of(LoadOptions, options)
        compared = Counter()
        where = topology or default_topology()
        settled = chosen.settled(reads_are_cheap=False)
        request = LoadRequest(where, SingleProcessAgreement(), model, optimizer, scheduler, settled)
        findings = list(_live_findings(checkpoint.opened, request, compared))
        for finding in findings:
            logger.warning("%s: %s: %s", checkpoint.opened.where, finding.what, finding.message)
        if losses is not None:
            self._losses = deque(losses, maxlen=_LOSSES)
            self._is_first = True
        return Examination(checkpoint.opened.where, None, None, None, tuple(findings), 0, compared.nbytes, ())

    def saw(self, loss: float) -> Finding | None:
        """Record the loss of a step. The first one after `check` is compared with those before the save.

        Returns the finding, which is also logged: a problem if the loss is no number, a doubt if it lies outside the
        range of the last losses by more than twice that range. None if the loss is plausible.
        """
        finding = self._judge(loss) if self._is_first else None
        if finding is not None:
            logger.warning("the first loss after the load: %s", finding.message)
        self._is_first = False
        self._losses.append(float(loss))
        return finding

    def _judge(self, loss: float) -> Finding | None:
        finite = [loss_before for loss_before in self._losses if math.isfinite(loss_before)]
        if not math.isfinite(loss):
            return problem("loss", "loss", f"expected a number, found {loss}") if finite else None
        if len(finite) < _ENOUGH:
            return None
        low = min(finite)
        high = max(finite)
        slack = _BEYOND * (high - low)
        if low - slack <= loss <= high + slack:
            return None
        return doubt(
            "loss",
            "loss",
            f"found {loss:g}, and the last {len(finite)} before the save were from {low:g} to {high:g}: the run may "
            "not continue from the saved state, or on other data; an unusual batch explains this",
        )


def _live_findings(opened: OpenTag, request: LoadRequest, compared: Counter) -> Iterator[Finding]:
    """Yield the differences between the live objects and the tag. ``compared`` counts the bytes.

    A tensor that the tag holds as a whole is compared by digest, without reading it. Parts of others, for example on
    other sizes than at the save, are read again.

    Raises the errors of a load of these objects.
    """
    attempt = LoadAttempt(opened, request, is_alone=True)
    if attempt.filtered:
        attempt.apply_filter()
    attempt.compare_names()
    attempt.judge_names()
    load = attempt.prepare()
    load.judge_parameters()
    with load.reader as reader:

        def digest(leaf: Leaf, name: str) -> int:
            recorded = recorded_digest(leaf)
            if recorded is not None:
                return recorded
            out = allocated(leaf.shape, leaf.dtype)
            reader.read_into(leaf, out, name, compare=True, verified=False)
            reader.finish()
            return crc32(byte_view(out))

        proof = load.proof(digest, everything=True)
        found = proof.run(request.model, request.optimizer, request.scheduler)
        compared.add(proof.nbytes)
        yield from found
