"""The latest tag is the newest save: ours by their manifests wherever they were copied to, NxD's by their marker."""

import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt import (
    Checkpointer,
    Every,
    Last,
    Within,
    effects,
    list_checkpoints,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.core.retention_rules import Rule
from nxd_ckpt.core.tags import in_order, undecided
from nxd_ckpt.prune import prune_checkpoints
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.verify import verify_checkpoint
from tests.core.documents import as_before, sealed
from tests.protocol.states import visible_tags

MODEL = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"


def save(directory: Path, step: int) -> None:
    with Checkpointer(directory, durable=False) as saver:
        saver.save(f"step_{step}", {"w": torch.full((4,), float(step))}, user_content={"step": step})


def save_as_nxd(directory: Path, name: str, value: float, at: float | None = None) -> None:
    """What NxD leaves of a save, over a tag that is there too; ``at`` is the time of its marker."""
    path = directory / name
    (path / "model").mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.full((4,), value)}, path / MODEL)
    for marker in ("checkpoint", "done"):
        (path / marker).write_text("1")
    if at is not None:
        os.utime(path / "done", (at, at))


def copied(directory: Path, target: Path, times: dict[str, float]) -> Path:
    """The tags as `aws s3 sync` brings them: without ours beside them, all files of the whole second of their tag."""
    shutil.copytree(directory, target, ignore=shutil.ignore_patterns(".nxd_ckpt"))
    for tag, seconds in times.items():
        for folder, _, files in os.walk(target / tag):
            for file in files:
                os.utime(Path(folder) / file, (seconds, seconds))
    return target


def order(directory: Path) -> list[str]:
    return [info.tag for info in in_order(list_tags(LocalStorage(directory)))]


@pytest.mark.parametrize("apart", [0, 1, -1], ids=["one second", "by name", "against the order"])
def test_a_copy_has_the_order_of_its_manifests(tmp_path: Path, apart: int) -> None:
    """And retention keeps the newest: whole seconds are no sign of ours."""
    for step in (8, 9, 10):
        save(tmp_path / "run", step)
    times = {tag: 1795600000.0 + apart * number for number, tag in enumerate(("step_10", "step_8", "step_9"))}
    down = copied(tmp_path / "run", tmp_path / "down", times)
    assert ["step_8", "step_9", "step_10"] == order(down)
    assert {"step": 10} == load_checkpoint(down, model={})
    with Checkpointer(down) as saver:
        saver.save("step_11", {"w": torch.ones(1)}, num_kept_ckpts=2)
    assert ["step_10", "step_11"] == visible_tags(down)


def test_a_copy_that_nxd_saved_over_is_of_the_time_of_that_save(tmp_path: Path) -> None:
    """What it wrote tells it: another file, whole. A copy that is merely cut off stays ours, and in its place."""
    for step in (1, 2, 3):
        save(tmp_path / "run", step)
    down = copied(tmp_path / "run", tmp_path / "down", dict.fromkeys(("step_1", "step_2", "step_3"), 1795600000.0))
    with open(down / "step_2" / MODEL, "r+b") as file:
        file.truncate(100)
    assert ["step_1", "step_2", "step_3"] == order(down)
    save_as_nxd(down, "step_1", 7.0, at=time.time() + 60)
    assert ["step_2", "step_3", "step_1"] == order(down)
    loaded: dict[str, torch.Tensor] = {}
    load_checkpoint(down, model=loaded)
    assert torch.equal(torch.full((4,), 7.0), loaded["w"])


@pytest.mark.parametrize("mark", [b"", b"2", b"1795600000.000001", b"1" * 99])
def test_a_damaged_marker_is_no_save_of_another_program(tmp_path: Path, mark: bytes) -> None:
    """The tag stays ours, in its place, and a verification tells of it."""
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step_1" / "done").write_bytes(mark)
    assert ["step_1", "step_2"] == order(tmp_path)
    assert {"step": 1} == load_checkpoint(tmp_path, "step_1", model={})
    assert "step_1/done" in "".join(verify_checkpoint(tmp_path, "step_1").problems)


@pytest.mark.parametrize("old", [{"format_version": 1}, {"format_version": 5, "per_rank": []}])
def test_tags_of_older_versions_are_ours_and_in_their_places(tmp_path: Path, old: dict[str, Any]) -> None:
    """Their ``done`` holds ``1``, as another program's does: also of a copy with other times, as nobody can tell."""
    for step in (1, 2, 3):
        save(tmp_path / "run", step)
    for step in (1, 2):
        manifest, done = (tmp_path / "run" / f"step_{step}" / name for name in ("manifest.json", "done"))
        manifest.write_bytes(sealed({**as_before(json.loads(manifest.read_bytes())), **old}))
        status = done.stat()
        done.write_bytes(b"1")
        os.utime(done, ns=(status.st_atime_ns, status.st_mtime_ns))
    down = copied(tmp_path / "run", tmp_path / "down", {"step_1": 1895600000.0, "step_3": 1795600000.0})
    for directory in (tmp_path / "run", down):
        assert ["step_1", "step_2", "step_3"] == order(directory)
        assert [True] * 3 == [info.ours for info in list_tags(LocalStorage(directory))]
        assert {"step": 2} == load_checkpoint(directory, "step_2", model={})
        assert verify_checkpoint(directory, "step_1").ours


def test_a_save_is_dated_after_a_tag_that_was_saved_over_since_the_save_before(tmp_path: Path) -> None:
    """The second save has listed it, and only looks at its time again."""
    with Checkpointer(tmp_path) as saver:
        for step in (1, 2):
            saver.save(f"step_{step}", {"w": torch.ones(4)})
        later = time.time() + 3600
        save_as_nxd(tmp_path, "step_1", 7.0, at=later)
        saver.save("step_3", {"w": torch.ones(4)})
    assert later < {info.tag: info.order_time for info in list_tags(LocalStorage(tmp_path))}["step_3"]


@pytest.mark.parametrize("names", [("a", "b"), ("step_9", "last")])
def test_foreign_tags_of_one_time_are_not_removed_and_not_guessed_in_silence(
    tmp_path: Path, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the steps in their names tell."""
    for name in names:
        save_as_nxd(tmp_path, name, 1.0, at=1795600000.0)
    with caplog.at_level(logging.WARNING, "nxd_ckpt"):
        load_checkpoint(tmp_path, model={})
    assert "saved at the same time" in caplog.text
    with Checkpointer(tmp_path) as saver:
        saver.save("new", {"w": torch.ones(1)}, num_kept_ckpts=1)
    assert {*names, "new"} == set(visible_tags(tmp_path))


@pytest.mark.parametrize("first_is_ours", [False, True])
def test_a_tag_that_is_dated_after_the_clock_is_not_taken_in_silence(
    tmp_path: Path, first_is_ours: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What NxD saves after it counts as older: the warning names both. What we save after it is the latest."""
    ahead = float(int(time.time()) + 500)
    if first_is_ours:
        with mock.patch("nxd_ckpt.effects.time", return_value=ahead):
            save(tmp_path, 1)
    else:
        save_as_nxd(tmp_path, "step_1", 1.0, ahead)
    load_checkpoint(tmp_path, model={})
    assert "dated" not in caplog.text
    save_as_nxd(tmp_path, "step_2", 2.0)
    load_checkpoint(tmp_path, model={})
    assert "step_1 is taken for the latest, though it is dated" in caplog.text
    assert "s after the clock of this host. step_2, which another program saved" in caplog.text
    save(tmp_path, 3)
    assert "step_3" == order(tmp_path)[-1]


def test_a_save_is_later_than_the_whole_second_of_another_program(tmp_path: Path) -> None:
    """Else it would be a tie: the commit waits for the end of that second."""
    save_as_nxd(tmp_path, "other", 9.0, at=1795600000.0)
    slept = list[float]()
    clock = mock.patch.object(effects, "time", return_value=1795600000.4)
    with clock, mock.patch.object(effects, "sleep", slept.append):
        save(tmp_path, 1)
    assert ["other", "step_1"] == order(tmp_path)
    assert [] == undecided(list_tags(LocalStorage(tmp_path)))
    assert 0.5 < sum(slept) < 0.7


def test_a_tag_of_unknown_time_is_not_removed_for_its_age(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not known to be old. A load that takes another one for the latest says so; a rule by steps still counts."""
    save_as_nxd(tmp_path, "step_5", 5.0, at=0)
    policies: list[list[Rule]] = [[Last(1)], [Within(minutes=1)], [Every(2), Last(1)]]
    for rules in policies:
        with Checkpointer(tmp_path) as saver:
            saver.save(f"step_{len(visible_tags(tmp_path))}", {"w": torch.ones(1)}, retain=rules)
        assert "step_5" in visible_tags(tmp_path)
        kept = prune_checkpoints(tmp_path, rules).kept["step_5"]
        assert ("saved at an unknown time",) == kept
    load_checkpoint(tmp_path, model={})
    assert "the time of step_5 is unknown" in caplog.text
    assert ("step_5",) == prune_checkpoints(tmp_path, [Every(2)], dry_run=True).removed


def test_tags_of_ours_of_one_time_have_one_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tag that was copied under another name: by the steps in the names, else by the names, and that is said."""
    save(tmp_path, 8)
    shutil.copytree(tmp_path / "step_8", tmp_path / "step_9", copy_function=shutil.copy2)
    assert ["step_8", "step_9"] == order(tmp_path)
    open_checkpoint(tmp_path)
    assert "" == caplog.text
    (tmp_path / "step_9").rename(tmp_path / "backup")
    assert ["backup", "step_8"] == order(tmp_path)
    assert "step_8" == open_checkpoint(tmp_path).tag
    assert "saved at the same time" in caplog.text
    with Checkpointer(tmp_path) as saver:
        saver.save("step_10", {"w": torch.ones(1)}, num_kept_ckpts=1)
    assert ["backup", "step_8", "step_10"] == visible_tags(tmp_path)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ours"), st.integers(0, 4)),
        st.tuples(st.just("nxd"), st.integers(0, 4)),
        st.tuples(st.just("back"), st.floats(0.0, 3600.0)),  # the clock is set back, by so many seconds
        st.tuples(st.just("copy"), st.booleans()),  # with whole-second times, of one second or by name
    ),
    min_size=1,
    max_size=8,
)


@given(events=EVENTS)
def test_the_latest_is_the_newest_save(events: list[tuple[str, float]]) -> None:
    """Whoever saved, over an existing tag too, however the clock runs, and however often the run was copied between.

    NxD dates by the clock: where that was set back before it saved, or whole seconds of a copy are all that is known of
    it, nobody can tell. There our own saves are still in order, and newer than all before them.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory, clock, expected, sure, ours = Path(folder) / "0", 1795600000.0, "", True, True
        directory.mkdir()
        for number, (event, value) in enumerate(events):
            clock += 1.5
            if event == "ours":
                with mock.patch.object(effects, "time", lambda clock=clock: clock), mock.patch.object(effects, "sleep"):
                    save(directory, int(value))
                expected, sure, ours = f"step_{int(value)}", True, True
            elif event == "nxd":
                newest = max((info.order_time for info in list_tags(LocalStorage(directory))), default=0.0)
                save_as_nxd(directory, f"step_{int(value)}", float(number), at=clock)
                expected, sure, ours = f"step_{int(value)}", clock > newest, False
            elif event == "back":
                clock -= value
            elif expected:
                tags = list_tags(LocalStorage(directory))
                sure = sure and ours
                times = {info.tag: 1795500000.0 + bool(value) * place for place, info in enumerate(tags)}
                directory = copied(directory, Path(folder) / str(number + 1), times)
            if expected and sure:
                assert expected == in_order(list_tags(LocalStorage(directory)))[-1].tag


COARSE_EVENTS = st.lists(
    st.tuples(st.sampled_from(["ours", "nxd"]), st.sampled_from([0.0, 1e-4, 0.3, 0.7, 1.0, 2.5])),
    min_size=2,
    max_size=6,
)


@given(events=COARSE_EVENTS, steps=st.booleans())
def test_whole_seconds_hide_no_newest_save(events: list[tuple[str, float]], steps: bool) -> None:
    """Where files have whole-second times: the latest is the newest save, or it is said, and that one is not removed.

    ``steps`` says that the names tell the order; then nothing needs to be said.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory, clock, newest = Path(folder), [1795600000.3], ""
        for number, (who, passed) in enumerate(events):
            clock[0] += passed
            newest = f"step_{number + 8}" if steps else "tag_" + "badcfe"[number]
            if who == "nxd":
                save_as_nxd(directory, newest, float(number), at=float(int(clock[0])))
                continue
            with (
                mock.patch.object(effects, "time", side_effect=lambda: clock[0]),
                mock.patch.object(effects, "sleep", side_effect=lambda s: clock.__setitem__(0, clock[0] + s)),
                Checkpointer(directory, durable=False) as saver,
            ):
                saver.save(newest, {"w": torch.ones(4)})
        tags = list_tags(LocalStorage(directory))
        unsure = {info.tag for group in undecided(tags) for info in group}
        assert in_order(tags)[-1].tag == newest or {newest, in_order(tags)[-1].tag} <= unsure
        assert not (steps and unsure)
        assert newest not in prune_checkpoints(directory, [Last(1)], dry_run=True).removed


def test_order_times_of_a_store_have_microseconds(tmp_path: Path) -> None:
    save(tmp_path, 1)
    [tag] = list_checkpoints(tmp_path)
    assert tag.saved is not None
    manifest = open_checkpoint(tmp_path).manifest
    assert manifest is not None
    assert abs(tag.saved.timestamp() - manifest.order_time) < 2e-6


def test_a_link_to_a_tag_is_no_tag_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scripts that keep a link ``latest`` lose no tag by it, and no load is unsure. One out of the directory counts."""
    directory = tmp_path / "run"
    save_checkpoint(directory, "step_1", {"weight": torch.ones(1)})
    save_checkpoint(tmp_path / "other", "step_9", {"weight": torch.ones(1)})
    (directory / "latest").symlink_to("step_2")
    save_checkpoint(directory, "step_2", {"weight": torch.ones(1)}, user_content=2, num_kept_ckpts=2)
    for name in ("theirs", "theirs_too"):
        (directory / name).symlink_to("../other/step_9")
    assert ["step_1", "step_2", "theirs", "theirs_too"] == [info.tag for info in list_tags(LocalStorage(directory))]
    assert [2, 2] == [load_checkpoint(directory), load_checkpoint(directory, "latest")]
    assert "at the same time" not in caplog.text
