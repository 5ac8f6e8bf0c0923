"""Runs in forked processes, of which one is killed at a change of the file system. They import nothing."""

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
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
        gc.freeze()  # what the parent left is not collected here: threads that some of it would wait for are not here
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


SAVES = 8
"""Saves of a script."""
_KILLED_IN = (2.4, 2.7, 1.5)
"""Saves in which a script is killed, each time that it is started, in units of the mean changes of one save."""

Losses = dict[int, float]
"""By step."""
Script = Callable[[Path, Path], None]
"""A program that trains in a directory from the last checkpoint there on, and notes each loss in a file."""


def note(log: Path, step: int, loss: float) -> None:
    """Note the loss of a step, whatever happens to this process later."""
    with log.open("a") as file:
        file.write(json.dumps([step, loss]) + "\n")


def losses_in(log: Path) -> Losses:
    """The noted losses. A step that was made again has the same one."""
    found: Losses = {}
    for step, loss in map(json.loads, log.read_text().splitlines()):
        assert loss == found.setdefault(step, loss), f"step {step}"
    return found


def killed_three_times(script: Script, directory: Path) -> tuple[Losses, Losses]:
    """The losses of a run that nothing interrupts, and of one that is killed three times in its saves, and started
    again each time by the same call."""
    logs = directory / "whole.jsonl", directory / "killed.jsonl"
    changes = in_a_process(partial(script, directory / "whole", logs[0]))
    again = partial(script, directory / "killed", logs[1])
    for part in _KILLED_IN:
        assert -signal.SIGKILL == in_a_process(again, int(changes * part / SAVES))
    assert in_a_process(again) > 0
    whole, killed = map(losses_in, logs)
    return whole, killed
