"""What reading one file may cost, however small it is: tests/counts.md promises this much."""

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 2.0
"""Of CPU, for each part of a file that is begun."""
MEMORY = 256 * 2**20
"""Bytes beside the file's own, for each part of it that is begun."""
PART = 4 * 2**20
"""Bytes of a part of a file."""
PICKLE_PART = 2**20
"""Bytes of a part of a file that is a pickle, or holds one."""


class OverBudget(BaseException):
    """A file took more than it may. No Exception: a parser would make an error of the file of it."""


@contextmanager
def within_budget(nbytes: int, part: int = PICKLE_PART) -> Iterator[None]:
    """Around the reading of a file of ``nbytes`` bytes, in parts of ``part`` bytes, in the main thread. Memory beyond
    the budget is refused: MemoryError.

    Raises OverBudget: of CPU.
    """
    parts = max(1, -(-nbytes // part))
    seconds, began = parts * SECONDS, time.process_time()

    def stop(*_: Any) -> None:
        raise OverBudget(f"{nbytes} bytes took {time.process_time() - began:.1f} s of CPU, {seconds:.0f} are allowed")

    memory, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (_used() + parts * MEMORY + nbytes, memory[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, memory)


def _used() -> int:
    """Bytes of address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
