"""Reading ahead of the writing: two buffers, one that is filled while the caller writes the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nxd_ckpt.runtime.arena import Arena

Task = TypeVar("Task")
Filled = TypeVar("Filled")


class Ahead:
    """Two buffers of at most ``nbytes`` each, which are reused."""

    def __init__(self, nbytes: int) -> None:
        self._arenas = (Arena(nbytes), Arena(nbytes))

    def filled(
        self, tasks: Sequence[Task], fill: Callable[[Task, Arena], Filled]
    ) -> Iterator[tuple[Task, Filled]]:
        """Each task with what ``fill`` made of it, valid until the next is asked for. Raises what that raises."""
        with ThreadPoolExecutor(1, "nxd_ckpt-reader") as reader:
            ahead = [reader.submit(fill, task, self._arenas[0]) for task in tasks[:1]]
            for number, task in enumerate(tasks):
                found = ahead.pop().result()
                if number + 1 < len(tasks):
                    ahead.append(reader.submit(fill, tasks[number + 1], self._arenas[(number + 1) % 2]))
                yield task, found
