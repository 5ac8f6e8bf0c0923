"""The promises of the README, one checker each."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise
from math import inf

from nxd_ckpt.storage.base import Storage
from tests.simulation import oracle
from tests.simulation.job import TIMEOUT, Job, Outcome, Reader, Save
from tests.simulation.world import EPOCH, World

_DOUBT = "may be there after a power cut"
"""What the error says where a disk refused to sync a tag, and to sync what undoes it."""

Times = Mapping[str, tuple[float, float]]
"""See `oracle.order_times`."""


class Promises:
    """Each method raises AssertionError. ``stalled`` are the seconds for which a rank was made to stand still.

    ``in_place`` says that nothing can be renamed: there a tag that is saved over is removed first, if the caller allows
    it, and a rank waits for rank 0 twice, before it writes and after. ``late`` says that requests happen after they
    were given up: a tag whose ``done`` is among them is visible, and whole, though its save was called failed, or the
    remains of one that the next launch removed are visible, and no reader takes them for whole. ``may_end_late`` says
    only the former: a host that stood still writes ``done`` when its caller has given it up.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.stalled = 0.0
        self.in_place = False
        self.late = False
        self.may_end_late = False
        self.retention_is_exact = False
        """Whether tags are dated by this world's clock, and no rank is killed that has taken another job's tag away."""
        self.failed_calls = 0
        """How many system calls were made to fail so far."""

    def hold(self, jobs: Sequence[Job], storage: Storage, reader: Reader | None = None) -> None:
        tags = oracle.visible(storage, self.late)  # complete or invisible
        saves = [save for job in jobs for _, save in job.begun]
        outcomes = [outcome for job in jobs for outcome in job.outcomes]
        self.nothing_good_is_lost(tags, jobs, partial(oracle.order_times, storage, tags))
        self.every_rank_tells_the_same(tags, outcomes)
        self.no_doubt_is_without_reason(jobs)
        self.ranks_that_differ_save_nothing(tags, outcomes)
        self.no_wait_is_longer(outcomes)
        self.what_must_not_be_replaced_stays(jobs)
        if reader is not None:
            self.readers_see_whole_tags(reader, saves, outcomes, self._first_removal(jobs))

    def nothing_good_is_lost(
        self, tags: dict[str, int], jobs: Sequence[Job], dated: Callable[[], Times] | None = None
    ) -> None:
        """What any rank was told is saved is there: as it was saved, or as a later save under the same tag, unless
        retention has removed it for later ones, which are dated so."""
        for job, save in ((one, told.save) for one in jobs for told in one.outcomes if told.word == "saved"):
            later = _later(jobs, job, save)
            found = tags.get(save.tag)
            same = {save.value, *(other.value for other in later if other.tag == save.tag)}
            if found in same:
                continue
            kept = min((other.num_kept for other in later if other.num_kept is not None), default=None)
            assert found is None, f"save {save.value} of {save.tag!r} became save {found}"
            if self.in_place and any(other.tag == save.tag and other.removes for other in later):
                continue
            assert kept is not None, f"save {save.value} of {save.tag!r} is lost: {tags}"
            newer = {other.value for other in later} & {*tags.values(), *self._removed_to_be_saved_over(jobs)}
            is_exact = self.retention_is_exact and not self.in_place and not any(one.is_skewed for one in jobs)
            if dated is not None and is_exact:
                times, began = dated(), EPOCH + job.began[save]
                newer = {tags[tag] for tag, (time, _) in times.items() if tags[tag] in newer and time >= began}
            assert len(newer) >= kept, f"retention removed save {save.value} of {save.tag!r} for {newer}"
        assert set(tags.values()) <= {save.value for job in jobs for _, save in job.begun}

    def _removed_to_be_saved_over(self, jobs: Sequence[Job]) -> set[int]:
        """Complete saves whose tag a later one removed by the caller's leave. Retention counted them."""
        saved = [(job, told.save) for job in jobs for told in job.outcomes if self.in_place and told.word == "saved"]
        return {
            save.value
            for job, save in saved
            if any(other.tag == save.tag and other.removes for other in _later(jobs, job, save))
        }

    def what_must_not_be_replaced_stays(self, jobs: Sequence[Job]) -> None:
        """``overwrite=False`` is refused where a tag of that name was saved before, and no rule removes any."""
        for job in jobs:
            saved = {told.save for told in job.outcomes if told.word == "saved"}
            for save in saved:
                earlier = [other for other in saved if other.tag == save.tag and other.value < save.value]
                assert save.overwrite is not False or save.num_kept or not earlier, f"{save} replaced {earlier}"

    def tags_are_in_the_order_of_saves(self, jobs: Sequence[Job], storage: Storage) -> None:
        """Of each job, and after those of the jobs before it that are over: so the latest tag is the newest save."""
        if self.late:
            return
        tags = oracle.visible(storage)
        times = oracle.order_times(storage, tags)
        last = {job.run_id: {save.value for _, save in job.begun} for job in jobs}
        for one, other in combinations(sorted(tags, key=lambda tag: tags[tag]), 2):
            is_apart = any(tags[one] in values and tags[other] in values for values in last.values())
            if is_apart or tags[other] in last.get("second", ()):
                assert times[one][0] < times[other][0], f"{other!r} is newer than {one!r}, and dated before: {times}"

    def done_tells_the_order(self, storage: Storage) -> None:
        """To NxD: ``done`` has the order time of the manifest. Power that is lost may take that away."""
        for tag, (order, done) in oracle.order_times(storage, oracle.visible(storage)).items():
            assert abs(order - done) < 1e-5, f"{tag}: its manifest says {order}, done is of {done}"

    def retention_removes_what_its_rules_say(self, job: Job, storage: Storage) -> None:
        """And no more, where nothing failed: after each save there are so many of the newest."""
        tags: dict[str, int] = {}
        for save in sorted({told.save for told in job.outcomes if told.word == "saved"}, key=lambda save: save.value):
            tags.pop(save.tag, None)
            tags[save.tag] = save.value
            if save.num_kept is not None:
                tags = dict(list(tags.items())[-save.num_kept :])
        found = oracle.visible(storage)
        assert found == tags, f"retention left {found}, expected {tags}"

    def a_job_that_is_left_alone_saves(self, job: Job) -> None:
        """All that it may, and no rank waits for a timeout, beside the saves before it that are still in flight."""
        for told in job.outcomes:
            save, before = told.save, [other for other in job.outcomes if other.save.value < told.save.value]
            seconds = told.ended - max([told.began, *(other.ended for other in before if other.rank == told.rank)])
            is_there = any(other.save.tag == save.tag and other.word == "saved" for other in before)
            replaces = save.overwrite or (save.overwrite is None and not self.in_place)
            if save.fails_on is None and (replaces or not is_there):
                assert told.word == "saved", f"rank {told.rank}: {save}: {told.error}"
            work = 5.0 if self.in_place else 0.0  # requests to a store take long, and a page of two keys needs many
            assert seconds < TIMEOUT + work, f"rank {told.rank} waited {seconds:.1f} s for {save}"

    def jobs_keep_apart(self, jobs: Sequence[Job]) -> None:
        """Of those that come to one directory one saves, if nothing else happens, and no other disturbs it."""
        for job in jobs:
            self.a_job_is_not_disturbed(job)
        words = [{outcome.word for outcome in job.outcomes} for job in jobs]
        assert {"saved"} in words, [[outcome.error for outcome in job.outcomes] for job in jobs]

    def a_job_is_not_disturbed(self, job: Job, excused: Collection[str] = ()) -> None:
        """What has begun to save goes on, whoever else comes to the directory, or wakes there; but for saves in whose
        errors are the words that are ``excused``."""
        outcomes = sorted(job.outcomes, key=lambda outcome: outcome.save.value)
        told = [outcome.word for outcome in outcomes if not any(word in str(outcome.error) for word in excused)]
        assert ("saved", "failed") not in pairwise(told), [outcome.error for outcome in outcomes]

    def every_rank_tells_the_same(self, tags: dict[str, int], outcomes: Sequence[Outcome]) -> None:
        """No rank says "saved" where another says "failed", and what failed is not there; but where the error says that
        a disk that refused to sync may bring it."""
        for value in {outcome.save.value for outcome in outcomes}:
            of_save = [outcome for outcome in outcomes if outcome.save.value == value]
            words, errors = {outcome.word for outcome in of_save}, [str(outcome.error) for outcome in of_save]
            assert not {"saved", "failed"} <= words, f"save {value} is saved for one rank and failed for another"
            is_late = self.late or self.may_end_late
            if "failed" in words and not is_late and _DOUBT not in str(errors):
                assert value not in tags.values(), f"save {value} failed, and is visible: {tags}"

    def no_doubt_is_without_reason(self, jobs: Sequence[Job]) -> None:
        """A failed save is undone for good, unless a second call fails, or another job takes over meanwhile."""
        if self.failed_calls < 2 and not any(job.is_rival for job in jobs):
            errors = [str(told.error) for job in jobs for told in job.outcomes]
            assert _DOUBT not in str(errors), f"{self.failed_calls} calls failed, and a save is in doubt: {errors}"

    def ranks_that_differ_save_nothing(self, tags: dict[str, int], outcomes: Sequence[Outcome]) -> None:
        """A save that is not the same on all ranks is refused on all."""
        for told in outcomes:
            if told.save.instead.startswith("another"):
                assert told.word != "saved", f"{told.save} was saved for rank {told.rank}"
                assert told.save.value not in tags.values(), f"{told.save} is visible: {tags}"

    def ranks_get_in_step_again(self, job: Job) -> None:
        """Of saves some of which a rank left out the last works, and where steps tell which, all from the next but one
        on that all make."""
        saves = sorted({save for _, save in job.begun}, key=lambda save: save.value)
        last = max([number for number, save in enumerate(saves) if save.instead == "nothing"], default=len(saves))
        after = saves[last + 2 :] if "step" in saves[0].tag else saves[last + 1 :][-1:]
        for told in (told for told in job.outcomes if told.save in after):
            assert told.word == "saved", f"rank {told.rank}, {told.save}: {told.error}"

    def no_wait_is_longer(self, outcomes: Sequence[Outcome]) -> None:
        """Than two timeouts for a save and for the one before it, and what a rank's own work takes.

        One is for ranks that have not left earlier attempts, the other for their votes.
        """
        for outcome in outcomes:
            seconds = outcome.ended - outcome.began
            allowed = (6 if self.in_place else 4) * TIMEOUT + self.stalled + 5.0
            assert seconds <= allowed, f"rank {outcome.rank} waited {seconds:.1f} s for {outcome.save}"

    def readers_see_whole_tags(
        self, reader: Reader, saves: Sequence[Save], outcomes: Sequence[Outcome], until: float
    ) -> None:
        """Whoever loads finds a save, and one that was there, from the moment that the first is there, and ``until``
        tags are removed to be saved anew."""
        numbers = {save.value for save in saves}
        first = min((outcome.ended for outcome in outcomes if outcome.word == "saved"), default=None)
        for began, ended, value in reader.found:
            assert value is None or value in numbers
            if first is not None and began > first and ended < until:
                assert value is not None, f"a reader found nothing between {began:.3f} and {ended:.3f}"

    def _first_removal(self, jobs: Sequence[Job]) -> float:
        """When the first save began that removes its tag before it writes it anew."""
        began = {save: time for job in jobs for save, time in job.began.items()}
        tags = set[str]()
        for save in sorted(began, key=lambda save: began[save]) if self.in_place else ():
            if save.tag in tags and save.removes:
                return began[save]
            tags.add(save.tag)
        return inf

    def next_saves_work(self, job: Job, storage: Storage) -> None:
        """Those of a job that nothing happens to, whatever happened before."""
        words = {(outcome.rank, outcome.save.value): outcome.word for outcome in job.outcomes}
        expected = {(rank, save.value): "saved" for rank, save in job.begun}
        assert words == expected, [outcome.error for outcome in job.outcomes]
        tags = oracle.visible(storage)
        assert all(tags.get(save.tag) == save.value for _, save in job.begun), tags


def _later(jobs: Sequence[Job], job: Job, save: Save) -> list[Save]:
    """The saves that may have come after it: any of a rival may."""
    return [
        other
        for another in jobs
        for _, other in another.begun
        if other.value > save.value or (another is not job and (another.is_rival or job.is_rival))
    ]
