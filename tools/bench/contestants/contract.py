"""What every contestant can be asked."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from tools.bench.results import ASYNC, COLD, LOST, RETURNED, SAVE, SLOWDOWN, STALL, WARM
from tools.bench.workloads import State
from tools.bench.world import World

SAVES = frozenset({SAVE, RETURNED})
ASYNCS = frozenset({STALL, ASYNC, SLOWDOWN, LOST})
LOADS = frozenset({WARM, COLD})


class Pending(Protocol):
    """An async save in flight."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Return once it is durable."""


class Contestant:
    """One way to save and load ``state``. Methods take no part in what is outside :attr:`measures`.

    A save goes to a new path, as a training run's do; :meth:`tidy` removes the one before, which nobody times.
    Loads read the latest save, and leave its values in the live tensors.

    Attributes:
        measures: what it can be measured at.
        loads: ways to load; each is a row.
        restores: whether a load brings the live tensors back (a floor reads into memory of its own).
        fresh: at what it needs memory that it does not have yet, the page cache's for what it writes included.
        notes: by measure, what a reader must know.
    """

    measures: frozenset[str] = SAVES | LOADS
    loads: tuple[str, ...] = ("",)
    restores = True
    fresh: frozenset[str] = SAVES | ASYNCS | LOADS
    notes: Mapping[str, str] = MappingProxyType({})

    def __init__(self, name: str, state: State, directory: Path, world: World) -> None:
        self.name, self.state, self.world = name, state, world
        self.directory = directory / name.translate(str.maketrans(" /,+=", "_____"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self._saves = 0

    def save(self, durable: bool) -> None:
        raise NotImplementedError

    def save_async(self) -> Pending:
        raise NotImplementedError

    def load(self, how: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Give memory and threads back."""

    @property
    def leads(self) -> bool:
        """Whether this rank writes what is the same on all."""
        return self.world.rank == 0

    @property
    def saved(self) -> bool:
        """Whether there is something to load."""
        return self._saves > 0

    @property
    def path(self) -> Path:
        """The latest save."""
        return self.directory / f"step_{self._saves}"

    def next_path(self) -> Path:
        """Where the save that begins goes to."""
        self._saves += 1
        return self.path

    def tidy(self) -> None:
        """Remove all saves but the latest."""
        if self.leads:
            kept = self.path.name
            for path in self.directory.glob("step_*"):
                if path.name != kept and not path.name.startswith(f"{kept}."):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


RATE = 200 * 10**6
"""Bytes a second of a save that is to slow training down by at most 2 % on two cores."""


class Settled:
    """An async save that was complete when its call returned: of a floor."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return
