"""Statistics of every tensor of a tag: norm, mean, largest value, zeros, NaN and infinities.

They are stored beside the tag in ``.nxd_ckpt/statistics``, since reading all of it again takes minutes: for one save
only, whose `Identity` they hold. A read-only directory has none, and damaged ones are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from nxd_ckpt import effects
from nxd_ckpt.checkpoint import Checkpoint
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.errors import as_checkpoint_errors
from nxd_ckpt.examine.stored_statistics import StatisticsByName, keeps_statistics, read_statistics, write_statistics
from nxd_ckpt.reshard.summary import PART, Summary
from nxd_ckpt.reshard.tensor_statistics import TensorStatistics
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.storage.progress import watched
from nxd_ckpt.tag.reading import Leaf

__all__ = ["Statistics", "TensorStatistics", "checkpoint_statistics"]


_AHEAD = 64 * 2**20
"""Bytes that are requested before earlier ones are waited for: requested bytes occupy memory."""
@dataclass(frozen=True)
class Statistics:
    """Statistics of the tensors of a tag.

    Attributes:
        tensors: by name, in the order of `Checkpoint.metadata`.
        problems: why a tensor has none, by name.
        cached: true if they were stored beside the tag, so that no tensor was read.
    """

    tensors: Mapping[str, TensorStatistics]
    problems: Mapping[str, str]
    cached: bool


@as_checkpoint_errors
@takes()
def checkpoint_statistics(checkpoint: Checkpoint, *, progress: bool = False) -> Statistics:
    """Read a tag once, in some 10 MiB of memory per reading thread, and count. Its digests are verified.

    A tensor whose partition is unknown is counted as the ranks hold it, one after the other. Statistics are stored in
    ``.nxd_ckpt/statistics`` beside the tag, if that is writable, and used by the next call. Not those of a checkpoint
    opened with ``partitions`` or ``saved_param_names``, nor of a tag without markers.

    Args:
        checkpoint: opened by `open_checkpoint`.
        progress: show a bar on a terminal.

    Raises:
        CorruptCheckpoint, PartLost: the tag is not what was written, or lost a file.
        TagReplaced: it was removed, or saved again, since it was opened.
    """
    opened = checkpoint.opened
    with opened.guarded():
        cached = read_statistics(opened) if checkpoint.as_recorded else None
    if cached is not None:
        return Statistics(MappingProxyType(cached), {}, cached=True)
    return count_anew(checkpoint, progress)


def count_anew(checkpoint: Checkpoint, progress: bool) -> Statistics:
    """Count as `checkpoint_statistics` does, whatever is stored."""
    opened = checkpoint.opened
    with opened.guarded():
        problems: dict[str, str] = {}
        leaves = leaves_of(checkpoint.whole, problems)
        statistics = count_leaves(checkpoint.whole, leaves, "statistics", progress)
        opened.require_unchanged()
    if checkpoint.as_recorded and keeps_statistics(opened) and not problems:
        write_statistics(opened, statistics)
    return Statistics(MappingProxyType(statistics), MappingProxyType(problems), cached=False)


def leaves_of(whole: WholeTag, problems: dict[str, str]) -> dict[str, list[Leaf]]:
    """Return the leaves of each tensor; those that cannot be put together are left out, and ``problems`` says why."""
    leaves_by_name: dict[str, list[Leaf]] = {}
    for name in whole.tensors:
        parts = whole.parts_or_problem(name, problems)
        if parts is not None:
            leaves_by_name[name] = list(dict.fromkeys(parts))  # ranks may hold the same part
    return leaves_by_name


def count_leaves(
    whole: WholeTag, leaves_by_name: Mapping[str, list[Leaf]], what: str, progress: bool
) -> StatisticsByName:
    """Read and count all leaves, and verify their digests. ``what`` names the bar that ``progress`` shows."""
    counts = {name: [_LeafCount() for _ in leaves] for name, leaves in leaves_by_name.items()}
    total = sum(leaf.nbytes for leaves in leaves_by_name.values() for leaf in leaves)
    with whole.opened.reader() as reader, watched(what, total, lambda: reader.done.nbytes, progress):
        requested = nbytes = 0
        for name, leaves in leaves_by_name.items():
            for leaf, counted in zip(leaves, counts[name], strict=True):
                reader.visit(leaf, name, counted.add)
                nbytes += leaf.nbytes
                if nbytes > _AHEAD:
                    reader.wait(requested)
                    requested = reader.requested
                    nbytes = 0
        reader.finish()
    return {name: Summary.of_all(leaf.summary for leaf in leaves).statistics for name, leaves in counts.items()}


class _LeafCount:
    """Counts of a leaf so far.

    Parts are added in their order, whichever is counted first, so that the last digits never vary.
    """

    def __init__(self) -> None:
        self.summary = Summary()
        self._lock = effects.Lock()
        self._next = 0
        self._waiting: dict[int, list[Summary]] = {}

    def add(self, number: int, values: list[torch.Tensor]) -> None:
        """Count a part, and add it once all parts before it are. Thread-safe."""
        counted = [Summary.of(part) for summary in values for part in torch.split(summary, PART)]
        with self._lock:
            self._waiting[number] = counted
            while self._next in self._waiting:
                for summary in self._waiting.pop(self._next):
                    self.summary.add_all(summary)
                self._next += 1
