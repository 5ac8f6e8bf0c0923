"""The writer of a conversion's tag: a save without live objects, by the processes that play its ranks.

It claims the directory, lays out every rank's files, writes them, and commits, as a save does (see
`saving.save_attempt`). One that fails leaves nothing behind. A `Job` describes the tag, equal in each process; its
`Input` has the states of its ranks.

Files of a tag that do not change pass through. Files of ours are hard-linked if possible, because they are never
modified in place. neuronx_distributed does write into files of a tag that it saves again, so its files are copied.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

from nxd_ckpt.commit.publication import Publication
from nxd_ckpt.commit.session import open_session
from nxd_ckpt.conversion.result import Converted
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, in_turns, on_all
from nxd_ckpt.coordination.rendezvous import joint_agreement
from nxd_ckpt.core import names
from nxd_ckpt.core.data_position import Position
from nxd_ckpt.core.manifest import FileEntry, ParameterSpec, Parts, RankIndex, TensorEntry
from nxd_ckpt.core.retention_rules import Metrics
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Vote, dump, load_vote
from nxd_ckpt.errors import CheckpointError, PeerTimeout, RanksDisagree, UnsupportedState
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.state import SaveState, StateTensor
from nxd_ckpt.formats.tensors import TensorStub, iter_tensors
from nxd_ckpt.formats.torch_zip import check_digest
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag, HuggingFaceTerms
from nxd_ckpt.hugging_face.imported_model import ImportTarget
from nxd_ckpt.loading.load_attempt import unwrapped
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.options.execution import ExecutionOptions
from nxd_ckpt.output.cp_files import copy_guests
from nxd_ckpt.output.image_writer import TOGETHER, write_images
from nxd_ckpt.output.locations import Location, leaving_none
from nxd_ckpt.output.source import Source, open_as_tag
from nxd_ckpt.reshard.resharded_state import recorded_parameters
from nxd_ckpt.reshard.target import Target, target_state
from nxd_ckpt.saving.plan import SavePlan, plan_save
from nxd_ckpt.saving.save_attempt import CollectedSave
from nxd_ckpt.saving.writing import write_index
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import report, watched
from nxd_ckpt.storage.system import tell_room
from nxd_ckpt.storage.transfer import Progress, StoredFile, copy, link_or_copy
from nxd_ckpt.surroundings import gc_paused
from nxd_ckpt.tag.opened import OpenTag


@dataclass(frozen=True)
class Job:
    """The conversion of ``source`` to the tag ``target``. Plain data, because it is sent to worker processes.

    Attributes:
        source: the input.
        target: the result.
        what: the form of each rank of the result; the rank of its ``topology`` does not matter.
        parts: parts of the result, for its manifest.
        imported: how a Hugging Face directory becomes NxD's layers; None for other inputs.
        terms: how the input is translated to Hugging Face's names; None if it is not.
        keeps_model: True if the model's files pass through unchanged, from equal ranks of the input.
        durable: True to fsync everything before the result becomes visible.
        overwrite: True to replace an existing checkpoint, even one completed after the target was checked.
        save: identity of the tag's save (see tag.identity), because workers open the tag again; None for other inputs.
        metrics: metrics of the tag's save, which the result keeps.
        positions: data positions for each rank of a result whose ranks differ from the input's.
        left_out: descriptions of parts of the source that the result lacks.
    """

    source: Source
    target: Location
    what: Target
    parts: Parts
    imported: ImportTarget | None = None
    terms: HuggingFaceTerms | None = None
    keeps_model: bool = False
    durable: bool = True
    overwrite: bool = False
    save: str | None = None
    metrics: Metrics = field(default_factory=dict)
    positions: Mapping[Any, Position] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def topology(self) -> Topology:
        return self.what.topology

    def of(self, opened: OpenTag | None, chosen: ConvertOptions) -> Job:
        """Return the job with what it takes of the ``opened`` input, and of the options."""
        save, manifest = (None, None) if opened is None else (opened.save, opened.manifest)
        metrics = {} if manifest is None else manifest.metrics
        return replace(self, durable=chosen.durable, overwrite=chosen.overwrite, save=save, metrics=metrics)


class Input:
    """The open input of ``job``, whose result is written to ``storage``."""

    def __init__(self, job: Job, storage: Storage) -> None:
        self._job = job
        self._storage = storage
        self._model = None
        if job.imported is None:
            self.opened: OpenTag = job.source.open()
        else:
            self.opened, self._model = open_as_tag(job.source.place, job.imported)
        self.opened.require_save(job.save)
        if job.terms is not None:
            with self.opened.guarded():
                self.opened = HuggingFaceTag(unwrapped(self.opened, job.terms.mapping), job.terms)
        self._passes_files = job.source.is_tag and job.terms is None

    def state(self, topology: Topology) -> SaveState:
        """Return the state that the rank of ``topology`` would save, with leaves that stand for tensors on disk."""
        job = self._job
        opened = self.opened
        if self._model is not None and job.terms is None:
            return self._model.state(topology)
        state = target_state(opened, replace(job.what, topology=topology))
        if self._passes_files:
            return replace(state, rank_content=dict(job.positions)) if job.positions else state
        return replace(
            state,
            scheduler=opened.scheduler() if opened.parts.scheduler else None,
            user_content=opened.user_content() if opened.parts.user_content else None,
        )

    def pass_files(self, index: RankIndex, topology: Topology, folder: str, progress: Progress) -> RankIndex:
        """Link or copy the rank's unchanged files, durably, below ``folder``; return its ``index`` with them.

        All model files of a replica group go into the index of its first rank, because the other ranks may not exist in
        the result. ``progress`` is called with the bytes of each chunk that had to be copied.

        Raises:
            CorruptCheckpoint, PartNotFound: a file is missing, or differs from the input's index or its own digests.
        """
        if not self._passes_files:
            return index
        opened = self.opened
        at = topology.coordinates
        listed = dict(self._objects(topology))
        tensors = index.tensors
        parameters = index.parameters
        files: dict[str, FileEntry] = {}
        passes_model = self._job.keeps_model and topology.writer_of(at) == at
        if passes_model and opened.manifest is None:
            files, copied, parameters = self._copy_foreign_model(topology, folder, progress)
            tensors += copied
        elif passes_model:
            replicas = opened.topology.replicas(at, expert=opened.topology.ep > 1)
            group = [opened.index(opened.topology.coordinates_of(rank)) for rank in replicas]
            listed |= {file: entry for own in group for file, entry in own.files.items() if _is_model(file)}
            tensors += tuple(tensor for own in group for tensor in own.tensors if _is_model(tensor.file))
            # From the manifest, since the commit knew more than each index.
            recorded = recorded_parameters(opened, {})
            parameters = {**parameters, **{name: recorded[name] for name in group[0].parameters}}
        for file, entry in listed.items():
            source = StoredFile(opened.storage, f"{opened.tag}/{file}")
            files[file] = link_or_copy(source, StoredFile(self._storage, f"{folder}/{file}"), entry, progress)
        for directory in names.tensors_dirs(files):
            self._storage.make_dir(f"{folder}/{directory}")
        for directory in names.folders_of(files) if files else ():
            self._storage.sync_dir(f"{folder}/{directory}".rstrip("/"))
        return replace(index, files={**index.files, **files}, tensors=tensors, parameters=parameters)

    def _copy_foreign_model(
        self, topology: Topology, folder: str, progress: Progress
    ) -> tuple[dict[str, FileEntry], tuple[TensorEntry, ...], dict[str, ParameterSpec]]:
        """Copy the model of NxD's rank; return entries for its files, tensors and parameters, as an index has them.

        Cuts are recorded only where they are certain: NxD's files do not tell them. A load of the result uses the live
        parameters' cuts then, as for NxD's own tag.
        """
        opened = self.opened
        at = topology.coordinates
        sizes = opened.topology
        recorded = recorded_parameters(opened, {}) if (sizes.tp, sizes.ep) == (1, 1) else {}
        tree = opened.model_tree(at)
        leaves = [(".".join(map(str, path)), stub) for path, stub in iter_tensors(tree, TensorStub)]
        files: dict[str, FileEntry] = {}
        tensors: list[TensorEntry] = []
        for file in self._foreign_files(names.model_file(topology, at)):
            own = [(name, stub) for name, stub in leaves if stub.file == file]
            source = StoredFile(opened.storage, f"{opened.tag}/{file}")
            records = {stub.storage.offset: stub.storage.nbytes for _, stub in own}
            files[file], blocks = copy(source, StoredFile(self._storage, f"{folder}/{file}"), records, progress)
            for name, stub in own:
                self._compare(name, stub, blocks[stub.storage.offset])
                about = StateTensor(f"model/{name}", recorded.get(name))
                tensors.append(
                    TensorEntry(
                        about.name,
                        file,
                        stub.storage.offset,
                        stub.storage.nbytes,
                        stub.dtype,
                        stub.shape,
                        tuple(blocks[stub.storage.offset]),
                        about.pieces(topology, stub.shape),
                    )
                )
        parameters = {name: recorded[name] for name in tree if at.tp_rank == 0 and name in recorded}
        return files, tuple(tensors), parameters

    def _foreign_files(self, file: str) -> Iterator[str]:
        storage = self.opened.storage
        tag = self.opened.tag
        yield file
        if storage.is_file(f"{tag}/{names.info_file(file)}"):
            yield names.info_file(file)
        folder = names.tensors_dir(file)
        yield from (f"{folder}/{entry.name}" for entry in storage.list(f"{tag}/{folder}"))

    def _compare(self, name: str, stub: TensorStub, blocks: Sequence[int]) -> None:
        """Compare what was copied with the digest in NxD's file."""
        where = f"{self.opened.where}/{stub.file}, tensor {name!r}"
        storage = stub.storage
        if stub.nbytes != storage.nbytes or not stub.is_contiguous or storage.crc32 is None:
            raise UnsupportedState(
                f"{where}: it is a view of a larger one, or its file records no digest, so the file cannot be passed "
                "through. Convert the optimizer alone (optim_only=True), or save the checkpoint again with nxd_ckpt"
            )
        check_digest(crc32.combine_blocks(blocks, storage.nbytes), storage.crc32, where, storage.record)

    def _objects(self, topology: Topology) -> Iterator[tuple[str, FileEntry | None]]:
        """Yield the files of other parts with their entries in the input's index, if it has any.

        These are scheduler and user content for rank 0, and each rank's own content if ranks stayed the same.
        """
        parts = self._job.parts
        opened = self.opened
        chosen = {
            names.SCHEDULER: parts.scheduler and topology.rank == 0,
            names.USER_CONTENT: parts.user_content and topology.rank == 0,
            names.rank_content_file(topology.rank): parts.rank_content and not self._job.positions,
        }
        for file in (file for file, is_needed in chosen.items() if is_needed):
            if opened.manifest is None:
                yield file, None
                continue
            written = opened.index(opened.topology.coordinates_of(topology.rank)).files
            if file in written:
                yield file, written[file]


def _is_model(file: str) -> bool:
    return file.startswith(f"{names.MODEL_DIR}/")


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
        place = job.source.place
        folder = save.publication.folder
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
        started = time.monotonic()
        topologies = [self._job.topology.at(rank) for rank in ranks]
        votes = []
        with self._input.opened.guarded():
            plans = [self._plan(topology) for topology in topologies]
            with self._input.opened.reader() as reader:
                sets = [plan.files for plan in plans]
                beside = _beside(self._job.topology)
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
        self._written = context.Value("q", 0)
        self._stop = context.Event()
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
