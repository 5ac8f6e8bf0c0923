"""A sampler whose position in the data is one number, equal on all data-parallel ranks of any dp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from nxd_ckpt.errors import IncompatibleState, InvalidArgument


class ElasticSampler(Sampler[int]):
    """Indices of a map-style dataset for one of ``dp`` data-parallel ranks, without end.

    Use it so:

        sampler = ElasticSampler(len(dataset), dp=4, dp_rank=1, seed=7)
        loader = StatefulDataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)

    All ranks deal out one order, that of epoch after epoch, each a permutation of its own: rank r takes every dp-th
    index from the r-th on. Nothing is padded or dropped at the end of an epoch, as with torch's DistributedSampler: the
    last samples of one and the first of the next may be in one batch. So every sample is read once in each epoch, also
    if dp changes in the middle of it.

    It is iterated once. To continue elsewhere, take ``state_dict()`` of the loader, not of the sampler: the sampler is
    ahead of the samples that workers have delivered.
    """

    def __init__(self, length: int, *, dp: int = 1, dp_rank: int = 0, shuffle: bool = True, seed: int = 0) -> None:
        """Make the sampler at the start of the data.

        Args:
            length: samples in the dataset.
            dp, dp_rank: number of data-parallel ranks, and this rank's number.
            shuffle: use a new order in each epoch, drawn only from ``seed`` and the epoch; else the dataset's order.

        Raises:
            InvalidArgument: no samples, or no such rank.
        """
        if length < 1:
            raise InvalidArgument(f"length must be at least 1, found {length}")
        if not 0 <= dp_rank < dp:
            raise InvalidArgument(f"dp_rank must be one of the {dp} ranks that dp= says, found {dp_rank}")
        self.length, self.dp, self.dp_rank, self.shuffle, self.seed = length, dp, dp_rank, shuffle, seed
        self._consumed = 0
        self._reader: object | None = None

    @property
    def consumed(self) -> int:
        """Samples that all ranks together have taken, over all epochs, if all took as many as this one."""
        return self._consumed

    @property
    def epoch(self) -> int:
        """Number of complete passes over the samples."""
        return self._consumed // self.length

    def __iter__(self) -> Iterator[int]:
        mine = object()
        order, of_epoch = torch.empty(0), -1
        while True:
            if self._reader not in (None, mine):
                raise InvalidArgument(
                    "an ElasticSampler has no end and is iterated once: workers of the first iterator have taken "
                    "samples that were never delivered. Keep that iterator (batches = iter(loader)), or continue from "
                    "a state dict"
                )
            self._reader = mine
            epoch, at = divmod(self._consumed + self.dp_rank, self.length)
            if epoch != of_epoch:
                order, of_epoch = self._order(epoch), epoch
            self._consumed += self.dp
            yield int(order[at])

    def state_dict(self) -> dict[str, Any]:
        """Return plain data from which a sampler of any dp can continue."""
        return {
            "kind": "samples",
            "consumed": self._consumed,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state`` with a new iterator. Raises IncompatibleState for another order of samples."""
        expected = self.state_dict() | {"consumed": state.get("consumed")}
        if state != expected or not isinstance(state.get("consumed"), int):
            raise IncompatibleState(
                f"the data position is of another order of samples: expected {expected}, found {state}; make the "
                "sampler as it was at the save"
            )
        self._consumed, self._reader = state["consumed"], None

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))
