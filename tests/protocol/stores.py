"""Jobs on a store in memory: processes that are threads, and that may die before any operation.

A process dies by losing its connection: nothing that it does afterwards reaches the store, which is all that a store
sees of a death.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.coordination.paths import LEASE, STAGING, TRASH
from nxd_ckpt.core import names
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.opened import open_complete_tag
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation
from tests.protocol.states import PATIENCE, weights

Moment = Callable[[Operation], bool]
"""Whether it is just before this operation."""


def nth(number: int) -> Moment:
    """Before the operation with this number, counted from 0."""
    seen = iter(range(10**9))
    return lambda operation: next(seen) == number


def before(name: str, end: str) -> Moment:
    """Before an operation of this name on a key that ends so."""
    return lambda operation: operation.name == name and operation.key.endswith(end)


class _Connection(MemoryStorage):
    """A process's own way to the store. Once it is gone, the process aborts nothing any more."""

    gone = False

    def forget(self, writer: Any) -> None:
        if not self.gone:
            super().forget(writer)


class Process:
    """One rank of a job. From :meth:`arm` on, ``then`` happens once, at the given moment."""

    def __init__(self, store: MemoryStorage, rank: int = 0, world: int = 1, run: str | None = None, **options: Any):
        self._connection = _Connection(store.name, store.renames)
        self._lock, self._armed = threading.Lock(), False
        self._moment: Moment = lambda operation: False
        self._then: Callable[[], Any] = lambda: None
        self.reached = threading.Event()
        self.log: list[Operation] = []
        self.saver = Checkpointer(
            store.url,
            topology=Topology(tp=world, rank=rank),
            storage=HookedStorage(self._connection, self._hook),
            run_id=run,
            **{"timeout": PATIENCE, **options},
        )

    def arm(self, moment: Moment, then: Callable[[], Any] | None = None) -> None:
        """By default it dies: no operation happens any more."""
        self._moment, self._then = moment, then or self.die
        self.log.clear()
        self._armed = True

    def save(self, tag: str, value: int, **options: Any) -> Any:
        """Save a state that tells the value, see tests.protocol.states; the error, or None."""
        rank = self.saver.topology.rank
        try:
            self.saver.save(tag, weights(value, rank), user_content={"value": value}, **options)
        except Exception as error:
            return error
        return None

    def end(self) -> None:
        """Give the directory back, dead or alive. Another save takes it again."""
        with suppress(CheckpointError):
            self.saver.release()

    def die(self) -> None:
        self._connection.gone = True

    def _hook(self, operation: Operation) -> None:
        with self._lock:
            due = self._armed and self._moment(operation)
            self.log.append(operation)
            if due:
                self._armed = False
        if due:
            self.reached.set()
            self._then()
        if self._connection.gone:
            raise OSError(errno.ENOTCONN, "the process is dead")


def bury(store: MemoryStorage) -> None:
    """Let the holder of the lease, if there is one, be known as dead: it was a process that is not this one."""
    if store.is_file(LEASE):
        store.write(LEASE, json.dumps({**json.loads(store.read(LEASE)), "born": "1"}).encode())


def complete_tags(storage: Storage) -> list[str]:
    return [info.tag for info in sorted(list_tags(storage), key=lambda info: info.order_time) if info.complete]


def value_in(store: MemoryStorage, tag: str, world: int = 1) -> int:
    """Which save a tag holds; loads and verifies every rank's part."""
    values = set()
    for rank in range(world):
        model: dict[str, torch.Tensor] = {}
        topology, storage = Topology(tp=world, rank=rank), MemoryStorage(store.name, store.renames)
        content = Checkpointer(store.url, topology=topology, storage=storage).load(tag, model)
        expected = weights(content["value"], rank)
        assert all(torch.equal(expected[name], model[name]) for name in expected)
        values.add(int(content["value"]))
    (value,) = values
    return value


def values(store: MemoryStorage, world: int = 1) -> dict[str, int]:
    """What every complete tag holds."""
    return {tag: value_in(store, tag, world) for tag in complete_tags(MemoryStorage(store.name))}


def strays(store: MemoryStorage) -> list[str]:
    """Keys and unfinished uploads that no complete tag names, but for the job's own small files."""
    named = set()
    for tag in complete_tags(store):
        opened = open_complete_tag(store, tag)
        assert opened.manifest is not None
        places = [opened.topology.coordinates_of(rank) for rank in range(opened.topology.world_size)]
        files = {file for at in places for file in (names.index_file(at), *opened.index(at).files)}
        named |= {f"{tag}/{file}" for file in (names.MARKER, names.MANIFEST, names.DONE, *files)}
    left = [key for key in store.keys if key.startswith((STAGING, TRASH)) or not key.startswith(".")]
    return [key for key in left if key not in named] + store.unfinished
