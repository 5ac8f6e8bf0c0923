"""Form "tag" with names="nxd": a Hugging Face directory as a job of given sizes would have saved it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from nxd_ckpt.conversion.result import Converted, ConvertedTensor
from nxd_ckpt.conversion.tag_job import Job
from nxd_ckpt.conversion.tag_writer import write_tag
from nxd_ckpt.coordination.agreement import on_all
from nxd_ckpt.coordination.rendezvous import joint_agreement
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import TopologyMismatch, UnsupportedState
from nxd_ckpt.formats.safetensors import TensorForm
from nxd_ckpt.gc_paused import gc_paused
from nxd_ckpt.hugging_face.imported_model import ImportedModel, ImportTarget, closest
from nxd_ckpt.hugging_face.mappings import find_mapping, text_config, with_head_of
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.output.locations import Location, locate_output
from nxd_ckpt.output.model_files import config_in, read_config
from nxd_ckpt.output.source import Source, open_imported
from nxd_ckpt.reshard.target import Target
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.foreign.hugging_face_directory import open_weights
from nxd_ckpt.tag.foreign.quantization import quantization_of
from nxd_ckpt.tag.foreign.recognise import Program

logger = logging.getLogger("nxd_ckpt")


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
    plans: list[_Plan] = []

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
        tensors = plans[-1].tensors
        nbytes = sum(TensorForm(each.name, each.dtype, each.shape).nbytes for each in tensors)
        paths = (source.root.path, job.target.path, "tag", source.writer.value)
        done = Converted(*paths, nbytes, job.topology.sizes)
    else:
        done = write_tag(prepare, chosen)
    plan, model = plans[-1], Parts(model=True)
    return replace(
        done,
        mapping=plan.mapping,
        tensors=plan.tensors,
        unknown=plan.unknown,
        missing=plan.missing,
        left_out=(*plan.left_out, *source.left_out(model, model)),
    )


class _Plan(NamedTuple):
    mapping: str
    tensors: tuple[ConvertedTensor, ...]
    unknown: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]


def _planned(source: Location, what: ImportTarget) -> _Plan:
    """Plan the tag. Raises the errors of `ImportedModel.state`, except for unknown and missing names."""
    model = ImportedModel(open_imported(source, what), what)
    selection, sizes = model.selection, what.sizes
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
    return _Plan(what.mapping.name, tuple(tensors), unknown, selection.missing, outside(model))


def outside(model: ImportedModel) -> tuple[str, ...]:
    """Describe the tensors of the directory that are no part of the model."""
    return tuple(f"tensors {reason}: {first_of(names)}" for reason, names in model.left_out.items())
