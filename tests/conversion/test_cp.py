"""Copying a tag: to the last byte, verified on the way, resumed where interrupted, visible only when complete."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, copy_checkpoint, has_checkpoint, open_checkpoint
from nxd_ckpt.conversion.cp import Copy
from nxd_ckpt.errors import CheckpointNotFound, DigestMismatch, InvalidArgument, PartNotFound
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import MemoryStorage
from tests.conversion.tags import contents, remains, save_example
from tests.golden.checkpoints import CONFIGURATIONS
from tests.support.damage import flip
from tests.support.processes import run_program

KILLED = """
import sys
from nxd_ckpt import copy_checkpoint
from nxd_ckpt.output import locations
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, killing

hook = killing(*sys.argv[3:])
locations.open_storage = lambda path, durable, options: HookedStorage(LocalStorage(path, durable), hook)
copy_checkpoint(sys.argv[1], sys.argv[2], num_workers=1)
"""


def shard(tag: Path, rank: int) -> Path:
    return tag / f"optim/dp_rank_{rank:02d}_tp_rank_00_pp_rank_00.pt"


def test_a_copy_goes_as_fast_as_it_may(tmp_path: Path) -> None:
    """``max_bytes_per_second`` is the rate of all files together; what is no rate is refused."""
    source = save_example(tmp_path / "input", 2)
    planned = copy_checkpoint(source, tmp_path / "output" / "slow", dry_run=True)
    started = time.monotonic()
    copied = copy_checkpoint(source, tmp_path / "output" / "slow", max_bytes_per_second=4 * planned.nbytes)
    assert time.monotonic() - started >= 0.25
    assert copied.nbytes == copied.copied_nbytes
    with pytest.raises(InvalidArgument, match="max_bytes_per_second must be a number of bytes"):
        copy_checkpoint(source, tmp_path / "output" / "fast", max_bytes_per_second=0)


@pytest.mark.parametrize("use_xser", [False, True])
def test_a_copy_is_the_same_to_the_last_byte(tmp_path: Path, use_xser: bool) -> None:
    """Under another name too; and what made it leaves nothing else behind."""
    source = save_example(tmp_path / "input", 2, use_xser=use_xser)
    copied = copy_checkpoint(source, tmp_path / "output" / "other")
    assert contents(source) == contents(tmp_path / "output" / "other")
    assert [] == remains(tmp_path / "output")
    found = verify_checkpoint(tmp_path / "output", "other")
    assert () == found.problems
    files = contents(source).keys() - {"done", "checkpoint"}
    nbytes = sum(len(contents(source)[file]) for file in files)
    expected = Copy(
        str(source), f"{tmp_path}/output/other", len(files), nbytes, copied=len(files), copied_nbytes=nbytes
    )
    assert expected == copied


def test_copies_stand_in_the_order_of_their_saves(tmp_path: Path) -> None:
    """Not of their copying: the latest of a mirror is the latest of the original."""
    for step in (3, 4):
        save_example(tmp_path / "input", 1, f"step_{step}", step=step)
    for step in (4, 3):
        copy_checkpoint(tmp_path / "input" / f"step_{step}", tmp_path / "output" / f"step_{step}")
    assert "step_4" == open_checkpoint(tmp_path / "output").tag
    assert list_tags(LocalStorage(tmp_path / "input")) == list_tags(LocalStorage(tmp_path / "output"))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.one_in(3)
def test_tags_of_neuronx_distributed_are_copied_alike(golden: Path, configuration: str, tmp_path: Path) -> None:
    """With the time of their markers."""
    directory = golden / configuration / "ckpt"
    for tag in sorted(path.name for path in directory.iterdir()):
        copy_checkpoint(directory / tag, tmp_path / tag)
        assert contents(directory / tag) == contents(tmp_path / tag)
    assert list_tags(LocalStorage(directory)) == list_tags(LocalStorage(tmp_path))


@pytest.mark.parametrize(("operation", "key"), [("write_at", "*/optim/dp_rank_01*"), ("rename", "*copies*")])
def test_an_interrupted_copy_goes_on(tmp_path: Path, operation: str, key: str) -> None:
    """Killed between files, or just before it becomes visible: nothing is to be seen, and whole files are kept."""
    source, output = save_example(tmp_path / "input", 2), tmp_path / "output"
    assert -signal.SIGKILL == run_program(KILLED, source, output / "copy", operation, key).returncode
    assert not has_checkpoint(output)
    assert any("model" in file for file in remains(output))

    copied = copy_checkpoint(source, output / "copy")
    assert contents(source) == contents(output / "copy")
    assert [] == remains(output)
    unfinished = 0 if operation == "rename" else len([file for file in contents(source) if file > "optim/dp_rank_01"])
    assert (copied.files - unfinished, unfinished) == (copied.kept, copied.copied)


def test_what_an_interrupted_copy_left_is_verified(tmp_path: Path) -> None:
    """A file with other bytes is copied again, and one that is not of the tag goes."""
    source, output = save_example(tmp_path / "input", 2), tmp_path / "output"
    run_program(KILLED, source, output / "copy", "rename", "*copies*")
    left = output / ".nxd_ckpt" / "copies" / "copy"
    flip(shard(left, 0))
    (left / "model" / "other").write_bytes(b"of another tag")

    assert 1 == copy_checkpoint(source, output / "copy").copied
    assert contents(source) == contents(output / "copy")


def test_a_damaged_tag_is_not_copied(tmp_path: Path) -> None:
    source = save_example(tmp_path / "input", 2)
    flip(shard(source, 1))
    with pytest.raises(DigestMismatch, match="dp_rank_01"):
        copy_checkpoint(source, tmp_path / "output" / "copy")
    assert not has_checkpoint(tmp_path / "output")
    os.remove(shard(source, 0))
    with pytest.raises(PartNotFound, match=r"dp_rank_00.*is missing"):
        copy_checkpoint(source, tmp_path / "output" / "copy")
    assert not has_checkpoint(tmp_path / "output")


def test_damage_in_a_file_of_neuronx_distributed_is_found(tmp_path: Path) -> None:
    source = save_example(tmp_path / "input", 2)
    (source / "manifest.json").unlink()
    shutil.rmtree(source / "index")
    data = bytearray(shard(source, 1).read_bytes())
    at = data.index(b"\x00\x00\x40\x40")  # the step, 3.0: a byte of a tensor
    data[at] ^= 1
    shard(source, 1).write_bytes(data)
    with pytest.raises(DigestMismatch, match=r"dp_rank_01.*record 'data/0'"):
        copy_checkpoint(source, tmp_path / "output" / "copy")
    assert not has_checkpoint(tmp_path / "output")


def test_places_that_cannot_be(tmp_path: Path) -> None:
    """A copy onto itself, of nothing, of a whole directory of tags, or into an archive, which was made a directory."""
    source = save_example(tmp_path / "input", 1)
    with pytest.raises(InvalidArgument, match="inside the other"):
        copy_checkpoint(source, source, overwrite=True)
    with pytest.raises(InvalidArgument, match=r"named as an archive, .* convert writes archives"):
        copy_checkpoint(source, tmp_path / "output" / "step_1.tar.gz")
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        copy_checkpoint(tmp_path / "absent" / "step_1", tmp_path / "output" / "copy")
    with pytest.raises(CheckpointNotFound, match="directory of checkpoints"):
        copy_checkpoint(tmp_path / "input", tmp_path / "output" / "copy")
    (source / "done").unlink()
    with pytest.raises(CheckpointNotFound, match="incomplete"):
        copy_checkpoint(source, tmp_path / "output" / "copy")
    assert not (tmp_path / "output").exists()


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """``store://NAME`` is an object store in memory."""

    def open_storage(path: str, durable: bool, options: object) -> LocalStorage | MemoryStorage:
        return MemoryStorage(path) if "://" in path else LocalStorage(path, durable)

    monkeypatch.setattr("nxd_ckpt.output.locations.open_storage", open_storage)


def test_a_copy_to_a_store_goes_on_too(tmp_path: Path, stores: None) -> None:
    """Without ``done`` nothing is visible there; what is right stays, what is not is uploaded again."""
    source = save_example(tmp_path / "input", 2)
    url = f"store://{tmp_path.name}"
    store = MemoryStorage(url)
    copy_checkpoint(source, f"{url}/step_3")
    done = store.read("step_3/done")
    for key in ("done", "user_content.pt"):
        store.remove(f"step_3/{key}")
    store.write("step_3/scheduler.pt", b"damaged")
    assert [False] == [info.complete for info in list_tags(store)]

    copied = copy_checkpoint(source, f"{url}/step_3")
    assert (2, copied.files - 2) == (copied.copied, copied.kept)
    assert (done, [True]) == (store.read("step_3/done"), [info.complete for info in list_tags(store)])
    with pytest.raises(InvalidArgument, match="overwrite=True"):
        copy_checkpoint(source, f"{url}/step_3")


def test_a_save_takes_the_place_of_what_an_interrupted_copy_left(tmp_path: Path, stores: None) -> None:
    """In a store: the files of the copy that never became a tag are gone with it."""
    source = save_example(tmp_path / "input", 2)
    store = MemoryStorage(f"store://{tmp_path.name}")
    copy_checkpoint(source, f"{store.url.removeprefix('memory://')}/step_3")
    store.remove("step_3/done")
    with Checkpointer("unused", storage=store) as checkpointer:
        checkpointer.save("step_3", {"weight": torch.ones(2)})
    assert [] == [key for key in store.keys if key.startswith("step_3/optim")]
    assert ["step_3"] == [info.tag for info in list_tags(store) if info.complete]
