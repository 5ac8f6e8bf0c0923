"""The path of a tier leads to another place in mid-run: it was unmounted, or a link came in its place."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_ckpt import Checkpointer, Tier
from nxd_ckpt.errors import CheckpointError, SaveFailed
from nxd_ckpt.storage.base import Writer
from nxd_ckpt.storage.local import LocalStorage
from tests.support.mounts import needs_mounts
from tests.tiers.saving import damaged, save, tags_in


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    if folder.is_mount():
        unmount(folder)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def files_below(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def save_everywhere(saver: Checkpointer, step: int) -> None:
    save(saver, step)
    saver.wait(tier=1)


def test_a_link_to_the_first_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No tag of the first counts as copied, or is removed as surplus; the tier gets the next save once it is back."""
    near, far, third, aside = (tmp_path / name for name in ("near", "far", "third", "aside"))
    with Checkpointer(tiers=[Tier(near), Tier(far), Tier(third, keep=1)]) as saver:
        save(saver, 1)
        saver.wait(tier=1)
        far.rename(aside)
        far.symlink_to(near)
        for step in (2, 3):
            save(saver, step)
            with pytest.raises(CheckpointError, match=f"{far} leads to a directory that this process saves to as"):
                saver.wait(tier=1)
            saver.wait(tier=2)
        assert 2 == len([line for line in caplog.messages if f"was not copied to tier {far}" in line])
        assert ["step_1", "step_2", "step_3"] == tags_in(near)
        far.unlink()
        aside.rename(far)
        save(saver, 4)
    assert ["step_1", "step_4"] == tags_in(far)
    assert ["step_4"] == tags_in(third)
    assert [] == damaged([near, far, third])


@needs_mounts()
@pytest.mark.parametrize("name", ["", "far"])
def test_a_tier_that_is_unmounted(tmp_path: Path, mounted: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Nothing is copied to what its path leads to now, each save says so, and the other tiers go on."""
    near, far, third = tmp_path / "near", mounted / name, tmp_path / "third"
    with Checkpointer(tiers=[Tier(near), Tier(far), Tier(third)]) as saver:
        save(saver, 1)
        saver.wait(tier=1)
        unmount(mounted)
        for step in (2, 3):
            save(saver, step)
            with pytest.raises(CheckpointError, match="is not the directory that this job began with"):
                saver.wait(tier=1)
            saver.wait(tier=2)
    assert 2 == len([line for line in caplog.messages if f"was not copied to tier {far}" in line])
    assert [] == files_below(mounted)
    assert ["step_1", "step_2", "step_3"] == tags_in(near) == tags_in(third)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("leads_to", ["other", "nowhere"])
def test_a_lease_is_given_back_where_it_was_taken(tmp_path: Path, is_first: bool, leads_to: str) -> None:
    """Also once the link to the directory leads elsewhere: the next job there need not wait, and nothing is left."""
    run, other, current, beside = (tmp_path / name for name in ("run", "other", "current", "beside"))
    run.mkdir()
    save_to = [Tier(current), Tier(beside)] if is_first else [Tier(beside), Tier(current)]
    current.symlink_to(run)
    with Checkpointer(other) as neighbour:
        save(neighbour, 1)
        with Checkpointer(tiers=save_to) as saver:
            save_everywhere(saver, 1)
            current.unlink()
            current.symlink_to(other if leads_to == "other" else tmp_path / "gone")
        save(neighbour, 2)
    for place in (run, other):
        assert [] == [*place.glob(".nxd_ckpt/*.json")]
    assert [] == files_below(run / ".nxd_ckpt/probes")
    with Checkpointer(run) as saver:
        save(saver, 2)
    assert ["step_1", "step_2"] == tags_in(run)


class Unmounted(LocalStorage):
    """Its file system is unmounted before the first file of a model is written; several threads write files."""

    _lock = threading.Lock()

    def create(self, key: str, nbytes: int) -> Writer:
        with self._lock:
            if "/model/" in key and self.root.parent.is_mount():
                unmount(self.root.parent)
        return super().create(key, nbytes)


@needs_mounts()
def test_a_tier_that_is_unmounted_while_a_tag_is_copied(tmp_path: Path, mounted: Path) -> None:
    """What was copied until then is not there, so the rest becomes no tag."""
    far = Unmounted(mounted / "far")
    with Checkpointer(tiers=[Tier(tmp_path / "near"), Tier(far.root, storage=far)]) as saver:
        save(saver, 1)
        with pytest.raises(CheckpointError, match="is not the directory that this job began with"):
            saver.wait(tier=1)
    assert [] == tags_in(far)
    assert 5 > len(files_below(mounted)), "only what was being written by then lies below the mount point"
    assert ["step_1"] == tags_in(tmp_path / "near")


@needs_mounts()
def test_a_first_tier_that_is_unmounted(tmp_path: Path, mounted: Path) -> None:
    """The save fails, and says why: what it wrote would be hidden once the place is back."""
    with Checkpointer(tiers=[Tier(mounted / "near"), Tier(tmp_path / "far")]) as saver:
        save(saver, 1)
        saver.wait(tier=1)
        unmount(mounted)
        with pytest.raises(SaveFailed, match="is not the directory that this job began with"):
            save(saver, 2)
    assert [] == files_below(mounted)
    assert ["step_1"] == tags_in(tmp_path / "far")


@needs_mounts()
@pytest.mark.parametrize("is_first", [True, False])
def test_another_file_system_comes_in_its_place(tmp_path: Path, mounted: Path, is_first: bool) -> None:
    """Also one that has the number of the old one: nothing is saved there. Once the old one is back, saves go on."""
    swapped, other = mounted / "a", tmp_path / "b"
    with Checkpointer(tiers=[Tier(place) for place in ((swapped, other) if is_first else (other, swapped))]) as saver:
        save(saver, 1)
        saver.wait(tier=1)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mounted)], check=True)
        with pytest.raises(CheckpointError, match="is not the directory that this job began with"):
            save_everywhere(saver, 2)
        assert [] == files_below(mounted)
        unmount(mounted)
        save(saver, 3)
        saver.wait(tier=1)
        assert "step_3" in tags_in(swapped)
        assert [] == damaged([swapped, other])
