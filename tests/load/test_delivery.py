"""What is on its way to a device arrives in order, and little of it is in memory at once."""

from typing import Any, cast

import pytest
import torch

from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.loading.overwriting import Delivery
from nxd_ckpt.tag.reading import Leaf, LeafReader

MIB = 2**20


class Reader:
    """Fills tensors with their number, no sooner than it must."""

    def __init__(self) -> None:
        self.begun: list[torch.Tensor] = []
        self.done = 0

    def fill(self, leaf: Leaf, out: torch.Tensor) -> None:
        self.begun.append(out)

    @property
    def requested(self) -> int:
        return len(self.begun)

    def wait(self, requested: int) -> None:
        while self.done < requested:
            self.begun[self.done].fill_(self.done)
            self.done += 1

    def finish(self) -> None:
        self.wait(self.requested)


@pytest.mark.parametrize(("mib", "most"), [([1] * 300, 64), ([100] * 5, 200), ([1, 100, 1, 1, 100, 100, 3], 200)])
def test_what_waits_is_bounded_and_in_order(mib: list[int], most: int) -> None:
    """Two tensors of any size, or 64 MiB of smaller ones, wait at a time; the next is read while one is taken."""
    reader = Reader()
    delivery = Delivery(cast("LeafReader", reader), reader.fill, lambda leaf, value: None)
    taken: list[float] = []
    waiting = 0
    for size in mib:
        waiting += size

        def take(value: torch.Tensor) -> None:
            nonlocal waiting
            waiting -= value.nbytes // MIB
            taken.append(value[0].item())

        delivery.then(Assembly("float32", (size * MIB // 4,), ()), take)
        assert waiting <= most
    assert len(taken) < len(mib)
    delivery.finish()
    assert [float(number) for number in range(len(mib))] == taken


def test_memory_that_is_being_filled_is_not_filled_twice_at_once() -> None:
    """An overlapping request waits for the earlier ones; others do not."""
    reader: Any = Reader()
    delivery = Delivery(reader, reader.fill, lambda leaf, value: None)
    memory, leaf = torch.full((100,), -1.0), Assembly("float32", (50,), ())
    delivery.into(leaf, memory[:50])
    delivery.into(leaf, memory[50:])
    assert 0 == reader.done
    delivery.into(leaf, memory[49:99])
    assert (2, 3) == (reader.done, reader.requested)
    delivery.finish()
    assert [0.0] * 49 + [2.0] * 50 + [1.0] == memory.tolist()
