"""Form "tag": a checkpoint as a job of the given sizes would have saved it, bit for bit, under its own names.

Scheduler and user content are passed through. Rank content belongs to no rank of another job, and is left out unless
the sizes stay the same; but data positions in it are merged, and each rank of the result gets them. Unchanged files of
a tag are hard-linked if that works and is safe, otherwise copied.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from nxd_ckpt.conversion.job import Converted, Job, metrics_of, positions_for
from nxd_ckpt.conversion.tag_writer import write_tag
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, PartNotFound
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.output.locations import Location, locate_output
from nxd_ckpt.output.source import Source, refuse_mixed_ranks
from nxd_ckpt.reshard.resharding import refuse_unknown
from nxd_ckpt.reshard.target import Target
from nxd_ckpt.reshard.unrecorded import checked_facts
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.opened import OpenTag

logger = logging.getLogger("nxd_ckpt")

_SHARDED = ("zero1", "zero1_dcp")


def to_tag(source: Source, dst: StrPath, chosen: ConvertOptions) -> Converted:
    """Make the tag ``dst`` from a tag, or from a checkpoint of another layout.

    Raises:
        TopologyMismatch: the sizes do not divide a tensor, or its cut is not known.
        OptimizerMismatch: the parameters of the optimizer's entries are not known, or it has not the form that
            ``optimizer_form`` changes.
        DirectoryInUse: a live job saves to the directory that holds ``dst``.
    """

    def prepare(process: int, processes: int) -> Job:
        target = locate_output(dst, source.place, chosen.overwrite, chosen.written_with)
        opened = source.open()
        opened.refuse_per_rank("model", "optim", "scheduler")
        parts = opened.parts
        if not parts.model and parts.optimizer is None:
            raise PartNotFound(
                f"{opened.where} holds neither model nor optimizer, so there is nothing to convert; the keys of model "
                "and optimizer in a state dict are given by model_key= and optim_key="
            )
        refuse_mixed_ranks(opened, process, processes)
        if not source.is_tag:
            return _anew(source, target, opened, chosen)
        if chosen.optimizer_form in ("zero1", "zero1_full") and set(chosen.sizes) <= {"dp"}:
            return _zero1(source, target, opened, chosen, process)
        return _resharded(source, target, opened, chosen, process)

    return write_tag(prepare, chosen)


def _resharded(source: Source, target: Location, opened: OpenTag, chosen: ConvertOptions, process: int) -> Job:
    """Return the job for a tag of other sizes."""
    recuts = chosen.tp not in (None, opened.topology.tp)
    cuts = checked_facts(opened, chosen.partitions, chosen.saved_param_names, cuts_change=recuts)
    what = Target(
        _topology(opened.topology, chosen.sizes),
        optimizer=_kind(opened.parts, chosen),
        partitions=cuts,
        stages=chosen.stages,
        saved_names=chosen.saved_param_names,
        use_xser=chosen.use_xser,
    )
    if process == 0:
        _warn_if_nothing_is_cut(opened, what.topology.tp, cuts)
    positions = positions_for(what.topology, opened, process)
    parts = replace(
        opened.parts,
        optimizer=what.optimizer,
        use_xser=opened.parts.use_xser if what.use_xser is None else what.use_xser,
        lower_precision_weights=True,  # weights that were left out are written, from the master weights
        rank_content=bool(positions) or (opened.parts.rank_content and what.topology == opened.topology),
    )
    return replace(_job(source, target, opened, what, parts, chosen), positions=positions)


def _zero1(source: Source, target: Location, opened: OpenTag, chosen: ConvertOptions, process: int) -> Job:
    """Return the job for a tag in which only a ZeRO-1 optimizer changes; files of the model pass through."""
    is_full = chosen.optimizer_form == "zero1_full"
    _check_zero1(opened, is_full)
    if is_full and chosen.dp is not None:
        raise InvalidArgument(f"dp={chosen.dp} has no meaning with optimizer_form='zero1_full': leave it out")
    sizes = {"dp": opened.topology.ep} if is_full else chosen.sizes
    what = Target(_topology(opened.topology, sizes), optimizer=chosen.optimizer_form, model=False)
    saved = replace(opened.parts, optimizer=what.optimizer)
    if chosen.optim_only:
        alone = Parts(optimizer=saved.optimizer, use_xser=saved.use_xser, master_weights=saved.master_weights)
        return _job(source, target, opened, what, alone, chosen)
    positions = positions_for(what.topology, opened, process)
    has_content = bool(positions) or (saved.rank_content and what.topology == opened.topology)
    job = _job(source, target, opened, what, replace(saved, rank_content=has_content), chosen)
    return replace(job, keeps_model=saved.model, positions=positions)


def _anew(source: Source, target: Location, opened: OpenTag, chosen: ConvertOptions) -> Job:
    """Return the job for what is no tag of ranks."""
    saved = opened.parts
    refuse_unknown(chosen.partitions or {}, opened.model_names() if saved.model else (), opened.where)
    optimizer = chosen.optimizer_form or ("zero1" if saved.master_weights else "plain")
    what = Target(
        _topology(opened.topology, chosen.sizes),
        optimizer=None if saved.optimizer is None else optimizer,
        use_xser=bool(chosen.use_xser),
        partitions=chosen.partitions,
        stages=chosen.stages,
        saved_names=chosen.saved_param_names,
    )
    parts = Parts(
        model=saved.model,
        optimizer=what.optimizer,
        scheduler=saved.scheduler,
        user_content=saved.user_content,
        use_xser=bool(what.use_xser),
        master_weights=saved.master_weights and what.optimizer == "zero1",
    )
    return _job(source, target, opened, what, parts, chosen)


def _job(
    source: Source, target: Location, opened: OpenTag, what: Target, parts: Parts, chosen: ConvertOptions
) -> Job:
    return Job(
        *(source, target, what, parts),
        durable=chosen.durable,
        overwrite=chosen.overwrite,
        save=opened.save,
        metrics=metrics_of(opened),
    )


def _warn_if_nothing_is_cut(opened: OpenTag, tp: int, partitions: Mapping[str, Partition]) -> None:
    saved = {} if opened.manifest is None else opened.manifest.parameters
    is_recorded = opened.manifest is not None or opened.topology.tp == 1
    cuts = {**{name: spec.partition for name, spec in saved.items()}, **partitions}.values()
    if tp not in (1, opened.topology.tp) and is_recorded and all(cut == Partition() for cut in cuts):
        logger.warning(
            "%s records no parameter as cut over tensor-parallel ranks, so each of the %d will hold the whole model. "
            "If they should hold parts, pass partitions= with the cut of each parameter, by name",
            opened.where,
            tp,
        )


def _topology(saved: Topology, sizes: Mapping[str, int]) -> Topology:
    """Return the new sizes, with ranks in the standard order unless nothing changes."""
    merged = saved.sizes | dict(sizes)
    return saved if merged == saved.sizes else Topology(merged["dp"], merged["tp"], merged["pp"], merged["ep"])


def _kind(saved: Parts, chosen: ConvertOptions) -> str | None:
    """Return the kind of the result's optimizer; the unsharded ZeRO-1 form exists only between jobs."""
    if saved.optimizer is None or chosen.optimizer_form is not None:
        return chosen.optimizer_form
    return "zero1" if saved.optimizer in ("zero1_full", "zero1_dcp") else saved.optimizer


def _check_zero1(opened: OpenTag, is_full: bool) -> None:
    kind = opened.parts.optimizer
    if kind not in (*_SHARDED, "zero1_full"):
        actual = "no optimizer" if kind is None else f"a {kind} optimizer, which is the same for any data-parallel size"
        raise OptimizerMismatch(f"{opened.where} holds {actual}, but no ZeRO-1 optimizer; there is nothing to convert")
    if kind == "zero1_full" and is_full:
        raise InvalidArgument(f"{opened.where} is unsharded already; optimizer_form='zero1' shards it")
    unknown_ep = opened.manifest is None and not opened.parts.model and opened.topology.dp > 1
    if unknown_ep and any(key in opened.optimizer_tree(Coordinates()) for key in EXPERT_KEYS):
        raise OptimizerMismatch(
            f"{opened.where} is an expert-parallel optimizer without its model, whose file names have the "
            "expert-parallel size; convert the whole tag"
        )
