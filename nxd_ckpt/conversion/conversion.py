"""A whole conversion: claim the directory, write, vote, commit. One that fails leaves nothing behind.

The order is that of a save (see `save.attempt`), with ranks of the result instead of live ones: the worker that writes
a rank's files votes for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial

from nxd_ckpt.commit.commit import Commit, commit
from nxd_ckpt.commit.publication import publication_of
from nxd_ckpt.commit.session import Session, open_session
from nxd_ckpt.commit.voting import AttemptVotes
from nxd_ckpt.conversion.job import Converted, Job
from nxd_ckpt.conversion.worker_pool import WorkerPool, joint_agreement
from nxd_ckpt.coordination import intents, journal
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.environment import versions
from nxd_ckpt.coordination.paths import JOURNAL, staging_dir, verdict_dir, verdict_file, votes_dir
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Verdict, Vote
from nxd_ckpt.errors import (
    CheckpointError,
    DirectoryInUse,
    PeerTimeout,
    RanksDisagree,
    from_wire,
    to_wire,
)
from nxd_ckpt.options.execution import ExecutionOptions
from nxd_ckpt.output.cp_files import copy_guests
from nxd_ckpt.output.new_directories import leaving_none
from nxd_ckpt.storage.progress import report, watched
from nxd_ckpt.storage.system import tell_room

logger = logging.getLogger("nxd_ckpt")


def write_tag(prepare: Callable[[int, int], Job], execution: ExecutionOptions) -> Converted:
    """Run the job that ``prepare(process, processes)`` returns, alone or together with ``execution.all_ranks``.

    Raises CheckpointError on every process; then the directory is as before.
    """
    started = time.monotonic()
    with joint_agreement(execution.all_ranks, execution.timeout) as agreement:
        job = on_all(agreement, lambda: prepare(agreement.rank, agreement.world_size))
        descriptions = agreement.gather(repr((job.what, job.parts, job.save)))
        decided_by_rank0(agreement, lambda: _must_agree(descriptions))
        with closing(WorkerPool(job, execution.num_workers)) as workers:
            ranks = range(agreement.rank, job.topology.world_size, agreement.world_size)
            nbytes = on_all(agreement, lambda: workers.survey(ranks))
            reports_progress = agreement.rank == 0
            planned = agreement.gather(nbytes)
            whole = decided_by_rank0(agreement, lambda: sum(planned or ()))
            source, sizes = job.source, job.topology.sizes
            done = Converted(source.root.path, job.target.path, "tag", source.writer.value, whole, sizes)
            if execution.dry_run:
                return done
            with (
                _claimed(job, agreement, execution.timeout, workers) as session,
                watched("convert", nbytes, lambda: workers.written, execution.progress and reports_progress),
            ):
                attempt = _Attempt(job, session, workers, ranks)
                decided_by_rank0(agreement, attempt.begin)
                try:
                    attempt.run()
                except OSError as error:
                    tell_room(error, session.storage.url, nbytes)
                    raise
            if reports_progress:
                report("converted", f"{job.source.root.path} to {job.target.path}", workers.written, started)
            return done


def _must_agree(descriptions: Sequence[str] | None) -> None:
    if len(set(descriptions or ())) > 1:
        raise RanksDisagree(
            "the processes of this conversion have different inputs or arguments; start all of them with the same ones"
        )


@contextmanager
def _claimed(job: Job, agreement: Agreement, timeout: float, workers: WorkerPool) -> Iterator[Session]:
    """Hold the result's directory; at the end, remove what the attempt left there."""
    storage = job.target.open(job.durable)
    processes = Topology(dp=agreement.world_size, rank=agreement.rank)
    with leaving_none(job.target) if agreement.rank == 0 else nullcontext():
        session = open_session(storage, processes, agreement, None, timeout)
        try:
            yield session
        finally:
            workers.close()
            with suppress(PeerTimeout):
                agreement.gather(None)  # from here on no process writes
            if agreement.rank == 0:
                _clean_up(session)
            with suppress(PeerTimeout):
                agreement.broadcast(None)
            session.close()


def _clean_up(session: Session) -> None:
    storage, attempt = session.storage, session.attempt(1)
    try:
        if storage.is_file(JOURNAL):
            return  # an unfinished swap, which the next process to open the directory finishes from these files
        session.require()
        intents.clear(storage, staging_dir(attempt), session.confirm)
        storage.remove(votes_dir(attempt))
        journal.discard_trash(storage, session.run_id, session.confirm)
    except (OSError, DirectoryInUse) as error:
        logger.warning("could not clean up %s: %s", storage.url, error)


class _Attempt:
    """This process's part of writing one tag, for ``ranks`` of the result; process 0 also decides."""

    def __init__(self, job: Job, session: Session, workers: WorkerPool, ranks: range) -> None:
        self._job, self._session, self._workers = job, session, workers
        self._storage, self._attempt = session.storage, session.attempt(1)
        self._votes = AttemptVotes(self._storage, self._attempt)
        # Checked again after the check before reading, because another job may have saved there since.
        self._publication = publication_of(session, 1, job.target.name, job.overwrite)
        self._unwritten = list(ranks)
        self._failure_reported = False
        self._checked = time.monotonic()

    def begin(self) -> None:
        """Make room, on process 0, before any process writes."""
        self._publication.begin(self._session)

    def run(self) -> None:
        """Write, then decide or learn the verdict. Raises this process's own error if it has one."""
        own: BaseException | None = None
        try:
            self._write()
        except BaseException as error:
            own = error  # the other processes must learn of it, even of an interrupt
        if self._session.topology.rank == 0:
            own = self._decide(own)
            verdict = Verdict()
        else:
            verdict = self._learn(own)
        if own is not None:
            raise own
        if verdict.error is not None:
            raise from_wire(*verdict.error, verdict.rank)

    def _write(self) -> None:
        self._storage.make_dir(verdict_dir(self._attempt))
        self._storage.make_dir(self._publication.folder)
        for vote in self._workers.write(tuple(self._unwritten), self._publication, self._tick):
            self._cast(vote)
            self._unwritten.remove(vote.rank)

    def _cast(self, vote: Vote) -> None:
        try:
            self._votes.cast(vote)
            self._failure_reported = vote.error is not None
        except OSError:
            if vote.error is None:
                raise
            # The error itself, perhaps a full disk, is raised next and is more useful.

    def _tick(self) -> None:
        """Show the other processes that this one makes progress, and stop if one of them has failed."""
        now = time.monotonic()
        if self._session.topology.world_size == 1 or now - self._checked < min(5.0, self._session.timeout / 10):
            return
        self._checked = now
        if self._unwritten:
            rank = self._unwritten[0] if self._session.topology.rank > 0 else 0  # process 0's sign, not the target's
            self._votes.report_progress(rank, self._workers.written)
        if self._storage.is_file(verdict_file(self._attempt)):  # before all ranks voted: it can only be a failure
            raise CheckpointError("stopped: another process of this conversion failed")

    def _decide(self, own: BaseException | None) -> BaseException | None:
        """Collect the votes, commit and announce, on process 0. Returns the error if the tag did not become visible."""
        if own is None:
            try:
                self._commit()
            except BaseException as error:
                own = error
        try:
            self._votes.announce(Verdict(None if own is None else to_wire(own)))
        except OSError as error:
            logger.error("%s: cannot announce the outcome to the other processes: %s", self._storage.url, error)
        return own

    def _commit(self) -> None:
        session, job = self._session, self._job

        def gone(rank: int) -> bool:
            return session.is_gone(rank % session.topology.world_size)  # the process that writes it

        votes = self._votes.collect(job.topology.world_size, session.timeout, gone=gone)
        if job.source.is_tag:
            copy_guests(job.source.place.open(), job.source.place.name, self._storage, self._publication.folder)
        request = Commit(self._publication, job.parts, versions=versions(), metrics=job.metrics)
        try:
            commit(session, job.topology, votes, request)
        except OSError as error:
            raise CheckpointError(f"could not complete {job.target.path}: {type(error).__name__}: {error}") from error

    def _learn(self, own: BaseException | None) -> Verdict:
        if own is None:
            session = self._session
            return self._votes.await_verdict(self._job.target.name, session.timeout, partial(session.is_gone, 0))
        if self._unwritten and not self._failure_reported:
            self._cast(Vote(self._unwritten[0], error=to_wire(own)))
        return Verdict()
