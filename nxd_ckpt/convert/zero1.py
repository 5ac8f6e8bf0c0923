"""``convert_zero1``: the ZeRO-1 optimizer of a tag, unsharded or cut for another data-parallel size."""

from __future__ import annotations

from dataclasses import replace

from nxd_ckpt.adapters.zero1 import EXPERT_KEYS
from nxd_ckpt.convert.conversion import ExecutionOptions, convert
from nxd_ckpt.convert.job import Converted, Job
from nxd_ckpt.convert.locations import Options, StrPath, locate_input, locate_output, written_with
from nxd_ckpt.convert.source import open_source, refuse_mixed_ranks
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, as_checkpoint_errors
from nxd_ckpt.runtime.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.views.target import Target

_SHARDED = ("zero1", "zero1_dcp")


@as_checkpoint_errors()
def convert_zero1(
    input_dir: StrPath,
    output_dir: StrPath,
    *,
    dp_size: int | None = None,
    convert_to_full: bool = False,
    convert_to_sharded: bool = False,
    num_workers: int = 1,
    all_ranks: bool = False,
    optim_only: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    storage_options: Options | None = None,
    output_options: Options | None = None,
    durable: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
    progress: bool = False,
) -> Converted:
    """Make ``output_dir``, a tag like ``input_dir`` but for its ZeRO-1 optimizer.

    Names and meaning are those of NxD's ``nxd_convert_zero_checkpoints``. Unlike its, the result is a complete tag:
    the model's files, scheduler and user content are hard-linked where that works and is safe, else copied. The
    input, a tag of nxd_ckpt's or NxD's or what NxD's converter wrote, is only read. The result appears at once, when
    all of it is durable; a conversion that fails or is killed leaves no half one. Extra memory: about 100 MiB for each
    worker, whatever the size of the checkpoint.

    Args:
        input_dir: a tag's directory or URL.
        output_dir: the tag's directory or URL that is made, outside ``input_dir``.
        dp_size: data-parallel size of the result, a multiple of its expert-parallel size; for ``convert_to_sharded``.
        convert_to_full: one file ``optim/full_tp_rank_XX_pp_rank_XX.pt`` for each tp, pp (and ep) rank, not padded.
        convert_to_sharded: one file for each rank, from full files or from shards of another ``dp_size``.
        num_workers: processes on this host. More than one import the caller's main module again: call below
            ``if __name__ == "__main__":``.
        all_ranks: share the work among all ranks of the job: every rank makes this call, and writes its share. They
            are those of the process group, or else those that torchrun started. Without it a conversion is this
            process's own business, on one rank of a running job too.
        optim_only: leave out everything but the optimizer.
        overwrite: replace an existing checkpoint at ``output_dir``, after the conversion has succeeded.
        dry_run: plan everything, and write nothing.
        storage_options: what URLs are opened with, of those that the call names; secrets stay in memory.
        output_options: the same for ``output_dir``, if it needs others.
        durable: fsync everything before the result becomes visible.
        timeout: seconds without progress until another rank counts as lost.
        progress: show a bar on standard error, if that is a terminal.

    Raises:
        InvalidArgument: arguments that contradict each other or the input, or an ``output_dir`` that must stay.
        CheckpointNotFound: no such tag, an incomplete one, or ranks' files are missing.
        OptimizerMismatch: there is no ZeRO-1 optimizer in it.
        CorruptCheckpoint: its files are damaged, or of two saves.
        TagReplaced: ``input_dir`` was removed, or saved anew, while it was read; there is no result.
        DirectoryInUse: a live job saves to the directory that holds ``output_dir``.
        PeerTimeout: with ``all_ranks``, a rank did not come, or was lost.
    """
    execution = ExecutionOptions(num_workers, all_ranks, timeout, progress, dry_run)

    def prepare(process: int, processes: int) -> Job:
        execution.validate()
        _check_mode(convert_to_full, convert_to_sharded, dp_size)
        source = locate_input(input_dir, storage_options)
        target = locate_output(output_dir, source, overwrite, written_with(storage_options, output_options))
        opened = open_source(source)
        _check_input(opened, convert_to_full)
        with opened.kept():
            for rank in range(process, opened.topology.world_size, processes):
                refuse_mixed_ranks(opened, opened.topology.coordinates_of(rank))
        what = Target(
            _topology(opened.topology, opened.topology.ep if dp_size is None else dp_size),
            optimizer="zero1_full" if convert_to_full else "zero1",
            model=False,
        )
        parts = replace(opened.parts, optimizer=what.optimizer)
        job = Job(source, target, what, parts, durable=durable, overwrite=overwrite, save=opened.save)
        return _job(opened, job, optim_only)

    return convert(prepare, execution)


def _check_mode(full: bool, sharded: bool, dp_size: int | None) -> None:
    if full == sharded:
        raise InvalidArgument("give convert_to_full or convert_to_sharded, one of the two")
    if sharded and dp_size is None:
        raise InvalidArgument("convert_to_sharded needs dp_size, the new data-parallel size")
    if full and dp_size is not None:
        raise InvalidArgument(f"dp_size={dp_size} means nothing with convert_to_full: leave it out")


def _check_input(opened: OpenTag, convert_to_full: bool) -> None:
    kind = opened.parts.optimizer
    if kind not in (*_SHARDED, "zero1_full"):
        held = "no optimizer" if kind is None else f"a {kind} optimizer, which is the same for any data-parallel size"
        raise OptimizerMismatch(f"{opened.where} holds {held}; expected a ZeRO-1 one: there is nothing to convert")
    if kind == "zero1_full" and convert_to_full:
        raise InvalidArgument(f"{opened.where} is unsharded already; use convert_to_sharded=True")
    unknown_ep = opened.manifest is None and not opened.parts.model and opened.topology.dp > 1
    if unknown_ep and any(key in opened.optimizer_tree(Coordinates()) for key in EXPERT_KEYS):
        raise OptimizerMismatch(
            f"{opened.where} is an expert-parallel optimizer without its model, whose file names tell the "
            "expert-parallel size; convert the whole tag"
        )


def _topology(saved: Topology, dp: int) -> Topology:
    """The input's sizes with another dp; ranks in the standard order, unless nothing changes."""
    return saved if dp == saved.dp else Topology(dp, saved.tp, saved.pp, saved.ep)


def _job(opened: OpenTag, job: Job, optim_only: bool) -> Job:
    parts = job.parts
    if optim_only:
        alone = Parts(optimizer=parts.optimizer, use_xser=parts.use_xser, master_weights=parts.master_weights)
        return replace(job, parts=alone)
    same_ranks = job.topology == opened.topology
    return replace(job, keeps_model=parts.model, parts=replace(parts, rank_content=parts.rank_content and same_ranks))
