"""Whether a tag can be resumed from, and whether it continues the tag before it, as no correct run could fail to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from nxd_ckpt.checkpoint import Checkpoint
from nxd_ckpt.core import optimizer_bounds
from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.html_table import html_table
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import CorruptCheckpoint, PartLost, as_checkpoint_errors
from nxd_ckpt.examine import counters, shard_findings
from nxd_ckpt.examine.counters import Progress
from nxd_ckpt.examine.shard_findings import Known, merged
from nxd_ckpt.examine.shards import AFTER, WEIGHT, Shard, crosswise, read_shards, shards_of
from nxd_ckpt.examine.steps import steps_of
from nxd_ckpt.formats.tensors import itemsize, torch_dtype
from nxd_ckpt.load.scheduled_rates import lacks_scheduled_rates
from nxd_ckpt.reshard.plain_values import equal_values, plain_values, rank_values
from nxd_ckpt.storage.progress import Counter, watched

__all__ = ["Examination", "Finding", "examine_checkpoint"]

_SUSPECTS = 32
"""Shards at most that are compared with each other: each pair is read."""


@dataclass(frozen=True)
class Examination:
    """What was found. True if nothing is wrong: no problem; doubts do not count.

    Attributes:
        tag, before: the tags, as errors name them; ``before`` is None where the tag was examined by itself.
        step, step_before: the optimizer's steps in them; None where nothing counts them.
        findings: what is wrong, problems first.
        parameters, nbytes: how many parameters were looked at, and the bytes that were read for it.
        problems: values that were not examined, and why.
    """

    tag: str
    before: str | None
    step: int | None
    step_before: int | None
    findings: tuple[Finding, ...]
    parameters: int
    nbytes: int
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return not any(one.severity == "problem" for one in self.findings)

    def _repr_html_(self) -> str:
        """For a notebook."""
        rows = [(one.severity, one.kind, one.what, one.message) for one in self.findings]
        after = "" if self.before is None else f" after {self.before}"
        return html_table(f"{self.tag}{after}: {'ok' if self else 'not ok'}", ("", "kind", "what", "message"), rows)


@as_checkpoint_errors()
def examine_checkpoint(
    checkpoint: Checkpoint, before: Checkpoint | None = None, *, progress: bool = False
) -> Examination:
    """Examine a tag, and whether it is what a run that went on from ``before`` has saved.

    Both are read in 64 MiB of memory, and verified: once, but for a few weights that are unlike what they were. They
    may have been saved on any sizes. docs/doctor.md lists what is checked, and what a finding means.

    Args:
        checkpoint: opened by :func:`open_checkpoint`.
        before: an earlier tag of the same run; None examines the tag by itself.
        progress: show a bar on a terminal.

    Raises:
        TagReplaced: a tag was removed, or saved again, since it was opened.
    """
    tags = [one for one in (before, checkpoint) if one is not None]
    try:
        for one in tags:
            one.opened.require_kept()
        found = _Examined(before, checkpoint).result(progress)
    except (CorruptCheckpoint, PartLost) as error:
        for one in tags:
            one.opened.require_kept()
        damage = problem("files", checkpoint.opened.where, str(error))
        return Examination(checkpoint.opened.where, _where(before), None, None, (damage,), 0, 0, ())
    for one in tags:
        one.opened.require_kept()
    return found


class _Examined:
    def __init__(self, before: Checkpoint | None, after: Checkpoint) -> None:
        self._before, self._after = before, after
        self._unread: dict[str, str] = {}
        self._apart: dict[str, str] = {}
        self._was = None if before is None else self._progress(before)
        self._is = self._progress(after)
        if before is not None and self._was is not None and before.topology.sizes != after.topology.sizes:
            self._was = replace(self._was, of_ranks={})  # no rank of then is one of now
        options = [{} if tag is None else _options(tag) for tag in (before, after)]
        grown = {} if self._was is None else counters.growth(self._was, self._is)
        self._known = Known(options[0], options[1], grown, counts=bool(self._is.steps))

    def result(self, progress: bool) -> Examination:
        whole = None if self._before is None else self._before.whole
        shards = [self._with_laws(one) for one in shards_of(whole, self._after.whole, self._apart)]
        done, total = Counter(), sum(_nbytes(one) for one in shards)
        with watched("doctor", total, lambda: done.nbytes, progress):
            read_shards(whole, self._after.whole, shards, done)
        findings = merged([*self._of_shards(shards), *self._of_the_tag(), *self._of_both()])
        return Examination(
            self._after.opened.where,
            _where(self._before),
            self._is.step,
            None if self._was is None else self._was.step,
            tuple(findings),
            len({one.parameter for one in shards}),
            done.nbytes,
            tuple(self._unread.values()),
        )

    def _progress(self, tag: Checkpoint) -> Progress:
        values = plain_values(tag.whole, self._unread)
        steps, stages = steps_of(tag.opened)
        return Progress(steps, values, stages, rank_values(tag.opened, self._unread))

    def _with_laws(self, shard: Shard) -> Shard:
        """The shard, with the bounds that its optimizer keeps."""
        was, now = (options.get(shard.parameter, {}) for options in (self._known.before, self._known.after))
        grown = self._known.grown.get(shard.parameter)
        for role, side in shard.places:
            if side == AFTER and shard.has(role) and grown is not None and grown >= 0:
                factor = optimizer_bounds.decay(role, now)
                dtype = torch_dtype(shard.leaves[role, AFTER].dtype)
                if factor is not None and factor == optimizer_bounds.decay(role, was) and dtype.is_floating_point:
                    shard.decays[role] = optimizer_bounds.least_ratio(factor, grown, torch.finfo(dtype).eps)
        moments = [shard.leaves.get((role, AFTER)) for role in ("exp_avg", "exp_avg_sq")]
        if all(leaf is not None and leaf.dtype in ("float32", "float64") for leaf in moments):
            shard.bound = optimizer_bounds.momentum_bound(now)
        return shard

    def _of_shards(self, shards: list[Shard]) -> Iterator[Finding]:
        for shard in shards:
            yield from shard_findings.check_values(shard)
        yield from shard_findings.check_rounding(shards)
        if self._before is None:
            return
        for shard in shards:
            yield from shard_findings.check_moves(shard, self._known)
        if self._was is not None and self._went_on(self._was):
            yield from shard_findings.check_any_moved(shards, self._known)
        yield from _stale_buffers(shards)
        for role, suspects in shard_findings.suspects(shards).items():
            for one, other in crosswise(self._before.whole, self._after.whole, suspects[:_SUSPECTS], role):
                yield shard_findings.exchanged(role, one, other)

    def _went_on(self, was: Progress) -> bool:
        return (self._is.step or 0) > (was.step or 0) or bool(counters.moved_counters(was, self._is))

    def _of_the_tag(self) -> Iterator[Finding]:
        for name, why in self._apart.items():
            yield doubt("parts", name, f"it was not examined: {why}")
        yield from counters.check_ranks(self._is)
        if not lacks_scheduled_rates(self._after.opened):
            yield from counters.check_rates(self._was, self._is)

    def _of_both(self) -> Iterator[Finding]:
        if self._before is None or self._was is None:
            return
        for check in (counters.check_steps, counters.check_scheduler, counters.check_positions):
            yield from check(self._was, self._is)
        yield from _lost_parts(self._before, self._after)
        yield from _regrouped(self._before, self._after)
        yield from _untied(self._before, self._after)
        yield from _standing_random(self._was, self._is)


def _options(tag: Checkpoint) -> dict[str, dict[str, Any]]:
    """The options of each parameter's group, with single numbers for tensors of one."""
    found: dict[str, dict[str, Any]] = {}
    for group in tag.param_groups:
        options = {key: _single(value) for key, value in group.items() if key != "params"}
        found |= dict.fromkeys(group["params"], options)
    return found


def _single(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_single(one) for one in value]
    return value.item() if hasattr(value, "numel") and value.numel() == 1 else value


def _nbytes(shard: Shard) -> int:
    return sum(leaf.numel * itemsize(leaf.dtype) for leaf in shard.leaves.values())


def _where(tag: Checkpoint | None) -> str | None:
    return None if tag is None else tag.opened.where


def _stale_buffers(shards: list[Shard]) -> Iterator[Finding]:
    """Running statistics of a module that counted batches meanwhile."""
    by_name = {shard.parameter: shard for shard in shards}
    for name, shard in by_name.items():
        module, _, last = name.rpartition(".")
        if last != "num_batches_tracked" or not shard.moved.get(WEIGHT):
            continue
        for buffer in (f"{module}.running_mean", f"{module}.running_var"):
            held = by_name.get(buffer)
            if held is not None and held.moved.get(WEIGHT) is False:
                yield problem("buffers", f"model/{buffer}", f"it did not change, though {name} did: it is of before")


def _lost_parts(before: Checkpoint, after: Checkpoint) -> Iterator[Finding]:
    was, now = before.parts, after.parts
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


def _regrouped(before: Checkpoint, after: Checkpoint) -> Iterator[Finding]:
    """Param groups hold the same parameters."""
    was, now = ([sorted(map(str, group["params"])) for group in tag.param_groups] for tag in (before, after))
    if was != now and before.parts.optimizer and after.parts.optimizer:
        counts = [list(map(len, groups)) for groups in (was, now)]
        yield problem(
            "groups", "optim/param_groups", f"they do not hold the same parameters: {counts[0]} before, {counts[1]} now"
        )


def _untied(before: Checkpoint, after: Checkpoint) -> Iterator[Finding]:
    """What was one tensor under several names is one still."""
    was, now = (
        {name: spec.tie for name, spec in tag.manifest.parameters.items()} if tag.manifest is not None else {}
        for tag in (before, after)
    )
    groups: dict[str, list[str]] = {}
    for name, tie in was.items():
        if tie is not None and name in now:
            groups.setdefault(tie, []).append(name)
    for names in groups.values():
        if len({now[name] or name for name in names}) > 1:
            yield problem("ties", f"model/{names[0]}", f"one tensor in the tag before, several now: {first_of(names)}")


def _standing_random(before: Progress, after: Progress) -> Iterator[Finding]:
    """Random state that moved on some ranks only."""
    moved: dict[int, bool] = {}
    for rank in sorted(before.of_ranks.keys() & after.of_ranks.keys()):
        for name, value in before.of_ranks[rank].items():
            now = after.of_ranks[rank].get(name)
            if name.endswith("/torch") and isinstance(value, torch.Tensor) and now is not None:
                moved[rank] = moved.get(rank, False) or not equal_values(value, now)
    still = [rank for rank, by in moved.items() if not by]
    if still and len(still) < len(moved):
        ranks = first_of(map(str, still))
        yield doubt("random", f"rank {still[0]}", f"random state did not move on rank {ranks}, on others it did")
