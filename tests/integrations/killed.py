"""Runs in forked processes, of which one is killed at a change of the file system. They import nothing."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from nxd_ckpt.storage.local import LocalStorage

LASTS = 600.0
"""Seconds after which a run hangs."""

_CHANGES = ("create", "write", "link_new", "make_dir", "rename", "swap", "remove", "sync_dir", "set_time")


def killed_at(number: int | None, seen: Any = None) -> None:
    """From now on this process is killed before the change numbered ``number`` that it makes by storages of ours;
    ``seen``, a shared number, counts them."""
    seen = seen or multiprocessing.Value("i", 0)

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            with seen.get_lock():
                at, seen.value = seen.value, seen.value + 1
            if at == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args)

        return made

    for name in _CHANGES:
        setattr(LocalStorage, name, counted(getattr(LocalStorage, name)))


def in_a_process(run: Callable[[], Any], kill_at: int | None = None) -> int:
    """The number of changes that ``run`` makes by storages of ours; killed before the one numbered ``kill_at``, it is
    the negative number of the signal."""
    context = multiprocessing.get_context("fork")
    seen = context.Value("i", 0)

    def child() -> None:
        faulthandler.dump_traceback_later(LASTS / 2, exit=False)
        killed_at(kill_at, seen)
        run()

    process = context.Process(target=child)
    process.start()
    process.join(LASTS)
    code = process.exitcode
    assert code is not None, "the run hangs"
    assert code in (0, -signal.SIGKILL)
    return int(seen.value) if code == 0 else code
