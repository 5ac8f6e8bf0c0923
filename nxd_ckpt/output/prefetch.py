"""Reading ahead: a thread reads the next piece while the caller uses the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import TypeVar

from nxd_ckpt.storage.arena import Arena

Task = TypeVar("Task")
Filled = TypeVar("Filled")


def prefetched(
    tasks: Sequence[Task], fill: Callable[[Task, Arena], Filled], nbytes: int, threads: Executor | None = None
) -> Iterator[Filled]:
    """Yield ``fill``'s result for each task, valid until the next is asked for. Errors of ``fill`` pass.

    Memory: two arenas of at most ``nbytes`` each, which are filled in turn. Reads on ``threads`` if given.
    """
    arenas = Arena(nbytes), Arena(nbytes)
    with nullcontext(threads) if threads is not None else ThreadPoolExecutor(1, "nxd_ckpt-reader") as thread:
        ahead = [thread.submit(fill, task, arenas[0]) for task in tasks[:1]]
        try:
            for number in range(len(tasks)):
                filled = ahead.pop().result()
                if number + 1 < len(tasks):
                    ahead.append(thread.submit(fill, tasks[number + 1], arenas[(number + 1) % 2]))
                yield filled
        finally:
            wait(ahead)  # it fills memory that is released afterwards
