"""Bind mounts show a directory in another place: what lies inside of another one by them is refused as by its path."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, Tier, copy_checkpoint, save_checkpoint
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage import system
from nxd_ckpt.storage.system import aliases
from nxd_ckpt.storage.urls import lies_in, overlap
from tests.support.mounts import needs_mounts


@contextmanager
def mounted(source: Path | str, target: Path, *options: str) -> Iterator[Path]:
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *options, str(source), str(target)], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """A directory with another one in it."""
    (tmp_path / "near" / "deep" / "down").mkdir(parents=True)
    return tmp_path / "near"


@pytest.fixture
def bound(near: Path, tmp_path: Path) -> Iterator[Path]:
    """What shows the inner directory elsewhere, under a name with a space."""
    with mounted(near / "deep", tmp_path / "shown else where", "--bind") as folder:
        yield folder


@needs_mounts()
@pytest.mark.parametrize("below", ["", "down", "down/not there"])
def test_what_lies_in_another_by_a_bind_mount(near: Path, bound: Path, below: str) -> None:
    """Tiers are refused in any order. What is not there yet would lie there too."""
    place = bound / below
    assert lies_in(place, near)
    assert not lies_in(near, place)
    assert overlap(near, place)
    assert not overlap(near, place, inside=False)
    assert overlap(near / "deep" / below, place, inside=False)
    for tiers in ([near, place], [place, near]):
        with pytest.raises(InvalidArgument, match="one lies inside the other"):
            Checkpointer(tiers=[Tier(path) for path in tiers])
    assert not overlap(near / "other", place)


@needs_mounts()
def test_a_tier_that_is_mounted_in_another(near: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    with mounted(tmp_path / "far", near / "mount", "--bind"):
        assert [str(tmp_path / "far"), str(near / "mount")] == aliases(tmp_path / "far")
        with pytest.raises(InvalidArgument, match="one lies inside the other"):
            Checkpointer(tiers=[Tier(near), Tier(tmp_path / "far" / "run")])


@needs_mounts()
def test_directories_inside_of_a_tag_by_a_bind_mount(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "one", {"weight": torch.ones(2)})
    with mounted(tmp_path / "one" / "model", tmp_path / "elsewhere", "--bind") as inside:
        with pytest.raises(InvalidArgument, match="inside"):
            save_checkpoint(inside / "run", "two", {"weight": torch.ones(2)})
        with pytest.raises(InvalidArgument, match="inside"):
            copy_checkpoint(tmp_path / "one", inside / "two")
        assert not list(inside.glob("run*"))
        assert not list(inside.glob("two*"))


@needs_mounts()
def test_another_file_system_over_a_directory_is_another_place(near: Path, bound: Path) -> None:
    """The same root, of other devices; and what is covered is not seen any more."""
    with mounted("tmpfs", near / "deep", "-t", "tmpfs", "-o", "size=1m"):
        assert [str(bound)] == aliases(bound)
        assert not overlap(near, bound)
        assert [str(near / "deep")] == aliases(near / "deep")


def test_where_no_mounts_are_told_a_directory_has_its_own_path(
    near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_MOUNTS", tmp_path / "none")
    (tmp_path / "link").symlink_to(near / "deep")
    assert [str(near / "deep" / "down")] == aliases(tmp_path / "link" / "down")
    assert lies_in(tmp_path / "link", near)
    assert not overlap(near, tmp_path / "nearby")
