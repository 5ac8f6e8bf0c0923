"""Readers while others write: a tag that is replaced or removed under a reader is never taken for a damaged one.

Before each operation of a reader in turn, a job saves: under the name that is being read, or a newer tag for which
the old one goes. What is read is then all of one save, or TagReplaced says what happened.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from nxd_ckpt import (
    Checkpointer,
    Topology,
    convert,
    copy_checkpoint,
    has_checkpoint,
    open_checkpoint,
    unshard_checkpoint,
)
from nxd_ckpt.checkpoint import get_checkpoint_metadata
from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.agreement import StoreAgreement
from nxd_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, PartNotFound, TagReplaced
from nxd_ckpt.examine.diff import diff_checkpoints
from nxd_ckpt.loading.load import load as load_on_ranks
from nxd_ckpt.loading.options import LoadRequest
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.choosing import open_complete_tag
from nxd_ckpt.tag.listing import directory_document
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation

MODULES = ("tag.verify", "checkpoint", "commit.tier", "api", "tag.listing", "output.locations")
"""Where a reader opens its storage."""


INPUT = "the-directory"


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300,), float(value)), "x": torch.full((7, 5), float(value))}


class Directory:
    """A checkpoint directory, a job that saves to it, and readers that are disturbed."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.value = storage, 0
        self.job = Checkpointer(INPUT, storage=storage, durable=False)
        self.save("t")

    def save(self, tag: str, **options: Any) -> None:
        """The next value, with content of another size."""
        self.value, self.newest = self.value + 1, tag
        content = {"value": self.value, "longer": "." * self.value}
        self.job.save(tag, state(self.value), user_content=content, scheduler={"value": self.value}, **options)

    def replace(self) -> None:
        """Save under the name that is being read."""
        self.save("t", overwrite=True)

    def supersede(self) -> None:
        """Save a newer tag, for which the one that is being read goes."""
        self.save(f"t{self.value}", num_kept_ckpts=1)

    def remove(self) -> None:
        """As retention does."""
        if self.storage.renames:
            journal.remove_tag(self.storage, "t", f"x-{self.value}")
        else:
            self.storage.remove("t/done")
            self.storage.remove("t")

    @contextmanager
    def disturbed(self, number: int, disturb: Callable[[], None]) -> Iterator[list[Operation]]:
        """Readers see a storage that calls ``disturb`` before operation ``number``; what they did."""
        log: list[Operation] = []

        def hook(operation: Operation) -> None:
            log.append(operation)
            if len(log) == number + 1:
                disturb()

        def opened(path: Any, *others: Any, **options: Any) -> Storage:
            is_input = str(path).endswith(INPUT)
            return HookedStorage(self.storage, hook) if is_input else open_storage(path, *others, **options)

        with ExitStack() as patches:
            for module in MODULES:
                if hasattr(__import__(f"nxd_ckpt.{module}", fromlist=["x"]), "open_storage"):
                    patches.enter_context(mock.patch(f"nxd_ckpt.{module}.open_storage", opened))
            yield log


@pytest.fixture(params=["directory", "store"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Directory]:
    storage = LocalStorage(tmp_path / "run", durable=False) if request.param == "directory" else MemoryStorage()
    directory = Directory(storage)
    yield directory
    directory.job.close()


def value_of(loaded: dict[str, torch.Tensor], content: Any) -> int:
    """Of the one save that all of it is from."""
    found = {float(number) for tensor in loaded.values() for number in tensor.flatten()} | {float(content["value"])}
    assert 1 == len(found), found
    return int(found.pop())


def sweep(directory: Directory, disturb: Callable[[], None], read: Callable[[int], Any], *, step: int = 1) -> int:
    """``read`` with a disturbance before each operation; how many times it raised TagReplaced, all else is wrong."""
    replaced = number = 0
    while True:
        with directory.disturbed(number, disturb) as log:
            try:
                read(number)
            except TagReplaced:
                replaced += 1
        assert len(log) < 2000
        if len(log) <= number:
            return replaced
        number += step


def load(tag: str | None, **options: Any) -> int:
    loaded: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    with Checkpointer(INPUT) as reader:
        content = reader.load(tag, model=loaded, **options)
    return value_of(loaded, content)


@pytest.mark.parametrize("verify", [True, "reading", False])
@pytest.mark.one_in(2)
def test_a_load_of_the_latest_goes_on_with_the_new_one(directory: Directory, verify: Any) -> None:
    """Whenever the old one goes, by either way."""

    def latest(_: int) -> None:
        assert load(None, verify=verify) in (directory.value - 1, directory.value)

    assert 0 == sweep(directory, directory.replace, latest, step=2)
    assert 0 == sweep(directory, directory.supersede, latest, step=3)


@pytest.mark.parametrize("disturb", ["replace", "remove"])
def test_a_load_of_a_named_tag_says_what_became_of_it(directory: Directory, disturb: str) -> None:
    """Unless it had all that it needs."""

    def named(_: int) -> None:
        if not directory.storage.is_file("t/done"):
            directory.save("t")
        try:
            assert load("t") in (directory.value - 1, directory.value)
        except PartNotFound:
            raise
        except CheckpointNotFound:
            pass  # it went before it was chosen

    assert sweep(directory, getattr(directory, disturb), named) > 4


@pytest.mark.parametrize(("disturb", "what"), [("replace", "replaced by another save"), ("remove", "removed")])
def test_the_error_says_what_happened(directory: Directory, disturb: str, what: str) -> None:
    """And what was met."""
    with directory.disturbed(10**9, directory.replace):
        checkpoint = open_checkpoint(INPUT, "t")
        getattr(directory, disturb)()
        with pytest.raises(TagReplaced, match=f"/t was {what} while it was read"):
            checkpoint.read("model/w")


def test_what_reads_the_latest_reads_the_new_one(directory: Directory) -> None:
    """Verifying, opening, listing: no error, and nothing that looks like damage."""

    def read(_: int) -> None:
        assert () == verify_checkpoint(INPUT).problems
        assert ["model/w", "model/x"] == list(get_checkpoint_metadata(INPUT))
        assert has_checkpoint(INPUT)
        assert [] == [problem for tag in directory_document(INPUT)["tags"] for problem in tag["problems"]]

    assert 0 == sweep(directory, directory.supersede, read)


def read_named(target: Path) -> dict[str, Callable[[], Any]]:
    """Every way to read the tag "t"."""
    opened = open_checkpoint

    def tensors() -> None:
        checkpoint = opened(INPUT, "t")
        value_of({name: checkpoint.read(f"model/{name}") for name in ("w", "x")}, checkpoint.user_content())

    def differs() -> None:
        assert not diff_checkpoints(opened(INPUT, "t"), opened(INPUT, "t"), full=True).problems

    return {
        "tensors": tensors,
        "verify": lambda: verify_checkpoint(INPUT, "t"),
        "diff": differs,
        "cp": lambda: copy_checkpoint(f"/{INPUT}/t", target / "t"),
        "pack": lambda: convert(f"/{INPUT}/t", target / "t.tar", to="tar"),
        "unshard": lambda: unshard_checkpoint(f"/{INPUT}/t", target / "t"),
        "to_dcp": lambda: convert(f"/{INPUT}/t", target / "t", to="dcp"),
        "reshard": lambda: convert(f"/{INPUT}/t", target / "t", to="tag", dp=2),
    }


@pytest.mark.parametrize("how", read_named(Path()))
@pytest.mark.one_in(3)
def test_every_reader_of_a_named_tag(directory: Directory, how: str, tmp_path: Path) -> None:
    """What it makes is of one save; or it says that the tag was replaced, and makes nothing."""

    def read(number: int) -> None:
        target = tmp_path / "out" / str(number)
        target.mkdir(parents=True)
        read_named(target)[how]()
        if how in ("cp", "reshard"):
            assert () == verify_checkpoint(target, "t").problems

    assert sweep(directory, directory.replace, read, step=3) > 1


def test_all_ranks_go_on_with_the_same_tag(directory: Directory) -> None:
    """Whenever one of them finds that the old one went, also between the moments at which they open it."""

    def both(number: int) -> None:
        store = HashStore()

        def rank(number: int, storage: Storage) -> int:
            loaded: dict[str, Any] = {}
            agreement = StoreAgreement(store, number, 2, timeout=600)
            request = LoadRequest(Topology(dp=2, rank=number), agreement, loaded, None, timeout=60.0)
            content = load_on_ranks([storage], None, request).user_content
            return value_of(loaded, content)

        with ThreadPoolExecutor(1) as thread:
            other = thread.submit(rank, 1, directory.storage)
            values = [rank(0, Checkpointer(INPUT).storage), other.result()]
        assert values[0] == values[1]

    assert 0 == sweep(directory, directory.supersede, both, step=5)
    if directory.storage.renames:
        name = directory.newest
        assert 0 == sweep(directory, lambda: directory.save(name), both, step=5)


def save_as_nxd(folder: Path, value: int) -> None:
    """In place, as neuronx_distributed does: no index, no manifest."""
    for name in ("model", "optim"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint").write_text("1")
    torch.save(state(value), folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    torch.save({"value": value, "longer": "." * value}, folder / "user_content.pt")
    (folder / "done").write_text("1")
    os.utime(folder / "done", (value, value))


def test_a_tag_of_nxd_that_is_saved_anew(tmp_path: Path) -> None:
    """No digest of ours tells its files from those of a later save."""
    save_as_nxd(tmp_path / "t", 1)
    directory = Directory.__new__(Directory)
    directory.storage, directory.value = LocalStorage(tmp_path), 1

    def replace() -> None:
        directory.value += 1
        save_as_nxd(tmp_path / "t", directory.value)

    assert sweep(directory, replace, lambda _: load("t")) > 5
    assert 0 == sweep(directory, replace, lambda _: load(None))


def test_damage_stays_damage(directory: Directory) -> None:
    """Where nobody replaced the tag, also while others are saved."""
    file = "t/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    data = bytearray(directory.storage.read(file))
    data[data.index(state(1)["w"].numpy().tobytes())] ^= 1
    directory.storage.remove(file)
    directory.storage.write(file, bytes(data))

    def damaged(_: int) -> None:
        with pytest.raises(CorruptCheckpoint):
            load("t")
        assert 1 <= len(verify_checkpoint(INPUT, "t").problems)

    assert 0 == sweep(directory, lambda: directory.save("another", overwrite=True), damaged, step=5)


def test_a_tag_of_a_store_that_began_to_go_before_it_was_opened() -> None:
    """``done`` goes first; what is left is not taken for a tag that lost a file."""
    storage = MemoryStorage()
    with Checkpointer(INPUT, storage=storage) as job:
        job.save("t", state(1))
    storage.remove("t/done")
    with pytest.raises(TagReplaced, match="was removed, or is being replaced"):
        open_complete_tag(storage, "t")
