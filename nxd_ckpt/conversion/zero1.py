"""``convert_zero1``: the ZeRO-1 optimizer of a tag, unsharded or cut for another data-parallel size."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import Unpack

from nxd_ckpt.conversion.conversion import convert
from nxd_ckpt.conversion.job import Converted, Job, metrics_of, positions_for
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, as_checkpoint_errors
from nxd_ckpt.keywords import Zero1Keywords
from nxd_ckpt.live.zero1 import EXPERT_KEYS
from nxd_ckpt.options.tags import Zero1Options
from nxd_ckpt.output.locations import locate_input, locate_output
from nxd_ckpt.output.source import open_source, refuse_mixed_ranks
from nxd_ckpt.reshard.target import Target
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.opened import OpenTag

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
    chosen = Zero1Options(**options)

    def prepare(process: int, processes: int) -> Job:
        chosen.validate()
        source = locate_input(input_dir, chosen.storage_options)
        target = locate_output(output_dir, source, chosen.overwrite, chosen.written_with)
        opened = open_source(source)
        _check_input(opened, chosen.convert_to_full)
        refuse_mixed_ranks(opened, process, processes)
        what = Target(
            _topology(opened.topology, opened.topology.ep if chosen.dp_size is None else chosen.dp_size),
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


def _topology(saved: Topology, dp: int) -> Topology:
    """Return the input's sizes with another dp, with ranks in the standard order unless nothing changes."""
    return saved if dp == saved.dp else Topology(dp, saved.tp, saved.pp, saved.ep)


def _job(opened: OpenTag, job: Job, optim_only: bool, process: int) -> Job:
    parts = job.parts
    if optim_only:
        alone = Parts(optimizer=parts.optimizer, use_xser=parts.use_xser, master_weights=parts.master_weights)
        return replace(job, parts=alone)
    same_ranks = job.topology == opened.topology
    positions = positions_for(job.topology, opened, process)
    has_content = bool(positions) or (parts.rank_content and same_ranks)
    return replace(
        job, keeps_model=parts.model, parts=replace(parts, rank_content=has_content), positions=positions
    )
