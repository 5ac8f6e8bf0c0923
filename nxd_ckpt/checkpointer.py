"""A job's handle on one checkpoint directory: saving in the background, loading, retention."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from typing_extensions import Unpack

from nxd_ckpt import effects
from nxd_ckpt.commit.commit import clean_up
from nxd_ckpt.commit.retention import Removed, plan_removal, remove_surplus, remove_tags
from nxd_ckpt.commit.session import Session, open_session
from nxd_ckpt.commit.tier import Tier
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement
from nxd_ckpt.coordination.at_exit import ClosesUnheld, close_at_exit, counts_at_exit, forget
from nxd_ckpt.coordination.preemption import Preemption
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.coordination.stopping import Schedule
from nxd_ckpt.coordination.waiting import FairLock
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.tags import Tag, step_of, validate_tag
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.effects import logger, require_own
from nxd_ckpt.errors import CheckpointerClosed, CheckpointError, as_checkpoint_errors
from nxd_ckpt.formats.state import SaveState
from nxd_ckpt.keywords import CheckpointerKeywords, LoadKeywords, SaveKeywords
from nxd_ckpt.live.environment import require_all_ranks, require_same_group, topology_of, versions
from nxd_ckpt.loading.load import Loaded, load
from nxd_ckpt.loading.options import LoadOptions, LoadRequest, agreed_options
from nxd_ckpt.options.checkpointer_options import JobOptions
from nxd_ckpt.saving.capture import capture
from nxd_ckpt.saving.options import SaveOptions, understood
from nxd_ckpt.saving.pending import Failures, PendingSave, SaveProgress, UnfinishedSaves
from nxd_ckpt.saving.pipeline import Pipeline, SaveCall, StagingPlan, await_decided
from nxd_ckpt.saving.plan import SavePlan
from nxd_ckpt.saving.replica_check import refuse_differences
from nxd_ckpt.saving.save_attempt import SaveAttempt, SaveRequest
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.system import require_locks
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.choosing import name_of
from nxd_ckpt.tag.directory import other_content
from nxd_ckpt.tag.listing import best_of, steps_of
from nxd_ckpt.tiers.tiers import Tiers

_Answer = TypeVar("_Answer")

_GRACE = 5.0
"""Seconds that an exit after an exception waits for the other ranks, beyond writing this rank's own bytes."""


class Checkpointer(ClosesUnheld):
    """Saves to and loads from one directory, or URL in a store, that all ranks of a job share.

        with Checkpointer("/fsx/run7") as checkpointer:
            first = checkpointer.load_latest(model, optimizer)
            for step in range(first + 1, 1001):
                ...
                if step % 100 == 0:
                    checkpointer.save(step, model, optimizer, async_save=True)

    Every rank makes the same calls in the same order. Threads may share a Checkpointer: their saves and loads take
    turns, in the order of the calls. A forked child makes one of its own. One job at a time writes to a directory, and
    holds its lease. What is still open at exit is closed then; a failure that was never raised makes the exit code 1.
    A Checkpointer that nobody holds any more finishes its saves in the background, and gives the directory back.
    """

    @as_checkpoint_errors
    @takes(*JobOptions.kinds())
    def __init__(
        self,
        path: StrPath | None = None,
        *,
        storage: Storage | None = None,
        tiers: Sequence[Tier] | None = None,
        **options: Unpack[CheckpointerKeywords],
    ) -> None:
        """Set the options that all saves and loads of a directory share.

        Args:
            path: the directory, created by the first save; or a URL such as ``s3://bucket/run``.
            storage: where the files go, in place of what ``path`` names: one of your own (``docs/own-storage.md``).
            tiers: the places that checkpoints go to, of which the first is ``path``, which may be left out.
                Complete tags are copied to the others in the background (``docs/tiers.md``).
        """
        job = JobOptions.of(options)
        self.options = chosen = job.shared
        self._places = Tiers(path, tiers, storage, chosen, job.retention.rules)
        self.storage: Storage = self._places.first
        self.tiers: tuple[Tier, ...] = self._places.tiers
        self.topology: Topology = topology_of(chosen.topology, chosen.process_group)
        self._counter = 0
        self._session: Session | None = None
        self.resumed_from: str | None = None
        self._is_closed = self._has_saved = False
        self._pipeline = Pipeline(self.topology, chosen.memory_cap, shows=chosen.progress and self.topology.rank == 0)
        self._failures = Failures(chosen)
        self._lock = FairLock(self._require_caller)
        self._pid = os.getpid()
        self._in_flight = UnfinishedSaves()
        self._versions: dict[str, str] = {}
        self._schedule = Schedule(job.schedule, chosen.timeout)
        self._preemption = Preemption(job.preemption)
        self._meant_for_saves = job.meant_for_saves

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open" if self.is_open else "not open yet"
        return f"<Checkpointer {self.storage.url!r}: {state}, rank {self.topology.rank} of {self.topology.world_size}>"

    @counts_at_exit
    @as_checkpoint_errors
    @takes(SaveOptions, checks=False)
    def save(
        self,
        tag: Tag,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        user_content: Any = None,
        *,
        state: Mapping[str, Any] | None = None,
        rank_content: Any = None,
        async_save: bool = False,
        tag_values: Mapping[str, Any] | None = None,
        **options: Unpack[SaveKeywords],
    ) -> PendingSave:
        """Save the objects that are not None under ``tag``. Other keywords are the fields of `SaveOptions`.

        Returns once the state is staged in host memory (``async_save=True``) or the tag is visible and durable. From
        the second async save on, this thread copies from the device and does no more. A save in flight is waited for.

        An earlier async save that failed does not make this one fail: its own ``PendingSave``, `wait` or
        `close` reports it. With ``on_save_failure="warn"`` this call raises the last of too many that failed.

        Args:
            tag: a step, or a name, one directory name such as "step_300"; 300 is "step_300".
            model: a module, an NxD model (local part), or a state dict; a dict of several by name. None saves none.
            optimizer: a torch, torch-xla ZeRO-1 or NxD optimizer, or its state dict; a dict of several by name.
            scheduler: anything with ``state_dict()``; None saves none. Rank 0's is saved, and each rank's own values.
            user_content: plain data of rank 0: numbers, strings, tensors, NumPy arrays, dates, paths, containers.
            state: models, optimizers, and anything else with ``state_dict()`` and ``load_state_dict()``, by name.
            rank_content: plain data of this rank alone; a load on the same sizes gives it back to the same rank. Data
                positions in it (`capture_data_position`) are re-split for other sizes.
            async_save: return once the state is copied, and write in the background.
            tag_values: as for `save_checkpoint`: values in a tag such as ``"ep{epoch}-ba{batch:06d}"``.

        Raises:
            CheckpointError: see `nxd_ckpt.errors`; on every rank, and nothing became visible.
        """
        require_own(self._pid, self.storage.url)
        started = effects.monotonic()
        name, chosen, refused = understood(tag, tag_values, options, self.topology.world_size)

        def captured() -> SaveState:
            require_locks()
            if refused is not None:
                raise refused
            chosen.validate(self.options.timeout)
            return capture(self.topology, chosen, model, optimizer, scheduler, user_content, rank_content, state)

        pending = SaveProgress(name, self._failures)
        self._schedule.saved(step_of(name))
        with self._lock.held(f"save of {name!r}"):
            self._require_open("saves nothing more")
            self._in_flight.settle()
            if self._failures.warns:
                self._in_flight.raise_unreported()
            attempt = pending.begun(lambda: self._begin(SaveCall(pending, captured, started, async_save), chosen))
        if not async_save and attempt is not None:
            await_decided(attempt, pending, shown=self.options.progress and self.topology.rank == 0)
        return pending.future

    @as_checkpoint_errors
    @takes(LoadOptions, checks=False)
    def load(
        self,
        tag: Tag | None = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        state: Mapping[str, Any] | None = None,
        **options: Unpack[LoadKeywords],
    ) -> Any:
        """Load the objects that are not None from ``tag``; return the user content or None.

        Other keywords are the fields of `LoadOptions`. Everything is validated on all ranks before anything is
        changed on any (digests too, unless ``verify`` says otherwise). Empty dicts are filled.

        A path without tags may name a checkpoint of another program (``docs/convert.md``). Of Hugging Face's, which has
        no optimizer, each rank reads its slices only. Numbers take the live dtype, unless that has a smaller range.
        Parameters and buffers on the meta device get memory on the CPU, this rank's part of the model and no more, and
        stay the same objects, with their attributes and ties; what is on another device stays there.

        Args:
            tag: its name, or its step: 300 is "300" or else the newest tag of that step. None takes the newest of all.
            model: a module or NxD model, of any sizes; or a dict.
            optimizer: an optimizer of the same parameters; or a dict.
            scheduler: anything with ``load_state_dict()``; or a dict.
            state: the objects that were saved as ``state``, by the same names.

        Raises:
            CheckpointError: see `nxd_ckpt.errors`; on every rank, and nothing was changed except what
                ``verify="reading"`` or ``verify=False`` find too late.
        """
        return self.load_objects(tag, (model, optimizer, scheduler, state), options).user_content

    @as_checkpoint_errors
    @takes(LoadOptions, checks=False)
    def load_latest(
        self,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        state: Mapping[str, Any] | None = None,
        default: int = 0,
        user_content: dict[Any, Any] | None = None,
        **options: Unpack[LoadKeywords],
    ) -> int:
        """Load the latest tag, as `load` does without a tag, and return its step; ``default`` if there is no tag.

        The step is the number in the tag's name. If it has none, it is ``"steps"`` or ``"step"`` of the user content.

        Args:
            model, optimizer, scheduler, state: as for `load`.
            default: what is returned, on all ranks, by a run that begins.
            user_content: an empty dict, filled with the user content, if that is a dict.

        Raises:
            CheckpointError: as `load`. There is a tag, but it cannot be loaded, or it tells no step.
        """
        with self._lock.held("load_latest"):
            self._in_flight.settle()
            self._reserve("load_latest")
            agreement, objects = self._meet("load_latest"), (model, optimizer, scheduler, state)
            self._request(agreement, objects, options, "load_latest").checked()
            if not self._places.have_checkpoint(agreement, lasting=self._session is not None):
                if self.topology.rank == 0:
                    url, others = self.storage.url, other_content(self.storage)
                    logger.warning("%s: there is no checkpoint: the run begins at step %d%s", url, default, others)
                return default
        loaded = self.load_objects(None, objects, options)
        content = loaded.user_content
        if user_content is not None and isinstance(content, Mapping):
            user_content.update(content)
        elif user_content is not None and content is not None:
            logger.warning("user_content= fills a dict, but a %s was saved: load() returns it", type(content).__name__)
        return loaded.step

    def load_objects(self, tag: Tag | None, objects: Any, options: Any) -> Loaded:
        """Load (model, optimizer, scheduler, state), as `load` does."""
        with self._lock.held("load"):
            self._in_flight.settle()
            self._reserve("load")
            agreement = self._meet("load")
            with self._places.joined(agreement, lasting=self._session is not None):
                loaded = load(self._places.storages, tag, self._request(agreement, objects, options, "load"))
            self.resumed_from = loaded.tag
            if self._session is not None:
                self._session.resumed_from = loaded.tag
            return loaded

    def _request(self, agreement: Agreement | None, objects: Any, options: Any, call: str) -> LoadRequest:
        ranks, (model, optimizer, scheduler, state) = agreement or SingleProcessAgreement(), objects
        chosen = agreed_options(ranks, {"progress": self.options.progress, **options}, f"Checkpointer.{call}")
        more = (chosen, self.options.timeout, state, self._places.place)
        return LoadRequest(self.topology, ranks, model, optimizer, scheduler, *more)

    @as_checkpoint_errors
    def latest_step(self) -> int | None:
        """Return the step of the newest complete tag that has one in its name; None without any. All ranks call it."""
        return self._ask("latest_step", lambda places: next((tag.step for tag in reversed(steps_of(places))), None))

    @as_checkpoint_errors
    def all_steps(self) -> list[int]:
        """Return the steps of all complete tags, the numbers in their names, oldest save first. All ranks call it."""
        return self._ask("all_steps", lambda places: [tag.step for tag in steps_of(places)])

    @as_checkpoint_errors
    @takes()
    def best_step(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """Return the step with the lowest ``metric`` of all that were saved with ``metrics=``. All ranks call it.

        None if no save has metrics yet, or all have NaN.

        Args:
            metric: its name, such as "loss".
            mode: "max" for the highest.

        Raises:
            InvalidArgument: saves have metrics, but none of that name, or only tags without a step have it.
        """
        return self._ask("best_step", lambda places: best_of(places, metric, mode))

    def _ask(self, call: str, question: Callable[[Sequence[Storage]], _Answer]) -> _Answer:
        """Return rank 0's answer to a ``question`` about the tags in all places, on all ranks."""
        with self._lock.held(call):
            self._in_flight.settle()
            agreement, lasting = self._meet(f"{call} (one rank alone: list_checkpoints)"), self._session is not None
            return self._places.ask(agreement, lambda: question(self._places.storages), lasting=lasting)

    def _begin(self, call: SaveCall, options: SaveOptions) -> SaveAttempt:
        """Stage the state and hand it over to the writer thread, which does the rest."""
        require_same_group(self.topology, self.options.topology, self.options.process_group)

        def attempt_of(plan: SavePlan | None) -> SaveAttempt:
            assert self._session is not None
            tag, places = call.pending.tag, self._places
            request = SaveRequest(tag, plan, options, places.rules, self._versions, places.drains)
            self._in_flight.add(call.pending)
            return SaveAttempt(self._session, request, self._pipeline.writers)

        return self._pipeline.save(call, None if self._has_saved else self._open, attempt_of)

    @as_checkpoint_errors
    @takes()
    def step(self, number: int) -> bool:
        """Return whether to save now, and stop: a rank was told that it is about to be stopped (``preemption=``).

        All ranks call it after every step of the training, and get True after the same one, whichever rank was told
        and however different their steps were then: the first that none had passed. It stays True. The first call waits
        for the other ranks; later ones look at a flag until a rank is told. Without ``preemption=`` it is False.

        Args:
            number: of the step, for the log.

        Raises:
            PeerTimeout: a rank was told, but not all agreed within ``preemption_grace`` seconds, or one ended.
            CheckpointError: several ranks without a process group, or without connections to rank 0.
        """
        self._require_open("makes no further step")
        return self._preemption.step(number, lambda: self._meet("step"))

    @as_checkpoint_errors
    @takes()
    def should_save(self, step: int) -> bool:
        """Return whether to save after this step, by ``every=`` and ``every_minutes=``. All ranks get the same.

        All ranks call it after every step of the training. With ``every_minutes``, the first call waits for the other
        ranks, and so does the one after each save by time; the others look at a flag.

        Raises:
            InvalidArgument: there is neither ``every=`` nor ``every_minutes=``.
            PeerTimeout: the time is over, but not all ranks agreed on a step within ``timeout`` seconds, or one ended.
            CheckpointError: ``every_minutes=`` of several ranks without a process group, or connections to rank 0.
        """
        self._require_open("makes no further step")
        return self._schedule.is_due(step, lambda: self._meet("should_save"))

    @as_checkpoint_errors
    def check_replicas(
        self, model: Any = None, optimizer: Any = None, *, state: Mapping[str, Any] | None = None
    ) -> None:
        """Raise RanksDisagree if ranks that hold copies of the same tensors hold different values. All ranks call it.

        A tag has one rank's copy, and a load gives it to all. Every save compares samples, and saves each rank's own
        where they differ. This reads every tensor, which takes about as long as staging. ZeRO-1 shards have no copies.

        Args:
            model, optimizer, state: as for `save`.

        Raises:
            RanksDisagree: it names two ranks, and the tensors.
        """
        with self._lock.held("check_replicas"):
            agreement = self._meet("check_replicas")
            if agreement is None:
                raise CheckpointError("check_replicas() needs torch.distributed to be initialised: it compares ranks")
            options, objects = SaveOptions(), (model, optimizer, None, None, None, state)
            refuse_differences(agreement, self.topology, lambda: capture(self.topology, options, *objects))

    @as_checkpoint_errors
    @takes()
    def remove(self, *tags: Tag, pinned: bool = False, dry_run: bool = False) -> Removed:
        """Remove tags of this directory, like ``nxd_ckpt.remove_checkpoint``."""
        if dry_run:
            return self._remove(lambda names: plan_removal(self.storage, names, pinned), tags)
        with self._lock.held("removal"):
            self._require_open("removes nothing more")
            self._in_flight.settle()
            session = self._session or self._claim(self._meet("remove"))
            return self._remove(lambda names: remove_tags(session, names, pinned), tags)

    def remove_later(self, *tags: Tag) -> effects.Event:
        """Remove tags behind the saves in flight, on the thread that writes; return what is set once it has done so.

        Rank 0's call counts. An absent tag is no error; after a failed save tags stay until the next one has succeeded.
        """
        session, done = self._session, effects.Event()
        if session is None or self.topology.rank:
            done.set()
            return done
        session.surplus.extend(map(validate_tag, tags))
        self._pipeline.submit(lambda: None if self.failed_in_a_row else remove_surplus(session))
        self._pipeline.submit(done.set)
        return done

    def _remove(self, remove: Callable[[Sequence[str]], Removed], tags: Sequence[Tag]) -> Removed:
        return Removed() if self.topology.rank else remove([name_of(self.storage, tag) for tag in tags])

    @property
    def failed_in_a_row(self) -> int:
        """Number of the last saves that failed: 0 after a successful one."""
        return self._failures.in_a_row

    @property
    def stopped(self) -> bool:
        """True once `step` has said to stop: a script that ends has not finished its training."""
        return self._preemption.has_stopped

    @property
    def is_open(self) -> bool:
        """True if it holds the directory: from the first save on, or before (`__enter__`), until it is closed."""
        return self._session is not None

    @property
    def may_rest(self) -> bool:
        """True if it holds the directory, and can take it again later: tiers last, and a run_id is used once."""
        lasts = len(self._places) > 1 or self._places.per_host or self.options.run_id is not None
        return self._session is not None and not lasts

    @property
    def has_unreported(self) -> bool:
        """True if a save failed, and the failure is still to be raised."""
        return self._in_flight.has_unreported

    @as_checkpoint_errors
    def rest(self) -> None:
        """Finish saves in flight, and release directory and memory until the next save. Raises no save's failure."""
        self._shut(None, final=False)

    @as_checkpoint_errors
    @takes()
    def wait(self, tier: int = 0) -> None:
        """Wait for every save in flight; raise the first failure that was not raised before.

        With the number of a lower ``tier``, also wait until that tier is up to date, and raise the failure of its last
        copy. Then all ranks call this.
        """
        require_own(self._pid, self.storage.url)
        self._places.require(tier)
        self._in_flight.wait()
        self._in_flight.raise_unreported()
        if tier:
            with self._lock.held(f"wait for tier {tier}"):
                self._places.wait(tier, self._meet(f"wait for tier {tier}"))

    @as_checkpoint_errors
    def close(self) -> None:
        """Finish saves in flight, release the directory and the memory, raise the first failure that was not raised.

        Then it can load, but not save any more. Closing it again does nothing.
        """
        self.release(final=True)

    @as_checkpoint_errors
    def release(self, *, final: bool = False) -> None:
        """Do the same as `close`, but unless it is ``final`` the next save takes directory and memory again."""
        self._require_caller("close")
        try:
            if not self._is_closed:
                if self._has_saved and self.topology.rank == 0:
                    self._schedule.warn_if_not_asked()
                    self._preemption.warn_if_not_asked()
                self._schedule.finish()
        finally:
            self._shut(None, final=final)
        forget(self)
        self._in_flight.raise_unreported()

    @as_checkpoint_errors
    def __enter__(self) -> Checkpointer:
        """Return this Checkpointer. One that will save, by its options, takes the directory: see `DirectoryInUse`."""
        if os.getpid() == self._pid:
            try:
                with self._lock.held("open"):
                    self._reserve("open")
            except BaseException:
                self._shut(0.0)
                raise
        return self

    @as_checkpoint_errors
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abandon()
        elif os.getpid() == self._pid:  # else a forked child leaves its parent's block: nothing here is its own
            self.close()

    @as_checkpoint_errors
    def abandon(self, grace: float | None = _GRACE) -> None:
        """Close after an exception: write this rank's own bytes, then wait at most ``grace`` seconds for the others."""
        if os.getpid() == self._pid:  # else a forked child: nothing here is its own
            self._shut(grace, meets=False)

    def _open(self, captured: Callable[[], SaveState], tag: str) -> StagingPlan | None:
        """Claim the directory for the first save, if that is not done, with the plan that all ranks agreed on before.

        Without a process group nothing can be agreed on before: then the plan is None, and an error becomes a vote.
        """
        try:
            agreement, planned = self._pipeline.plan_together(lambda: self._meet("save"), captured, tag)
            if self._session is None:
                self._claim(agreement)
        except BaseException:
            self._pipeline.stop()  # threads and memory are given back: nobody may close this Checkpointer
            raise
        self._has_saved = True
        return planned

    @as_checkpoint_errors
    def hold(self) -> None:
        """Take the directory before the first save; all ranks call this. Raises DirectoryInUse."""
        with self._lock.held("hold"):
            self._session = self._session or self._claim(self._meet("hold"))

    def _reserve(self, call: str) -> None:
        """Take the directory before the training, if it will be saved to: without a group only the first save can."""
        if self._session is None and self._meant_for_saves and not self._is_closed:
            with self._failures.before_training(self.storage.url, self._meant_for_saves):
                if (agreement := self._meet(call)) is not None:
                    self._claim(agreement)

    def _claim(self, agreement: Agreement | None) -> Session:
        """Take the directory for this job."""
        require_all_ranks(self.topology, self.options.topology, self.options.process_group)
        self._versions = versions()  # reads files: not on a later save's way
        try:
            self._places.claim(self.topology, agreement)
            session = open_session(self.storage, self.topology, agreement, self.options.run_id, self.options.timeout)
        except BaseException:
            self._places.close(0.0)
            # With a group it failed on all ranks. Without one the others may make this attempt: our next is another.
            self._counter += agreement is None
            raise
        self._session = session
        session.counter = self._counter
        session.resumed_from = self.resumed_from
        close_at_exit(self, while_held=True)
        self._places.resume()
        return session

    def _meet(self, call: str) -> Agreement | None:
        """Return the agreement of the job's ranks for this ``call``; None for a process that acts as one of many."""
        at, described = self.topology, self._places.described(call)
        if call != "close":  # which gives back what the old group's ranks have
            require_same_group(at, self.options.topology, self.options.process_group)
        return meet(at.rank, at.world_size, self.options.timeout, described, at.members)

    def _require_caller(self, call: str) -> None:
        """Raise where the ``call`` would never end: in a forked child, and on the thread that writes a save."""
        require_own(self._pid, self.storage.url)
        self._failures.require_other_thread(call)

    def _require_open(self, refused: str) -> None:
        require_own(self._pid, self.storage.url)
        if self._is_closed:
            raise CheckpointerClosed(
                f"{self.storage.url}: this Checkpointer was closed, by close() or the end of its with block, and "
                f"{refused}: make the call before, or make another Checkpointer"
            )

    def _shut(self, grace: float | None, *, final: bool = True, meets: bool = True) -> None:
        with self._preemption.leaving():
            self._schedule.leave()
            if grace is not None and self._session is not None:
                self._session.leaves_at = effects.monotonic() + grace
            with suppress(TimeoutError), self._lock.held("close", grace):
                self._is_closed |= final
                if self._in_flight.finish(grace):
                    self._tear_down(grace, meets and grace is None)

    def _tear_down(self, grace: float | None, meets: bool) -> None:
        """Release everything, with nothing in flight; without a ``grace`` once the other tiers are up to date."""
        self._pipeline.stop()
        meet = None if self._session is None else lambda: self._meet("close") if meets else None
        self._places.finish(meet)
        self._places.close(grace)
        if self._session is not None:
            if self.topology.rank == 0:
                clean_up(self._session, self._session.counter + 1)
            self._counter = self._session.counter  # a given run_id may be used again, its attempts may not
            self._session.close(clean=grace is None)
            self._session = None
            self._has_saved = False
            if not self.has_unreported:
                forget(self)
        self._places.leave(meet)
