"""Which tags a directory holds, which are complete, and which retention may remove."""

import os
from pathlib import Path

import pytest

from nxd_ckpt.core.manifest import FileEntry, Manifest, Parts, dump_manifest
from nxd_ckpt.core.tags import TagInfo, latest
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.directory import (
    NO_TAG,
    is_checkpoint_of_ours_or_nxd,
    list_tags,
)

MANIFEST = dump_manifest(Manifest("t", "run-1", 1.0, Topology(), Parts(), ranks=(FileEntry(2, 0),)))
RANK_FILE = "model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt"


def make(directory: Path, *files: str, at: float | None = None, text: bytes = b"1") -> None:
    """Files with the contents of NxD's markers, and their time."""
    for file in files:
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(MANIFEST if path.name == "manifest.json" else text)
        if at is not None:
            os.utime(path, (at, at))


def test_a_tag_is_complete_with_its_done_marker(tmp_path: Path) -> None:
    """``done`` makes a tag complete, and its time is the tag's order; without it the tag is shown as incomplete.

    Beside another program's files it makes no tag.
    """
    make(tmp_path / "step_10", "checkpoint", "done", "model/x", at=500.0)
    make(tmp_path / "step_9", "done", "optim/x", at=600.0)
    make(tmp_path / "step_8", "done", "model.safetensors", "config.json", at=800.0)
    make(tmp_path / "step_11", "checkpoint", at=700.0)
    make(tmp_path / "ours", "checkpoint", "manifest.json", at=400.0)
    make(tmp_path / "ours", "done", at=400.0, text=b"1 run-1")
    make(tmp_path / "was ours", "checkpoint", "manifest.json", "done", at=450.0)
    expected = [
        TagInfo("ours", 1.0, complete=True, ours=True),
        TagInfo("step_10", 500.0, complete=True, ours=False),
        TagInfo("step_11", 700.0, complete=False, ours=False),
        TagInfo("step_9", 600.0, complete=True, ours=False),
        TagInfo("was ours", 450.0, complete=True, ours=False),  # another program wrote ``done`` again
    ]
    assert expected == list_tags(LocalStorage(tmp_path))


def test_newest_lists_the_tags_of_0_6_in_order(tmp_path: Path) -> None:
    """NxD 0.6: the order is that of the lines; a tag counts only if no rank's file is missing, and there are some: the
    line is written before the data."""
    make(tmp_path / "b", RANK_FILE.format(tp=0), RANK_FILE.format(tp=1))
    make(tmp_path / "a", RANK_FILE.format(tp=0), RANK_FILE.format(tp=1))
    make(tmp_path / "broken", RANK_FILE.format(tp=1))
    make(tmp_path / "unlisted", RANK_FILE.format(tp=0))
    make(tmp_path / "begun", "scheduler.pt")
    make(tmp_path, "newest", text=b"gone\nbegun\nb\na\nbroken\n", at=1000.0)
    expected = [
        TagInfo("a", 999.0, complete=True, ours=False),
        TagInfo("b", 998.0, complete=True, ours=False),
        TagInfo("begun", 997.0, complete=False, ours=False),
        TagInfo("broken", 1000.0, complete=False, ours=False),
    ]
    tags = list_tags(LocalStorage(tmp_path))
    assert expected == tags
    assert expected[0] == latest(tags)


@pytest.mark.parametrize("name", ["tp_rank_00", "tp_rank_00_pp_rank_00", "tp_rank_00_pp_rank_00_dp_rank_00"])
def test_a_directory_of_0_1_to_0_5_is_a_checkpoint_itself(tmp_path: Path, name: str) -> None:
    """Without tags, the directory is listed as one that is older than any tag, and is never removed."""
    make(tmp_path, name)
    make(tmp_path / "step_1", "done", "checkpoint", at=5.0)
    tags = list_tags(LocalStorage(tmp_path))
    assert TagInfo(NO_TAG, 0.0, complete=True, ours=False) == tags[0]
    assert tags[1] == latest(tags)
    assert not is_checkpoint_of_ours_or_nxd(LocalStorage(tmp_path), NO_TAG)


def test_a_directory_of_0_5_that_lacks_a_rank_is_incomplete(tmp_path: Path) -> None:
    """The ranks of the old layouts form a grid; one with a hole was interrupted, or copied in part."""
    make(tmp_path, "tp_rank_00_pp_rank_00", "tp_rank_01_pp_rank_01")
    assert [False] == [info.complete for info in list_tags(LocalStorage(tmp_path))]


@pytest.mark.parametrize(
    ("files", "removable"),
    [
        (["checkpoint", "done", "model/x", "optim/x", "scheduler.pt", "user_content.pt"], True),
        (["checkpoint", "done"], True),
        (["manifest.json", "done", "index/x.json", "my_notes.txt"], True),
        (["checkpoint", "model/x"], False),
        (["done", "model/x"], False),
        (["checkpoint", "done", "model/x", "my_notes.txt"], False),
        (["checkpoint", "done", "model/x", "tokenizer/vocab.json"], False),
        (["checkpoint", "done", "model"], False),
        (["checkpoint", "done/x"], False),
        (["manifest.json"], False),
    ],
)
def test_what_retention_may_remove(tmp_path: Path, files: list[str], removable: bool) -> None:
    """Only a complete tag that holds a manifest, or nothing but NxD's files, is a checkpoint to remove."""
    make(tmp_path / "tag", *files)
    assert removable == is_checkpoint_of_ours_or_nxd(LocalStorage(tmp_path), "tag")


def test_a_users_directory_is_never_removed(tmp_path: Path) -> None:
    """A file named ``checkpoint``, or a manifest of something else, does not make a directory NxD's or ours."""
    make(tmp_path / "tensorflow", "checkpoint", "done", text=b'model_checkpoint_path: "model.ckpt-1"')
    make(tmp_path / "website", "done")
    (tmp_path / "website" / "manifest.json").write_text('{"name": "a web application"}')
    storage = LocalStorage(tmp_path)
    assert not is_checkpoint_of_ours_or_nxd(storage, "tensorflow")
    assert not is_checkpoint_of_ours_or_nxd(storage, "website")


def test_golden_tags_may_be_removed(golden: Path) -> None:
    for directory in golden.glob("*/ckpt"):
        storage = LocalStorage(directory)
        tags = list_tags(storage)
        assert tags
        assert all(info.complete and is_checkpoint_of_ours_or_nxd(storage, info.tag) for info in tags)
