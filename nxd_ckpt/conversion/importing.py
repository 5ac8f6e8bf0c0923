"""``import_checkpoint``: a Hugging Face directory as a tag of a job of given sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import Unpack

from nxd_ckpt.conversion.conversion import convert
from nxd_ckpt.conversion.inputs import open_imported
from nxd_ckpt.conversion.job import Job
from nxd_ckpt.conversion.worker_pool import joint_agreement
from nxd_ckpt.coordination.agreement import on_all
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.option_classes import options_of, takes
from nxd_ckpt.errors import TopologyMismatch, as_checkpoint_errors
from nxd_ckpt.gc_paused import gc_paused
from nxd_ckpt.hugging_face.imported_model import ImportedModel, ImportTarget, closest
from nxd_ckpt.hugging_face.model_heads import with_head_of
from nxd_ckpt.keywords import ImportKeywords
from nxd_ckpt.options.hugging_face import ImportOptions
from nxd_ckpt.output.locations import Location, locate_existing, locate_output
from nxd_ckpt.output.model_files import config_in, read_config
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.foreign.hugging_face_directory import open_weights
from nxd_ckpt.tag.foreign.quantization import quantization_of
from nxd_ckpt.tag.mappings import find_mapping, text_config

logger = logging.getLogger("nxd_ckpt")


@dataclass(frozen=True)
class ImportedTensor:
    """An NxD tensor of an import.

    Attributes:
        name: its name in the tag.
        dtype: torch's name.
        shape: shape on each rank of its pipeline stage.
        pp_rank: the pipeline stage.
        members: the Hugging Face tensors that it is made of.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pp_rank: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Import:
    """The result of an import, or of a dry run.

    Attributes:
        source: path of the Hugging Face directory.
        target: path of the tag.
        mapping: the mapping's name.
        tensors: tensors of the tag.
        unknown: names in the directory that no rule maps, each with the closest rules. Empty unless nothing was
            written.
        missing: tensors that the model should have but the directory lacks. Empty unless nothing was written.
        left_out: tensors of the directory that the tag does not have, by the reason.
    """

    source: str
    target: str
    mapping: str
    tensors: tuple[ImportedTensor, ...]
    unknown: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def import_target(source: Location, chosen: ImportOptions, process: int = 0) -> ImportTarget:
    """Return the form of the tag; sizes and names come from config.json and the mapping.

    The first process warns of files that are not read.
    """
    directory = open_weights(source.open(), source.name, chosen.model_key)
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
    sizes = mapping.sizes(config, chosen.kv_size_multiplier, chosen.hardware)
    return ImportTarget(
        chosen.topology,
        mapping,
        replace(sizes, heads_of=chosen.tp if chosen.pad_attn_heads else 1),
        chosen.variants,
        chosen.dtype,
        chosen.use_xser,
        chosen.virtual_pp,
        chosen.stages,
        chosen.model_key,
        chosen.renaming,
        quantization,
    )


def import_plan(source: Location, target: Location, what: ImportTarget) -> Import:
    """Plan an import. Raises the errors of `ImportedModel.state`, except for unknown and missing names."""
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
            tensors.append(ImportedTensor(name, spec.dtype, spec.shape, pp_rank, members[name]))
    unknown = {name: tuple(closest(what.mapping, name)) for name in selection.unknown}
    whole_tag, missing = tuple(tensors), selection.missing
    return Import(source.path, target.path, what.mapping.name, whole_tag, unknown, missing, model.left_out)


@as_checkpoint_errors()
@takes(ImportOptions)
def import_checkpoint(hf_directory: StrPath, tag: StrPath, **options: Unpack[ImportKeywords]) -> Import:
    """Make ``tag`` from the model in ``hf_directory``, as a job of the given sizes would have saved it.

    The tag holds only the model. It is written rank by rank in bounded memory, below 200 MiB for each worker, and
    becomes visible when it is complete. Keywords are the fields of `nxd_ckpt.options.hugging_face.ImportOptions`.

    Args:
        hf_directory: a directory or URL with safetensors files, or one file with the whole model: safetensors, or a
            state dict from torch.save, which is read as plain data, without running code. It is only read.
        tag: directory or URL of the new tag, outside ``hf_directory``.

    Raises:
        KeyMismatch: no rule maps a name (with the closest rules), or the directory lacks tensors.
        ShapeMismatch, TopologyMismatch: tensors or sizes do not fit this config.json, or do not divide.
        DtypeMismatch: a value does not fit into ``dtype``.
        InvalidArgument: invalid arguments, or ``tag`` may not be replaced.
        CheckpointNotFound, PartNotFound, MalformedFile, UnsupportedState: no such directory, or it cannot be read.
    """
    chosen = options_of(ImportOptions, options)
    plans: list[Import] = []

    def prepare(process: int, processes: int) -> Job:
        source = locate_existing(hf_directory, chosen.storage_options)
        target = locate_output(tag, source, chosen.overwrite, chosen.written_with)
        with gc_paused():
            what = import_target(source, chosen, process)
            plans.append(import_plan(source, target, what))
        parts = Parts(model=True, use_xser=chosen.use_xser)
        return Job(source, target, what, parts, durable=chosen.durable, overwrite=chosen.overwrite)

    if chosen.dry_run:
        with joint_agreement(chosen.all_ranks, chosen.timeout) as agreement:
            on_all(agreement, lambda: prepare(agreement.rank, agreement.world_size))
    else:
        convert(prepare, chosen)
    return plans[-1]
