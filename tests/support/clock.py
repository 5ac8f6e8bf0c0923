"""A clock for what waits: its time passes only while somebody sleeps."""

from collections.abc import Callable
from typing import Any

from nxd_ckpt.testing.storage import Operation


class Clock:
    """Stands in for ``nxd_ckpt.effects`` in a module that waits, in one thread.

    ``listing`` seconds pass with each listing of a storage whose hook is :meth:`looked`; ``slept`` are the sleeps.
    """

    def __init__(self, listing: float = 0.0) -> None:
        self.now, self.listing, self.slept = 0.0, listing, list[float]()
        self._due: list[tuple[float, Callable[[], Any]]] = []

    def at(self, seconds: float, action: Callable[[], Any]) -> None:
        """Let something happen once that time has come: what another rank does meanwhile."""
        self._due.append((seconds, action))

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        for moment, action in sorted(self._due, key=lambda due: due[0]):
            if moment <= self.now:
                action()
        self._due = [due for due in self._due if due[0] > self.now]

    def looked(self, operation: Operation) -> None:
        if operation.name == "list":
            self.now += self.listing
