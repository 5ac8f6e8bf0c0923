"""A directory of another library's files takes the place of one of that name, also where names cannot be exchanged."""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement
from nxd_ckpt.errors import DigestMismatch, MalformedFile, StorageError, UnsupportedState
from nxd_ckpt.integrations.sealed import SealedDirectory, require_one_writer, verify_files
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations.killed import in_a_process
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.plain, pytest.mark.once]

NAME = "checkpoints/checkpoint_1"


def save(root: Path, content: bytes, name: str = "weights", added: str = "", directory_name: str = NAME) -> None:
    """A callback has ``added`` a file to the visible place by then."""
    directory = SealedDirectory(str(root), directory_name)
    directory.begin()
    Path(directory.staged, name).write_bytes(content)
    if added:
        Path(root, NAME, added).parent.mkdir(parents=True, exist_ok=True)
        Path(root, NAME, added).write_bytes(b"of a callback")
    with directory.publishing(is_rank_0=True):
        pass
    directory.wait(SingleProcessAgreement())


def content(root: Path) -> bytes:
    verify_files(str(root / NAME), "model")
    return (root / NAME / "weights").read_bytes()


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS."""
    monkeypatch.setattr(LocalStorage, "swap", lambda storage, one, other: False)


@pytest.mark.usefixtures("no_exchange")
def test_a_replacement_that_is_killed_anywhere_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Once the next save begins, of whatever name."""
    save(tmp_path / "rehearsal", b"old")
    found = []
    for number in range(in_a_process(partial(save, tmp_path / "rehearsal", b"new"))):
        root = tmp_path / str(number)
        save(root, b"old")
        assert in_a_process(partial(save, root, b"new"), number) < 0
        SealedDirectory(str(root), "checkpoints/checkpoint_2").begin()
        [attempt] = {*os.listdir(root / ".incomplete")} - {"tags"}
        assert ["checkpoint_2"] == os.listdir(root / ".incomplete" / attempt)
        found.append(content(root))
    assert sorted(found, reverse=True) == found
    assert {b"old", b"new"} == {*found}


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.one_in(2)
def test_a_callbacks_file_outlives_a_kill_anywhere(tmp_path: Path, replaces: bool) -> None:
    """It is at the visible place at every instant."""

    def prepared(root: Path) -> Path:
        if replaces:
            save(root, b"old")
        return root

    rehearsal = prepared(tmp_path / "rehearsal")
    for number in range(in_a_process(partial(save, rehearsal, b"new", added="metrics/a.json"))):
        root = prepared(tmp_path / str(number))
        assert in_a_process(partial(save, root, b"new", added="metrics/a.json"), number) < 0
        save(root, b"next", directory_name="checkpoints/checkpoint_2")
        file, weights = root / NAME / "metrics/a.json", root / NAME / "weights"
        if file.exists():
            assert b"of a callback" == file.read_bytes()
        else:  # killed before the callback
            assert not weights.exists() or b"old" == content(root)


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("fails", [False, True])
def test_a_callbacks_file_that_comes_at_the_last_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """It is kept; if it cannot be, that is said, and the save has succeeded."""
    save(tmp_path, b"old")
    rename = LocalStorage.rename

    def renaming(storage: LocalStorage, old: str, new: str) -> None:
        if old == NAME:
            (tmp_path / NAME / "late").touch()
        if fails and old.endswith("late"):
            raise OSError("no")
        rename(storage, old, new)

    monkeypatch.setattr(LocalStorage, "rename", renaming)
    save(tmp_path, b"new")
    assert b"new" == (tmp_path / NAME / "weights").read_bytes()
    assert fails != (tmp_path / NAME / "late").exists()
    assert ("is lost: no" if fails else "late was written there before") in caplog.text


def test_what_was_visible_for_a_moment_is_removed_once_that_is_undone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could bring its name back without its files. A disk refuses to sync the folder for a while."""
    sync_dir = LocalStorage.sync_dir

    def refusing(storage: LocalStorage, key: str) -> None:
        if key == "checkpoints":
            raise OSError("no")
        sync_dir(storage, key)

    def attempts() -> list[str]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob(".incomplete/attempt-*/*/weights"))

    save(tmp_path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "sync_dir", refusing)
        with pytest.raises(StorageError, match=r"its undoing is not durable either: .* may be there after a power cut"):
            save(tmp_path, b"new")
        assert b"old" == content(tmp_path)
        [left] = attempts()
        with pytest.raises(OSError, match="no"):
            SealedDirectory(str(tmp_path), NAME).begin()
        assert [left] == attempts()
    save(tmp_path, b"newer")
    assert b"newer" == content(tmp_path)
    assert [] == attempts()


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("happens", [False, True])
def test_a_replacement_that_fails_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: bool
) -> None:
    """Also after its name was taken away, and where the rename happened although a server did not answer."""
    rename = LocalStorage.rename

    def fails(storage: LocalStorage, old: str, new: str) -> None:
        if old.startswith(".incomplete/attempt-") and old.endswith("checkpoint_1") and new == NAME:
            if happens:
                rename(storage, old, new)
            raise OSError("no")
        rename(storage, old, new)

    save(tmp_path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "rename", fails)
        with pytest.raises(Exception, match="no"):
            save(tmp_path, b"new")
    assert b"old" == content(tmp_path)
    save(tmp_path, b"new")
    assert b"new" == content(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ".", "a//b", ""])
def test_a_list_of_files_that_leads_elsewhere_is_malformed(tmp_path: Path, name: str) -> None:
    """Nothing beside the directory is read."""
    save(tmp_path, b"old")
    (tmp_path / NAME / "digests.json").write_text(json.dumps({name: [1, 2]}))
    with pytest.raises(MalformedFile, match=r"digests\.json is no list of files"):
        verify_files(str(tmp_path / NAME), "model")


def test_another_library_s_manifest_is_a_file_like_others(tmp_path: Path) -> None:
    save(tmp_path, b"old", "manifest.json")
    (tmp_path / NAME / "manifest.json").write_bytes(b"new")
    with pytest.raises(DigestMismatch, match=r"manifest\.json: its bytes are not those that were saved"):
        verify_files(str(tmp_path / NAME), "model")


def saved_by_two(root: Path, async_save: bool) -> list[object]:
    """What each of two ranks is told of a checkpoint with a tag: None, or what is raised."""

    def call(agreement: Agreement) -> None:
        directory, rank = SealedDirectory(str(root), NAME, durable=False), agreement.rank
        if rank == 0:
            directory.begin()
        with Checkpointer(directory.tags, topology=Topology(dp=2, rank=rank), run_id="run", durable=False) as saver:
            with directory.publishing(is_rank_0=rank == 0) as saves:
                saves.append(saver.save("state", {"weight": torch.ones(2)}, async_save=async_save))
            directory.wait(agreement)

    return on_ranks(2, call)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_rank_that_cannot_read_the_verdict_is_told_of_it_by_rank_0(
    async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the tag has left the place where that rank looks for it."""
    moved, read, rename = threading.Event(), LocalStorage.read, LocalStorage.rename

    def damaged(storage: LocalStorage, key: str, *args: Any) -> bytes:
        if not key.endswith("verdict.json"):
            return read(storage, key, *args)
        assert moved.wait(60)
        return b"{"

    def seen(storage: LocalStorage, old: str, new: str) -> None:
        rename(storage, old, new)
        if old == "tags/state":
            moved.set()

    monkeypatch.setattr(LocalStorage, "read", damaged)
    monkeypatch.setattr(LocalStorage, "rename", seen)
    assert [None, None] == saved_by_two(tmp_path, async_save)
    assert not verify_checkpoint(tmp_path / NAME, "state").problems


def test_what_fails_after_the_tags_are_saved_is_raised_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone makes the directory visible."""
    rename = LocalStorage.rename

    def fails(storage: LocalStorage, old: str, new: str) -> None:
        if new == NAME:
            raise OSError("no")
        rename(storage, old, new)

    monkeypatch.setattr(LocalStorage, "rename", fails)
    found = saved_by_two(tmp_path, async_save=True)
    assert [StorageError, StorageError] == [type(each) for each in found]
    assert "on rank 0: OSError: no" in str(found[1])
    assert not (tmp_path / NAME).exists()


def test_one_rank_alone_writes_for_all() -> None:
    """``save_on_each_node`` on several nodes is refused on every rank; on one node it has no effect."""
    for writers, refused in [({0, 2}, True), ({0}, False)]:

        def require(agreement: Agreement, of: set[int] = writers) -> None:
            require_one_writer(agreement, agreement.rank in of)

        outcomes = on_ranks(4, require)
        assert [refused] * 4 == [isinstance(outcome, UnsupportedState) for outcome in outcomes]
        assert refused == ("save_on_each_node=True writes a checkpoint on the disk of each" in str(outcomes[0]))


@pytest.mark.parametrize("lost", ["weights", "digests", "a tag's file", "a tag's manifest"])
def test_a_directory_that_lost_files_does_not_count(
    tmp_path: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays, and so does an older one in its place: else the only ones that load might go."""
    for number in range(4):
        directory = SealedDirectory(str(tmp_path), f"checkpoint-{number}")
        directory.begin()
        Path(directory.staged, "weights").write_bytes(b"weights")
        with Checkpointer(directory.tags, durable=False) as saver, directory.publishing(is_rank_0=True) as saves:
            saves.append(saver.save("state", {"weight": torch.ones(2)}))
        last = tmp_path / "checkpoint-2"
        if number == 3 and lost == "digests":
            (last / "digests.json").write_bytes(b"{")
        elif number == 3:
            names = {"weights": "weights", "a tag's file": "state/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"}
            (last / names.get(lost, "state/manifest.json")).unlink()
        retire = partial(directory.retire, r"checkpoint-(\d+)", "state", 2 if number == 3 else None)
        directory.wait(SingleProcessAgreement(), retire)
    assert [1, 2, 3] == sorted(int(path.name[-1]) for path in tmp_path.glob("checkpoint-*"))
    assert str(last) in caplog.text
    assert "It does not count, and an older checkpoint is kept in its place" in caplog.text
