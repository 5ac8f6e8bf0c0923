"""The mistakes of somebody who uses this for the first time: each works, or gets a message that names its cause."""

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import (
    Checkpointer,
    Topology,
    close_checkpointers,
    convert,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    DirectoryInUse,
    InvalidArgument,
    InvalidTag,
    OptimizerMismatch,
    SaveFailed,
    StorageError,
    TopologyMismatch,
    UnsupportedState,
)
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation

STATE = {"w": torch.ones(2)}


def _trained(width: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def _forgotten_close() -> None:
    Checkpointer("run").save(1, STATE, async_save=True)
    gc.collect()
    Checkpointer("run").save(2, STATE)
    assert has_checkpoint("run")


def _two_handles() -> None:
    with Checkpointer("run") as first:
        first.save(1, STATE)
        Checkpointer("run").save(2, STATE)


def _another_number_of_ranks() -> None:
    ranks = [Checkpointer("run", topology=Topology(tp=2, rank=rank), run_id="launch1") for rank in range(2)]
    for rank, saver in enumerate(ranks):  # without attributes nothing tells how it is cut
        saver.save("t", {"w": torch.full((2,), float(rank))}, async_save=True)
    for saver in ranks:
        saver.close()
    load_checkpoint("run", "t", {})


def _one_rank_only() -> None:
    Checkpointer("run", topology=Topology(dp=2, rank=0), run_id="launch1", timeout=1).save(1, STATE)


def _gone() -> None:
    save_checkpoint("from", "run", STATE)
    source = os.path.abspath("from/run")
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    os.rmdir("../elsewhere")
    convert(source, "out", to="files")


def _cell_twice() -> None:
    for _ in range(2):
        saver = Checkpointer("run", every=1)
        first = saver.load_latest({}) + 1
        saver.save(first, STATE, async_save=True)
    saver.wait()
    assert [1, 2] == saver.all_steps()


def _interrupted() -> None:
    def interrupt(operation: Operation) -> None:
        if operation.key.endswith(".pt") and not pressed:
            pressed.append(1)
            raise KeyboardInterrupt

    pressed = list[int]()
    saver = Checkpointer("", storage=HookedStorage(LocalStorage("run"), interrupt))
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        saver.save(1, STATE)
    saver.save(2, STATE)
    assert [2] == saver.all_steps()


def _disk(number: int) -> Callable[[], Any]:
    """A save on a disk that refuses every file."""

    def refuse(operation: Operation) -> None:
        if operation.name in ("write", "write_at", "make_dir", "create"):
            raise OSError(number, os.strerror(number), operation.key)

    return lambda: Checkpointer("", storage=HookedStorage(LocalStorage("run"), refuse)).save(1, STATE)


def _compiled() -> None:
    model, optimizer = _trained()
    save_checkpoint("run", "t", torch.compile(model), optimizer)
    load_checkpoint("run", "t", *_trained())


def _another_optimizer() -> None:
    model, optimizer = _trained()
    save_checkpoint("run", "t", model, optimizer)
    load_checkpoint("run", "t", model, torch.optim.SGD(model.parameters(), momentum=0.9))


def _load_with(**options: Any) -> None:
    save_checkpoint("run", "t", STATE)
    load_checkpoint("run", "t", {}, **options)


def _in_the_way(path: str, call: Callable[..., Any] = save_checkpoint, *arguments: Any) -> None:
    save_checkpoint("from", "run", STATE)
    Path("run").write_text("a log")
    call(path, *(arguments or (1, STATE)) if call is save_checkpoint else arguments)


WORKS = None
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception] | None, str]] = {
    "swapped: model and optimizer": (
        lambda: save_checkpoint("run", 1, *_trained()[::-1]),
        InvalidArgument,
        r"^model= is an optimizer \(AdamW\): pass it as optimizer=",
    ),
    "swapped: directory and tag": (
        lambda: save_checkpoint("step_1", os.getcwd(), STATE),
        InvalidTag,
        "^tag .* must be one name.*it is not a path",
    ),
    "swapped: model and directory": (
        lambda: save_checkpoint(*_trained()[:1], "run", STATE),  # type: ignore[arg-type]
        InvalidArgument,
        "^checkpoint_dir_str must be a string or a path.*found a Linear",
    ),
    "a forgotten close": (_forgotten_close, WORKS, ""),
    "two handles": (_two_handles, DirectoryInUse, r"this process already saves here.*close_checkpointers\(\)"),
    "a file as the directory": (
        lambda: _in_the_way("run"), StorageError, "/run is a file, expected a directory: move it away, or choose",
    ),
    "a directory below a file": (
        lambda: _in_the_way("run/a/b"), StorageError, "/run is a file, expected a directory: move it away, or choose",
    ),
    "a load from below a file": (
        lambda: _in_the_way("run/a", load_checkpoint, None, {}), CheckpointNotFound, "/run is a file, expected a dir",
    ),
    "a conversion to below a file": (
        lambda: _in_the_way("run/a", lambda path: convert("from/run", path, to="files")),
        CheckpointError,
        "/run is a file, expected a directory",
    ),
    "a NUL": (lambda: save_checkpoint("r\0n", 1, STATE), InvalidArgument, r"^'r\\x00n' holds a NUL, which no path may"),
    "a long name": (lambda: save_checkpoint("r" * 300, 1, STATE), StorageError, "too long.*; choose a shorter path"),
    "another number of ranks": (_another_number_of_ranks, TopologyMismatch, r"w: .*is not known; pass partitions="),
    "one rank only": (_one_rank_only, SaveFailed, "no vote from rank 1 of 2.*or not in this save"),
    "a removed directory": (_gone, StorageError, "if the working directory was removed, change to another one"),
    "a cell twice": (_cell_twice, WORKS, ""),
    "Ctrl-C": (_interrupted, WORKS, ""),
    "a full disk": (_disk(errno.ENOSPC), StorageError, "No space left on device.*free space there"),
    "a compiled model": (_compiled, WORKS, ""),
    "another optimizer": (_another_optimizer, OptimizerMismatch, "the live SGD does not know: another class"),
    "no directory": (lambda: save_checkpoint(None, 1, STATE), InvalidArgument, "^the checkpoint directory is None"),
    "no input": (
        lambda: convert(None, "x", to="tag", tp=2),  # type: ignore[arg-type]
        InvalidArgument,
        "^src must be a string or a path, found None",
    ),
    "a model as a tag": (
        lambda: save_checkpoint("run", torch.nn.Linear(1, 1)),  # type: ignore[arg-type]
        InvalidTag,
        "^tag must be a .* found a Linear$",
    ),
    "schedulers in a dict": (
        lambda: save_checkpoint("run", 1, STATE, scheduler={"warmup": torch.nn.Linear(1, 1)}),
        UnsupportedState,
        "^scheduler= is a dict with .* pass them by names of your choice, state=",
    ),
    "nothing to save": (lambda: save_checkpoint("run", 1), InvalidArgument, "^nothing was passed to be saved"),
    "a URL as a path": (
        lambda: _load_with(pre_download=True, work_dir="s3://bucket/tmp"),
        InvalidArgument,
        "^work_dir='s3://bucket/tmp' is a URL, expected a directory",
    ),
    "a path from a URL": (
        lambda: save_checkpoint(Path("s3://bucket/run"), 1, STATE),
        InvalidArgument,
        "^'s3:/bucket/run' is a URL that lost a slash.*pass URLs as strings",
    ),
    "a URL as a tag": (lambda: save_checkpoint("run", "s3://b/1", STATE), InvalidTag, "^tag .* it is not a path"),
}  # fmt: skip
"""What a newcomer does; the error, and its message."""


@pytest.mark.parametrize(("mistake", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_of_a_newcomer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[], Any],
    error: type[Exception] | None,
    message: str,
) -> None:
    """All in an empty directory; after each, a save there works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if error is None:
        mistake()
    else:
        with pytest.raises(error, match=message):
            mistake()
    close_checkpointers()
    save_checkpoint(tmp_path / "after", 1, STATE)


def test_no_group_is_in_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several processes that no group joins: tests/protocol/test_forgotten_group.py has each call."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(InvalidArgument, match=r"^WORLD_SIZE=8: this process is one of 8.*init_process_group"):
        save_checkpoint(tmp_path / "run", 1, STATE)
