"""Retention by rules: at saves, in directories and stores, and by ``prune``; pinned tags stay."""

import errno
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from nxd_ckpt import (
    Best,
    Checkpointer,
    Every,
    Last,
    Within,
    has_checkpoint,
    list_checkpoints,
    load_checkpoint,
    open_checkpoint,
    prune,
    save_checkpoint,
)
from nxd_ckpt.commit import commit
from nxd_ckpt.commit import retention as save_retention
from nxd_ckpt.coordination import control_files, journal
from nxd_ckpt.coordination.control_files import TRASH, pin, trash_file
from nxd_ckpt.core.manifest import load_manifest
from nxd_ckpt.core.names import MANIFEST
from nxd_ckpt.core.retention_rules import Rule
from nxd_ckpt.errors import CheckpointNotFound, DirectoryInUse, InvalidArgument
from nxd_ckpt.prune import pin_checkpoint, prune_checkpoints, unpin_checkpoint
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.choosing import settled_tags
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, failing
from nxd_ckpt.torch_dcp.storage_writer import StorageWriter
from tests.protocol.states import moments, visible_tags, weights
from tests.support.damage import flip

LOSSES = {"step_1": 3.0, "step_2": 1.0, "step_3": math.nan, "step_4": 2.0, "step_5": 2.5}
STATE = {"weight": torch.ones(2)}


def save_all(storage: Storage, **options: Any) -> list[str]:
    """A save for each of :data:`LOSSES`; the complete tags after the last one, by name."""
    with Checkpointer("", storage=storage) as saver:
        for tag, loss in LOSSES.items():
            saver.save(tag, STATE, metrics={"loss": loss}, **options)
    return sorted(info.tag for info in list_tags(storage) if info.complete)


@pytest.fixture(params=["directory", "store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path, durable=False) if request.param == "directory" else MemoryStorage()


def test_rules_are_followed_at_each_save(storage: Storage) -> None:
    """The best, and every second, and the newest stay, of directories and of stores."""
    assert ["step_2", "step_4", "step_5"] == save_all(storage, retain=[Best("loss"), Every(2)])


def test_a_pinned_tag_stays(storage: Storage) -> None:
    """Whatever the rules say; a pin of a tag that is not there does no harm."""
    pin(storage, "step_1")
    pin(storage, "never")
    assert ["step_1", "step_4", "step_5"] == save_all(storage, num_kept_ckpts=1, retain=[Last(2)])


def test_the_manifest_keeps_metrics(tmp_path: Path) -> None:
    """Those of rank 0 at the call, as floats; what was not finite is None."""
    metrics = {"loss": math.inf, "accuracy": 1}
    with Checkpointer(tmp_path) as saver:
        pending = saver.save("t", STATE, metrics=metrics, async_save=True)
        metrics["accuracy"] = 7
        pending.wait()
    manifest = open_checkpoint(tmp_path).manifest
    assert manifest is not None
    assert {"loss": None, "accuracy": 1.0} == manifest.metrics


def test_rules_are_those_of_the_call(tmp_path: Path) -> None:
    """A list that the caller changes during the save is for the next one."""
    rules = [Last(1)]
    with Checkpointer(tmp_path) as saver:
        saver.save("a", STATE)
        pending = saver.save("b", STATE, retain=rules, async_save=True)
        rules[0] = Last(9)
        pending.wait()
    assert ["b"] == [path.name for path in tmp_path.iterdir() if path.name[0] != "."]


@pytest.mark.parametrize("options", [{"metrics": {"loss": torch.ones(1)}}, {"retain": []}, {"retain": [7]}])
def test_what_means_nothing_is_refused_before_anything_is_written(tmp_path: Path, options: Any) -> None:
    """And the next save works."""
    with Checkpointer(tmp_path) as saver:
        saver.save("first", STATE)
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            saver.save("second", STATE, **options)
        saver.save("third", STATE)
    assert ["first", "third"] == visible_tags(tmp_path)


@pytest.fixture
def five(tmp_path: Path) -> Path:
    """A directory with a tag for each of :data:`LOSSES`."""
    save_all(LocalStorage(tmp_path, durable=False))
    return tmp_path


def test_prune_removes_what_a_save_would(five: Path) -> None:
    """First only said, then done; a second time there is nothing left to do."""
    rules: list[Rule] = [Best("loss", 2), Within(minutes=1e-9)]
    pin_checkpoint(five, "step_1")
    would = prune_checkpoints(five, rules, dry_run=True)
    before = visible_tags(five)
    done = prune_checkpoints(five, rules)
    assert list(LOSSES) == before
    assert ("step_3",) == done.removed == would.removed  # it has NaN
    rules[0] = Last(2)
    would = prune_checkpoints(five, rules, dry_run=True)
    done = prune_checkpoints(five, rules)
    assert ("step_2",) == done.removed == would.removed
    assert ["step_1", "step_4", "step_5"] == visible_tags(five) == list(done.kept)
    assert () == prune_checkpoints(five, rules).removed

    assert (True, False) == (unpin_checkpoint(five, "step_1"), unpin_checkpoint(five, "step_1"))
    assert ("step_1",) == prune_checkpoints(five, rules).removed


def test_prune_works_on_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a removed tag is left there."""
    store = MemoryStorage()
    save_all(store)
    monkeypatch.setattr(prune, "open_storage", lambda path, storage_options: store)
    assert ("step_1", "step_2", "step_3") == prune_checkpoints("memory://run", [Last(2)]).removed
    assert {"step_4", "step_5"} == {entry.name for entry in store.list() if entry.name[0] != "."}


def test_prune_leaves_the_directory_to_a_live_job(five: Path) -> None:
    """It needs the lease; pinning does not, and what would be removed may be asked."""
    with Checkpointer(five) as saver:
        saver.save("step_6", STATE)
        with pytest.raises(DirectoryInUse):
            prune_checkpoints(five, [Last(1)])
        assert 5 == len(prune_checkpoints(five, [Last(1)], dry_run=True).removed)
        pin_checkpoint(five, "step_1")
        saver.save("step_7", STATE, num_kept_ckpts=1)
    assert ["step_1", "step_7"] == visible_tags(five)


def lose_index(tag: Path) -> None:
    shutil.rmtree(tag / "index")


def lose_model(tag: Path) -> None:
    next((tag / "model").iterdir()).unlink()


def cut_off(tag: Path) -> None:
    file = next((tag / "model").iterdir())
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(tag: Path) -> None:
    flip(next((tag / "model").iterdir()))


@pytest.mark.parametrize("harm", [lose_index, lose_model, cut_off, flip_a_bit])
def test_damaged_tags_do_not_count(five: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture) -> None:
    """Prune keeps older ones in their place, and them; so does a save of this process, which knows what prune read."""
    for tag in ("step_4", "step_5"):
        harm(five / tag)
    verify = harm is flip_a_bit or None
    assert {"step_4", "step_5"} == prune_checkpoints(five, [Last(2)], dry_run=True, verify=True).damaged.keys()
    done = prune_checkpoints(five, [Last(2)], verify=verify)
    assert (("step_1",), ("last 2",)) == (done.removed, done.kept["step_2"])
    assert done.kept["step_5"][0].startswith("damaged, and not counted: ")
    save_checkpoint(five, "step_6", STATE, num_kept_ckpts=2)
    assert ["step_3", "step_4", "step_5", "step_6"] == visible_tags(five)
    assert "Retention does not count this tag" in caplog.text
    save_checkpoint(five, "step_7", STATE, num_kept_ckpts=2)
    assert ["step_6", "step_7"] == visible_tags(five), "beyond the newest two a damaged one goes too"


def test_tags_are_removed_by_name(storage: Storage) -> None:
    """Several at once, an incomplete one too, by name or step; one that is absent keeps all."""
    save_all(storage)
    storage.remove("step_4/done")
    with Checkpointer("", storage=storage) as saver:
        assert ["step_9"] == [*saver.remove("step_1", "step_9").refused]
        assert ("step_1", "step_4") == saver.remove(1, "step_4", dry_run=True).removed
        assert saver.remove(1, "step_4")
        assert ["step_2", "step_3", "step_5"] == [entry.name for entry in storage.list() if entry.name[0] != "."]
        assert saver.remove("step_5")
        assert 3 == saver.latest_step()


def test_pinning_needs_a_tag(five: Path) -> None:
    """One that is complete."""
    with pytest.raises(CheckpointNotFound, match="step_9"):
        pin_checkpoint(five, "step_9")


def pinning_once(storage: Storage, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody pins ``tag`` after the rules were applied to the tags."""
    judge_tags = save_retention.judge_tags

    def judge(*args: Any, **options: Any) -> Any:
        judgement = judge_tags(*args, **options)
        pin(storage, tag)
        return judgement

    for module in (save_retention, commit):
        monkeypatch.setattr(module, "judge_tags", judge)


def test_what_is_pinned_while_rules_are_applied_stays(five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a save and by prune, which says that it is kept."""
    pinning_once(LocalStorage(five), "step_2", monkeypatch)
    done = prune_checkpoints(five, [Last(2)])
    assert (("step_1", "step_3"), ("pinned",)) == (done.removed, done.kept["step_2"])
    unpin_checkpoint(five, "step_2")
    save_checkpoint(five, "step_6", STATE, retain=[Last(1)])
    assert ["step_2", "step_6"] == visible_tags(five)


def test_what_is_pinned_while_it_is_removed_stays(storage: Storage) -> None:
    """Who pins it finds it there, just before it goes: then it goes not, or comes back."""
    found: list[Any] = []

    def pin_it(operation: Operation) -> None:
        if operation.name in ("rename", "write") and ".nxd_ckpt/trash/" in operation.key and not found:
            pin(storage, "step_1")
            found.append("step_1" in {info.tag for info in list_tags(storage) if info.complete})

    assert ["step_1", "step_5"] == save_all(HookedStorage(storage, pin_it), num_kept_ckpts=1)
    assert [True] == found
    assert [] == storage.list(".nxd_ckpt/trash")


def test_what_is_pinned_while_a_process_that_ends_removes_it_comes_back(five: Path) -> None:
    """If that did not put it back, the next job does. What is saved over a pinned tag stays."""
    storage = LocalStorage(five)

    def pin_it_and_end(operation: Operation) -> None:
        if operation.name == "rename" and ".nxd_ckpt/trash/" in operation.key:
            if control_files.pinned(storage):
                raise OSError(errno.EIO, "no more from here on")
            pin(storage, "step_1")
            pin(storage, "step_9")

    with Checkpointer("", storage=HookedStorage(storage, pin_it_and_end)) as saver:
        saver.save("step_6", STATE, num_kept_ckpts=5)
    assert [f"step_{number}" for number in range(2, 7)] == visible_tags(five)
    save_checkpoint(five, "step_7", STATE)
    assert [f"step_{number}" for number in range(1, 8)] == visible_tags(five)
    assert [] == storage.list(".nxd_ckpt/trash")
    assert () == verify_checkpoint(five, "step_1").problems
    save_checkpoint(five, "step_1", {"weight": torch.zeros(2)}, overwrite=True)
    loaded: dict[str, torch.Tensor] = {}
    load_checkpoint(five, "step_1", model=loaded)
    assert [0.0, 0.0] == loaded["weight"].tolist()
    assert [] == storage.list(".nxd_ckpt/trash")


def moved_away(directory: Path, tag: str) -> None:
    """Pin a tag that a job has just moved away when it is killed."""
    storage = LocalStorage(directory)
    pin(storage, tag)
    journal.remove_tag(storage, tag, "dead-1")


@pytest.mark.parametrize("by_name", [True, False])
def test_who_reads_finds_what_is_pinned_though_a_killed_process_moved_it_away(five: Path, by_name: bool) -> None:
    """No save and no prune is needed for that; of two in the trash it is the newer. What is not pinned stays there."""
    shutil.copytree(five / "step_1", five / trash_file("dead-0", "step_5"))
    moved_away(five, "step_5")
    journal.remove_tag(LocalStorage(five), "step_2", "dead-1")
    assert "step_5" not in visible_tags(five)
    content = load_checkpoint(five, "step_5" if by_name else None, model={})
    assert content is None
    assert ["step_1", "step_3", "step_4", "step_5"] == visible_tags(five)
    assert () == verify_checkpoint(five, "step_5").problems
    assert LOSSES["step_5"] == load_manifest((five / "step_5" / MANIFEST).read_bytes(), "").metrics["loss"]


def test_who_lists_finds_what_is_pinned(five: Path) -> None:
    """So does has_checkpoint, where it is the only one."""
    moved_away(five, "step_3")
    assert {f"step_{number}" for number in range(1, 6)} == {one.tag for one in list_checkpoints(five)}
    for tag in visible_tags(five):
        moved_away(five, tag)
    assert has_checkpoint(five)


@pytest.mark.parametrize(("order_time", "is_back"), [(1.0, True), (None, False)])
def test_another_save_than_the_one_that_was_to_go_is_found(five: Path, order_time: float | None, is_back: bool) -> None:
    """A job stood still right before it removed a tag, another saved under that name, and then the first one ended."""
    storage = LocalStorage(five)
    meant = order_time or load_manifest(storage.read(f"step_3/{MANIFEST}"), "").order_time
    journal.remove_tag(storage, "step_3", "dead-1", order_time=meant)
    assert is_back == ("step_3" in {one.tag for one in list_checkpoints(five)})
    journal.discard_trash(storage, "dead")
    assert is_back == storage.is_dir("step_3")


def test_a_save_that_was_not_to_go_is_not_deleted(five: Path) -> None:
    """The next job finds it in the trash before anybody has read."""
    storage = LocalStorage(five)
    journal.remove_tag(storage, "step_3", "dead-1", order_time=1.0)
    journal.discard_trash(storage, "dead")
    assert () == verify_checkpoint(five, "step_3").problems


def test_what_a_live_job_moves_away_is_left_to_it(five: Path) -> None:
    """It sees the pin itself, and would not find what it has to move back."""
    with Checkpointer(five) as saver:
        saver.save("step_6", STATE)
        moved_away(five, "step_3")
        assert "step_3" not in {one.tag for one in list_checkpoints(five)}
    assert "step_3" in {one.tag for one in list_checkpoints(five)}


def test_who_may_only_read_is_told_where_it_is(five: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others are read meanwhile."""
    moved_away(five, "step_3")
    read_only = failing("rename", "*", OSError(errno.EROFS, "Read-only file system"))
    tags = settled_tags(HookedStorage(LocalStorage(five), read_only))
    assert ["step_1", "step_2", "step_4", "step_5"] == sorted(info.tag for info in tags)
    [message] = caplog.messages
    assert "step_3 is in " in message
    assert f"{TRASH}/dead-1-" in message


def test_what_is_being_removed_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store, it is announced before it is gone: rules may not see a pin that comes later."""
    store = MemoryStorage()
    save_all(store)
    journal.declare(store, ".nxd_ckpt/trash/run-1-0", "step_2")
    monkeypatch.setattr(prune, "open_storage", lambda path, storage_options: store)
    pin_checkpoint("memory://run", "step_1")
    with pytest.raises(CheckpointNotFound, match="step_2 is being removed by the rules of a job"):
        pin_checkpoint("memory://run", "step_2")
    assert {"step_1"} == control_files.pinned(store)


def test_a_pin_that_comes_too_late_is_refused(five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tag was removed before its pin was seen: no pin stays, so that it is not pinned when it is saved anew."""

    def pin_late(storage: Storage, tag: str) -> None:
        shutil.rmtree(five / tag)
        pin(storage, tag)

    monkeypatch.setattr(control_files, "pin", pin_late)
    with pytest.raises(CheckpointNotFound, match="step_2"):
        pin_checkpoint(five, "step_2")
    assert set() == control_files.pinned(LocalStorage(five))


def test_tags_without_metrics_follow_other_rules(tmp_path: Path) -> None:
    """Tags from before metrics were given, and NxD's, are not removed for a metric, as it is not known. Later ones, of
    a run that validates less often than it saves, are."""
    for tag in ("a", "b"):
        save_checkpoint(tmp_path, tag, STATE)
    for name in ("checkpoint", "done"):
        (tmp_path / "nxd" / "model").mkdir(parents=True, exist_ok=True)
        (tmp_path / "nxd" / name).write_text("1")
    save_checkpoint(tmp_path, "c", STATE, metrics={"loss": 1.0}, retain=[Best("loss")])
    assert ["a", "b", "nxd", "c"] == visible_tags(tmp_path)
    for tag in ("d", "e"):
        save_checkpoint(tmp_path, tag, STATE, retain=[Best("loss")])
    assert ["a", "b", "nxd", "c", "e"] == visible_tags(tmp_path)
    save_checkpoint(tmp_path, "d", STATE, metrics={"loss": 2.0}, retain=[Last(1)])
    assert ["d"] == visible_tags(tmp_path)


def test_a_metric_that_no_tag_has_removes_nothing(five: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save says so, and which one may have been meant; what is asked to remove tags refuses."""
    with Checkpointer(five) as saver:
        saver.save("step_6", STATE, metrics={"loss": 9.0}, retain=[Best("los", 1)])
    assert [*LOSSES, "step_6"] == visible_tags(five)
    assert "no tag has the metric 'los' (did you mean 'loss'?)" in caplog.text
    for dry_run in (True, False):
        with pytest.raises(InvalidArgument, match=r"did you mean 'loss'\?.*Nothing was removed"):
            prune_checkpoints(five, [Best("los"), Last(1)], dry_run=dry_run)
    assert [*LOSSES, "step_6"] == visible_tags(five)


@pytest.mark.parametrize("in_store", [False, True])
def test_the_newest_optimizer_and_model_stay(tmp_path: Path, in_store: bool) -> None:
    """While no newer tag has one: a run of exports, or of notes, does not remove what can be resumed from."""
    storage = MemoryStorage() if in_store else LocalStorage(tmp_path, durable=False)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saves = [(model, optimizer), (model, optimizer), (model, None), (model, None), (None, None)]
    with Checkpointer("", storage=storage) as saver:
        for number, (one, other) in enumerate(saves):
            saver.save(f"s{number}", one, other, user_content={"number": number}, num_kept_ckpts=1)
        assert ["s1", "s3", "s4"] == sorted(info.tag for info in list_tags(storage))
        saver.save("s5", model, optimizer, num_kept_ckpts=1)
    assert ["s5"] == sorted(info.tag for info in list_tags(storage))


@pytest.mark.parametrize("form", ["plain", "zero1", "zero1_dcp", "xser"])
def test_the_newest_optimizer_stays_in_every_form(tmp_path: Path, form: str) -> None:
    """Whatever an optimizer's files are called."""
    options: dict[str, Any] = moments(1, 0) | {"use_zero1_dcp": form == "zero1_dcp"}
    if form in ("plain", "xser"):
        plain = {"state": {0: {"step": 1, "exp_avg": torch.ones(3, 4)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
        options |= {"optimizer": plain}
    with Checkpointer(tmp_path) as saver:
        for number in range(5):
            own = options if number < 2 else {}
            saver.save(f"s{number}", weights(number, 0), num_kept_ckpts=1, use_xser=form == "xser", **own)
        assert ["s1", "s4"] == visible_tags(tmp_path)
        assert ("the newest with an optimizer",) == prune_checkpoints(tmp_path, [Last(1)], dry_run=True).kept["s1"]
        saver.save("s5", weights(5, 0), num_kept_ckpts=1, **options)
    assert ["s5"] == visible_tags(tmp_path)


def nxd_tag(directory: Path, tag: str, at: float, *parts: str, markers: Sequence[str] = ("checkpoint", "done")) -> None:
    """What NxD leaves of a save: it makes the folders of both parts, also of one that is not saved."""
    for part in ("model", "optim"):
        (directory / tag / part).mkdir(parents=True)
        if part in parts:
            state: Any = {"state": {}, "param_groups": [{"params": []}]} if part == "optim" else STATE
            torch.save(state, directory / tag / part / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    for marker in markers:
        (directory / tag / marker).write_text("1")
        os.utime(directory / tag / marker, (at, at))


def test_the_newest_optimizer_of_nxd_stays(tmp_path: Path) -> None:
    """Beside our tags, too; an empty folder is no optimizer, nor is one of tensors that are none."""
    for number in range(4):
        nxd_tag(tmp_path, f"s{number}", 1000.5 + number, "model", *(["optim"] if number < 2 else []))
    (tmp_path / "s3" / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors").mkdir()
    assert ("s0", "s2") == prune_checkpoints(tmp_path, [Last(1)], dry_run=True).removed
    with Checkpointer(tmp_path) as saver:
        saver.save("s4", STATE, num_kept_ckpts=1)
    assert ["s1", "s4"] == visible_tags(tmp_path)


@pytest.mark.parametrize("version", ["0.6", "0.5"])
def test_tags_of_old_versions_of_nxd_stay(tmp_path: Path, version: str) -> None:
    """They have no mark that shows that they are whole checkpoints: neither counts nor goes, and keeps no other."""
    if version == "0.6":
        nxd_tag(tmp_path, "old", 1000.5, "model", "optim", markers=())
        (tmp_path / "newest").write_text("old\n")
    else:
        (tmp_path / "tp_rank_00_pp_rank_00").mkdir()
        torch.save({"model": {}, "optimizer": {}}, tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt")
    before = sorted(tmp_path.rglob("*.pt"))
    optimizer = {"state": {0: {"step": 1}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    with Checkpointer(tmp_path) as saver:
        saver.save("s0", STATE, optimizer, num_kept_ckpts=1)
        saver.save("s1", STATE, num_kept_ckpts=1)
        saver.save("s2", STATE, num_kept_ckpts=1)
    assert {"s0", "s2"} == {info.tag for info in list_tags(LocalStorage(tmp_path)) if info.tag in ("s0", "s1", "s2")}
    assert {*before} <= {*tmp_path.rglob("*.pt")}


def test_the_newest_optimizer_of_torch_dcp_stays(tmp_path: Path) -> None:
    """In tags that torch DCP wrote through our writer."""
    optimizer = {"state.weight.exp_avg": torch.ones(2), "param_groups.weight.lr": 0.5}
    for number in range(4):
        state = {"model": STATE} | ({"optim": optimizer} if number < 2 else {})
        save_dcp(state, storage_writer=StorageWriter(tmp_path, f"s{number}", num_kept_ckpts=1), no_dist=True)
    assert ["s1", "s3"] == visible_tags(tmp_path)
