"""The last phase of a save on one rank: its index, its vote, and the decision on the attempt."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.commit.commit import Commit, clean_up, commit
from nxd_ckpt.commit.publication import is_visible
from nxd_ckpt.commit.voting import ANSWER, VOTE, AttemptVotes
from nxd_ckpt.coordination import journal, lease
from nxd_ckpt.coordination.control_files import votes_dir
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import FileEntry, RankIndex
from nxd_ckpt.core.mesh import leaders_of
from nxd_ckpt.core.names import folders_of
from nxd_ckpt.core.tags import goes_back, latest
from nxd_ckpt.core.votes import (
    FORMS,
    VALUES,
    WHOLE,
    Claim,
    Verdict,
    Vote,
    disputed,
    raise_error_of,
    require_one_plan,
    unlike,
    with_other_user_content,
)
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    CheckpointError,
    MalformedFile,
    OutcomeUnknown,
    RanksDisagree,
    SaveFailed,
    StorageError,
    in_words,
    to_wire,
)
from nxd_ckpt.layouts.dcp_metadata import dump_metadata
from nxd_ckpt.saving.plan import SavePlan
from nxd_ckpt.saving.replica_check import lines_of, names_that_differ, refuse_lines, warn_of_own
from nxd_ckpt.saving.replicas import Own
from nxd_ckpt.saving.save_attempt import AttemptFiles, SaveAttempt, failure_of, is_in_the_way
from nxd_ckpt.saving.staging import stage_and_write
from nxd_ckpt.saving.writing import FileWriter, write_index, write_small
from nxd_ckpt.storage.arena import Arena
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.transfer import StoredFile, copy, digest, link
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.per_rank import Gone


def take(
    storage: Storage, folder: str, files: Mapping[str, str], threads: Executor, progress: Callable[[int], None]
) -> dict[str, FileEntry]:
    """Link or copy ``files``, paths by name, into ``folder``, durably; return the size and CRC-32 of each by its name.

    A link costs no space, and the file need not be written again; where none can be made, as between file systems, the
    file is copied. ``threads`` read ahead; ``progress`` is called with the bytes of each piece.

    Raises SaveFailed for a file that is gone.
    """
    taken: dict[str, FileEntry] = {}
    for name, path in sorted(files.items()):
        place, key = os.path.split(os.path.abspath(path))
        source = StoredFile(LocalStorage(place), key)
        target = StoredFile(storage, f"{folder}/{name}")
        if not source.storage.is_file(key):
            raise SaveFailed(
                f"{path} was given to this save, and vanished: another program changes the files there. Find it, or "
                "keep the files until the save is decided"
            )
        if not storage.renames:
            storage.remove(target.key)  # one of that name that was in the tag before
        if link(source, target):
            taken[name] = digest(target, progress, threads)
        else:
            taken[name], _ = copy(source, target, {}, progress, threads)
    for inner in folders_of(taken) if taken else ():
        storage.sync_dir(f"{folder}/{inner}".rstrip("/"))
    return taken


class _Counted(NamedTuple):
    """This rank's vote, and what rank 0 needed of the others before it could vote.

    Attributes:
        own: the vote; without an error its files are whole.
        may_count: True if this rank failed while it voted, so that rank 0 may have counted its files as whole.
        others: the votes of the other ranks, or the error that came instead; None if they were not needed.
    """

    own: Vote
    may_count: bool
    others: Sequence[Vote] | SaveFailed | None


class Ballot:
    """The decision on an attempt whose ``files`` this rank has finished, or failed to write."""

    def __init__(self, files: AttemptFiles) -> None:
        self._files = files
        self._publication = files.publication
        self._attempt = files.attempt
        self._session = files.attempt.session
        self._tag = files.attempt.tag
        self._number = files.publication.attempt
        self._rank = self._session.topology.rank
        self._votes = AttemptVotes(self._session.storage, self._number, self._session.news)
        self._index_now: RankIndex | None = None
        self._guests: dict[str, FileEntry] = {}
        """Files of others that the tag is given, on rank 0."""
        self._own = Own()
        """The content that proved to be this rank's own after it had voted."""
        self._has_answered = False

    def decide(self, voted: Callable[[], None]) -> int:
        """Vote, then call ``voted``, and wait until the attempt is decided; return the bytes of all ranks, on rank 0.

        Raises:
            SaveFailed: the tag did not become visible; on the rank that failed, from its own error.
            OutcomeUnknown: no verdict came.
        """
        attempt = self._attempt
        index, others = self._index()
        nbytes = 0
        started = effects.monotonic()
        with attempt.timed("commit_seconds"):
            counted = self._cast(index, others)
            voted()
            if self._rank == 0:
                verdict, nbytes = self._commit(counted, started)
                self._announce(verdict)
            else:
                verdict = self._learn(counted)
        is_explained = verdict.error is not None and verdict.error[0] == RanksDisagree.__name__
        if verdict.error is not None and attempt.error is not None and not is_explained:
            raise attempt.failed(attempt.error) from attempt.error
        if verdict.error is not None:
            raise attempt.refused(verdict)
        self._session.last_saved = self._tag
        self._session.resumed_from = None
        self._session.missed.clear()
        self._session.tried.clear()
        return nbytes

    def _index(self) -> tuple[FileEntry | None, Sequence[Vote] | SaveFailed | None]:
        """Write the index of this rank's files; None if it failed. Return also what came of the other ranks' votes."""
        attempt = self._attempt
        session = self._session
        plan = self._attempt.plan
        writer = self._files.writer
        others: Sequence[Vote] | SaveFailed | None = None
        try:
            if attempt.error is None and writer is not None and plan is not None:
                metadata: dict[str, FileEntry] = {}
                if plan.parts.optimizer == "zero1_dcp" and self._rank == 0:
                    with attempt.timed("commit_seconds"):
                        others = self._other_votes()
                        if isinstance(others, SaveFailed):
                            return None, others
                        metadata = self._write_metadata(writer, others)
                with attempt.timed("write_seconds"):
                    if self._rank == 0 and attempt.request.options.files:
                        folder = self._publication.folder
                        files = attempt.request.options.files
                        self._guests = take(session.storage, folder, files, attempt.threads, self._files.progress)
                    at = session.topology.coordinates
                    index = writer.index(plan, at)
                    index = self._index_now = replace(index, files={**index.files, **metadata})
                    write = partial(write_index, session.storage, self._publication, names.index_file(at), index)
                    entry, _ = effects.side_by_side(write, writer.finish)
                    return entry, others
        except BaseException as error:
            attempt.fail(error)
        return None, others

    def _other_votes(self) -> Sequence[Vote] | SaveFailed:
        try:
            return self._collect()
        except SaveFailed as error:
            return error

    def _write_metadata(self, writer: FileWriter, others: Sequence[Vote]) -> dict[str, FileEntry]:
        """Write the metadata of the torch DCP directory, once the others have reported their chunks.

        So rank 0 votes last, and its index verifies the metadata like any file of its own.
        """
        metadata = dump_metadata(chain(writer.chunks(), *(vote.chunks for vote in others)))
        entry = write_small(self._session.storage, self._publication, names.DCP_METADATA, metadata)
        return {names.DCP_METADATA: entry}

    def _cast(self, index: FileEntry | None, others: Sequence[Vote] | SaveFailed | None) -> _Counted:
        attempt = self._attempt
        session = self._session
        refusal = others if isinstance(others, SaveFailed) else None
        own = self._vote(index, attempt.error or refusal)
        may_count = False
        if session.is_alone:
            return _Counted(own, False, ())
        try:
            if attempt.error is not None:
                self._files.make_room()
            self._votes.cast(own, None if attempt.error is None else session.write_in_spare)
        except OSError as error:
            # Rank 0 may miss this vote or see it: its verdict counts.
            was_good = attempt.error is None
            attempt.fail(error)
            lost = self._files.failed_vote(attempt.error or error)
            try:
                if self._votes.has_cast(self._rank):
                    raise
                self._files.make_room()
                self._votes.cast(lost, session.write_in_spare)
            except OSError:
                session.lost_votes[self._number] = lost
                may_count = was_good
        return _Counted(own, may_count, others)

    def _vote(self, index: FileEntry | None, error: BaseException | None) -> Vote:
        plan = self._attempt.plan
        writer = self._files.writer
        timings = self._attempt.timings
        if error is not None or plan is None or writer is None:
            return self._files.failed_vote(error or CheckpointError("nothing was staged"))
        claims = {} if plan.replicas is None else plan.replicas.summary(writer.blocks)
        if self._attempt.request.options.files:  # rank 0's are taken, whichever they are
            claims[Claim(0, f"files{VALUES}", WHOLE).key] = 0
        return Vote(
            self._rank,
            plan=plan.agreed(self._tag, self._session.topology),
            replica=plan.replica,
            common=plan.common,
            index=index,
            replicated=writer.replicated_digest(),
            nbytes=self._files.nbytes,
            seconds=round(timings.get("write_seconds", 0.0), 6),
            stage_seconds=round(timings.get("stage_seconds", 0.0), 6),
            host=effects.processes().partition("/")[0],
            chunks=writer.chunks() if self._rank > 0 else (),
            duplicated=writer.duplicated_nbytes,
            claims=claims,
            per_rank=() if plan.replicas is None else tuple({*plan.replicas.per_rank, *self._own.values}),
            lost=tuple(self._own.names_of(Gone.LOST)),
            rank_content=plan.parts.rank_content,
        )

    def _learn(self, counted: _Counted) -> Verdict:
        """Await rank 0's verdict on the other ranks. Without one, a tag that is there for good counts as one."""
        session = self._session
        where = f"{self._session.storage.url}/{votes_dir(self._number)}"
        try:
            gone = partial(session.is_gone, 0)
            verdict = self._votes.await_verdict(self._tag, self._files.patience, gone, self._answer)
            self._known.update(verdict.per_rank)
            if verdict.error is not None and not self._has_answered:
                with suppress(OSError):  # rank 0 may have appealed meanwhile, and would wait for an answer
                    if self._votes.is_appealed():
                        self._votes.leave(self._rank, self._tag)
            session.last_failed = verdict.error is not None
            if verdict.tag is not None and verdict.tag != self._tag:
                session.missed.add(verdict.tag)
            return verdict
        except (OutcomeUnknown, OSError, MalformedFile) as error:
            if self._is_there_for_good():
                return Verdict()
            with suppress(OSError):
                self._votes.leave(self._rank, self._tag)
            if self._attempt.error is not None and not counted.may_count:
                return Verdict(to_wire(self._attempt.error), self._rank)  # without its vote, no tag
            if isinstance(error, OutcomeUnknown):
                raise
            raise OutcomeUnknown(f"save of {self._tag!r}: cannot read rank 0's verdict in {where}: {error}") from error

    def _is_there_for_good(self) -> bool:
        """Return whether the tag is visible, durable, and undone by nobody any more: a rank 0 that wakes up might."""
        storage = self._session.storage
        try:
            if not is_visible(storage, self._tag, self._number):
                return False
            storage.sync_dir("" if storage.renames else self._tag)  # rank 0 may have ended before it did
            return journal.decides(storage, self._number, b"saved")
        except (OSError, CheckpointError):
            return False

    def _commit(self, counted: _Counted, voted: float) -> tuple[Verdict, int]:
        """Collect the votes and commit, on rank 0, which ``voted`` then; return the bytes of all ranks too."""
        session = self._session
        error = self._attempt.error
        try:
            if isinstance(error, SaveFailed):
                raise error  # it refused the attempt
            if isinstance(counted.others, SaveFailed):
                raise counted.others
            if error is not None and not is_in_the_way(error):
                raise failure_of(error)(f"rank 0 failed: {in_words(to_wire(error))}")
            votes = [counted.own, *(self._collect() if counted.others is None else counted.others)]
            if self._attempt.plan is None:
                raise SaveFailed("rank 0 staged nothing")
            votes = list(self._after_appeal(votes))
            per_rank = tuple(sorted({name for vote in votes for name in vote.per_rank}))
            self._known.update(per_rank)
            has_content = any(vote.rank_content for vote in votes)
            parts = replace(self._attempt.plan.parts, rank_content=has_content)
            request = self._request(replace(self._attempt.plan, parts=parts), voted, per_rank)
            self._warn_of_earlier_step()
            self._warn_of_other_content(votes)
            commit(session, session.topology, votes, request)
            return Verdict(per_rank=per_rank), sum(vote.nbytes for vote in votes)
        except (SaveFailed, OutcomeUnknown) as failure:
            is_saved = isinstance(failure, OutcomeUnknown) and self._is_there_for_good()
            return Verdict() if is_saved else Verdict(to_wire(failure), per_rank=tuple(sorted(self._known))), 0
        except Exception as failure:
            why = f"rank 0 could not commit it: {in_words(to_wire(failure))}"
            return Verdict(to_wire(failure_of(failure)(why))), 0

    def _after_appeal(self, votes: Sequence[Vote]) -> Sequence[Vote]:
        """Return the votes, on rank 0, after ranks that hold other values than who writes them saved their own."""
        if all(vote.error is None for vote in votes):
            require_one_plan(votes)  # before their values are compared, which are those of different saves otherwise
        self._refuse_other_forms(votes)  # also if one's files stood in another's way
        require_one_plan(votes)
        keys = disputed(votes)
        if not keys:
            return votes
        self._votes.appeal(keys)
        own = self._answer(keys)
        raise_error_of(own)
        votes = [own, *self._collect(ANSWER)]
        for vote in votes:
            new = sorted({*vote.per_rank} - self._known)
            if new:
                writers = [(key, votes[Claim.of(key).writes]) for key in keys if key in vote.claims]
                others = [writer.rank for key, writer in writers if writer.claims.get(key) != vote.claims[key]]
                warn_of_own(([*others, vote.rank][0], vote.rank), new)
                break
        return votes

    def _refuse_other_forms(self, votes: Sequence[Vote]) -> None:
        """Raise RanksDisagree with the tensor, on rank 0, if two ranks that share the writing do not hold the same."""
        plan = self._attempt.plan
        groups = None if plan is None else plan.groups
        pair = unlike([(vote.replica, vote.common) for vote in votes], self._session.topology, leaders_of(groups))
        if pair is None or plan is None or any(vote.replica is None for vote in votes):
            return
        keys = {rank: Claim(rank, FORMS, WHOLE).key for rank in pair}
        self._votes.appeal([*keys.values()])
        forms = {keys[0]: lines_of(plan)} if 0 in pair else {}
        for rank in filter(None, pair):
            forms |= self._digests_of(rank)
        if len(forms) < len(pair):
            self._collect(ANSWER)  # with the error of the rank that could not tell
        lines = {rank: forms[key] for rank, key in keys.items()}
        self._known.update(names_that_differ(lines))
        refuse_lines(lines, on_mesh=groups is not None)

    @property
    def _known(self) -> set[str]:
        """Names of what ranks save for themselves: the job's set, to which more are added."""
        replicas = None if self._attempt.plan is None else self._attempt.plan.replicas
        return set() if replicas is None else replicas.known

    def _digests_of(self, rank: int) -> Any:
        session = self._session
        return self._votes.digests_of(rank, session.timeout, partial(session.is_gone, rank))

    def _answer(self, keys: Sequence[str]) -> Vote:
        """Answer an appeal: tell what this rank wrote for others, save what it has for itself, and vote again."""
        attempt = self._attempt
        plan = attempt.plan
        writer = self._files.writer
        index: FileEntry | None = None
        self._has_answered = True
        try:
            forms = Claim(self._rank, FORMS, WHOLE).key
            if forms in keys and plan is not None:
                self._votes.publish_digests(self._rank, {forms: lines_of(plan)})
            elif attempt.error is None and plan is not None and plan.replicas is not None and writer is not None:
                replicas = plan.replicas
                published = replicas.published(keys, writer.blocks)
                if published:
                    self._votes.publish_digests(self._rank, published)
                theirs: dict[str, Any] = {}
                for rank in replicas.disputed(keys):
                    theirs |= self._digests_of(rank)
                self._own = replicas.differing(theirs)
                index = self._write_own()
        except BaseException as error:
            attempt.fail(error)
            with suppress(OSError, CheckpointError):  # the others wait for its digests
                self._votes.publish_digests(self._rank, {})
        vote = self._vote(index, attempt.error)
        if self._rank > 0:
            self._votes.cast(vote, kind=ANSWER)
        return vote

    def _write_own(self) -> FileEntry:
        """Write what was found to be this rank's own, and the index again; return the index's entry."""
        session = self._session
        plan = self._attempt.plan
        index = self._index_now
        assert plan is not None
        assert index is not None
        at = session.topology.coordinates
        if self._own:
            planned = self._own.file(self._rank, 1)
            folder = self._publication.folder
            threads = self._attempt.threads
            own = FileWriter(session.storage, folder, [planned], lambda _: None, threads)
            stage_and_write([planned], own, Arena(planned.image.tensor_nbytes + 2**16))
            more = own.index(plan, at)
            index = replace(index, files={**index.files, **more.files}, tensors=(*index.tensors, *more.tensors))
        if self._publication.in_place:  # there it takes the place of no file, not even of this rank's own
            session.storage.remove(f"{self._publication.folder}/{names.index_file(at)}")
        return write_index(session.storage, self._publication, names.index_file(at), index)

    def _request(self, plan: SavePlan, voted: float, per_rank: tuple[str, ...]) -> Commit:
        request = self._attempt.request
        return Commit(
            self._publication,
            plan.parts,
            rules=request.rules,
            timings=self._attempt.timings,
            versions=request.versions,
            parameters=plan.parameters,
            groups=plan.groups,
            metrics=request.options.recorded_metrics,
            draining=request.draining,
            voted=voted,
            per_rank=per_rank,
            guests=self._guests,
        )

    def _announce(self, verdict: Verdict) -> None:
        """Announce the verdict, whatever happens; it counts even if this fails."""
        session = self._session
        has_failed = verdict.error is not None
        session.last_failed = has_failed
        if session.is_alone:
            return
        in_spare = session.write_in_spare if has_failed else None
        announce = partial(self._votes.announce, replace(verdict, tag=self._tag), in_spare)
        try:
            try:
                announce()
            except OSError:
                if has_failed:
                    self._files.make_room()
                # On a full disk, what is left of a failed attempt may take the space that the verdict needs.
                clean_up(session, session.counter)
                announce()
        except OSError as error:
            logger.error("after the save of %r in %s: %s", self._tag, session.storage.url, error)

    def _warn_of_earlier_step(self) -> None:
        """Warn, once in a run, of a step before that of the tag that was saved or loaded last, or is the latest."""
        session = self._session
        before = self._session.resumed_from or self._session.last_saved
        with suppress(OSError, CheckpointError):  # publishing meets it too
            newest = latest(list_tags(session.storage)) if before is None else None
            before = newest.tag if newest is not None else before
        if before is not None and goes_back(self._tag, before) and not session.warned_of_steps:
            session.warned_of_steps = True
            logger.warning(
                "%s: %r is saved after %r. A load without a tag takes the newest save, not the highest step: %r from "
                "now on. If it belongs to another run, save that in a directory of its own",
                session.storage.url,
                self._tag,
                before,
                self._tag,
            )

    def _warn_of_other_content(self, votes: Sequence[Vote]) -> None:
        """Warn, once in a run, of ranks whose user content is not rank 0's."""
        session = self._session
        ranks = with_other_user_content(votes)
        if ranks and not session.warned_of_content:
            session.warned_of_content = True
            logger.warning(
                "%s: rank %d passes other user_content= than rank 0, whose is saved for all ranks. rank_content= keeps "
                "what each rank has of its own",
                session.storage.url,
                ranks[0],
            )

    def _collect(self, kind: str = VOTE) -> list[Vote]:
        """The votes of the other ranks."""
        session = self._session
        ranks = session.topology.world_size
        timeout = session.timeout
        return self._votes.collect(ranks, timeout, first=1, gone=session.is_gone, kind=kind)


def tidy(attempt: SaveAttempt, *, failed: bool) -> None:
    """Delete remains of attempts and retention, on rank 0, once the outcome is known, without delaying anyone.

    After an attempt that ``failed``, used space of the reserve is reserved again.
    """
    session = attempt.session
    if session.topology.rank == 0:
        clean_up(session, session.counter, is_saved=not failed)
        if failed:
            with suppress(OSError, StorageError):
                lease.require_place(session.storage, session.run_id, session.place)
                session.keep_spares()
