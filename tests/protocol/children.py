"""Children of multiprocessing that end with an async save."""

import multiprocessing
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Topology, save_checkpoint
from nxd_ckpt.commit import tier
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, delaying, failing
from tests.support.processes import FORKED


def saves_last(path: Path, fails: bool) -> None:
    """The work of a child: its last line is an async save, which takes a while, or fails."""
    error = OSError(28, "No space left on device")
    hook = failing("close", "*-2/model/*", error) if fails else delaying("close", "*/model/*", 0.5)
    opened: Any = lambda path, durable, options: HookedStorage(LocalStorage(path, durable), hook)  # noqa: E731
    tier.open_storage = opened  # type: ignore[attr-defined]
    for tag in ("one", "two"):
        save_checkpoint(path, tag, {"weight": torch.ones(10)}, async_save=True)


def fails_without_rank_1(path: Path, error: BaseException) -> None:
    """The work of a child that fails after a save that only rank 0 makes."""
    weight = {"weight": torch.ones(10)}
    save_checkpoint(path, "t", weight, async_save=True, topology=Topology(dp=2), run_id="a", timeout=3600)
    raise error


def in_child(method: str, path: Path, fails: bool) -> int | None:
    context = FORKED if method == "forkserver" else multiprocessing.get_context(method)
    child = context.Process(target=saves_last, args=(path, fails))  # type: ignore[attr-defined]
    child.start()
    child.join(600)
    code: int | None = child.exitcode
    return code
