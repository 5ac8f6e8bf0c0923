"""Form "tag": a checkpoint as a job of the given sizes would have saved it, bit for bit, under its own names.

Scheduler and user content are passed through. Rank content belongs to no rank of another job, and is left out unless
the sizes stay the same; but data positions in it are merged, and each rank of the result gets them. Unchanged files of
a tag are hard-linked if that works and is safe, otherwise copied.

With names="nxd", `to_nxd_tag` makes a Hugging Face directory the tag that a job of given sizes would have saved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nxd_ckpt.conversion.result import Converted, ConvertedTensor
from nxd_ckpt.conversion.tag_writer import Job, write_tag
from nxd_ckpt.coordination.agreement import on_all
from nxd_ckpt.coordination.rendezvous import joint_agreement
from nxd_ckpt.core.data_position import Position
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, TopologyMismatch, UnsupportedState
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS
from nxd_ckpt.formats.safetensors import TensorForm
from nxd_ckpt.hugging_face.imported_model import ImportedModel, ImportTarget, closest
from nxd_ckpt.hugging_face.mappings import find_mapping, text_config, with_head_of
from nxd_ckpt.layouts.hugging_face_directory import open_weights
from nxd_ckpt.layouts.quantization import quantization_of
from nxd_ckpt.loading.parts import positions_together
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.output.locations import Location, locate_output
from nxd_ckpt.output.model_files import config_in, read_config
from nxd_ckpt.output.source import Source, open_imported
from nxd_ckpt.reshard.resharded_state import checked_facts
from nxd_ckpt.reshard.target import Target
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.surroundings import gc_paused
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import refuse_per_rank
from nxd_ckpt.tag.recognise import Program

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
        refuse_per_rank(opened, "model", "optim", "scheduler")
        return _job(source, target, opened, chosen, process)

    return write_tag(prepare, chosen)


def _job(source: Source, target: Location, opened: OpenTag, chosen: ConvertOptions, process: int) -> Job:
    saved = opened.parts
    sizes: Mapping[str, int] = chosen.sizes
    becomes_zero1 = (saved.optimizer, chosen.optimizer_form, chosen.optim_only) == ("plain", "zero1", False)
    keeps_sizes = source.is_tag and set(sizes) <= {"dp"} and not becomes_zero1
    converts_optimizer = keeps_sizes and chosen.optimizer_form in ("zero1", "zero1_full")
    if converts_optimizer:
        sizes = _zero1_sizes(opened, chosen)
    recuts = source.is_tag and chosen.tp not in (None, opened.topology.tp)
    keeps_model = converts_optimizer and saved.model and not chosen.optim_only
    what = Target(
        _topology(opened.topology, sizes),
        optimizer=_kind(saved, source.is_tag, chosen),
        use_xser=(saved.use_xser and source.is_tag) if chosen.use_xser is None else chosen.use_xser,
        model=not (keeps_model or chosen.optim_only),
        partitions=checked_facts(opened, _cuts(opened, chosen), chosen.saved_param_names, cuts_change=recuts),
        stages=chosen.stages,
        saved_names=chosen.saved_param_names,
    )
    parts = replace(saved, optimizer=what.optimizer, use_xser=bool(what.use_xser), rank_content=False)
    if not keeps_model:  # weights that were left out are written, from the master weights
        parts = replace(parts, lower_precision_weights=True)
    if not source.is_tag:
        parts = replace(parts, master_weights=saved.master_weights and what.optimizer == "zero1")
    if chosen.optim_only:
        alone = Parts(optimizer=parts.optimizer, use_xser=parts.use_xser, master_weights=parts.master_weights)
        return Job(source, target, what, alone).of(opened, chosen)
    if process == 0:
        _warn_if_nothing_is_cut(opened, what)
    positions: dict[Any, Position] = {}
    if source.is_tag:
        positions = _positions_for(what.topology, opened, process)
        has_content = bool(positions) or (saved.rank_content and what.topology == opened.topology)
        parts = replace(parts, rank_content=has_content)
    job = Job(source, target, what, parts, keeps_model=keeps_model, positions=positions)
    left_out = source.left_out(saved, parts, in_tag=True)
    rest = ("rank content, except data positions",) if positions else ()
    return replace(job, left_out=(*left_out, *rest)).of(opened, chosen)


def _cuts(opened: OpenTag, chosen: ConvertOptions) -> Mapping[str, Partition]:
    """Return the caller's cuts as those of the source: one rank holds as a whole what the result's ranks will cut."""
    cuts = chosen.partitions or {}
    if opened.topology.tp > 1:
        return cuts
    parts = (chosen.tp, None)
    return {
        name: replace(cut, num_partitions=1) if (cut.num_partitions, cut.rank_ordering) == parts else cut
        for name, cut in cuts.items()
    }


def _positions_for(topology: Topology, opened: OpenTag, process: int) -> dict[Any, Position]:
    """Return the merged data positions of the tag, for each rank of another ``topology``; empty for its own.

    The first process logs positions that cannot be read or split again.
    """
    if topology == opened.topology:
        return {}
    merged, problems = positions_together(opened)
    for problem in problems if process == 0 else ():
        logger.warning("not taken over: %s", problem)
    return merged


def _warn_if_nothing_is_cut(opened: OpenTag, what: Target) -> None:
    tp = what.topology.tp
    partitions = what.partitions or {}
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


def _kind(saved: Parts, is_tag: bool, chosen: ConvertOptions) -> str | None:
    """Return the kind of the result's optimizer; the unsharded ZeRO-1 form exists only between jobs."""
    if saved.optimizer is None or chosen.optimizer_form is not None:
        return saved.optimizer and chosen.optimizer_form
    if not is_tag:
        return "zero1" if saved.master_weights else "plain"
    return "zero1" if saved.optimizer in ("zero1_full", "zero1_dcp") else saved.optimizer


def _zero1_sizes(opened: OpenTag, chosen: ConvertOptions) -> Mapping[str, int]:
    """Return the sizes of the result, of which only the ZeRO-1 optimizer changes."""
    is_full = chosen.optimizer_form == "zero1_full"
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
    if is_full and chosen.dp is not None:
        raise InvalidArgument(f"dp={chosen.dp} has no meaning with optimizer_form='zero1_full': leave it out")
    return {"dp": opened.topology.ep} if is_full else chosen.sizes


def import_target(source: Location, chosen: ConvertOptions, process: int = 0) -> ImportTarget:
    """Return the form of the tag; sizes and names come from config.json and the mapping.

    The first process warns of files that are not read.
    """
    model_key = "model" if chosen.model_key is None else chosen.model_key
    directory = open_weights(source.open(), source.name, model_key)
    if directory.strays is not None and process == 0:
        logger.warning("%s", directory.strays)
    document = directory.config
    quantization = quantization_of(document, directory.where)
    if chosen.config is not None:
        document = config_in(read_config(os.fspath(chosen.config), chosen.storage_options))
        quantization = quantization_of(document, directory.where) or quantization
    if quantization is not None and chosen.dtype is not None:
        quantization = replace(quantization, dtype=chosen.dtype)
    config = text_config(document)
    mapping = with_head_of(find_mapping(chosen.mapping, config), config, directory.names)
    sizes = mapping.sizes(config, chosen.kv_size_multiplier or 1, chosen.hardware or "trn1")
    return ImportTarget(
        chosen.topology,
        mapping,
        replace(sizes, heads_of=chosen.topology.tp if chosen.pad_attn_heads else 1),
        chosen.variants,
        chosen.dtype,
        bool(chosen.use_xser),
        chosen.virtual_pp,
        chosen.stages,
        model_key,
        chosen.renaming,
        quantization,
    )


def to_nxd_tag(source: Source, dst: StrPath, chosen: ConvertOptions) -> Converted:
    """Make the tag ``dst`` with the model of a Hugging Face directory, or of one file, rank by rank.

    Raises the errors of `ImportedModel.state`; in a dry run not those of unknown and missing names.
    """
    if source.writer not in (Program.HUGGING_FACE, Program.TORCH_XLA):
        raise UnsupportedState(
            f"{source.root.path} was written by {source.writer.value}, but names='nxd' makes NxD's layers of a Hugging "
            "Face model: leave it out, or convert to the form hf first"
        )
    plans: list[dict[str, Any]] = []

    def prepare(process: int, processes: int) -> Job:
        target = locate_output(dst, source.place, chosen.overwrite, chosen.written_with)
        with gc_paused():
            what = import_target(source.place, chosen, process)
            plans.append(_planned(source.place, what))
        parts = Parts(model=True, use_xser=what.use_xser)
        return Job(source, target, Target(what.topology), parts, imported=what).of(None, chosen)

    if chosen.dry_run:
        with joint_agreement(chosen.all_ranks, chosen.timeout) as agreement:
            job = on_all(agreement, lambda: prepare(agreement.rank, agreement.world_size))
        tensors = plans[-1]["tensors"]
        nbytes = sum(TensorForm(each.name, each.dtype, each.shape).nbytes for each in tensors)
        paths = (source.root.path, job.target.path, "tag", source.writer.value)
        done = Converted(*paths, nbytes, job.topology.sizes)
    else:
        done = write_tag(prepare, chosen)
    done = replace(done, **plans[-1])
    model = Parts(model=True)
    return replace(done, left_out=(*done.left_out, *source.left_out(model, model)))


def _planned(source: Location, what: ImportTarget) -> dict[str, Any]:
    """Return fields of `Converted`. Raises the errors of `ImportedModel.state`, not for unknown and missing names."""
    model = ImportedModel(open_imported(source, what), what)
    selection = model.selection
    sizes = what.sizes
    members = {
        match.name: tuple(what.mapping.in_files(match.rule.names(match.numbers, sizes))) for match in selection.matches
    }
    whole = {match.name: match for match in selection.matches if not set(members[match.name]) & set(selection.missing)}
    is_blocked = bool(selection.unknown or selection.missing)
    try:
        stages = model.staged(list(whole)) if is_blocked else model.stages
    except TopologyMismatch:
        if not is_blocked:
            raise
        stages = [list(whole)]  # too few layers have rules: their names are the problem
    tensors = []
    for pp_rank, names in enumerate(stages):
        for name in names:
            spec = model.spec(whole[name], what.topology)
            tensors.append(ConvertedTensor(name, spec.dtype, spec.shape, members[name], pp_rank=pp_rank))
    unknown = {name: tuple(closest(what.mapping, name)) for name in selection.unknown}
    return {
        "mapping": what.mapping.name,
        "tensors": tuple(tensors),
        "unknown": unknown,
        "missing": selection.missing,
        "left_out": outside(model),
    }


def outside(model: ImportedModel) -> tuple[str, ...]:
    """Describe the tensors of the directory that are no part of the model."""
    return tuple(f"tensors {reason}: {first_of(names)}" for reason, names in model.left_out.items())
