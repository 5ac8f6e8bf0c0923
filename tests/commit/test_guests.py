"""Files of others in a tag: they stay, whenever they come and whatever happens to the save."""

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch

import nxd_ckpt
import nxd_ckpt.verify
from nxd_ckpt import convert
from nxd_ckpt.cli.main import main
from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.control_files import JOURNAL, STAGING, staging_dir
from nxd_ckpt.coordination.guests import bring
from nxd_ckpt.core import names
from nxd_ckpt.core.names import DONE, MARKER
from nxd_ckpt.storage import local
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import Hook, HookedStorage, MemoryStorage, Operation

MODEL = {"w": torch.ones(4)}
GUESTS = ("config.json", "tokenizer/vocab.txt", "tokenizer/deep/er.txt", "model/notes.md", "optim/mine.bin")


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system can exchange two names."""
    if not request.param:
        monkeypatch.setattr(local, "exchange", lambda one, other: False)
    return bool(request.param)


def put(folder: Path, *files: str, text: str = "theirs") -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


def texts(folder: Path, *files: str) -> list[str]:
    return [(folder / file).read_text() for file in files]


@pytest.mark.usefixtures("exchanges")
@pytest.mark.parametrize("use_xser", [False, True])
def test_what_was_there_before_stays(tmp_path: Path, use_xser: bool) -> None:
    """Before the first save, and through every later one."""
    put(tmp_path / "shards", *GUESTS)
    (tmp_path / "shards" / "empty").mkdir()
    with nxd_ckpt.Checkpointer(tmp_path) as checkpointer:
        for value in (1.0, 2.0):
            checkpointer.save("shards", {"w": torch.full((4,), value)}, use_xser=use_xser)
            assert ["theirs"] * len(GUESTS) == texts(tmp_path / "shards", *GUESTS)
            assert (tmp_path / "shards" / "empty").is_dir()
    loaded: dict[str, torch.Tensor] = {}
    nxd_ckpt.load_checkpoint(tmp_path, model=loaded)
    assert [2.0] * 4 == loaded["w"].tolist()
    assert [] == list(tmp_path.glob(".nxd_ckpt/trash/*"))


@pytest.mark.usefixtures("exchanges")
def test_empty_folders_and_a_done_that_somebody_touched_are_no_obstacle(tmp_path: Path) -> None:
    """Trainers make them before the save."""
    (tmp_path / "shards" / "model").mkdir(parents=True)
    (tmp_path / "shards" / DONE).touch()
    nxd_ckpt.save_checkpoint(tmp_path, "shards", MODEL)
    assert nxd_ckpt.has_checkpoint(tmp_path)
    nxd_ckpt.load_checkpoint(tmp_path, "shards", model={})


@pytest.mark.usefixtures("exchanges")
@pytest.mark.parametrize("exists", [False, True])
def test_what_comes_while_a_tag_is_saved_is_in_it(tmp_path: Path, exists: bool) -> None:
    """At any operation of the publication; a file that is open meanwhile is written to the end."""
    shards = tmp_path / "shards"
    for number in count():
        storage = LocalStorage(tmp_path / str(number), durable=False)
        tag = tmp_path / str(number) / "shards"
        if exists:
            prepared(storage, "shards")
        prepared(storage, staging_dir("run-1"))
        numbers, opened = count(), []

        def come(operation: Operation) -> None:
            if next(numbers) == number:  # noqa: B023
                put(tag, "config.json", "model/notes.md")  # noqa: B023
                opened.append(open(tag / "slow.json", "w"))  # noqa: B023, SIM115

        journal.publish(HookedStorage(storage, come), "run-1", "shards", lambda: True)
        if not opened:
            break
        opened[0].write("theirs")
        opened[0].close()
        assert ["theirs"] * 3 == texts(tag, "config.json", "model/notes.md", "slow.json"), number
        assert "1" == (tag / MARKER).read_text()
    assert 4 < number
    assert not shards.exists()


def prepared(storage: Storage, folder: str) -> None:
    for name in (MARKER, DONE):
        storage.write(f"{folder}/{name}", b"1")


class Death(BaseException):
    """What nothing catches: the process is gone, as far as the storage can tell."""


def at(number: int, act: Callable[[], None]) -> Hook:
    numbers = count()
    return lambda operation: act() if next(numbers) == number else None


def die() -> None:
    raise Death


@pytest.mark.usefixtures("exchanges")
@pytest.mark.parametrize("late", [False, True])
def test_a_death_at_any_operation_loses_none(tmp_path: Path, late: bool) -> None:
    """Also in the recovery; ``late``: one comes right before the process dies, where its directory is away."""
    for number in range(200):
        storage = LocalStorage(tmp_path / str(number), durable=False)
        tag = tmp_path / str(number) / "shards"
        prepared(storage, "shards")
        put(tag, *GUESTS)
        prepared(storage, staging_dir("run-1"))

        def end() -> None:
            if late:
                put(tag, "late.txt")  # noqa: B023
            raise Death

        expected = [*GUESTS, *(["late.txt"] if late else [])]
        try:
            journal.publish(HookedStorage(storage, at(number, end)), "run-1", "shards", lambda: True)
        except Death:
            for again in (3, 6, 9):
                with suppress(Death):
                    journal.recover(HookedStorage(storage, at(number % again, die)))
            journal.recover(storage)
            assert ["theirs"] * len(expected) == texts(tag, *expected), number
            assert "1" == (tag / DONE).read_text()
            assert not storage.is_file(JOURNAL)
        else:
            break
    assert 20 < number < 199


@pytest.mark.usefixtures("exchanges")
def test_an_undone_publication_keeps_what_came_to_it(tmp_path: Path) -> None:
    """The old tag has it then."""
    storage, tag = LocalStorage(tmp_path), tmp_path / "shards"
    prepared(storage, "shards")
    prepared(storage, staging_dir("run-1"))
    put(tmp_path / staging_dir("run-1"), "new")

    def hook(operation: Operation) -> None:
        if operation == Operation("sync_dir", "") and (tag / "new").exists() and not (tag / "late.txt").exists():
            put(tag, "late.txt")
            raise OSError(5, "not synced")

    with pytest.raises(OSError, match="not synced"):
        journal.publish(HookedStorage(storage, hook), "run-1", "shards", lambda: (tag / "new").exists())
    assert ["theirs"] == texts(tag, "late.txt")


def test_of_two_with_one_name_the_later_stays(tmp_path: Path) -> None:
    """Files that were replaced while the directories changed places."""
    for number, (old, new) in enumerate([(2.0, 1.0), (1.0, 2.0)]):
        put(tmp_path / f"old{number}", "both.txt", "folder/both.txt", text="old")
        put(tmp_path / f"new{number}", "both.txt", "folder/both.txt", text="new")
        for folder, seconds in ((f"old{number}", old), (f"new{number}", new)):
            for file in ("both.txt", "folder/both.txt"):
                os.utime(tmp_path / folder / file, (seconds, seconds))
        bring(LocalStorage(tmp_path), f"old{number}", f"new{number}")
        later = "old" if old > new else "new"
        assert [later] * 2 == texts(tmp_path / f"new{number}", "both.txt", "folder/both.txt")


def test_links_pipes_and_what_they_lead_to_stay(tmp_path: Path) -> None:
    """They are moved as they are, and never opened."""
    put(tmp_path / "elsewhere", "data.txt")
    put(tmp_path / "shards", "config.json")
    (tmp_path / "shards" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "shards" / "nowhere").symlink_to("absent")
    os.mkfifo(tmp_path / "shards" / "pipe")
    for _ in range(2):
        nxd_ckpt.save_checkpoint(tmp_path, "shards", MODEL)
    assert ["theirs"] == texts(tmp_path / "shards", "link/data.txt")
    assert (tmp_path / "shards" / "nowhere").is_symlink()
    assert (tmp_path / "shards" / "pipe").is_fifo()


def test_in_a_store_they_stay_where_they_are(tmp_path: Path) -> None:
    """Through a save over the tag, a save that fails, and the next job's sweep. Retention removes them with the tag."""
    storage = MemoryStorage()
    storage.write("a/config.json", b"theirs")
    with nxd_ckpt.Checkpointer("run", storage=storage) as checkpointer:
        checkpointer.save("a", MODEL)
        storage.write("a/tokenizer/vocab.txt", b"theirs")
        checkpointer.save("a", MODEL, overwrite=True)
    journal.declare(storage, staging_dir("dead-1"), "b")
    for name in ("config.json", "scheduler.pt"):
        storage.write(f"b/{name}", b"theirs")
    with nxd_ckpt.Checkpointer("run", storage=storage) as checkpointer:
        checkpointer.save("c", MODEL)
    for key in ("a/config.json", "a/tokenizer/vocab.txt", "b/config.json"):
        assert b"theirs" == storage.read(key)
    assert not storage.is_file("b/scheduler.pt")
    assert [] == storage.list(STAGING)
    with nxd_ckpt.Checkpointer("run", storage=storage) as checkpointer:
        checkpointer.remove("a")
    assert [] == storage.list("a")


@pytest.mark.parametrize("use_xser", [False, True])
def test_every_file_of_a_save_is_its_own(tmp_path: Path, use_xser: bool) -> None:
    """No file that a save writes counts as somebody else's."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = model, optimizer, scheduler, {"a": 1}
    nxd_ckpt.save_checkpoint(tmp_path, "t", *state, use_xser=use_xser, rank_content={"b": 2})
    files = [str(path.relative_to(tmp_path / "t")) for path in (tmp_path / "t").rglob("*") if path.is_file()]
    assert [] == [file for file in files if not names.is_own(file)]
    assert len(files) > 5


def test_names_that_only_look_like_a_saves_are_guests() -> None:
    """And the temporaries of its files are not."""
    own = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    assert [True] * 4 == [
        *map(names.is_own, [own, "model/.dp_rank_00_tp_rank_00_pp_rank_00.pt.0123456789ab", "optim/__0_1.distcp"]),
        names.is_own_folder(f"{own}.tensors"),
    ]
    others = ("config.json", "model/config.json", "index/faiss.bin", f"x/{own}", "model", ".hidden", f"{own}.bak")
    assert [] == [*filter(names.is_own, others)]
    assert not any(map(names.is_own_folder, ("tokenizer", "model/sub", "model.tensors")))




def test_copies_resharding_and_tiers_carry_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also what stood in the place of the copy; a pipe is left out. ``verify`` and ``list`` say what has no digest."""
    lower = tmp_path / "lower"
    put(lower / "t", "lower.txt")
    with nxd_ckpt.Checkpointer(tiers=[nxd_ckpt.Tier(tmp_path / "run"), nxd_ckpt.Tier(lower)]) as checkpointer:
        put(tmp_path / "run" / "t", *GUESTS)
        os.mkfifo(tmp_path / "run" / "t" / "pipe")
        checkpointer.save("t", torch.nn.Linear(4, 4))
        checkpointer.wait(tier=1)
    with nxd_ckpt.Checkpointer(tmp_path / "copies") as checkpointer:
        checkpointer.save("t", MODEL)
    put(tmp_path / "copies" / "t", "older.txt")
    assert 0 == main(["cp", str(tmp_path / "run" / "t"), str(tmp_path / "copies" / "t"), "--overwrite"])
    convert(tmp_path / "run" / "t", tmp_path / "resharded", to="tag", dp=2)
    for folder, more in (("lower/t", ["lower.txt"]), ("copies/t", ["older.txt"]), ("resharded", [])):
        expected = [*GUESTS, *more]
        assert ["theirs"] * len(expected) == texts(tmp_path / folder, *expected)
        assert not (tmp_path / folder / "pipe").exists()

    capsys.readouterr()
    assert 0 == main(["verify", str(lower)])
    assert 0 == main(["list", str(lower)])
    out = capsys.readouterr().out
    assert "not read: 6 files of others, which nxd_ckpt has no digest of: config.json, " in out
    assert "t holds files of others, which carry no digest: config.json, lower.txt, tokenizer" in out
    assert set(GUESTS) < set(nxd_ckpt.verify.verify_checkpoint(lower).guests)
    assert ("config.json", "lower.txt", "tokenizer") == nxd_ckpt.list_checkpoints(lower)[0].guests
