"""Reading ahead: while the caller uses what was read, a thread of its own reads what comes next."""

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
    """What ``fill`` made of each task, valid until the next is asked for. Raises what that raises.

    Memory: two arenas of at most ``nbytes`` each, which are filled in turn. ``threads`` may be given to read on.
    """
    arenas = Arena(nbytes), Arena(nbytes)
    with nullcontext(threads) if threads is not None else ThreadPoolExecutor(1, "nxd_ckpt-reader") as thread:
        ahead = [thread.submit(fill, task, arenas[0]) for task in tasks[:1]]
        try:
            for number in range(len(tasks)):
                found = ahead.pop().result()
                if number + 1 < len(tasks):
                    ahead.append(thread.submit(fill, tasks[number + 1], arenas[(number + 1) % 2]))
                yield found
        finally:
            wait(ahead)  # it fills memory that nobody holds afterwards
