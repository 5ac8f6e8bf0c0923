"""A job of one process on a store in memory, and what is found there."""

from contextlib import suppress
from typing import Any

import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, recording
from tests.protocol.states import PATIENCE, weights


class Process:
    """It saves, and logs each operation on the store."""

    def __init__(self, store: MemoryStorage) -> None:
        self.log: list[Operation] = []
        storage = HookedStorage(store, recording(self.log))
        self.saver = Checkpointer(store.url, storage=storage, timeout=PATIENCE)

    def save(self, tag: str, value: int, **options: Any) -> Any:
        """Save a state that tells the value, see tests.protocol.states; the error, or None."""
        try:
            self.saver.save(tag, weights(value, 0), user_content={"value": value}, **options)
        except Exception as error:
            return error
        return None

    def end(self) -> None:
        """Give the directory back. Another save takes it again."""
        with suppress(CheckpointError):
            self.saver.release()


def complete_tags(storage: Storage) -> list[str]:
    return [info.tag for info in sorted(list_tags(storage), key=lambda info: info.order_time) if info.complete]


def value_in(store: MemoryStorage, tag: str) -> int:
    """Which save a tag holds; loads and verifies it."""
    model: dict[str, torch.Tensor] = {}
    content = Checkpointer(store.url, storage=MemoryStorage(store.name)).load(tag, model)
    expected = weights(content["value"], 0)
    assert all(torch.equal(expected[name], model[name]) for name in expected)
    return int(content["value"])


def values(store: MemoryStorage) -> dict[str, int]:
    """What every complete tag holds."""
    return {tag: value_in(store, tag) for tag in complete_tags(MemoryStorage(store.name))}
