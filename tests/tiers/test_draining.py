"""Tiers: what is visible on the first is copied to the others, and nothing that happens there disturbs training."""

import errno
import logging
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nxd_ckpt import Checkpointer, Tier, checkpointer, load_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import CheckpointError, DirectoryInUse, InvalidArgument, StorageError
from nxd_ckpt.storage import wrapper
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.wrapper import RetryingStorage
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, failing
from nxd_ckpt.tiers import drain
from tests.conversion.tags import contents, remains
from tests.tiers.saving import damaged, save, state, tags_in

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_PAUSE", 0.0)


def test_each_tier_takes_and_keeps_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first every save, the second every other one; copies are exact, and the log tells how late they are."""
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [Tier(near, keep=2), Tier(far, every=2, keep=1)]
    with caplog.at_level(logging.INFO, "nxd_ckpt"), Checkpointer(tiers=tiers) as saver:
        for step in range(1, 6):
            save(saver, step)
            saver.wait(tier=1)
        assert ["step_4", "step_5"] == tags_in(near)
        assert ["step_5"] == tags_in(far)
    assert contents(near / "step_5") == contents(far / "step_5")
    assert [] == remains(far)
    copied = [line for line in caplog.messages if line.startswith("copied")]
    assert ["step_1", "step_3", "step_5"] == [line.split()[1] for line in copied]
    assert all("after its save; 0 B behind" in line for line in copied)


def test_what_is_being_copied_stays_and_the_newest_is_next(tmp_path: Path) -> None:
    """Retention of the first tier leaves a tag until it is copied; of those that wait only the newest is."""
    begun, goes_on = threading.Event(), threading.Event()

    def slowly(operation: Operation) -> None:
        if operation.name == "create":
            begun.set()
            goes_on.wait()

    near, far = tmp_path / "near", tmp_path / "far"
    slow = Tier("slow", storage=HookedStorage(LocalStorage(far), slowly))
    with Checkpointer(near, tiers=[Tier(near, keep=1), slow]) as saver:
        save(saver, 1)
        begun.wait()
        save(saver, 2, 3, 4)
        assert ["step_1", "step_3", "step_4"] == tags_in(near)
        goes_on.set()
        saver.wait(tier=1)
        assert ["step_1", "step_4"] == tags_in(far)
        save(saver, 5)
        assert ["step_5"] == [tag for tag in tags_in(near) if tag < "step_4" or tag > "step_4"]
    assert [] == damaged([near, far])


def test_a_tier_that_fails_disturbs_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is reported once for each save, and raised only to who waits for it. Once it is well, the newest arrives."""
    hook, well = failing("create", "*", FULL), threading.Event()
    bad = HookedStorage(LocalStorage(tmp_path / "bad"), lambda done: None if well.is_set() else hook(done))
    with Checkpointer(tiers=[Tier(tmp_path / "near"), Tier("bad", storage=bad), Tier(tmp_path / "far")]) as saver:
        for step in (1, 2):
            save(saver, step)
            with pytest.raises(StorageError, match="No space left"):
                saver.wait(tier=1)
            saver.wait(tier=2)
            saver.wait()
        warned = [line for line in caplog.messages if "was not copied to tier bad; training continues" in line]
        assert 2 == len(warned)
        assert [] == tags_in(tmp_path / "bad")
        well.set()
        save(saver, 3)
        saver.wait(tier=1)
    assert ["step_3"] == tags_in(tmp_path / "bad")
    assert ["step_1", "step_2", "step_3"] == tags_in(tmp_path / "far")
    assert [] == remains(tmp_path / "bad")


def test_a_tier_that_is_away_at_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training begins without it, with a warning; it gets the next save that it can take."""
    away = threading.Event()
    away.set()

    def unreachable(_: Operation) -> None:
        if away.is_set():
            raise ConnectionError("no route to host")

    far = HookedStorage(MemoryStorage(), unreachable)
    with Checkpointer(tiers=[Tier(tmp_path), Tier("far", storage=far)]) as saver:
        save(saver, 1)
        assert any("tier far cannot be reached" in line for line in caplog.messages)
        with pytest.raises(StorageError):
            saver.wait(tier=1)
        away.clear()
        save(saver, 2)
        saver.wait(tier=1)
    assert ["step_2"] == tags_in(far.inner)


def test_requests_that_fail_and_a_throttle_only_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 % of the requests to a store fail, and its rate is capped: every save returns, and the last tag arrives."""
    random, lock = Random(17), threading.Lock()
    never_repeated = ("link_new", "exchange", "write_at", "settle", "close")

    def unreliable(operation: Operation) -> None:
        with lock:
            fails = operation.name not in never_repeated and random.random() < 0.3
        if fails:
            raise ConnectionError("reset by peer")

    store = MemoryStorage()
    monkeypatch.setattr(wrapper, "pause_after", lambda tries: 0.0)
    flaky = RetryingStorage(HookedStorage(store, unreliable), retries=20)
    tier = Tier("flaky", keep=2, max_bytes_per_second="1MB", storage=flaky)
    with Checkpointer(tiers=[Tier(tmp_path, keep=2), tier]) as saver:
        save(saver, *range(1, 9))
        saver.wait(tier=1)
        assert "step_8" in tags_in(store)
        assert len(tags_in(store)) <= 2
    assert [] == [key for key in store.keys if key.startswith((".nxd_ckpt/copies", ".nxd_ckpt/lease"))]
    assert [] == store.unfinished


def test_what_is_left_of_a_copy_that_is_given_up_goes(tmp_path: Path) -> None:
    """Once another tag is copied; where tags are written in place too."""
    hook, broken = failing("create", "*/model/*", FULL), threading.Event()
    broken.set()
    store = MemoryStorage()
    tier = Tier("store", storage=HookedStorage(store, lambda done: hook(done) if broken.is_set() else None))
    with Checkpointer(tiers=[Tier(tmp_path), tier]) as saver:
        save(saver, 1)
        with pytest.raises(StorageError):
            saver.wait(tier=1)
        assert [key for key in store.keys if key.startswith("step_1/")]
        broken.clear()
        save(saver, 2)
        saver.wait(tier=1)
    assert ["step_2"] == tags_in(store)
    assert [] == [key for key in store.keys if not key.startswith("step_2/") and "nxd_ckpt/runs" not in key]


def test_a_store_keeps_a_tag_that_is_saved_anew(tmp_path: Path) -> None:
    """As for a save: a store would lose it before the new one is complete, so that has to be asked for."""
    store = MemoryStorage()
    with Checkpointer(tiers=[Tier(tmp_path), Tier("store", storage=store)]) as saver:
        save(saver, 1)
        saver.wait(tier=1)
        before = store.read("step_1/manifest.json")
        save(saver, 1)
        with pytest.raises(CheckpointError, match="pass overwrite=True"):
            saver.wait(tier=1)
        assert before == store.read("step_1/manifest.json")
        saver.save("step_1", state(2), overwrite=True)
        saver.wait(tier=1)
        assert (tmp_path / "step_1" / "manifest.json").read_bytes() == store.read("step_1/manifest.json")


def test_the_next_launch_copies_what_the_last_one_did_not(tmp_path: Path) -> None:
    """The newest tag of the first tier, as soon as it saves; nothing is copied twice."""
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(near) as saver:
        save(saver, 1, 2)
    log: list[Operation] = []
    for step in (3, 4):
        storage = HookedStorage(LocalStorage(far), log.append)
        with Checkpointer(tiers=[Tier(near), Tier("far", every=9, storage=storage)]) as saver:
            saver.save(f"step_{step}", state(step), async_save=True)
    assert ["step_3", "step_4"] == [tag for tag in tags_in(far) if tag > "step_2"]
    created = [done.key for done in log if done.name == "create" and "/step_3/" in done.key]
    assert len(set(created)) == len(created)


def test_a_crash_stops_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving by an exception waits for no tier; the next launch goes on."""
    monkeypatch.setattr(checkpointer, "_GRACE", 600.0)  # the tier is given back here, however busy the machine is
    begun = threading.Event()
    slow = HookedStorage(LocalStorage(tmp_path / "far"), lambda done: begun.set() if done.name == "create" else None)
    tiers = [Tier(tmp_path / "near"), Tier("far", max_bytes_per_second=1, storage=slow)]

    def crash() -> None:
        with Checkpointer(tiers=tiers) as saver:
            save(saver, 1)
            begun.wait()
            raise KeyError

    with pytest.raises(KeyError):
        crash()
    assert [] == tags_in(tmp_path / "far")
    with Checkpointer(tiers=[Tier(tmp_path / "near"), Tier(tmp_path / "far")]) as saver:
        save(saver, 2)
    assert "step_2" in tags_in(tmp_path / "far")


def test_two_jobs_never_copy_to_one_tier(tmp_path: Path) -> None:
    """The second is refused before it has saved anything, and the first goes on."""
    far = Tier(tmp_path / "far")
    with Checkpointer(tiers=[Tier(tmp_path / "one"), far]) as first:
        save(first, 1)
        with (
            pytest.raises(DirectoryInUse, match=r"far: this process already saves here"),
            Checkpointer(tiers=[Tier(tmp_path / "two"), far]) as second,
        ):
            save(second, 2)
        save(first, 3)
    assert [] == tags_in(tmp_path / "two")
    assert "step_3" in tags_in(tmp_path / "far")


def test_with_the_functions_of_neuronx_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tiers=`` of a save and a load; the directory may be left out, or is the first tier."""
    monkeypatch.chdir(tmp_path)
    tiers = [Tier("near"), Tier("far")]
    save_checkpoint(tag="step_1", model=state(1), tiers=tiers, user_content=1)
    save_checkpoint("near", "step_2", state(2), tiers=tiers, user_content=2)
    with pytest.raises(InvalidArgument, match="pass the same ones to load"):
        load_checkpoint(tiers=[Tier("near")], model={})
    assert 2 == load_checkpoint(tiers=tiers, model={})
    close_checkpointers()
    assert ["step_1", "step_2"] == tags_in(tmp_path / "near")
    assert "step_2" in tags_in(tmp_path / "far")


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([], "expected a list of at least one Tier"),
        ([3], "tiers must be a list of Tier or None, found"),
        ([{"path": "near"}, {"path": "./near/"}], "are the same place"),
        ([{"path": "near"}, {"path": "link"}], "are the same place"),
        ([{"path": "near"}, {"path": "file://{here}/near"}], "are the same place"),
        ([{"path": "near"}, {"path": "near/far"}], "one lies inside the other"),
        ([{"path": "s3://bucket/run"}, {"path": "s3a://bucket//run/"}], "are the same place"),
        ([{"path": "near"}, {"path": "far", "every": 0}], r"Tier\(\): every must be .* at least 1, found 0"),
        ([{"path": "near"}, {"path": "far", "keep": 0}], r"Tier\(\): keep must be .* or None, found 0"),
        ([{"path": "near"}, {"path": "far", "retain": []}], "an empty list would keep none"),
        ([{"path": "near"}, {"path": "far", "max_bytes_per_second": "fast"}], "per_second must be a number of bytes"),
        ([{"path": "near", "every": 2}, {"path": "far"}], "the first tier, near, is where every save is written"),
        ([{"path": ""}], "the checkpoint directory must not be empty"),
        ([{"path": "far"}], "is not the first tier"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: list[Any], message: str
) -> None:
    """Before anything is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near").mkdir()
    (tmp_path / "link").symlink_to("near")

    def made(tier: Any) -> Any:
        return Tier(**{**tier, "path": tier["path"].format(here=tmp_path)}) if isinstance(tier, dict) else tier

    with pytest.raises(InvalidArgument, match=message):
        Checkpointer("near" if message == "is not the first tier" else None, tiers=[*map(made, tiers)])
    assert [] == list((tmp_path / "near").iterdir())


def test_what_is_no_tier_is_not_waited_for(tmp_path: Path) -> None:
    """There are as many as were given; those that nothing was saved to have nothing to wait for."""
    with Checkpointer(tiers=[Tier(tmp_path / "near"), Tier(tmp_path / "far")]) as saver:
        saver.wait(tier=1)
        with pytest.raises(InvalidArgument, match="expected a number from 0, the first tier, to 1"):
            saver.wait(tier=2)
