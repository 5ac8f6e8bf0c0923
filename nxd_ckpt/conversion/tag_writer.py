"""The writer of a conversion's tag: a save without live objects, by the processes that play its ranks.

It claims the directory, lays out every rank's files, writes them, and commits, as a save does (see
`saving.save_attempt`). One that fails leaves nothing behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

from nxd_ckpt.commit.publication import Publication
from nxd_ckpt.commit.session import open_session
from nxd_ckpt.conversion.result import Converted
from nxd_ckpt.conversion.tag_job import Input, Job
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, in_turns, on_all
from nxd_ckpt.coordination.rendezvous import joint_agreement
from nxd_ckpt.core import names
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Vote, dump, load_vote
from nxd_ckpt.errors import CheckpointError, PeerTimeout, RanksDisagree
from nxd_ckpt.gc_paused import gc_paused
from nxd_ckpt.options.execution import ExecutionOptions
from nxd_ckpt.output.cp_files import copy_guests
from nxd_ckpt.output.image_writer import TOGETHER, write_images
from nxd_ckpt.output.locations import leaving_none
from nxd_ckpt.saving.collected_save import CollectedSave
from nxd_ckpt.saving.plan import SavePlan, plan_save
from nxd_ckpt.saving.writing import write_index
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import report, watched
from nxd_ckpt.storage.system import tell_room

T = TypeVar("T")

_TICK = 0.2
"""Seconds between two looks at the workers' progress."""


def write_tag(prepare: Callable[[int, int], Job], execution: ExecutionOptions) -> Converted:
    """Run the job that ``prepare(process, processes)`` returns, alone or together with ``execution.all_ranks``.

    Raises CheckpointError on every process; then the directory is as before.
    """
    started = time.monotonic()
    with joint_agreement(execution.all_ranks, execution.timeout) as agreement:
        job = on_all(agreement, lambda: prepare(agreement.rank, agreement.world_size))
        descriptions = agreement.gather(repr((job.what, job.imported, job.terms, job.parts, job.save)))
        decided_by_rank0(agreement, lambda: _must_agree(descriptions))
        with closing(WorkerPool(job, execution.num_workers, agreement.sign)) as workers:
            ranks = range(agreement.rank, job.topology.world_size, agreement.world_size)
            nbytes = on_all(agreement, lambda: workers.survey(ranks))
            reports_progress = agreement.rank == 0
            planned = agreement.gather(nbytes)
            whole = decided_by_rank0(agreement, lambda: sum(planned or ()))
            paths = (job.source.root.path, job.target.path, "tag", job.source.writer.value)
            done = Converted(*paths, whole, job.topology.sizes, left_out=job.left_out)
            if execution.dry_run:
                return done
            with (
                _claimed(job, agreement, execution.timeout, workers) as save,
                watched("convert", nbytes, lambda: workers.written, execution.progress and reports_progress),
            ):
                decided_by_rank0(agreement, save.begin)
                try:
                    votes = _written(save, agreement, workers, ranks)
                    decided_by_rank0(agreement, lambda: _commit(save, job, votes))
                except OSError as error:
                    tell_room(error, save.session.storage.url, nbytes)
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
def _claimed(job: Job, agreement: Agreement, timeout: float, workers: WorkerPool) -> Iterator[CollectedSave]:
    """Hold the result's directory for one attempt; at the end, remove what that left there."""
    storage = job.target.open(job.durable)
    processes = Topology(dp=agreement.world_size, rank=agreement.rank)
    with leaving_none(job.target) if agreement.rank == 0 else nullcontext():
        session = open_session(storage, processes, agreement, None, timeout)
        # It looks again whether it may replace the tag, because another job may have saved there meanwhile.
        save = CollectedSave(session, job.target.name, job.overwrite)
        try:
            yield save
        finally:
            workers.close()
            with suppress(PeerTimeout):
                agreement.gather(None)  # from here on no process writes
            if agreement.rank == 0:
                save.discard()
            with suppress(PeerTimeout):
                agreement.broadcast(None)
            session.close()


def _written(save: CollectedSave, agreement: Agreement, workers: WorkerPool, ranks: range) -> list[Vote]:
    """Write these ranks, and return the votes on all, by rank, on process 0."""
    on_all(agreement, lambda: save.session.storage.make_dir(save.publication.folder))
    writes = workers.write(ranks, save.publication)
    votes = in_turns(agreement, [partial(workers.result, write) for write in writes])
    texts = agreement.gather([dump(vote).decode() for own in votes for vote in own]) or ()
    every = (load_vote(text.encode(), "a vote of this conversion") for own in texts for text in own)
    return sorted(every, key=lambda vote: vote.rank)


def _commit(save: CollectedSave, job: Job, votes: Sequence[Vote]) -> None:
    if job.source.is_tag:
        place, folder = job.source.place, save.publication.folder
        copy_guests(place.open(), place.name, save.session.storage, folder)
    save.commit(job.topology, votes, job.parts, metrics=job.metrics)


class RankWriter:
    """A writer of any rank of the result of ``job``, in bounded memory. Each process or thread has its own.

    It counts what it has ``written``, and raises CheckpointError once it is told to ``stop``. It is sent to worker
    processes before it opens anything.
    """

    def __init__(self, job: Job, written: Any, stop: Any) -> None:
        self._job = job
        self._written = written
        self._stop = stop

    @cached_property
    def _storage(self) -> Storage:
        return self._job.target.open(self._job.durable)

    @cached_property
    def _input(self) -> Input:
        return Input(self._job, self._storage)

    @cached_property
    def _plan(self) -> Callable[[Topology], SavePlan]:
        """The plan of a rank. It is surveyed and then written; as many are kept as are written side by side."""
        return lru_cache(maxsize=TOGETHER)(self._planned)

    def survey(self, rank: int) -> int:
        """Return the bytes of the rank's new files. Writes nothing.

        Raises errors that make the conversion impossible: sizes that do not divide a tensor, parameters without a
        name, ...
        """
        with self._input.opened.guarded():
            return sum(planned.image.nbytes for planned in self._plan(self._job.topology.at(rank)).files)

    def write(self, ranks: Sequence[int], publication: Publication) -> list[Vote]:
        """Write the files and indexes of these ranks, durably, and return their votes; at most `TOGETHER` ranks.

        Raises TagReplaced if the input was replaced by another save.
        """
        started, topologies = time.monotonic(), [self._job.topology.at(rank) for rank in ranks]
        votes = []
        with self._input.opened.guarded():
            plans = [self._plan(topology) for topology in topologies]
            with self._input.opened.reader() as reader:
                sets, beside = [plan.files for plan in plans], _beside(self._job.topology)
                writers = write_images(reader, self._storage, publication.folder, sets, self._count, beside)
            for topology, plan, writer in zip(topologies, plans, writers, strict=True):
                written = writer.index(plan, topology.coordinates)
                index = self._input.pass_files(written, topology, publication.folder, self._count)
                passed = sum(entry.nbytes for file, entry in index.files.items() if file not in written.files)
                vote = Vote(
                    topology.rank,
                    plan=plan.agreed(self._job.target.name, topology),
                    replica=plan.replica,
                    index=write_index(self._storage, publication, names.index_file(topology.coordinates), index),
                    replicated=writer.replicated_digest(),
                    nbytes=writer.nbytes + passed,
                    seconds=round(time.monotonic() - started, 6),
                )
                votes.append(vote)
        return votes

    def _planned(self, topology: Topology) -> SavePlan:
        with gc_paused():
            plan = plan_save(self._input.state(topology), topology)
        return replace(plan, parts=self._job.parts)

    def _count(self, nbytes: int) -> None:
        if self._stop.is_set():
            raise CheckpointError("stopped: another rank's conversion failed, or it was interrupted")
        with self._written.get_lock():
            self._written.value += nbytes


def _beside(topology: Topology) -> int:
    """Return the number of neighbouring ranks that are written side by side; others one after the other.

    They hold parts of the same tensors, which are then read once. But ranks along ep have different experts, which are
    read faster in the longer runs of one rank.
    """
    return TOGETHER if topology.ep == 1 else min(TOGETHER, topology.tp)


class WorkerPool:
    """Workers that survey and write ranks of a job's result: one thread, or ``num_workers`` processes.

    ``sign`` is called now and then while they make progress. Worker processes import the caller's main module again
    (multiprocessing's "spawn"), so a script with several workers must make the call below ``if __name__ ==
    "__main__":``.
    """

    def __init__(self, job: Job, num_workers: int, sign: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._num_workers = num_workers
        self._topology = job.topology
        self._sign = sign
        self._written, self._stop = context.Value("q", 0), context.Event()
        self._own = RankWriter(job, self._written, self._stop)
        self._executor: Executor
        if num_workers > 1:
            self._executor = ProcessPoolExecutor(num_workers, context, _enter, (self._own,))
        else:
            self._executor = ThreadPoolExecutor(1, "nxd_ckpt-worker")

    @property
    def written(self) -> int:
        """Bytes that all workers have written."""
        return int(self._written.value)

    def survey(self, ranks: Sequence[int]) -> int:
        """Return the bytes of these ranks' files. Raises errors that make the conversion impossible."""
        return sum(map(self.result, [self._begin(RankWriter.survey, rank) for rank in ranks]))

    def write(self, ranks: Sequence[int], publication: Publication) -> list[Future[list[Vote]]]:
        """Begin to write these ranks, in groups of neighbours, and return the votes on each group."""
        beside = _beside(self._topology)
        together = min(TOGETHER // beside * beside, max(len(ranks) // self._num_workers, 1))
        groups = [ranks[at : at + together] for at in range(0, len(ranks), together)]
        return [self._begin(RankWriter.write, group, publication) for group in groups]

    def result(self, future: Future[T]) -> T:
        """Wait for what was begun."""
        before = 0
        while not future.done():
            wait([future], timeout=_TICK)
            if self.written != before:
                before = self.written
                self._sign()
        try:
            return future.result()
        except BrokenExecutor as error:
            raise CheckpointError(
                "a worker process died; check the system's log whether it was killed for lack of memory, and use fewer "
                "workers (num_workers=)"
            ) from error

    def close(self) -> None:
        """Stop all workers; afterwards none writes."""
        self._stop.set()
        self._executor.shutdown(cancel_futures=True)

    def _begin(self, step: Callable[..., T], *args: Any) -> Future[T]:
        if self._num_workers > 1:
            return self._executor.submit(_in_worker, step, *args)
        return self._executor.submit(step, self._own, *args)


_writer: RankWriter
"""The writer of this process, if that is a worker."""


def _enter(writer: RankWriter) -> None:
    global _writer
    _writer = writer
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops the workers

    def follow() -> None:
        parent.join()
        os._exit(1)  # nothing would use what this process writes

    threading.Thread(target=follow, daemon=True).start()


def _in_worker(step: Callable[..., T], *args: Any) -> T:
    return step(_writer, *args)
