"""Statistics of every tensor of a tag: norm, mean, largest value, zeros, NaN and infinities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from nxd_ckpt import effects
from nxd_ckpt.checkpoint import Checkpoint
from nxd_ckpt.errors import IncompatibleState, PartLost, PartNotFound, as_checkpoint_errors
from nxd_ckpt.examine.statistics_cache import keeps_statistics, read_statistics, write_statistics
from nxd_ckpt.formats.tensors import itemsize
from nxd_ckpt.reshard.summary import PART, Summary, TensorStatistics
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


@as_checkpoint_errors()
def checkpoint_statistics(checkpoint: Checkpoint, *, cache: bool = True, progress: bool = False) -> Statistics:
    """Read a tag once, in some 10 MiB of memory per reading thread, and count. Its digests are verified.

    A tensor whose partition is unknown is counted as the ranks hold it, one after the other.

    Args:
        checkpoint: opened by `open_checkpoint`.
        cache: use statistics that an earlier call stored in ``.nxd_ckpt/statistics`` beside the tag, and store new ones
            there if it is writable. Not for a checkpoint opened with ``partitions`` or ``saved_param_names``, nor for a
            tag
            without markers.
        progress: show a bar on a terminal.

    Raises:
        CorruptCheckpoint, PartLost: the tag is not what was written, or lost a file.
        TagReplaced: it was removed, or saved again, since it was opened.
    """
    opened = checkpoint.opened
    cache = cache and checkpoint.as_recorded and keeps_statistics(opened)
    with opened.guarded():
        cached = read_statistics(opened) if cache else None
        if cached is not None:
            return Statistics(MappingProxyType(cached), {}, cached=True)
        statistics = _count(checkpoint.whole, progress)
        opened.require_unchanged()
    if cache and not statistics.problems:
        write_statistics(opened, statistics.tensors)
    return statistics


def _count(whole: WholeTag, progress: bool) -> Statistics:
    tensors: dict[str, list[Leaf]] = {}
    problems: dict[str, str] = {}
    for name in whole.tensors:
        try:
            tensors[name] = list(_leaves(whole, name))
        except PartLost:
            raise
        except (IncompatibleState, PartNotFound) as error:
            problems[name] = str(error)
    counts = {name: [_LeafCount() for _ in leaves] for name, leaves in tensors.items()}
    total = sum(itemsize(leaf.dtype) * leaf.numel for leaves in tensors.values() for leaf in leaves)
    with (
        whole.opened.reader() as reader,
        watched("statistics", total, lambda: reader.done.nbytes, progress),
    ):
        asked = nbytes = 0
        for name, leaves in tensors.items():
            for leaf, counted in zip(leaves, counts[name], strict=True):
                reader.visit(leaf, name, counted.add)
                nbytes += itemsize(leaf.dtype) * leaf.numel
                if nbytes > _AHEAD:
                    reader.wait(asked)
                    asked, nbytes = reader.asked, 0
        reader.finish()
    statistics = {name: _together(leaves).statistics for name, leaves in counts.items()}
    return Statistics(MappingProxyType(statistics), MappingProxyType(problems), cached=False)


class _LeafCount:
    """Counts of a leaf so far.

    Parts are added in their order, whichever is counted first, so that the last digits never vary and equal those of
    the
    ranks that count the same parts at the save.
    """

    def __init__(self) -> None:
        self.summary = Summary()
        self._lock = effects.Lock()
        self._next, self._waiting = 0, dict[int, list[Summary]]()

    def add(self, number: int, values: list[torch.Tensor]) -> None:
        """Count a part, and add it once all parts before it are. Thread-safe."""
        counted = [Summary.of(part) for summary in values for part in torch.split(summary, PART)]
        with self._lock:
            self._waiting[number] = counted
            while self._next in self._waiting:
                for summary in self._waiting.pop(self._next):
                    self.summary.add_all(summary)
                self._next += 1


def _together(leaves: list[_LeafCount]) -> Summary:
    whole = Summary()
    for leaf in leaves:
        whole.add_all(leaf.summary)
    return whole


def _leaves(whole: WholeTag, name: str) -> Iterator[Leaf]:
    """Yield the tensor, or the distinct parts of the ranks if its partition is unknown."""
    try:
        yield whole.leaf(name)
    except PartLost:
        raise
    except (IncompatibleState, PartNotFound):
        yield from dict.fromkeys(whole.leaves_by_rank(name))
