"""nxd_ckpt: one Checkpointer kept over all rounds, as in a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxd_ckpt import Checkpointer
from tools.bench.contestants.contract import ASYNCS, LOADS, RATE, Contestant, Pending
from tools.bench.results import LOST, RETURNED, SAVE, SLOWDOWN
from tools.bench.workloads import State
from tools.bench.world import World

TWICE, ONCE, UNVERIFIED = "verify=True", 'verify="reading"', "verify=False"
UNPROVED = "verify=True, prove=False"
OPTIONS: dict[str, dict[str, Any]] = {
    TWICE: {"verify": True},
    ONCE: {"verify": "reading"},
    UNVERIFIED: {"verify": False},
    UNPROVED: {"verify": True, "prove": False},
}


class NxdCkpt(Contestant):
    """Plain files, or xser files. Digests are always written."""

    measures = ASYNCS | LOADS | {SAVE}
    loads: tuple[str, ...] = tuple(OPTIONS)
    # Its staging memory is its own after the first save, and what is written goes past the page cache: only the save
    # that is not durable needs memory that nobody has touched.
    fresh = frozenset({RETURNED})

    def __init__(
        self, name: str, state: State, directory: Path, world: World, *, use_xser: bool = False, durable: bool = True
    ) -> None:
        super().__init__(name, state, directory, world)
        self._use_xser = use_xser
        self._checkpointer = Checkpointer(self.directory, durable=durable)
        if use_xser:
            self.measures, self.loads = self.measures - {SLOWDOWN, LOST}, (ONCE,)
        if not durable:  # a property of the Checkpointer, not of a save
            self.measures = frozenset({RETURNED})

    def save(self, durable: bool) -> None:
        self._save(async_save=False)

    def save_async(self) -> Pending:
        return self._save(async_save=True)

    def save_slowly(self) -> Pending:
        return self._save(async_save=True, max_bytes_per_second=RATE)

    def load(self, how: str) -> None:
        state = self.state
        self._checkpointer.load(self.path.name, model=state.model, optimizer=state.optimizer, **OPTIONS[how])
        state.settle()

    def close(self) -> None:
        self._checkpointer.close()

    def _save(self, **options: Any) -> Pending:
        tag, state = self.next_path().name, self.state
        return self._checkpointer.save(tag, state.model, state.optimizer, use_xser=self._use_xser, **options)


class Slow(Contestant):
    """The saves of another contestant, and with them its staging memory, at a limited rate."""

    measures = frozenset({SLOWDOWN, LOST})
    fresh: frozenset[str] = frozenset()

    def __init__(self, name: str, fast: NxdCkpt) -> None:
        super().__init__(name, fast.state, fast.directory.parent, fast.world)
        self._fast = fast

    def save_async(self) -> Pending:
        return self._fast.save_slowly()

    def tidy(self) -> None:
        self._fast.tidy()


def plain(state: State, directory: Path, world: World) -> list[Contestant]:
    fast = NxdCkpt("nxd_ckpt", state, directory, world)
    return [
        fast,
        Slow(f"nxd_ckpt, {RATE // 10**6} MB/s", fast),
        NxdCkpt("nxd_ckpt, durable=False", state, directory, world, durable=False),
    ]


def xser(state: State, directory: Path, world: World) -> Contestant:
    return NxdCkpt("nxd_ckpt xser", state, directory, world, use_xser=True)
