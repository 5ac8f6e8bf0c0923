"""The simulated store: the contract of storages, and what a lost reply or a long listing does."""

import io
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.storage.base import DirEntry, Storage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.testing.contract import StorageContract
from tests.simulation.job import Save, among, checkpointer, loaded, run_to_end, state
from tests.simulation.stage import Stage
from tests.simulation.world import EPOCH, Process, World, inhabited
from tests.simulation.world.store import ObjectStore, Reply
from tests.simulation.world.store_client import ConnectionLost, store_storage


class TestStoreStorage(StorageContract):
    """It is a storage as any other, also where every listing takes several requests."""

    @pytest.fixture
    def storage(self) -> Storage:
        return store_storage(ObjectStore(page=1))


class Losing:
    """A network that loses the reply to one kind of request, ``times`` times, or the request itself."""

    def __init__(self, name: str, times: int, *, happens: bool) -> None:
        self.name, self.times, self.happens = name, times, happens
        self.requests: list[str] = []

    def __call__(self, name: str, key: str, happen: Callable[[], Reply]) -> Reply:
        self.requests.append(name)
        if name != self.name or not self.times:
            return happen()
        self.times -= 1
        if self.happens:
            happen()
        raise ConnectionLost


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxd_ckpt.effects.sleep", lambda seconds: None)


def test_who_never_gets_a_reply_is_told_and_the_request_may_have_happened() -> None:
    """An unconditional write, of which every reply is lost, raises, and is there; of one that never came, it is not."""
    for happens in (True, False):
        store = ObjectStore()
        storage = store_storage(store, Losing("delete_objects", 3, happens=happens))
        storage.write("key", b"1")
        with pytest.raises(ConnectionError, match="key"):
            storage.remove("key")
        assert happens is (not store_storage(store).is_file("key"))


def test_a_removal_that_happens_late_takes_nothing_that_came_since() -> None:
    """It was given up and made again, and then the key got another object; in a directory and by its own name."""
    store, late = ObjectStore(), list[Callable[[], Reply]]()

    def delaying(name: str, key: str, happen: Callable[[], Reply]) -> Reply:
        if name == "delete_objects" and not late:
            late.append(happen)
            raise ConnectionLost
        return happen()

    for removed in ("tag", "tag/key"):
        late.clear()
        storage = store_storage(store, delaying)
        storage.write("tag/key", b"old")
        storage.remove(removed)
        assert not storage.is_file("tag/key")
        storage.write("tag/key", b"new")
        [happen] = late
        happen()
        assert b"new" == storage.read("tag/key")


def test_a_listing_of_several_pages_holds_what_comes_meanwhile_or_does_not() -> None:
    """What comes behind the page that was read is seen, what comes before it is not."""
    store = ObjectStore(page=1)
    writing = store_storage(store)

    def network(name: str, key: str, happen: Callable[[], Reply]) -> Reply:
        reply = happen()
        if len(store.objects) == 2:
            writing.write("a", b"1")
            writing.write("z", b"1")
        return reply

    for key in ("m", "n"):
        writing.write(key, b"1")
    assert [DirEntry(name, False) for name in ("m", "n", "z")] == store_storage(store, network).list()


def test_a_load_makes_few_requests_and_a_listing_two_for_each_tag() -> None:
    """Each request takes tens of milliseconds."""
    network = Losing("", 0, happens=True)
    storage = store_storage(ObjectStore(), network)
    with checkpointer(storage, 0, 1, None) as saver:
        for value in range(5):
            saver.save(f"step_{value}", state(value, 0, 1), user_content={"value": value})
    network.requests.clear()
    assert loaded(storage, 0, 1, "step_3") == 3
    assert len(network.requests) <= 8, network.requests
    network.requests.clear()
    assert len(list_tags(storage)) == 5
    assert sorted(network.requests) == ["get_object"] * 5 + ["list_objects_v2"] * 6


def test_retention_makes_few_requests_for_a_tag() -> None:
    """For its markers and its manifest, and for the names of its files: index and model, one by one."""
    network = Losing("", 0, happens=True)
    counts = []
    for kept in (2, 5):
        storage, made = store_storage(ObjectStore(), network), []
        with Checkpointer("simulated", storage=storage, num_kept_ckpts=kept) as saver:
            for value in range(kept + 5):
                network.requests.clear()
                saver.save(f"step_{value}", state(value, 0, 1))
                made.append(len(network.requests))
        counts.append(median(made[kept:]))  # a thread may make the last requests of a save during the next one
    assert counts[0] <= 66
    assert counts[1] - counts[0] <= 3 * 8, counts


class CountedStage(Stage):
    """A store whose requests take 10 ms, with the number of those that each process made; heartbeats are left out."""

    def __init__(self) -> None:
        super().__init__(World(0), has_group=True)
        self.store, self.connects = ObjectStore(lambda: EPOCH + self.world.now), True
        self.requests = Counter[int]()

    def storage(self, process: Process) -> Storage:
        return store_storage(self.store, partial(self._carry, process))

    def outside(self) -> Storage:
        return store_storage(self.store)

    def _carry(self, process: Process, name: str, key: str, happen: Callable[[], Reply]) -> Reply:
        assert self.world.current is not None
        self.requests[process.pid] += self.world.current.name != "nxd_ckpt-lease"
        self.world.pause(0.01)
        return happen()


def test_the_requests_of_a_rank_do_not_depend_on_how_many_ranks_there_are() -> None:
    """Six a save, while it waits too, and one at first; and of rank 0 one for the vote of each other rank."""
    made = []
    for ranks in (2, 8):
        stage = CountedStage()
        with inhabited(stage.world), among(stage.jobs, stage.world):
            saves = [Save(f"step_{value}", value) for value in range(3)]
            run_to_end(stage.world, stage.launch("first", ("here",) * ranks, saves))
        first, *others = (stage.requests[process.pid] for process in stage.jobs[0].processes)
        assert others == [1 + 3 * 6] * (ranks - 1)
        made.append(first)
    assert made[0] <= 126
    assert made[1] - made[0] == 3 * 6


def test_tags_of_others_are_removed_where_listings_have_finer_times_than_a_head() -> None:
    """Without our order time in ``done``, its time tells whether a tag is still the one that was listed."""
    storage = store_storage(ObjectStore(map(0.123.__add__, count(1_700_000_000)).__next__, lists_milliseconds=True))
    for value in range(3):
        torch.save(state(value, 0, 1), model := io.BytesIO())
        storage.write(f"step_{value}/model/dp_rank_00_tp_rank_00_pp_rank_00.pt", model.getvalue())
        for name in ("checkpoint", "done"):
            storage.write(f"step_{value}/{name}", b"1")
    with Checkpointer("simulated", storage=storage, num_kept_ckpts=2) as saver:
        saver.save("step_3", state(3, 0, 1))
    assert ["step_2", "step_3"] == [info.tag for info in list_tags(storage)]
