"""Every tensor of a tag in a few numbers: norm, mean, largest value, zeros, NaN and infinite ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

import torch

from nxd_ckpt.checkpoint import Checkpoint
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import IncompatibleState, PartLost, PartNotFound, as_checkpoint_errors
from nxd_ckpt.runtime.compare.side_by_side import Leaf, Matched, SideBySide, Window
from nxd_ckpt.runtime.compare.statistics_cache import keeps_statistics, read_statistics, write_statistics
from nxd_ckpt.runtime.progress import Counter, watched
from nxd_ckpt.runtime.summary import PART, Summary, TensorStatistics
from nxd_ckpt.runtime.views.whole_tag import WholeTag

__all__ = ["Statistics", "TensorStatistics", "checkpoint_statistics"]

_THREADS = min(4, os.cpu_count() or 1)
"""More of them would wait for each other: between two chunks, Python runs on one."""
_BLOCKS = 2, 8
"""Blocks of a window, at least and at most; between them one for each thread that reads. In a small one, what was read
is in the processor's cache still when it is counted, and little is left to count when the last one was read."""


@dataclass(frozen=True)
class Statistics:
    """What is known of the tensors of a tag.

    Attributes:
        tensors: by name, as :attr:`Checkpoint.metadata` has them, in its order.
        problems: why a tensor has none, by name.
        cached: whether they were kept beside the tag, and no tensor was read.
    """

    tensors: Mapping[str, TensorStatistics]
    problems: Mapping[str, str]
    cached: bool


@as_checkpoint_errors()
def checkpoint_statistics(checkpoint: Checkpoint, *, cache: bool = True, progress: bool = False) -> Statistics:
    """Read a tag once, in 64 MiB of memory, and count. Its digests are verified.

    A tensor of which it is not known how ranks cut it is counted as the ranks hold it, one after the other.

    Args:
        checkpoint: opened by :func:`open_checkpoint`.
        cache: use what an earlier call kept in ``.nxd_ckpt/statistics`` beside the tag, and keep what is found there,
            where that can be written. Not of a checkpoint that was opened with ``partitions`` or
            ``saved_param_names``, nor of a tag without markers.
        progress: show a bar on a terminal.

    Raises:
        CorruptCheckpoint, PartLost: the tag is not what was written, or lost a file.
        TagReplaced: it was removed, or saved again, since it was opened.
    """
    opened = checkpoint.opened
    cache = cache and checkpoint.as_recorded and keeps_statistics(opened)
    with opened.kept():
        kept = read_statistics(opened) if cache else None
        if kept is not None:
            return Statistics(MappingProxyType(kept), {}, cached=True)
        found = _count(checkpoint.whole, progress)
        opened.require_kept()
    if cache and not found.problems:
        write_statistics(opened, found.tensors)
    return found


def _count(whole: WholeTag, progress: bool) -> Statistics:
    summaries: dict[str, Summary] = {}
    problems: dict[str, str] = {}
    tensors = list[Matched[Summary]]()
    for name in whole.tensors:
        try:
            leaves = list(_leaves(whole, name))
        except PartLost:
            raise
        except (IncompatibleState, PartNotFound) as error:
            problems[name] = str(error)
            continue
        summaries[name] = Summary()
        tensors += [Matched(summaries[name], name, ((0, leaf),)) for leaf in leaves]
    total = sum(one.itemsize * leaf.numel for one in tensors for _, leaf in one.leaves)
    done = Counter()
    blocks = min(max(_BLOCKS[0], whole.opened.storage.concurrency), _BLOCKS[1])
    with (
        watched("statistics", total, lambda: done.nbytes, progress),
        ThreadPoolExecutor(_THREADS, "nxd_ckpt-counter") as threads,
    ):
        for window in SideBySide(whole.opened, memory=blocks * CRC_BLOCK).windows(tensors):
            _add(window, threads)
            done.add(sum(values.nbytes for _, (values,) in window))
    found = {name: summary.statistics for name, summary in summaries.items()}
    return Statistics(MappingProxyType(found), MappingProxyType(problems), cached=False)


def _add(window: Window[Summary], threads: ThreadPoolExecutor) -> None:
    """Part by part in their order, whichever is counted first: as the ranks count at the save, to the last digit."""
    parts = [(summary, part) for summary, (values,) in window for part in torch.split(values, PART)]
    for (summary, _), part in zip(parts, threads.map(Summary.of, (part for _, part in parts)), strict=True):
        summary.add_all(part)


def _leaves(whole: WholeTag, name: str) -> Iterator[Leaf]:
    """The tensor; where its cut is not known, what each rank held that holds another part of it."""
    try:
        yield whole.leaf(name)
    except PartLost:
        raise
    except (IncompatibleState, PartNotFound):
        yield from dict.fromkeys(whole.leaves_by_rank(name))
