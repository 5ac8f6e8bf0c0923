"""``reshard``: a whole tag for other sizes of any kind of parallelism."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from typing_extensions import Unpack

from nxd_ckpt.conversion.conversion import convert
from nxd_ckpt.conversion.job import Converted, Job, metrics_of, positions_for
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import PartNotFound, as_checkpoint_errors
from nxd_ckpt.options.tags import ReshardKeywords, ReshardOptions
from nxd_ckpt.output.locations import locate_input, locate_output
from nxd_ckpt.output.source import open_source, refuse_mixed_ranks
from nxd_ckpt.reshard.target import Target
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.opened import OpenTag

logger = logging.getLogger("nxd_ckpt")


@as_checkpoint_errors()
@takes(ReshardOptions)
def reshard(input_dir: StrPath, output_dir: StrPath, **options: Unpack[ReshardKeywords]) -> Converted:
    """Make ``output_dir``, the tag ``input_dir`` as a job of the given sizes would have saved it.

    Model and optimizer are cut anew, bit for bit; scheduler and user content are taken over. What ranks saved for
    themselves alone (``rank_content``) is left out unless the sizes stay the same: it belongs to no rank of another
    job. But data positions in it are put together, and each rank of the result has them. Otherwise as
    :func:`nxd_ckpt.convert.convert_zero1`. Keywords are the fields of :class:`~nxd_ckpt.options.tags.ReshardOptions`.

    Args:
        input_dir: a tag's directory or URL.
        output_dir: the tag's directory or URL that is made, outside ``input_dir``.

    Raises:
        InvalidArgument: sizes that contradict each other, or an ``output_dir`` that must not be touched.
        TopologyMismatch: sizes that do not divide a tensor, or a cut that is not known.
        OptimizerMismatch: which parameters the optimizer's entries belong to is not known.
        CheckpointNotFound, CorruptCheckpoint, DirectoryInUse: as for ``convert_zero1``.
    """
    chosen = ReshardOptions(**options)

    def prepare(process: int, processes: int) -> Job:
        chosen.validate()
        source = locate_input(input_dir, chosen.storage_options)
        target = locate_output(output_dir, source, chosen.overwrite, chosen.written_with)
        opened = open_source(source)
        if not opened.parts.model and opened.parts.optimizer is None:
            raise PartNotFound(f"{opened.where} holds neither model nor optimizer: there is nothing to cut anew")
        refuse_mixed_ranks(opened, process, processes)
        what = Target(
            _topology(opened.topology, chosen.sizes),
            optimizer=_kind(opened.parts.optimizer),
            partitions=chosen.partitions,
            stages=chosen.stages,
            saved_names=chosen.saved_param_names,
            use_xser=chosen.use_xser,
        )
        if process == 0:
            _warn_if_nothing_is_cut(opened, what.topology.tp, chosen.partitions or {})
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


def _warn_if_nothing_is_cut(opened: OpenTag, tp: int, partitions: Mapping[str, Partition]) -> None:
    saved = {} if opened.manifest is None else opened.manifest.parameters
    known = opened.manifest is not None or opened.topology.tp == 1
    cuts = {**{name: spec.partition for name, spec in saved.items()}, **partitions}.values()
    if tp not in (1, opened.topology.tp) and known and all(cut == Partition() for cut in cuts):
        logger.warning(
            "%s does not say that any parameter is cut over tensor-parallel ranks: each of the %d will hold the whole "
            "model. If they should hold parts, pass partitions= with the cut of each, by name",
            opened.where,
            tp,
        )


def _topology(saved: Topology, sizes: Mapping[str, int]) -> Topology:
    """The new sizes; ranks in the standard order, unless nothing changes."""
    wanted = saved.sizes | dict(sizes)
    return saved if wanted == saved.sizes else Topology(wanted["dp"], wanted["tp"], wanted["pp"], wanted["ep"])


def _kind(saved: str | None) -> str | None:
    """The unsharded ZeRO-1 optimizer is a form between two jobs, never a job's own."""
    return "zero1" if saved in ("zero1_full", "zero1_dcp") else saved


def _parts(opened: OpenTag, what: Target, has_positions: bool) -> Parts:
    return replace(
        opened.parts,
        optimizer=what.optimizer,
        use_xser=opened.parts.use_xser if what.use_xser is None else what.use_xser,
        lower_precision_weights=True,  # what was left out of the model is written, from the master weights
        rank_content=has_positions or (opened.parts.rank_content and what.topology == opened.topology),
    )
