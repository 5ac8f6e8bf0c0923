"""The workers of a conversion on this host, which write its ranks in order, and its agreement with other ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

from nxd_ckpt.commit.publication import Publication
from nxd_ckpt.conversion.inputs import PassedFiles, open_input
from nxd_ckpt.conversion.job import Job
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.errors import CheckpointError, InvalidArgument, PeerTimeout, to_wire
from nxd_ckpt.gc_paused import gc_paused
from nxd_ckpt.output.image_writer import TOGETHER, write_images
from nxd_ckpt.saving.plan import SavePlan, plan_save
from nxd_ckpt.saving.writing import FileWriter, write_index
from nxd_ckpt.storage.transfer import Progress


class RankWriter:
    """A writer of any rank of the result of ``job``, in bounded memory. Each process or thread has its own."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._storage = job.target.open(job.durable)
        self._input = open_input(job, self._storage)
        # Surveyed and then written; as many as are written side by side.
        self._plan = lru_cache(maxsize=TOGETHER)(self._planned)

    def survey(self, rank: int) -> int:
        """Return the bytes of the rank's new files. Writes nothing.

        Raises errors that make the conversion impossible: sizes that do not divide a tensor, parameters without a
        name, ...
        """
        with self._input.guarded():
            return sum(planned.image.nbytes for planned in self._plan(self._job.topology.at(rank)).files)

    def write(self, ranks: Sequence[int], publication: Publication, progress: Progress) -> list[Vote]:
        """Write the files and indexes of these ranks, durably; at most `TOGETHER` ranks.

        Raises TagReplaced if the input was replaced by another save.
        """
        with self._input.guarded():
            return self._write(ranks, publication, progress)

    def _write(self, ranks: Sequence[int], publication: Publication, progress: Progress) -> list[Vote]:
        started = time.monotonic()
        topologies = [self._job.topology.at(rank) for rank in ranks]
        plans = [self._plan(topology) for topology in topologies]
        with self._input.reader() as reader:
            sets = [plan.files for plan in plans]
            writers = write_images(
                reader, self._storage, publication.folder, sets, progress, _beside(self._job.topology)
            )
        votes = []
        for topology, plan, writer in zip(topologies, plans, writers, strict=True):
            passed = self._input.pass_files(topology, publication.folder, progress)
            vote = Vote(
                topology.rank,
                plan=plan.agreed(self._job.target.name, topology),
                replica=plan.replica,
                index=self._write_index(writer, plan, passed, topology, publication),
                replicated=writer.replicated_digest(),
                nbytes=writer.nbytes + passed.nbytes,
                seconds=round(time.monotonic() - started, 6),
            )
            votes.append(vote)
        return votes

    def _planned(self, topology: Topology) -> SavePlan:
        with gc_paused():
            plan = plan_save(self._input.state(topology), topology)
        return replace(plan, parts=self._job.parts)

    def _write_index(
        self, writer: FileWriter, plan: SavePlan, passed: PassedFiles, topology: Topology, publication: Publication
    ) -> FileEntry:
        written = writer.index(plan, topology.coordinates)
        index = replace(
            written,
            files={**written.files, **passed.files},
            tensors=written.tensors + passed.tensors,
            parameters={**written.parameters, **passed.parameters},
        )
        return write_index(self._storage, publication, names.index_file(topology.coordinates), index)


def _beside(topology: Topology) -> int:
    """Return the number of neighbouring ranks that are written side by side; others one after the other.

    They hold parts of the same tensors, which are then read once. But ranks along ep have different experts, which are
    read faster in the longer runs of one rank.
    """
    return TOGETHER if topology.ep == 1 else min(TOGETHER, topology.tp)


_TICK = 0.2
"""Seconds between two checks of the workers' progress."""


class WorkerPool:
    """Workers that run a job's steps for ranks of its result: one thread, or ``num_workers`` processes.

    Worker processes import the caller's main module again (multiprocessing's "spawn"), so a script with several workers
    must make the call below ``if __name__ == "__main__":``.
    """

    def __init__(self, job: Job, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._num_workers, self._topology = num_workers, job.topology
        self._written, self._stop = context.Value("q", 0), context.Event()
        entry = (job, self._written, self._stop)
        self._executor: Executor
        if num_workers > 1:
            self._executor = ProcessPoolExecutor(num_workers, context, _enter_process, entry)
        else:
            self._executor = ThreadPoolExecutor(1, "nxd_ckpt-worker", _enter, entry)

    @property
    def written(self) -> int:
        """Bytes that all workers have written."""
        return int(self._written.value)

    def survey(self, ranks: Iterable[int]) -> int:
        """Return the bytes of these ranks' files. Raises errors that make the conversion impossible."""
        calls = {rank: partial(_survey, rank) for rank in ranks}
        sizes: list[int] = [_result(future) for _, future in self._run(calls, lambda: None)]
        return sum(sizes)

    def write(self, ranks: Sequence[int], publication: Publication, tick: Callable[[], None]) -> Iterator[Vote]:
        """Write these ranks; yield the vote of each when it is done. ``tick`` is called several times a second.

        If a rank fails, its vote is yielded first, and then its error is raised.
        """
        beside = _beside(self._topology)
        together = min(TOGETHER // beside * beside, max(len(ranks) // self._num_workers, 1))
        groups = [ranks[at : at + together] for at in range(0, len(ranks), together)]
        calls = {group[0]: partial(_write, group, publication) for group in groups}
        for rank, future in self._run(calls, tick):
            try:
                votes: list[Vote] = _result(future)
            except Exception as error:
                yield Vote(rank, error=to_wire(error))
                raise
            yield from votes

    def close(self) -> None:
        """Stop all workers; afterwards none writes."""
        self._stop.set()
        self._executor.shutdown(cancel_futures=True)

    def _run(
        self, calls: Mapping[int, Callable[[], Any]], tick: Callable[[], None]
    ) -> Iterator[tuple[int, Future[Any]]]:
        ranks = {self._executor.submit(call): rank for rank, call in calls.items()}
        waiting = set(ranks)
        while waiting:
            done, waiting = wait(waiting, timeout=_TICK, return_when=FIRST_COMPLETED)
            tick()
            yield from ((ranks[future], future) for future in done)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenExecutor as error:
        raise CheckpointError(
            "a worker process died; check the system's log whether it was killed for lack of memory, and use fewer "
            "workers (num_workers=)"
        ) from error


class _Own(threading.local):
    """The state of a worker (a process, or the one thread) from task to task."""

    job: Job
    writer: RankWriter | None = None
    written: Any
    stop: Any


_own = _Own()


def _enter(job: Job, written: Any, stop: Any) -> None:
    _own.job, _own.written, _own.stop = job, written, stop


def _enter_process(job: Job, written: Any, stop: Any) -> None:
    _enter(job, written, stop)
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops the workers

    def follow() -> None:
        parent.join()
        os._exit(1)  # nothing would use what this process writes

    threading.Thread(target=follow, daemon=True).start()


def _survey(rank: int) -> int:
    return _writer().survey(rank)


def _write(ranks: Sequence[int], publication: Publication) -> list[Vote]:
    # Bound here, because several threads may write a rank's files, and each has its own ``_own``.
    return _writer().write(ranks, publication, partial(_count, _own.written, _own.stop))


def _writer() -> RankWriter:
    if _own.writer is None:
        _own.writer = RankWriter(_own.job)
    return _own.writer


def _count(written: Any, stop: Any, nbytes: int) -> None:
    if stop.is_set():
        raise CheckpointError("stopped: another rank's conversion failed, or it was interrupted")
    with written.get_lock():
        written.value += nbytes


@contextmanager
def joint_agreement(all_ranks: bool, timeout: float) -> Iterator[Agreement]:
    """Yield an agreement of this process alone, or with ``all_ranks`` of all ranks of the job, which must all call it.

    The ranks are those of the process group. If there is none yet, they are the ranks that torchrun started, and a gloo
    group is made for them and closed again.

    Raises InvalidArgument if the environment describes no job, PeerTimeout if a rank does not join.
    """
    if not all_ranks:
        yield SingleProcessAgreement()
        return
    import torch.distributed as dist

    own = not dist.is_initialized()
    if own:
        _start_group(timeout)
    try:
        agreement = meet(dist.get_rank(), dist.get_world_size(), timeout, "conversion")
        assert agreement is not None  # there is a group of just that size
        yield agreement
    finally:
        if own:
            dist.destroy_process_group()


def _start_group(timeout: float) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except ValueError as error:
        raise InvalidArgument(
            "all_ranks=True needs a job whose ranks all make this call: start it with torchrun, or make a process "
            f"group first; found neither ({str(error).splitlines()[0]})"
        ) from error
    except RuntimeError as error:  # torch's DistError among others
        raise PeerTimeout(
            "all_ranks=True: not all ranks joined; each must make the same call (found "
            f"WORLD_SIZE={os.environ.get('WORLD_SIZE')}; {str(error).splitlines()[0]})"
        ) from error
