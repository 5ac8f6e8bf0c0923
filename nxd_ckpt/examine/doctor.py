"""Checks that a tag can be resumed from and that it continues the tag before it; a correct run fails none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nxd_ckpt.checkpoint import Checkpoint
from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    OptimizerMismatch,
    PartLost,
    PartNotFound,
    UnsafePickle,
    as_checkpoint_errors,
)
from nxd_ckpt.examine import counters
from nxd_ckpt.examine.counters import Progress, whole_number
from nxd_ckpt.examine.diff import same_digests
from nxd_ckpt.examine.statistics import count_leaves, leaves_of
from nxd_ckpt.examine.stored_statistics import StatisticsByName, not_finite
from nxd_ckpt.formats.optimizer_trees import STEP
from nxd_ckpt.formats.tensors import Assembly, TensorStub
from nxd_ckpt.reshard.saved_optimizer import saved_optimizer
from nxd_ckpt.reshard.whole_tag import plain_values
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import own_tensors
from nxd_ckpt.tag.reading import Leaf

__all__ = ["Examination", "Finding", "examine_checkpoint"]

@dataclass(frozen=True)
class Examination:
    """Result of an examination. True if there is no problem; doubts do not count.

    Attributes:
        tag, before: the tags, as errors name them; ``before`` is None where the tag was examined by itself.
        step, step_before: the optimizer's steps in them; None where nothing counts them.
        findings: problems, then doubts.
        tensors, nbytes: how many tensors were examined, and the bytes that were read.
        problems: values that were not examined, and why.
        as_recorded: False if a tag was opened with ``partitions`` or ``saved_param_names``, which are not checked.
    """

    tag: str
    before: str | None
    step: int | None
    step_before: int | None
    findings: tuple[Finding, ...]
    tensors: int
    nbytes: int
    problems: tuple[str, ...]
    as_recorded: bool = True

    def __bool__(self) -> bool:
        return not any(finding.severity == "problem" for finding in self.findings)


@as_checkpoint_errors
@takes()
def examine_checkpoint(
    checkpoint: Checkpoint, *, before: Checkpoint | None = None, progress: bool = False
) -> Examination:
    """Examine a tag, and whether a run that continued from ``before`` can have saved it.

    The tensors of ``checkpoint`` are read and verified, as by `checkpoint_statistics`; of ``before`` only values and
    digests are. They may have been saved on any sizes. docs/doctor.md lists the checks.

    Args:
        checkpoint: opened by `open_checkpoint`.
        before: an earlier tag of the same run; None examines the tag by itself.
        progress: show a bar on a terminal.

    Raises:
        TagReplaced: a tag was removed, or saved again, since it was opened.
    """
    checkpoints = [tag for tag in (before, checkpoint) if tag is not None]
    for tag in checkpoints:
        tag.opened.require_unchanged()
    try:
        examination = _Doctor(before, checkpoint).result(progress)
    except (CorruptCheckpoint, PartLost) as error:
        if before is not None:
            return examine_alone(checkpoint, error, progress=progress)
        damage = problem("files", checkpoint.opened.where, str(error))
        examination = Examination(checkpoint.opened.where, None, None, None, (damage,), 0, 0, ())
    for tag in checkpoints:
        tag.opened.require_unchanged()
    return replace(examination, as_recorded=all(tag.as_recorded for tag in checkpoints))


def examine_alone(checkpoint: Checkpoint, error: CheckpointError, *, progress: bool) -> Examination:
    """Examine a tag by itself, because of an ``error`` of reading it or the tag before, which is a problem."""
    alone = examine_checkpoint(checkpoint, progress=progress)
    if any(finding.message == str(error) for finding in alone.findings):  # it is the tag's own
        return alone
    return replace(alone, findings=(problem("before", "the tag before", str(error)), *alone.findings))


class _Doctor:
    def __init__(self, before: Checkpoint | None, after: Checkpoint) -> None:
        self._before = before
        self._after = after
        self._unread: dict[str, str] = {}
        self._was = None if before is None else self._progress(before)
        self._is = self._progress(after)

    def result(self, progress: bool) -> Examination:
        whole = self._after.whole
        unexamined: dict[str, str] = {}
        leaves = leaves_of(whole, unexamined)
        opened = whole.opened
        for rank in range(opened.topology.world_size if opened.per_rank else 0):
            leaves |= {f"{name} of rank {rank}": [leaf] for name, leaf in own_tensors(opened, rank)}
        counts = count_leaves(whole, leaves, "doctor", progress)
        findings = _merged(
            [
                *_not_finite(counts, leaves),
                *(doubt("parts", name, f"it was not examined: {why}") for name, why in unexamined.items()),
                *counters.check_ranks(self._is),
                *self._comparison_findings(),
            ]
        )
        return Examination(
            self._after.opened.where,
            _where(self._before),
            self._is.step,
            None if self._was is None else self._was.step,
            tuple(findings),
            len(leaves),
            sum(leaf.nbytes for parts in leaves.values() for leaf in parts),
            tuple(self._unread.values()),
        )

    def _progress(self, tag: Checkpoint) -> Progress:
        values = plain_values(tag.whole, self._unread)
        steps, stages = steps_of(tag.opened)
        _require_rank_content(tag.opened)
        return Progress(steps, values, stages)

    def _comparison_findings(self) -> Iterator[Finding]:
        if self._before is None or self._was is None:
            return
        yield from counters.check_steps(self._was, self._is)
        if (self._is.step or 0) > (self._was.step or 0) or counters.moved_counters(self._was, self._is):
            yield from _standing_weights(self._before, self._after)
        yield from _lost_parts(self._before, self._after)


def _require_rank_content(opened: OpenTag) -> None:
    """Raise PartLost or CorruptCheckpoint if what a rank saved for itself is lost or damaged."""
    for rank in range(opened.topology.world_size) if opened.parts.rank_content else ():
        try:
            opened.rank_content(rank)
        except PartLost:
            raise
        except (PartNotFound, UnsafePickle):  # this rank saved nothing, or what only its program reads
            continue


def _not_finite(counts: StatisticsByName, leaves: Mapping[str, list[Leaf]]) -> Iterator[Finding]:
    for name in not_finite(counts):
        files = {fragment.stub.file: None for leaf in leaves[name] for fragment in Assembly.of(leaf).fragments}
        yield problem(
            "values",
            name,
            f"{counts[name].nans} NaN and {counts[name].infs} infinite of {counts[name].numel} elements "
            f"(in {first_of(list(files))})",
        )


def _standing_weights(before: Checkpoint, after: Checkpoint) -> Iterator[Finding]:
    """Report an optimizer of whose weights not one changed, as their digests say."""
    names = [f"model/{name}" for group in after.param_groups for name in group["params"]]
    both = [name for name in names if name in before.whole.tensors and name in after.whole.tensors]
    if both and all(_has_same_digests(before, after, name) for name in both):
        yield problem("weights", "model", "not one weight changed since the tag before, though the run continued")


def _has_same_digests(before: Checkpoint, after: Checkpoint, name: str) -> bool:
    was, now = (tag.whole.parts_or_problem(name, {}) for tag in (before, after))
    if was is None or now is None or len(was) != len(now):
        return False
    return all(same_digests(a, b) for a, b in zip(was, now, strict=True))


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings of one kind about one thing; problems come first."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind, finding.what), []).append(finding)
    merged = []
    for first, *others in groups.values():
        more = f" (and {len(others)} more of it)" if others else ""
        merged.append(replace(first, message=first.message + more))
    return sorted(merged, key=lambda finding: finding.severity != "problem")


def _where(tag: Checkpoint | None) -> str | None:
    return None if tag is None else tag.opened.where


def _lost_parts(before: Checkpoint, after: Checkpoint) -> Iterator[Finding]:
    was = before.parts
    now = after.parts
    if was.optimizer and not now.optimizer:
        yield problem("parts", "optimizer", "the tag before has an optimizer, this one has none")
    if was.scheduler and not now.scheduler:
        yield problem("parts", "scheduler", "the tag before has a scheduler, this one has none")
    for part in ("user_content", "rank_content"):
        if getattr(was, part) and not getattr(now, part):
            yield doubt("parts", part, f"the tag before has {part}, this one has none")
    names = [{name for name in tag.metadata if name.startswith("model/")} for tag in (before, after)]
    lost = sorted(names[0] - names[1])
    if lost:
        yield problem("parts", lost[0], f"the tag before has {first_of(lost)}, this one does not")


def steps_of(opened: OpenTag) -> tuple[dict[str, dict[int, int]], dict[str, int]]:
    """Return steps by parameter and global rank, and the pipeline stage of each parameter where there are several.

    Parameters without a count have none. Experts differ between expert-parallel ranks, and have a name for each. A
    count whose digest equals another one's is not read again.
    """
    steps: dict[str, dict[int, int]] = {}
    stages: dict[str, int] = {}
    read: dict[Any, int | None] = {}
    for at in _writers(opened):
        prefix = f"#{at.pp_rank}." if opened.topology.pp > 1 else "#"
        try:
            tree = opened.optimizer_tree(at)
            names = opened.optimizer_names(at)
            slots = saved_optimizer(tree, names, prefix, lambda name: None, opened.where).slots
        except PartLost:
            raise
        except (OptimizerMismatch, PartNotFound):
            continue
        for name, slot in slots.items():
            key = f"{name} of expert rank {at.dp_rank % opened.topology.ep}" if slot.expert else name
            step = _number(opened, slot.entries.get(STEP), read)
            if step is not None:
                steps.setdefault(key, {})[opened.topology.rank_of(at)] = step
                if opened.topology.pp > 1:
                    stages[key] = at.pp_rank
    return steps, stages


def _writers(opened: OpenTag) -> list[Coordinates]:
    """Return one rank for each file of the optimizer."""
    kind = opened.parts.optimizer
    sizes = opened.topology
    if kind is None:
        return []
    if opened.manifest is not None and opened.manifest.leaders is not None:
        return [sizes.coordinates_of(rank) for rank in opened.manifest.leaders]
    every = map(sizes.coordinates_of, range(sizes.world_size))
    return list(every) if kind in ("zero1", "zero1_dcp") else list(dict.fromkeys(map(sizes.writer_of, every)))


def _number(opened: OpenTag, value: Any, read: dict[Any, int | None]) -> int | None:
    if not isinstance(value, (TensorStub, Assembly)):
        return whole_number(value)
    stubs = [fragment.stub for fragment in Assembly.of(value).fragments]
    if [stub.numel for stub in stubs] != [1]:
        return None
    (stub,) = stubs
    key = (stub.dtype, stub.storage.crc32, stub.storage.nbytes, stub.offset - stub.storage.offset)
    if key not in read or stub.storage.crc32 is None:
        count = opened.read(stub)
        read[key] = None if count.is_complex() or count.dtype == torch.bool else whole_number(count.item())
    return read[key]
