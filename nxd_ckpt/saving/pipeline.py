"""Pipeline of a rank's saves, one after the other: staged on the caller's thread, written on one of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.commit.retention import remove_surplus
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.core.tags import goes_back
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import plan_difference
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, OutcomeUnknown, RanksDisagree, in_words, to_wire, translated
from nxd_ckpt.formats.state import SaveState
from nxd_ckpt.live import torch_xla
from nxd_ckpt.saving.ballot import Ballot, tidy
from nxd_ckpt.saving.pending import Helpers, SaveProgress, Worker
from nxd_ckpt.saving.plan import SavePlan
from nxd_ckpt.saving.planned_file import Wave, end_of, plan_waves
from nxd_ckpt.saving.replica_check import MeshSummary, agree_on_groups, differing_state
from nxd_ckpt.saving.save_attempt import SaveAttempt
from nxd_ckpt.saving.save_planner import Planner
from nxd_ckpt.saving.staging import Stager, buffers_of
from nxd_ckpt.saving.writing import WRITERS
from nxd_ckpt.storage.arena import whole_pages
from nxd_ckpt.storage.progress import Counter, report, watched
from nxd_ckpt.storage.transfer import SavePace


class StagingPlan(NamedTuple):
    """Files of one save of this rank, and the waves in which they are staged."""

    plan: SavePlan
    waves: Sequence[Wave]


class SaveCall(NamedTuple):
    """A caller's save.

    ``captured`` captures the state; ``started`` is the time of the call.
    """

    pending: SaveProgress
    captured: Callable[[], SaveState]
    started: float
    is_async: bool


Agree = Callable[[Callable[[], SaveState], str], StagingPlan | None]
"""Opens the directory for the first save, of a captured state under that tag; returns its plan if all ranks met."""


class Pipeline:
    """Planner and threads of one Checkpointer; each is made when it is first needed.

    It serves one save at a time: the caller holds the Checkpointer's turn. Staging memory is the process's.
    """

    def __init__(self, topology: Topology, memory_cap: int | None, *, shows: bool) -> None:
        """Stage at most ``memory_cap`` bytes at once; if it ``shows``, with a bar while that takes long."""
        self._topology = topology
        self._memory_cap = memory_cap
        self._shows = shows
        self._planner = Planner(topology)
        self._worker: Worker | None = None
        self._helpers: Helpers | None = None
        self._stager: Stager | None = None  # of the last save
        self._held: Stager | None = None  # until the save is decided: what other ranks hold too is compared in it
        self._buffers = buffers_of(topology.rank if topology.members is None else topology.members[topology.rank])

    def plan(self, state: SaveState, *, agreed: bool = False) -> StagingPlan:
        """Plan a save of ``state``; see `Planner.plan`.

        Raises errors that make it impossible, before anything is written.
        """
        plan = self._planner.plan(state, agreed=agreed)
        _ = self._writer  # raises here if a thread cannot start
        return StagingPlan(plan, plan_waves(plan.staged_files, self._cap()))

    def plan_together(
        self, meet: Callable[[], Agreement | None], captured: Callable[[], SaveState], tag: str
    ) -> tuple[Agreement | None, StagingPlan | None]:
        """Plan the first save, under ``tag``, of the ``captured`` state, once all ranks ``meet``. Collective.

        Ranks of a mesh job exchange summaries of their tensors, for all later saves. A rank that left out saves of the
        others waits until they come to its own. Both results are None where ranks cannot meet.

        Raises on all ranks if the save is impossible on any. Raises RanksDisagree, where others left out this save only
        on the ranks that made it.
        """
        while (agreement := meet()) is not None:
            summary = on_all(agreement, lambda: MeshSummary(captured(), self._topology.members))
            self._planner.groups = agree_on_groups(agreement, summary)
            planned = on_all(agreement, partial(self.plan, summary.state, agreed=True))
            plans = agreement.gather(planned.plan.agreed(tag, self._topology))
            newest = decided_by_rank0(agreement, partial(_newest_tag, plans))
            if newest is None:
                # Two ranks tell what differs between them; then others may differ in more.
                while names := differing_state(
                    agreement, summary, planned.plan, self._topology, self._planner.groups
                ).difference(self._planner.known):
                    self._planner.known.update(names)
                    planned = on_all(agreement, partial(self.plan, summary.state))
                return agreement, planned
            if newest != tag:
                raise RanksDisagree(f"save of {tag!r} failed: not all ranks made it, others are at {newest!r}")
            logger.warning("not all ranks made the saves before %r: it waits for those that come later", tag)
        return None, None

    def save(
        self, call: SaveCall, agree: Agree | None, attempt_of: Callable[[SavePlan | None], SaveAttempt]
    ) -> SaveAttempt:
        """Make one save; see "One save" in docs/architecture.md. Returns once the state is staged.

        Raises this rank's own error, unless failures are warned of.
        """
        pending = call.pending
        error = None
        # 1. Capture, and 2. plan: which files this rank writes. 3. Agree: all ranks, at the first save.
        planned = None if agree is None else agree(call.captured, pending.tag)
        if planned is None:
            planned, error = self._planned(call.captured)
        attempt = attempt_of(None if planned is None else planned.plan)
        attempt.error = error
        # From here on each failure becomes this rank's vote, and so reaches all ranks.
        self.submit(attempt.open)
        try:
            # 4. Stage, and 5. write: each wave, on the writer thread, once it is staged.
            if planned is not None:
                self._stage(attempt, planned, pending.awaited if call.is_async and self._writer.is_thread else None)
        except BaseException as problem:  # an interrupt too: without this rank's vote the others would wait
            attempt.fail(problem)
            error = problem
        finally:
            attempt.timings["stage_seconds"] = effects.monotonic() - call.started
            pending.staged.set()
            # Here this rank's own, more telling error is raised at once. But where only the copy of an async save
            # failed, the others train on, and so does this rank until all of them wait.
            interrupted = error is not None and not isinstance(error, Exception)
            at_once = not pending.warns and (planned is None or not call.is_async)
            raise_now = pending.reported = error is not None and (at_once or interrupted)
            # 6. Vote, and 7. settle: on the writer thread.
            self._finish(attempt, pending, call.started)
        if error is not None and raise_now:
            raise error
        return attempt

    def _planned(self, captured: Callable[[], SaveState]) -> tuple[StagingPlan | None, BaseException | None]:
        try:
            return self.plan(captured()), None
        except BaseException as problem:
            return None, problem

    def _stage(self, attempt: SaveAttempt, planned: StagingPlan, awaited: effects.Event | None) -> None:
        """Copy the state into the arena and hand it over, in as many waves as it takes.

        The last wave of an async save has its maximum rate until it is ``awaited``; callers wait for all others.
        """
        rate = attempt.request.options.max_bytes_per_second
        buffers = self._buffers
        pace = None if awaited is None or rate is None else SavePace(rate, awaited)
        nbytes = max(map(end_of, planned.waves), default=0)
        stager = self._stager = buffers.take(self, nbytes, self._cap(), self._stager)
        try:
            torch_xla.sync(planned.plan.tensors)
            if planned.plan.replicas is not None:
                planned.plan.replicas.stays = awaited is None
            total = sum(map(end_of, planned.waves))
            stager.done = Counter()
            with watched("stage", total, lambda: stager.done.nbytes, self._shows):
                for number, wave in enumerate(planned.waves):
                    views = stager.stage(planned.plan.staged_files, wave)
                    wait = number < len(planned.waves) - 1
                    self._hand_over(attempt, wave, views, None if wait else pace, wait=wait)
        finally:
            buffers.filled(stager)
            if planned.plan.replicas is None:
                self.submit(lambda: buffers.give_back(stager))
            else:
                self._held = stager

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` on the writer thread, after those before it. It must not raise."""
        self._writer.submit(task)

    def _finish(self, attempt: SaveAttempt, pending: SaveProgress, started: float) -> None:
        """Commit everything handed over, on the writer thread, and settle it."""
        staged = self._held
        buffers = self._buffers
        self._held = None
        self.submit(lambda: _conclude(attempt, pending, started))
        if staged is not None:
            self.submit(lambda: buffers.give_back(staged))

    @property
    def _writer(self) -> Worker:
        if self._worker is None:
            self._worker = Worker("nxd_ckpt-writer")
        return self._worker

    @property
    def writers(self) -> Helpers:
        """The threads that write small files side by side."""
        if self._helpers is None:
            self._helpers = Helpers(WRITERS, "nxd_ckpt-helper")
        return self._helpers

    def stop(self) -> None:
        """End the threads, once they have run all submitted tasks. The last one that stops releases the memory."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        if self._helpers is not None:
            self._helpers.shutdown()
            self._helpers = None
        self._stager = None
        self._buffers.leave(self)

    def _cap(self) -> int:
        """Return the bytes of staging memory that this process may have."""
        cap = self._memory_cap
        return whole_pages(self._buffers.cap(self._topology.world_size) if cap is None else cap)

    def _hand_over(
        self, attempt: SaveAttempt, wave: Wave, views: list[memoryview], pace: SavePace | None, *, wait: bool
    ) -> None:
        written = effects.Event()
        plan = attempt.plan
        assert plan is not None
        own = [(span, view) for span, view in zip(wave, views, strict=True) if span.file < len(plan.files)]
        to_write = [span for span, _ in own]
        own_views = [view for _, view in own]

        def write() -> None:
            try:
                if plan.replicas is not None:
                    try:
                        plan.replicas.look(wave, views, plan.staged_files)
                    except BaseException as error:
                        attempt.fail(error)
                attempt.files.result().write(to_write, own_views, pace)
            finally:
                own.clear()
                own_views.clear()
                views.clear()  # the arena may only grow once nobody holds a view of it
                written.set()

        self.submit(write)
        if wait:
            written.wait()
            if plan.replicas is not None:
                plan.replicas.forget_staged()


def await_decided(attempt: SaveAttempt, pending: SaveProgress, *, shown: bool) -> None:
    """Wait until it is decided, with a bar of the bytes written if ``shown``; raise its failure."""
    total = 0 if attempt.plan is None else sum(planned.image.nbytes for planned in attempt.plan.files)
    with watched("save", total, lambda: attempt.nbytes, shown):
        pending.future.wait_decided()
    if not pending.tolerated:
        pending.future.wait()


def _newest_tag(plans: list[dict[str, Any]] | None) -> str | None:
    """Return None if all ranks save the same, or the tag that all others come before. Raises RanksDisagree."""
    if plans is None:
        return None
    tags: list[str] = [plan["tag"] for plan in plans]
    newest = next((tag for tag in tags if all(other == tag or goes_back(other, tag) for other in tags)), None)
    for rank, plan in enumerate(plans):
        agreed = {**plans[0], "tag": tags[0] if newest is None else plan["tag"]}
        if plan != agreed:
            raise RanksDisagree(plan_difference((0, rank), agreed, plan))
    return newest if len({*tags}) > 1 else None


def _conclude(attempt: SaveAttempt, pending: SaveProgress, started: float) -> None:
    error: BaseException | None = None
    session = attempt.session
    nbytes = 0
    try:
        with translated():
            files = attempt.files.result()
            files.end()
            nbytes = Ballot(files).decide(pending.voted.set)
    except CheckpointError as problem:
        error = problem
    except Exception as problem:  # a defect of ours must not leave a waiter hanging
        logger.exception("nxd_ckpt: unexpected error in the background thread")
        error = problem
    except BaseException as problem:  # an exit out of a storage is not the caller's own
        logger.exception("nxd_ckpt: exit in the background thread")
        error = OutcomeUnknown(f"save of {attempt.tag!r}: its thread was told to exit ({in_words(to_wire(problem))})")
        error.__cause__ = problem
    finally:
        if attempt.plan is not None and attempt.plan.replicas is not None:
            attempt.plan.replicas.forget_staged()  # the next save stages into the same memory
    pending.timings = attempt.timings
    pending.nbytes = attempt.nbytes
    if error is None and session.topology.rank == 0:
        report("saved", f"{session.storage.url}/{attempt.tag}", nbytes, started)
        if attempt.request.draining is not None:  # before anybody who waits for the save may wait for the tiers
            attempt.request.draining.saved(attempt.tag, nbytes, attempt.request.options.overwrite)
    pending.settle(error)
    if error is None:
        remove_surplus(session, attempt.tag)
    tidy(attempt, failed=error is not None)
