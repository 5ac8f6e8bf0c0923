"""The latest tag is the newest save: ours by their manifests wherever they were copied to, NxD's by their marker."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_ckpt import Checkpointer, host, list_checkpoints, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.core.tags import in_order
from nxd_ckpt.layout.directory import list_tags
from nxd_ckpt.storage.local import LocalStorage
from tests.protocol.states import visible_tags

pytestmark = [pytest.mark.plain, pytest.mark.once]

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


def test_quick_saves_and_nxds_take_turns(tmp_path: Path) -> None:
    """What NxD saves after thirty of ours is the latest, for it too: it goes by the time of ``done``."""
    for step in range(1, 31):
        save_checkpoint(tmp_path, f"step_{step}", {"w": torch.full((4,), float(step))}, durable=False)
    close_checkpointers()
    save_as_nxd(tmp_path, "step_31", 31.0)
    assert "step_31" == open_checkpoint(tmp_path).tag
    save(tmp_path, 32)
    assert "step_32" == open_checkpoint(tmp_path).tag
    newest = max(tmp_path.glob("*/done"), key=lambda path: path.stat().st_mtime)
    assert "step_32" == newest.parent.name


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


def test_steps_tell_foreign_tags_of_one_time_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """step_10 is later than step_9, and that than step_8."""
    for step in (10, 8, 9):
        save_as_nxd(tmp_path, f"step_{step}", float(step), at=1795600000.0)
    loaded: dict[str, torch.Tensor] = {}
    load_checkpoint(tmp_path, model=loaded)
    assert (10.0, "") == (float(loaded["w"][0]), caplog.text)
    with Checkpointer(tmp_path) as saver:
        saver.save("step_11", {"w": torch.ones(1)}, num_kept_ckpts=2)
    assert ["step_10", "step_11"] == visible_tags(tmp_path)


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


@settings(max_examples=60)
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
                with mock.patch.object(host, "time", lambda clock=clock: clock), mock.patch.object(host, "sleep"):
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


def test_order_times_of_a_store_have_microseconds(tmp_path: Path) -> None:
    """In the listing, as in the manifest."""
    save(tmp_path, 1)
    [tag] = list_checkpoints(tmp_path)
    assert tag.saved is not None
    manifest = open_checkpoint(tmp_path).manifest
    assert manifest is not None
    assert abs(tag.saved.timestamp() - manifest.order_time) < 2e-6
