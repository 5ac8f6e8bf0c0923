"""``reshard`` and ``convert_zero1``: a whole tag, or its ZeRO-1 optimizer, converted to other sizes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from typing_extensions import Unpack

from nxd_ckpt.conversion.conversion import convert
from nxd_ckpt.conversion.job import Converted, Job, metrics_of, positions_for
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.option_classes import options_of, takes
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, PartNotFound, as_checkpoint_errors
from nxd_ckpt.keywords import ReshardKeywords, Zero1Keywords
from nxd_ckpt.live.zero1 import EXPERT_KEYS
from nxd_ckpt.options.tags import ReshardOptions, Zero1Options
from nxd_ckpt.output.locations import Location, locate_input, locate_output
from nxd_ckpt.output.source import open_source, refuse_mixed_ranks
from nxd_ckpt.reshard.target import Target
from nxd_ckpt.reshard.unrecorded import checked_facts
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.opened import OpenTag

logger = logging.getLogger("nxd_ckpt")


@as_checkpoint_errors()
@takes(ReshardOptions)
def reshard(input_dir: StrPath, output_dir: StrPath, **options: Unpack[ReshardKeywords]) -> Converted:
    """Make ``output_dir``, the tag ``input_dir`` as a job of the given sizes would have saved it.

    Model and optimizer are resharded, bit for bit; scheduler and user content are passed through. ``rank_content`` is
    left out unless the sizes stay the same, because it belongs to no rank of another job; but data positions in it are
    merged, and each rank of the result gets them. Unchanged files are hard-linked if that works and is safe, otherwise
    copied. The input is only read. The result appears at once, when all of it is durable; a conversion that fails or is
    killed leaves nothing behind. Extra memory: about 100 MiB for each worker, for checkpoints of any size. Keywords are
    the fields of `nxd_ckpt.options.tags.ReshardOptions`.

    Args:
        input_dir: a tag's directory or URL.
        output_dir: directory or URL of the new tag, outside ``input_dir``.

    Raises:
        InvalidArgument: sizes contradict each other, or ``output_dir`` may not be replaced.
        TopologyMismatch: the sizes do not divide a tensor, or its cut is not known.
        OptimizerMismatch: the parameters of the optimizer's entries are not known.
        CheckpointNotFound: no such tag, an incomplete one, or ranks' files are missing.
        CorruptCheckpoint: its files are damaged, or from two saves.
        DirectoryInUse: a live job saves to the directory that holds ``output_dir``.
    """
    chosen = options_of(ReshardOptions, options)

    def prepare(process: int, processes: int) -> Job:
        source, target, opened = _located(input_dir, output_dir, chosen)
        if not opened.parts.model and opened.parts.optimizer is None:
            raise PartNotFound(f"{opened.where} holds neither model nor optimizer, so there is nothing to reshard")
        refuse_mixed_ranks(opened, process, processes)
        recuts = chosen.tp not in (None, opened.topology.tp)
        cuts = checked_facts(opened, chosen.partitions, chosen.saved_param_names, cuts_change=recuts)
        what = Target(
            _topology(opened.topology, chosen.sizes),
            optimizer=_kind(opened.parts.optimizer),
            partitions=cuts,
            stages=chosen.stages,
            saved_names=chosen.saved_param_names,
            use_xser=chosen.use_xser,
        )
        if process == 0:
            _warn_if_nothing_is_cut(opened, what.topology.tp, cuts)
        positions = positions_for(what.topology, opened, process)
        return Job(
            source,
            target,
            what,
            _parts(opened, what, bool(positions)),
            durable=chosen.durable,
            overwrite=chosen.overwrite,
            save=opened.save,
            metrics=metrics_of(opened),
            positions=positions,
        )

    return convert(prepare, chosen)


def _located(
    input_dir: StrPath, output_dir: StrPath, chosen: ReshardOptions | Zero1Options
) -> tuple[Location, Location, OpenTag]:
    """Return the places of input and output, and the open input."""
    source = locate_input(input_dir, chosen.storage_options)
    target = locate_output(output_dir, source, chosen.overwrite, chosen.written_with)
    opened = open_source(source)
    opened.refuse_per_rank("model", "optim", "scheduler")
    return source, target, opened


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


def _kind(saved: str | None) -> str | None:
    """Return the kind of the result's optimizer; the unsharded ZeRO-1 form exists only between jobs."""
    return "zero1" if saved in ("zero1_full", "zero1_dcp") else saved


def _parts(opened: OpenTag, what: Target, has_positions: bool) -> Parts:
    return replace(
        opened.parts,
        optimizer=what.optimizer,
        use_xser=opened.parts.use_xser if what.use_xser is None else what.use_xser,
        lower_precision_weights=True,  # weights that were left out are written, from the master weights
        rank_content=has_positions or (opened.parts.rank_content and what.topology == opened.topology),
    )


_SHARDED = ("zero1", "zero1_dcp")


@as_checkpoint_errors()
@takes(Zero1Options)
def convert_zero1(input_dir: StrPath, output_dir: StrPath, **options: Unpack[Zero1Keywords]) -> Converted:
    """Make ``output_dir``, a copy of the tag ``input_dir`` with a converted ZeRO-1 optimizer.

    Keywords are the fields of `nxd_ckpt.options.tags.Zero1Options`, with the names and meaning of NxD's
    ``nxd_convert_zero_checkpoints``. Unlike with NxD, the result is a complete tag: the model's files, scheduler and
    user content are hard-linked if that works and is safe, otherwise copied. The input, a tag of nxd_ckpt, NxD or NxD's
    converter, is only read. The result appears at once, when all of it is durable; a conversion that fails or is killed
    leaves nothing behind. Extra memory: about 100 MiB for each worker, for checkpoints of any size.

    Args:
        input_dir: a tag's directory or URL.
        output_dir: directory or URL of the new tag, outside ``input_dir``.

    Raises:
        InvalidArgument: arguments contradict each other or the input, or ``output_dir`` may not be replaced.
        CheckpointNotFound: no such tag, an incomplete one, or ranks' files are missing.
        OptimizerMismatch: the tag has no ZeRO-1 optimizer.
        CorruptCheckpoint: its files are damaged, or from two saves.
        TagReplaced: ``input_dir`` was removed, or saved again, while it was read; there is no result.
        DirectoryInUse: a live job saves to the directory that holds ``output_dir``.
        PeerTimeout: with ``all_ranks``, a rank did not join, or was lost.
    """
    chosen = options_of(Zero1Options, options)

    def prepare(process: int, processes: int) -> Job:
        source, target, opened = _located(input_dir, output_dir, chosen)
        _check_input(opened, chosen.convert_to_full)
        refuse_mixed_ranks(opened, process, processes)
        what = Target(
            _topology(opened.topology, {"dp": opened.topology.ep if chosen.dp_size is None else chosen.dp_size}),
            optimizer="zero1_full" if chosen.convert_to_full else "zero1",
            model=False,
        )
        parts = replace(opened.parts, optimizer=what.optimizer)
        job = Job(
            source,
            target,
            what,
            parts,
            durable=chosen.durable,
            overwrite=chosen.overwrite,
            save=opened.save,
            metrics=metrics_of(opened),
        )
        return _job(opened, job, chosen.optim_only, process)

    return convert(prepare, chosen)


def _check_input(opened: OpenTag, convert_to_full: bool) -> None:
    kind = opened.parts.optimizer
    if kind not in (*_SHARDED, "zero1_full"):
        actual = "no optimizer" if kind is None else f"a {kind} optimizer, which is the same for any data-parallel size"
        raise OptimizerMismatch(f"{opened.where} holds {actual}, but no ZeRO-1 optimizer; there is nothing to convert")
    if kind == "zero1_full" and convert_to_full:
        raise InvalidArgument(f"{opened.where} is unsharded already; use convert_to_sharded=True")
    unknown_ep = opened.manifest is None and not opened.parts.model and opened.topology.dp > 1
    if unknown_ep and any(key in opened.optimizer_tree(Coordinates()) for key in EXPERT_KEYS):
        raise OptimizerMismatch(
            f"{opened.where} is an expert-parallel optimizer without its model, whose file names have the "
            "expert-parallel size; convert the whole tag"
        )


def _job(opened: OpenTag, job: Job, optim_only: bool, process: int) -> Job:
    parts = job.parts
    if optim_only:
        alone = Parts(optimizer=parts.optimizer, use_xser=parts.use_xser, master_weights=parts.master_weights)
        return replace(job, parts=alone)
    same_ranks = job.topology == opened.topology
    positions = positions_for(job.topology, opened, process)
    has_content = bool(positions) or (parts.rank_content and same_ranks)
    return replace(job, keeps_model=parts.model, parts=replace(parts, rank_content=has_content), positions=positions)
