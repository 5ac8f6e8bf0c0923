"""Files of others that a save is given: they are part of its tag, with digests."""

import errno
import os
from pathlib import Path

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import Checkpointer, Last, Topology
from nxd_ckpt.cli.main import main
from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.errors import InvalidArgument, SaveFailed
from nxd_ckpt.storage import local
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import MemoryStorage
from tests.support.ranks import on_ranks

MODEL = {"w": torch.ones(4)}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Two files, one of them in a folder."""
    source = tmp_path / "source"
    (source / "adapter").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "adapter/x.bin").write_bytes(b"x" * 100)
    return {name: str(source / name) for name in ("config.json", "adapter/x.bin")}


def seen(place: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The problems of a tag, and the files that carry no digest."""
    found = verify_checkpoint(place)
    return found.problems, found.guests


def test_they_carry_digests(files: dict[str, str], tmp_path: Path) -> None:
    """That are compared, also of a copy; files that come later are told from them."""
    run = tmp_path / "run"
    nxd_ckpt.save_checkpoint(run, "one", MODEL, files=files)
    assert ((), ()) == seen(run / "one")
    assert () == nxd_ckpt.list_checkpoints(run)[0].guests
    for late in ("late", "adapter/late"):
        (run / "one" / late).touch()
    assert ((), ("adapter/late", "late")) == (seen(run / "one")[0], tuple(sorted(seen(run / "one")[1])))
    assert 0 == main(["cp", str(run / "one"), str(tmp_path / "copy/one")])
    (tmp_path / "copy/one/adapter/x.bin").write_bytes(b"y" * 100)
    [problem] = seen(tmp_path / "copy/one")[0]
    assert "one/adapter/x.bin: expected CRC-32" in problem


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_next_save_replaces_them(
    files: dict[str, str], tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it is not given go, however new they are; files of others stay."""
    if not exchanges:
        monkeypatch.setattr(local, "exchange", lambda one, other: False)
    nxd_ckpt.save_checkpoint(tmp_path, "one", MODEL, files=files)
    (tmp_path / "one/adapter/late").write_text("late")
    os.utime(tmp_path / "one/config.json", (2e9, 2e9))
    other = tmp_path / "source/other.json"
    other.write_text("[1]")
    os.utime(other, (1e9, 1e9))
    nxd_ckpt.save_checkpoint(tmp_path, "one", MODEL, files={"config.json": str(other)})
    assert "[1]" == (tmp_path / "one/config.json").read_text()
    assert ((), ("adapter/late",)) == seen(tmp_path / "one")


@pytest.mark.parametrize("linked", [True, False])
def test_they_go_to_any_storage(
    files: dict[str, str], tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a link where the file system has them. What the source's name holds later does not matter."""
    if not linked:
        monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    nxd_ckpt.save_checkpoint(tmp_path, "one", MODEL, files=files)
    assert linked == os.path.samefile(files["config.json"], tmp_path / "one/config.json")
    os.replace(files["adapter/x.bin"], files["config.json"])
    assert ((), ()) == seen(tmp_path / "one")


def test_a_store_has_them_too(files: dict[str, str]) -> None:
    """Also in place of a tag that had others. Removing the tag removes them."""
    storage = MemoryStorage()
    with Checkpointer("memory", storage=storage) as saver:
        for given in (files, {"config.json": files["adapter/x.bin"]}):
            saver.save("one", MODEL, files=given, overwrite=True)
        assert b"x" * 100 == storage.read("one/config.json")
        assert not storage.is_file("one/adapter/x.bin")
        saver.remove("one")
    assert [] == storage.list("one")


def test_a_tag_that_lost_one_does_not_count(files: dict[str, str], tmp_path: Path) -> None:
    """It stays, and an older one in its place."""
    with Checkpointer(tmp_path / "run") as saver:
        for step in range(4):
            saver.save(f"step_{step}", MODEL, files=files, retain=[Last(2)] if step == 3 else None)
            if step == 2:
                (tmp_path / "run/step_2/config.json").unlink()
    assert ["step_1", "step_2", "step_3"] == [tag.tag for tag in nxd_ckpt.list_checkpoints(tmp_path / "run")]


def test_the_newest_with_one_that_stays(tmp_path: Path) -> None:
    """Which counts as one of them; the newest stays in any case."""
    left = []
    for count, best in [(2, "step_0"), (1, "step_0"), (2, "step_3"), (2, None)]:
        run = tmp_path / f"{count}{best}"
        with Checkpointer(run) as saver:
            for step in range(4):
                saver.save(f"step_{step}", MODEL, retain=[Last(count, best)] if step == 3 else None)
        left.append("".join(tag.tag[-1] for tag in nxd_ckpt.list_checkpoints(run)))
    assert ["03", "03", "23", "23"] == left


@pytest.mark.parametrize("name", ["done", "manifest.json", "model", "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"])
def test_a_name_of_our_own_is_refused(name: str, files: dict[str, str], tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(InvalidArgument, match=name):
        nxd_ckpt.save_checkpoint(tmp_path / "run", "one", MODEL, files={name: files["config.json"]})
    assert not (tmp_path / "run").exists() or not nxd_ckpt.list_checkpoints(tmp_path / "run")


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a//b", "", "a/../../up"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises((InvalidArgument, SaveFailed)):
        nxd_ckpt.save_checkpoint(tmp_path / "run", "one", MODEL, files={name: files["config.json"]})
    assert not (tmp_path / "run/one").exists()
    assert not [*tmp_path.rglob("up")]


def test_rank_0s_count(files: dict[str, str], tmp_path: Path) -> None:
    """One that is gone fails the save on all ranks."""

    def call(agreement: Agreement) -> None:
        given = files if agreement.rank == 0 else {"other": "nowhere"}
        topology = Topology(dp=2, rank=agreement.rank)
        with Checkpointer(tmp_path, storage=LocalStorage(tmp_path), topology=topology, run_id="run") as saver:
            saver.save("one", MODEL, files=given)
            if agreement.rank == 0:
                os.unlink(files["config.json"])
            saver.save("two", MODEL, files=given)

    told = on_ranks(2, call)
    assert [SaveFailed, SaveFailed] == [type(each) for each in told]
    assert all("config.json was given to this save, and vanished" in str(each) for each in told)
    assert ((), ()) == seen(tmp_path / "one")
    assert not (tmp_path / "two").exists()
