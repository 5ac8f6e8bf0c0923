"""One save on one rank, from staged memory to the verdict: all work of the background thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from nxd_ckpt import effects
from nxd_ckpt.commit import voting
from nxd_ckpt.commit.commit import Commit, clean_up, clear_failed, commit
from nxd_ckpt.commit.host_semaphore import writing_slot
from nxd_ckpt.commit.publication import Publication, is_visible, publication_of
from nxd_ckpt.commit.session import Session
from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.paths import verdict_dir, votes_dir
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import FileEntry, RankLine
from nxd_ckpt.core.tags import goes_back, latest
from nxd_ckpt.core.votes import Verdict, Vote
from nxd_ckpt.errors import (
    CheckpointError,
    MalformedFile,
    OutcomeUnknown,
    RanksDisagree,
    SaveFailed,
    StorageError,
    from_wire,
    in_words,
    to_wire,
)
from nxd_ckpt.save.counting import Counting
from nxd_ckpt.save.dedup import parent_of
from nxd_ckpt.save.request import SaveRequest
from nxd_ckpt.save.waves import Wave
from nxd_ckpt.save.writing import FileWriter, write_index, write_small
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.foreign.dcp_metadata import dump_metadata

logger = logging.getLogger("nxd_ckpt")


class SaveAttempt:
    """The effects of one attempt, in order, on the background thread; a failure becomes this rank's vote.

    An exit that is raised there does, too: it cannot end the process, and must not leave the save undecided.
    """

    def __init__(self, session: Session, request: SaveRequest, error: BaseException | None, threads: Executor) -> None:
        self.session, self._request, self.error, self._threads = session, request, error, threads
        self.tag, self.plan, self._options = request.tag, request.plan, request.options
        self._patience = session.timeout
        self.timings: dict[str, float] = {}
        self.saved_nbytes = 0
        """Of all ranks; rank 0 knows it once the tag is visible."""
        self._own: Vote | None = None
        self._others: list[Vote] | None = None
        """The votes of the other ranks, if rank 0 needed them before it could vote."""
        self._failed_elsewhere: SaveFailed | None = None
        """The error that came instead of those votes."""
        self._may_count = False
        """True if this rank failed while it voted, so that rank 0 may have counted its files as whole."""
        self._is_elsewhere = False
        """True if the path leads to another directory than the session's: then nothing is written, not even a vote."""
        self._slot = ExitStack()
        self._holds_slot = False
        self._moved: Callable[[], None] = lambda: None
        self._reported = effects.monotonic()
        # It has the next number, unless the ranks are out of step: `begin` finds out.
        self.publication, self._writer = self._numbered(session.counter + 1)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has written so far."""
        return self._writer.nbytes if self._writer is not None else 0

    def begin(self) -> None:
        """Prepare everything that even a failing rank needs to vote.

        Then wait until the attempt's files may be written.
        """
        session = self.session
        self._next_attempt()
        self._look_for_place()
        self._look_for_votes()
        if self._is_elsewhere:
            return
        try:
            self._pass_over()
            # Each rank had the same verdict on the attempt before, so that they agree on whether rank 0 opens this one.
            is_opened, session.last_failed = self.publication.in_place or session.last_failed, False
            if session.topology.rank == 0 and is_opened:
                clear_failed(session, self.attempt)
            for attempt, vote in list(session.lost_votes.items()):
                voting.cast(session.storage, attempt, vote)
                del session.lost_votes[attempt]
            if session.topology.rank > 0 and is_opened and self.error is None:
                self._await_opening()  # before anything is written: there may be no room before
            session.storage.make_dir(verdict_dir(self.attempt))
            session.keep_spares()
            if session.topology.rank == 0:
                self._open_vote(is_opened)
            if self.error is None:
                session.storage.make_dir(self.publication.folder)
                if self._options.dedup and self._writer is not None:
                    self._writer.parent = parent_of(session.storage, session.last_saved)
        except BaseException as error:
            self.error = self.error or error

    def _look_for_place(self) -> None:
        session = self.session
        try:
            lease.require_place(session.storage, session.run_id, session.place)
        except (OSError, StorageError) as error:
            self.error, self._is_elsewhere = self.error or error, session.votes_here

    def _look_for_votes(self) -> None:
        """On the host of rank 0, if that is another one: else this rank would wait for it in vain."""
        try:
            self.session.require_votes()
        except (OSError, StorageError) as error:
            self.error, self._is_elsewhere = self.error or error, True

    def _next_attempt(self) -> None:
        self.session.counter += 1
        self.publication, self._writer = self._numbered(self.session.counter)

    def _numbered(self, counter: int) -> tuple[Publication, FileWriter | None]:
        """Return the publication of the attempt of that number, and the writer of this rank's files in it."""
        publication = publication_of(self.session, counter, self.tag, self._options.overwrite)
        if self.plan is None:
            return publication, None
        storage, files = self.session.storage, self.plan.files
        return publication, FileWriter(storage, publication.folder, files, self._progress, self._threads)

    @property
    def attempt(self) -> str:
        return self.publication.attempt

    def _pass_over(self) -> None:
        """Skip attempts that other ranks made and ended without this one, so that all are in step again.

        An attempt under this save's own tag is this save: then this rank came too late for it.
        """
        storage, rank0 = self.session.storage, self.session.topology.rank == 0
        ended = voting.left_with if rank0 else voting.ended_with
        while (tag := ended(storage, self.attempt)) not in (None, self.tag):
            logger.warning("rank %d did not make the save of %r, which others made", self.session.topology.rank, tag)
            if rank0:
                error = SaveFailed(f"rank 0 did not make this save, but that of {self.tag!r}")
                voting.announce(storage, self.attempt, Verdict(to_wire(error), tag=tag))
                self.session.last_failed = True
            else:
                missed = SaveFailed(f"this rank did not make the save of {tag!r}")
                voting.cast(storage, self.attempt, Vote(self.session.topology.rank, error=to_wire(missed)))
            self._next_attempt()

    def _open_vote(self, is_awaited: bool) -> None:
        if self.error is None:
            self.publication.begin(self.session)
            if is_awaited:
                voting.open_vote(self.session.storage, self.attempt, self.tag)

    def _await_opening(self) -> None:
        session, patience = self.session, self._patience
        try:
            verdict = voting.await_opening(session.storage, self.attempt, self.tag, patience, session.is_leaving)
        except RanksDisagree:
            raise
        except SaveFailed:
            self._patience = min(session.timeout, 5.0)  # it was silent for long enough
            raise
        if verdict is not None:
            raise self._told(verdict)

    def write(self, wave: Wave, views: Sequence[memoryview]) -> None:
        """Write one staged wave. A failure is kept for the vote and returned to no one else."""
        if self.error is not None or self._writer is None:
            return
        started = effects.monotonic()
        try:
            if not self._holds_slot:
                # Held until all waves are written.
                slot = writing_slot(self.session.run_id, self._options.writers_on_host, self.session.timeout)
                self._moved = self._slot.enter_context(slot)
                self._holds_slot = True
            self._writer.write(wave, views)
        except BaseException as error:
            self.error = error
        self._count("write_seconds", started)

    def conclude(self, voted: Callable[[], None]) -> None:
        """Finish the files, vote (then call ``voted``), and wait until the attempt is decided.

        Raises:
            SaveFailed: the tag did not become visible; on the rank that failed, from its own error.
            OutcomeUnknown: no verdict came.
        """
        self._finish_files()
        if not self._is_elsewhere:
            self._look_for_place()
        if self._is_elsewhere and self.error is not None:
            self.session.lost_votes[self.attempt] = self._vote(None)
            raise self._failed(self.error) from self.error
        index = self._finish_index()
        started = effects.monotonic()
        try:
            self._cast(index)
            voted()
            verdict = self._decide(started) if self.session.topology.rank == 0 else self._learn()
        finally:
            self._count("commit_seconds", started)
        if verdict.error is not None and self.error is not None:
            raise self._failed(self.error) from self.error
        if verdict.error is not None:
            raise self._told(verdict)
        self.session.last_saved = self.tag

    def _told(self, verdict: Verdict) -> CheckpointError:
        """The error in rank 0's verdict. The message names the rank that failed."""
        name, message = verdict.error or ("SaveFailed", "rank 0 decided it without this rank")
        kind = type(from_wire(name, message, 0))
        if issubclass(kind, OutcomeUnknown):
            return kind(f"save of {self.tag!r}: {message}")
        return (kind if issubclass(kind, SaveFailed) else SaveFailed)(f"save of {self.tag!r} failed: {message}")

    def _finish_files(self) -> None:
        started = effects.monotonic()
        try:
            if self.error is None and self._writer is not None:
                self._writer.finish()
        except BaseException as error:
            self.error = error
        finally:
            self._slot.close()
            if self.error is not None and self._writer is not None:
                self._writer.abort()
            self._count("write_seconds", started)

    def _finish_index(self) -> RankLine | None:
        session = self.session
        try:
            if self.error is None and self._writer is not None and self.plan is not None:
                metadata = self._write_metadata() if self.plan.parts.optimizer == "zero1_dcp" else {}
                if self._failed_elsewhere is not None:
                    return None
                started, at = effects.monotonic(), session.topology.coordinates
                index = self._writer.index(self.plan, at)
                index = replace(index, files={**index.files, **metadata})
                line = RankLine(*write_index(session.storage, self.publication, names.index_file(at), index))
                self._count("write_seconds", started)
                return line
        except BaseException as error:
            self.error = error
        return None

    def _write_metadata(self) -> dict[str, FileEntry]:
        """Write, on rank 0, the metadata of the torch DCP directory, once the others have reported their chunks.

        So rank 0 votes last, and its index verifies the metadata like any file of its own.
        """
        session = self.session
        if session.topology.rank > 0 or self._writer is None:
            return {}
        started = effects.monotonic()
        try:
            try:
                self._others = self._collect(first=1)
            except SaveFailed as error:
                self._failed_elsewhere = error
                return {}
            chunks = chain(self._writer.chunks(), *(vote.chunks for vote in self._others))
            metadata = dump_metadata(chunks)
            return {names.DCP_METADATA: write_small(session.storage, self.publication, names.DCP_METADATA, metadata)}
        finally:
            self._count("commit_seconds", started)

    def _cast(self, index: RankLine | None) -> None:
        storage, rank = self.session.storage, self.session.topology.rank
        try:
            if self.error is not None:
                self._make_room()
            self._own = self._vote(index)
            in_spare = self.session.write_in_spare if self.error is not None else voting.not_written
            voting.cast(storage, self.attempt, self._own, in_spare)
        except OSError as error:
            # Rank 0 may miss this vote or see it: its verdict counts.
            was_good, self.error = self.error is None, self.error or error
            lost = self._vote(None)
            try:
                if voting.has_cast(storage, self.attempt, rank):
                    raise
                self._make_room()
                voting.cast(storage, self.attempt, lost, self.session.write_in_spare)
            except OSError:
                self.session.lost_votes[self.attempt] = lost
                self._may_count = was_good

    def _make_room(self) -> None:
        """Remove this rank's files of a failed attempt: on a full disk even a vote needs their space.

        Those of an attempt that was visible for a moment stay until that is undone for good, see coordination.intents.
        """
        storage, done = self.session.storage, f"{self.publication.folder}/{names.DONE}"
        if self._writer is not None and storage.renames and not storage.is_file(done):
            self._writer.discard()

    def _vote(self, index: RankLine | None) -> Vote:
        rank = self.session.topology.rank
        error = self.error or self._failed_elsewhere
        if error is not None or self.plan is None or self._writer is None:
            return Vote(rank, error=to_wire(error or CheckpointError("nothing was staged")))
        return Vote(
            rank,
            plan=self.plan.agreed(self.tag, self.session.topology),
            replica=self.plan.replica,
            index=index,
            replicated=self._writer.replicated_digest(),
            nbytes=self.nbytes,
            seconds=round(self.timings.get("write_seconds", 0.0), 6),
            stage_seconds=round(self.timings.get("stage_seconds", 0.0), 6),
            host=effects.processes().partition("/")[0],
            chunks=self._writer.chunks() if rank > 0 else (),
            duplicated=self._writer.duplicated_nbytes,
            numbers=self.plan.numbers,
        )

    def _learn(self) -> Verdict:
        """Await rank 0's verdict on the other ranks. Without one, a visible tag of this attempt counts as one."""
        session, where = self.session, f"{self.session.storage.url}/{votes_dir(self.attempt)}"
        try:
            gone = partial(session.is_gone, 0)
            verdict = voting.await_verdict(session.storage, self.attempt, self.tag, self._patience, gone)
            session.last_failed = verdict.error is not None
            return verdict
        except (OutcomeUnknown, OSError, MalformedFile) as error:
            if is_visible(session.storage, self.tag, self.attempt):
                return Verdict()
            with suppress(OSError):
                voting.leave(session.storage, self.attempt, session.topology.rank, self.tag)
            if self.error is not None and not self._may_count:
                return Verdict(to_wire(self.error), session.topology.rank)  # without its vote, no tag
            if isinstance(error, OutcomeUnknown):
                raise
            raise OutcomeUnknown(f"save of {self.tag!r}: cannot read rank 0's verdict in {where}: {error}") from error

    def _decide(self, voted: float) -> Verdict:
        """Rank 0, which ``voted`` then.

        Collect, commit, announce. The verdict is announced whatever happens, and counts even if announcing it fails.
        """
        session = self.session
        try:
            if isinstance(self.error, SaveFailed):
                raise self.error  # it refused the attempt
            if self._failed_elsewhere is not None:
                raise self._failed_elsewhere
            if self.error is not None:
                raise SaveFailed(f"rank 0 failed: {in_words(to_wire(self.error))}")
            votes = self._votes()
            parts = self.plan.parts if self.plan is not None else None
            if parts is None:
                raise SaveFailed("rank 0 staged nothing")
            own, groups = (None, None) if self.plan is None else (self.plan.parameters, self.plan.groups)
            request = Commit(
                self.publication,
                parts,
                self._request.rules,
                self.timings,
                self._request.versions,
                own,
                groups,
                self._options.recorded_metrics,
                self._request.draining,
                voted,
            )
            self._warn_of_earlier_step()
            commit(session, session.topology, votes, request)
            self.saved_nbytes = sum(vote.nbytes for vote in votes)
            verdict = Verdict()
        except (SaveFailed, OutcomeUnknown) as error:
            seen = isinstance(error, OutcomeUnknown) and is_visible(session.storage, self.tag, self.attempt)
            verdict = Verdict() if seen else Verdict(to_wire(error))
        except Exception as error:
            verdict = Verdict(to_wire(SaveFailed(f"rank 0 could not commit it: {in_words(to_wire(error))}")))
        session.last_failed = verdict.error is not None
        announce = partial(
            voting.announce,
            session.storage,
            self.attempt,
            replace(verdict, tag=self.tag),
            session.write_in_spare if verdict.error is not None else voting.not_written,
            awaited=session.topology.world_size > 1,
        )
        try:
            try:
                announce()
            except OSError:
                if verdict.error is not None:
                    self._make_room()
                self._clean_up()  # on a full disk, what is left of a failed attempt may take the space that it needs
                announce()
        except OSError as error:
            logger.error("after the save of %r in %s: %s", self.tag, session.storage.url, error)
        return verdict

    def _warn_of_earlier_step(self) -> None:
        """Warn, once in a run, of a step before that of the latest tag, which this one is from now on."""
        session, before = self.session, self.session.last_saved
        with suppress(OSError, CheckpointError):  # publishing meets it too
            newest = latest(list_tags(session.storage)) if before is None else None
            before = newest.tag if newest is not None else before
        if before is not None and goes_back(self.tag, before) and not session.warned_of_steps:
            session.warned_of_steps = True
            logger.warning(
                "%s: %r is saved after %r. A load without a tag takes the newest save, not the highest step: %r from "
                "now on. If it belongs to another run, save that in a directory of its own",
                session.storage.url,
                self.tag,
                before,
                self.tag,
            )

    def _votes(self) -> list[Vote]:
        if self._others is not None and self._own is not None:
            return [self._own, *self._others]
        return self._collect()

    def _collect(self, first: int = 0) -> list[Vote]:
        session = self.session
        ranks = session.topology.world_size
        return voting.collect(session.storage, self.attempt, ranks, session.timeout, first=first, gone=session.is_gone)

    def keep_counts(self, counting: Counting) -> None:
        """Store the counts of the visible tag as soon as they are complete, without waiting."""
        counting.keep(self.session.storage, self.tag, self.attempt, self.session.topology.rank)

    def hand_over(self) -> None:
        """Hand the visible tag over to the drains of the other tiers, on rank 0."""
        if self._request.draining is not None:
            self._request.draining.saved(self.tag, self.saved_nbytes, self._options.overwrite)

    def tidy(self, *, failed: bool) -> None:
        """Delete remains of attempts and retention, on rank 0, once the outcome is known, without delaying anyone.

        After an attempt that ``failed``, used space of the reserve is reserved again.
        """
        session = self.session
        if session.topology.rank == 0:
            self._clean_up()
        if failed and session.topology.rank == 0:
            with suppress(OSError, StorageError):
                lease.require_place(session.storage, session.run_id, session.place)
                session.keep_spares()

    def _clean_up(self) -> None:
        clean_up(self.session, self.session.counter)

    def _failed(self, error: BaseException) -> CheckpointError:
        rank = self.session.topology.rank
        if isinstance(error, (SaveFailed, OutcomeUnknown)):
            return error
        return SaveFailed(f"save of {self.tag!r} failed: rank {rank} failed: {in_words(to_wire(error))}")

    def _progress(self, nbytes: int) -> None:
        """Show rank 0, and ranks that wait for the slot, that a slow write progresses."""
        self._moved()
        now = effects.monotonic()
        if now - self._reported > self.session.timeout / 10:
            self._reported = now
            voting.report_progress(self.session.storage, self.attempt, self.session.topology.rank, self.nbytes)

    def _count(self, name: str, started: float) -> None:
        self.timings[name] = self.timings.get(name, 0.0) + effects.monotonic() - started
