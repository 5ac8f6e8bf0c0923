"""One save on one rank: its request, its opening, and its files; `nxd_ckpt.saving.ballot` decides it.

The effects of an attempt, in order, on the background thread. A failure becomes this rank's vote. An exit that is
raised there does, too: it cannot end the process, and must not leave the save undecided.

An attempt whose votes its caller collects, as torch DCP and the processes of a conversion do, is a `CollectedSave`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.commit.commit import Commit, clear_failed, commit
from nxd_ckpt.commit.publication import Publication, publication_of
from nxd_ckpt.commit.session import Session, writing_slot
from nxd_ckpt.commit.tier import Draining
from nxd_ckpt.commit.voting import AttemptVotes
from nxd_ckpt.coordination import journal, lease
from nxd_ckpt.coordination.control_files import JOURNAL, staging_dir, verdict_dir
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.retention_rules import Rule
from nxd_ckpt.core.tags import goes_back
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Verdict, Vote
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    CheckpointError,
    DirectoryInUse,
    DirectoryTakenOver,
    OutcomeUnknown,
    RanksDisagree,
    SaveFailed,
    StorageError,
    from_wire,
    in_words,
    to_wire,
)
from nxd_ckpt.live.environment import versions
from nxd_ckpt.saving.options import SaveOptions
from nxd_ckpt.saving.plan import SavePlan
from nxd_ckpt.saving.planned_file import Wave
from nxd_ckpt.saving.writing import FileWriter, parent_of
from nxd_ckpt.storage.transfer import SavePace


@dataclass(frozen=True)
class SaveRequest:
    """One call of save, on one rank.

    Attributes:
        plan: the files of this rank; None if it could not be made: then the options may be what is wrong.
        tier_rules: rules of retention of the first tier, for a save without its own.
        versions: of the libraries, for the manifest.
        draining: set if there are further tiers.
    """

    tag: str
    plan: SavePlan | None
    options: SaveOptions
    tier_rules: Sequence[Rule] | None
    versions: Mapping[str, str]
    draining: Draining | None

    @property
    def rules(self) -> Sequence[Rule] | None:
        """Rules for the complete tags to keep; None keeps all."""
        return self.options.rules or self.tier_rules


def failure_of(error: BaseException) -> type[SaveFailed]:
    """Return the class of the failure of a save that ``error`` causes."""
    return DirectoryTakenOver if isinstance(error, DirectoryInUse) else SaveFailed


class SaveAttempt:
    """One call of save on this rank, as its phases on the background thread and its caller share it.

    Attributes:
        error: this rank's first failure, on either thread.
        timings: seconds of each phase.
        files: the attempt's files, once it is open. Set for every attempt, also one that failed before.
    """

    def __init__(self, session: Session, request: SaveRequest, threads: Executor) -> None:
        self.session = session
        self.request = request
        self.threads = threads
        self.error: BaseException | None = None
        self.tag: str = request.tag
        self.plan: SavePlan | None = request.plan
        self.timings: dict[str, float] = {}
        self.files: Future[AttemptFiles] = Future()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has written so far."""
        return self.files.result().nbytes if self.files.done() else 0

    def open(self) -> None:
        """Prepare everything that even a failing rank needs to vote, and wait until the files may be written."""
        try:
            self.files.set_result(_Opening(self).files())
        except BaseException as error:  # a defect of ours must not leave what follows waiting
            self.files.set_exception(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Keep the failure for the vote, unless there was one before."""
        self.error = self.error or error

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to that timing."""
        started = effects.monotonic()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + effects.monotonic() - started

    def failed(self, error: BaseException) -> CheckpointError:
        """Return this rank's failure for its caller."""
        if isinstance(error, (SaveFailed, OutcomeUnknown)):
            return error
        rank = self.session.topology.rank
        return failure_of(error)(f"save of {self.tag!r} failed: rank {rank} failed: {in_words(to_wire(error))}")

    def refused(self, verdict: Verdict) -> CheckpointError:
        """Return the error in rank 0's verdict. The message names the rank that failed."""
        name, message = verdict.error or ("SaveFailed", "rank 0 decided it without this rank")
        kind = type(from_wire(name, message, 0))
        if issubclass(kind, OutcomeUnknown):
            return kind(f"save of {self.tag!r}: {message}")
        return (kind if issubclass(kind, SaveFailed) else SaveFailed)(f"save of {self.tag!r} failed: {message}")

    def is_away(self) -> bool:
        """Return whether the path leads to another directory than the session's, which fails the save."""
        session = self.session
        try:
            lease.require_place(session.storage, session.run_id, session.place)
        except (OSError, StorageError) as error:
            self.fail(error)
            return session.votes_here
        return False


class _Opening:
    """The first phase; the session's counter is the attempt's number."""

    def __init__(self, attempt: SaveAttempt) -> None:
        self._attempt = attempt
        self._session = attempt.session
        self._tag = attempt.tag
        self._patience = attempt.session.timeout
        self._is_left_out = False

    def files(self) -> AttemptFiles:
        attempt = self._attempt
        parent = None
        is_elsewhere = False
        self._session.counter += 1
        try:
            is_elsewhere = attempt.is_away()
            is_elsewhere = self._has_no_votes() or is_elsewhere
            if not is_elsewhere:
                parent = self._prepare()
        except BaseException as error:
            attempt.fail(error)
        if self._is_left_out:  # the attempt is another save's, which this rank is still to make
            self._session.counter -= 1
        self._session.tried.add(self._tag)
        return AttemptFiles(attempt, self._publication, parent, self._patience, is_elsewhere, self._is_left_out)

    @property
    def _publication(self) -> Publication:
        return publication_of(self._session, self._session.counter, self._tag, self._attempt.request.options.overwrite)

    def _has_no_votes(self) -> bool:
        """Return whether the votes are on the host of rank 0, if that is another: this rank would wait in vain."""
        try:
            self._session.require_votes()
        except (OSError, StorageError) as error:
            self._attempt.fail(error)
            return True
        return False

    def _prepare(self) -> str | None:
        """Return the tag whose files may be duplicated."""
        session = self._session
        rank0 = self._session.topology.rank == 0
        while self._passes_over(self._theirs()):
            pass
        # Each rank had the same verdict on the attempt before, so that they agree on whether rank 0 opens this one.
        is_opened = not session.storage.renames or session.last_failed
        if rank0 and is_opened:
            clear_failed(session)
        for lost, vote in list(session.lost_votes.items()):
            AttemptVotes(session.storage, lost).cast(vote)
            del session.lost_votes[lost]
        if not rank0 and is_opened and self._attempt.error is None:
            self._await_opening()  # before anything is written: there may be no room before
        session.last_failed = False
        publication = self._publication
        attempt = publication.attempt
        if not session.is_alone:
            session.storage.make_dir(verdict_dir(attempt))
        session.keep_spares()
        if self._attempt.error is not None:
            return None
        if rank0:
            publication.begin(session)
            if is_opened and not session.is_alone:
                AttemptVotes(session.storage, attempt, session.news).open(self._tag)
        # A staged folder's name need not last: what a power cut leaves of an attempt is removed.
        storage = session.storage if publication.in_place else session.storage.without_syncs()
        storage.make_dir(publication.folder)
        return parent_of(session.storage, session.last_saved) if self._attempt.request.options.dedup else None

    @property
    def _votes(self) -> AttemptVotes:
        session = self._session
        return AttemptVotes(session.storage, session.attempt(session.counter), session.news)

    def _theirs(self) -> str | Verdict | None:
        """Return what others save with this attempt, as far as it shows; for a rank that is alone None."""
        if self._session.is_alone:
            return None
        votes = self._votes
        return votes.of_rank0() if self._session.topology.rank else votes.of_others(self._tag)

    def _passes_over(self, opened: str | Verdict | None) -> bool:
        """Return False if the others save this very tag with the attempt, or nothing tells what they save.

        If they make, or made, a save that this rank has left out, it says so, and goes on to the next attempt.

        Raises RanksDisagree otherwise. If rank 0 left out this rank's save, the attempt stays for the one it makes.
        """
        session = self._session
        rank = self._session.topology.rank
        tag = self._tag
        theirs = opened.tag if isinstance(opened, Verdict) else opened
        if theirs is None or theirs == tag:
            return False
        is_over = isinstance(opened, Verdict)  # such a step tells nothing: a run may have gone back since
        if rank and (tag in session.missed or (not is_over and goes_back(tag, theirs))):
            self._is_left_out = True
            raise RanksDisagree(f"save of {tag!r} failed: rank 0 did not make it with this rank, it is at {theirs!r}")
        # Only then a later save of that tag cannot be taken for this one.
        if rank and not (is_over or goes_back(theirs, tag) or theirs in session.tried):
            raise RanksDisagree(
                f"rank 0 saves {theirs!r}, this rank {tag!r}; all ranks must call save_checkpoint with the same "
                "arguments, in the same order"
            )
        logger.warning("rank %d did not make the save of %r, which others made", rank, theirs)
        if rank == 0:
            error = SaveFailed(f"rank 0 did not make this save, but that of {tag!r}")
            self._votes.announce(Verdict(to_wire(error), tag=theirs))
        else:
            session.missed.add(theirs)
            missed = SaveFailed(f"this rank did not make the save of {theirs!r}")
            self._votes.cast(Vote(rank, error=to_wire(missed)))
        session.last_failed = True  # for all: without one rank there is no tag
        session.counter += 1
        return True

    def _await_opening(self) -> None:
        """Wait until rank 0 has opened this save. Raises its refusal."""
        session = self._session
        while True:
            try:
                opened = self._votes.await_opening(self._patience, session.is_leaving)
            except SaveFailed:
                self._patience = min(session.timeout, 5.0)  # it was silent for long enough
                raise
            if not self._passes_over(opened):
                break
        if isinstance(opened, Verdict):
            raise self._attempt.refused(opened)


class AttemptFiles:
    """The second phase: the files of an opened attempt, written wave by wave.

    Attributes:
        publication: the attempt's way to its tag.
        patience: seconds to wait for rank 0's verdict.
        writer: writes the files; None if nothing was planned.
    """

    def __init__(
        self,
        attempt: SaveAttempt,
        publication: Publication,
        parent: str | None,
        patience: float,
        is_elsewhere: bool,
        is_left_out: bool,
    ) -> None:
        self.attempt = attempt
        self.publication = publication
        self.patience = patience
        self._is_elsewhere = is_elsewhere
        """True if nothing may be written, not even a vote: the path leads to another directory."""
        self._is_left_out = is_left_out
        """True if nothing may be written because the others do not make this save."""
        self.writer: FileWriter | None = None
        if attempt.plan is not None:
            storage = attempt.session.storage
            folder = publication.folder
            files = attempt.plan.files
            self.writer = FileWriter(storage, folder, files, self.progress, attempt.threads, parent)
        self._slot = ExitStack()
        self._moved: Callable[[], None] = lambda: None
        self._holds_slot = False
        self._reported = effects.monotonic()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has written so far."""
        return self.writer.nbytes if self.writer is not None else 0

    def write(self, wave: Wave, views: Sequence[memoryview], pace: SavePace | None) -> None:
        """Write one staged wave at its ``pace``. A failure is kept for the vote and returned to no one else."""
        attempt = self.attempt
        session = self.attempt.session
        if attempt.error is not None or self.writer is None:
            return
        with attempt.timed("write_seconds"):
            try:
                if not self._holds_slot:
                    # Held until all waves are written.
                    writers = None if session.is_alone else attempt.request.options.writers_on_host
                    slot = writing_slot(session.run_id, writers, session.timeout)
                    self._moved = self._slot.enter_context(slot)
                    self._holds_slot = True
                self.writer.write(wave, views, pace)
            except BaseException as error:
                attempt.fail(error)

    def end(self) -> None:
        """Let other ranks write; drop the files after a failure. Raises it if this rank cannot even vote."""
        attempt = self.attempt
        self._slot.close()
        self._moved = lambda: None  # nobody waits for the slot: given files are read after it
        if attempt.error is not None and self.writer is not None:
            self.writer.abort()
        if self._is_left_out and attempt.error is not None:
            raise attempt.failed(attempt.error) from attempt.error
        if (self._is_elsewhere or attempt.is_away()) and attempt.error is not None:
            attempt.session.lost_votes[self.publication.attempt] = self.failed_vote(attempt.error)
            raise attempt.failed(attempt.error) from attempt.error

    def failed_vote(self, error: BaseException) -> Vote:
        """Return the vote of an error: with the digest of what is saved if another rank's file stood in the way."""
        plan = self.attempt.plan
        replica = plan.replica if plan is not None and is_in_the_way(error) else None
        return Vote(self.attempt.session.topology.rank, to_wire(error), replica=replica)

    def make_room(self) -> None:
        """Remove this rank's files of a failed attempt: on a full disk even a vote needs their space.

        Those of an attempt that was visible for a moment stay until that is undone for good, see coordination.journal.
        """
        storage = self.attempt.session.storage
        done = f"{self.publication.folder}/{names.DONE}"
        if self.writer is not None and storage.renames and not storage.is_file(done):
            self.writer.discard()

    def progress(self, nbytes: int) -> None:
        """Show rank 0, and ranks that wait for the slot, that a slow write progresses."""
        self._moved()
        now = effects.monotonic()
        session = self.attempt.session
        if now - self._reported > session.timeout / 10:
            self._reported = now
            votes = AttemptVotes(session.storage, self.publication.attempt)
            votes.report_progress(session.topology.rank, effects.monotonic_ns())


def is_in_the_way(error: BaseException) -> bool:
    """Return whether a file of another rank was where this one writes, as of ranks that hold other tensors."""
    return isinstance(error.__cause__ or error, FileExistsError)


class CollectedSave:
    """The next attempt of the ``session``: `begin` on rank 0, then all write as its ``publication`` says, `complete`.

    `discard` ends it in any case; `complete` and `discard` are rank 0's too.
    """

    def __init__(self, session: Session, tag: str, overwrite: bool | None) -> None:
        session.counter += 1
        self.session: Session = session
        self.publication: Publication = publication_of(session, session.counter, tag, overwrite)

    def begin(self) -> None:
        """Make room, before any rank writes. Raises SaveFailed if the tag must not be saved."""
        self.publication.begin(self.session)

    def commit(self, topology: Topology, votes: Sequence[Vote], parts: Parts, **facts: Any) -> None:
        """Make the tag of the ranks in ``topology`` visible; ``facts`` are further fields of `Commit`.

        Errors of `commit.commit` pass, with nothing visible.
        """
        session = self.session
        publication = self.publication
        try:
            commit(session, topology, votes, Commit(publication, parts, versions=versions(), **facts))
        except OSError as error:
            where = f"{session.storage.url}/{publication.tag}"
            raise CheckpointError(f"could not complete {where}: {type(error).__name__}: {error}") from error

    def discard(self) -> None:
        """Remove what is left of the attempt, once no rank writes for it. A visible tag stays."""
        session = self.session
        storage = self.session.storage
        try:
            if storage.is_file(JOURNAL):
                return  # an unfinished swap, which the next process to open the directory finishes from these files
            session.require()
            journal.clear(storage, staging_dir(self.publication.attempt), session.confirm)
            journal.discard_trash(storage, session.run_id, session.confirm)
        except (OSError, CheckpointError) as error:  # the next job removes it
            logger.warning("could not clean up %s: %s", storage.url, error)
