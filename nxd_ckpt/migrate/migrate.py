"""``migrate``: a checkpoint of training on Neuron, in a form that training on plain torch continues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from typing_extensions import Unpack

from nxd_ckpt.conversion.conversion import convert
from nxd_ckpt.conversion.export import Export, are_converted, export_checkpoint
from nxd_ckpt.conversion.job import HuggingFaceTarget, Job, metrics_of
from nxd_ckpt.conversion.to_dcp import write_dcp
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.heads import HARDWARE, Hardware
from nxd_ckpt.core.mapping import ModelMapping
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.torchtitan_names import TorchTitanNames
from nxd_ckpt.errors import InvalidArgument, TopologyMismatch, UnsupportedState, as_checkpoint_errors
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag, HuggingFaceTerms
from nxd_ckpt.hugging_face.mapped_tag import MappedTag
from nxd_ckpt.keywords import ExportKeywords, MigrateKeywords
from nxd_ckpt.load.attempt import RenamedTag
from nxd_ckpt.migrate.family import completed, refuse_other_model
from nxd_ckpt.migrate.source import Origin, find_origin
from nxd_ckpt.options.execution import ExecutionOptions
from nxd_ckpt.options.hugging_face import MappingSpec, MigrateOptions
from nxd_ckpt.options.tags import ToDcpOptions
from nxd_ckpt.output.locations import locate_any, locate_apart, locate_output, location_of, refuse_inside
from nxd_ckpt.output.model_files import config_in, read_config
from nxd_ckpt.output.output import TORCH_DCP, Output
from nxd_ckpt.reshard.dcp_state import DcpState
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.storage.urls import StrPath, join
from nxd_ckpt.tag.foreign.recognise import Writer
from nxd_ckpt.tag.mappings import INFERENCE, find_mapping, inference_sizes, text_config


@dataclass(frozen=True)
class Migration:
    """The result of a migration, or of a dry run.

    Attributes:
        source: path of the source, as passed.
        target: the new directory.
        writer: the program that wrote the source.
        form: form of the target.
        mapping: the mapping's name.
        step: number of steps of the run; None if not recorded.
        nbytes: bytes of the target's tensors.
        left_out: descriptions of parts of the source that the target lacks.
    """

    source: str
    target: str
    writer: str
    form: str
    mapping: str
    step: int | None
    nbytes: int
    left_out: tuple[str, ...]


@as_checkpoint_errors()
@takes(MigrateOptions)
def migrate(src: StrPath, dst: StrPath, **options: Unpack[MigrateKeywords]) -> Migration:
    """Make ``dst``, with which transformers, torch DCP, TorchTitan or ``load_checkpoint`` continue on plain torch.

    ``src`` is recognised by its files: a tag of neuronx-distributed or nxd_ckpt, a checkpoint of
    neuronx-distributed-training (``NAME.ckpt``), optimum-neuron (``checkpoint-N``), neuronx-nemo-megatron
    (``mp_rank_00/NAME.ckpt``), torch-xla (``*.pth``), torch DCP, SageMaker's tiered storage, or a Hugging Face
    directory, whose model is read as by an import. Model and optimizer get Hugging Face's names (for TorchTitan,
    TorchTitan's), and whole tensors on one rank. If NxD's optimizer kept master weights, they become the model. An
    adapter becomes PEFT's files. The input is only read, and its digests are verified; ``dst`` appears when all of it
    is written. Keywords are the fields of `nxd_ckpt.options.hugging_face.MigrateOptions`.

    Args:
        src: the checkpoint's directory or file, or the URL of one.
        dst: directory or URL of the result; for TorchTitan the directory in which ``step-N`` is made, or ``step-0`` for
            a model without its optimizer.

    Raises:
        UnsupportedState: a layout that is recognised but not supported, a model for which the form has no names, or,
            for TorchTitan, an optimizer without a count of steps.
        MalformedFile: two layouts at once, or files that contradict each other.
        CheckpointNotFound, PartNotFound: no checkpoint, or ranks' files are missing.
        KeyMismatch: no rule maps a name, or the checkpoint lacks tensors.
        ShapeMismatch, TopologyMismatch: tensors or sizes do not fit the config.json and mapping.
        OptimizerMismatch: names of the optimizer's parameters cannot be derived.
        InvalidArgument: invalid arguments, or ``dst`` may not be replaced.
    """
    chosen = MigrateOptions(**options)
    chosen.validate()
    origin = find_origin(src, chosen)
    # Ranks' files may be below ``src``, and the rest of the checkpoint beside them.
    refuse_inside(locate_any(src, chosen.storage_options), location_of(dst, "output", chosen.written_with))
    if origin.writer is Writer.OPTIMUM_ADAPTER:
        done = _as_adapter(origin, dst, chosen)
        fields = (done.target, origin.writer.value, chosen.to, done.mapping, None, done.nbytes, origin.left_out)
        return Migration(os.fspath(src), *fields)
    with origin.opened.guarded():
        terms = _terms(origin, chosen)
        seen = HuggingFaceTag(origin.opened, terms)
        seen.require_all()
        if origin.imported is None:
            refuse_other_model(origin.opened, terms)
        step = origin.step if origin.step is not None else seen.steps
        if chosen.to == "torchtitan" and step is None and seen.parts.optimizer is not None:
            raise UnsupportedState(
                f"{origin.place.path} has an optimizer without a count of steps, but TorchTitan continues at a step; "
                "pass model_only= to begin at step 0, or migrate it to another form"
            )
    place, nbytes = _WRITERS[chosen.to](origin, seen, terms, dst, step or 0, chosen)
    return Migration(
        os.fspath(src),
        place,
        origin.writer.value,
        chosen.to,
        terms.mapping.name,
        step,
        nbytes,
        _left_out(origin, seen, chosen),
    )


def _left_out(origin: Origin, seen: HuggingFaceTag, chosen: MigrateOptions) -> tuple[str, ...]:
    without_rest = chosen.model_only or chosen.to in ("hf", "torchtitan")
    missing = {
        "optimizer": chosen.model_only and origin.opened.parts.optimizer is not None,
        "optimizer state that belongs to no parameter": seen.general,
        "scheduler": without_rest and bool(origin.scheduler),
        "user content": without_rest and bool(origin.content),
    }
    return (*origin.left_out, *(what for what, is_missing in missing.items() if is_missing))


def _terms(origin: Origin, chosen: MigrateOptions) -> HuggingFaceTerms:
    config = _config(origin, chosen)
    document = {} if config is None else text_config(config_in(read_config(config, chosen.storage_options)))
    mapping = find_mapping(_mapping(origin, chosen), document)
    mapping = completed(mapping, document)
    names = chosen.saved_param_names if chosen.saved_param_names is not None else origin.param_names
    if names is not None and isinstance(origin.opened, RenamedTag):
        names = origin.opened.live_names(names)
    whole = not chosen.model_only
    sizes = _sizes(origin, chosen, mapping, document)
    titan = TorchTitanNames(document, chosen.torchtitan_release) if chosen.to == "torchtitan" else None
    return HuggingFaceTerms(
        mapping if titan is None else replace(mapping, packed=mapping.packed + titan.packed),
        sizes,
        names,
        torchtitan=titan,
        both_names=chosen.to in ("dcp", "torchtitan"),  # torch DCP asks for all names of a live module
        dtype=chosen.dtype,
        optimizer=whole,
        scheduler=origin.scheduler if whole else None,
        content=origin.content if whole else None,
    )


def _mapping(origin: Origin, chosen: MigrateOptions) -> MappingSpec:
    return chosen.mapping if chosen.mapping is not None else origin.mapping


def _config(origin: Origin, chosen: MigrateOptions) -> str | None:
    return os.fspath(chosen.config) if chosen.config is not None else origin.config


def _sizes(origin: Origin, chosen: MigrateOptions, mapping: ModelMapping, config: Mapping[str, Any]) -> Sizes:
    """Return the sizes of the model, with the order of key-value heads in which their copies are equal."""
    recorded, requested = origin.kv_size_multiplier, chosen.kv_size_multiplier
    if None not in (recorded, requested) and recorded != requested:
        raise InvalidArgument(f"kv_size_multiplier={requested}, but {origin.place.path} has {recorded}; leave it out")
    if mapping.name == INFERENCE:
        return inference_sizes(mapping, config, origin.opened.topology.tp)
    copies = requested or recorded or 1
    if copies == 1:
        return mapping.sizes(config, copies, chosen.hardware or "trn1")

    def mapped(sizes: Sizes) -> MappedTag:
        return MappedTag(origin.opened, mapping, sizes)

    fitting: list[Sizes] = []
    for hardware in HARDWARE if chosen.hardware is None else (chosen.hardware,):
        sizes = mapping.sizes(config, copies, hardware)
        converted = replace(sizes, converted=True)
        try:
            is_converted = are_converted(origin.opened, mapped(sizes), partial(mapped, converted))
        except TopologyMismatch as error:
            reason = error
        else:
            fitting.append(converted if is_converted else sizes)
    if not fitting:
        raise reason
    if len(fitting) == 1:
        return fitting[0]
    raise InvalidArgument(
        f"{origin.place.path} does not show the order of copies of key-value heads; pass hardware=, the kind of "
        f"accelerator that the job ran on: {' or '.join(HARDWARE)}"
    )


def _as_hugging_face(
    origin: Origin, seen: HuggingFaceTag, terms: HuggingFaceTerms, dst: StrPath, step: int, chosen: MigrateOptions
) -> tuple[str, int]:
    of_tag: ExportKeywords = {
        "kv_size_multiplier": terms.sizes.kv_size_multiplier,
        "hardware": _named(terms.sizes.hardware),
        "optimizer": seen.parts.optimizer is not None,
        "saved_param_names": terms.param_names,
    }
    done = _exported(origin, dst, chosen, of_tag)
    return done.target, done.nbytes


def _as_adapter(origin: Origin, dst: StrPath, chosen: MigrateOptions) -> Export:
    if chosen.to != "hf":
        raise UnsupportedState(
            f"{origin.place.path} is an adapter without its base model, but training needs both; migrate it to the "
            "form hf, which peft loads onto the base"
        )
    return _exported(origin, dst, chosen, {"kv_size_multiplier": origin.kv_size_multiplier or 1})


def _exported(origin: Origin, dst: StrPath, chosen: MigrateOptions, terms: ExportKeywords) -> Export:
    options: ExportKeywords = {
        **terms,
        "config": _config(origin, chosen),
        "mapping": _mapping(origin, chosen),
        "dtype": chosen.dtype,
        "size_per_shard": chosen.size_per_shard,
        "overwrite": chosen.overwrite,
        "dry_run": chosen.dry_run,
        "storage_options": chosen.storage_options,
        "output_options": chosen.output_options,
        "durable": chosen.durable,
        "progress": chosen.progress,
    }
    return export_checkpoint(join(origin.place.directory, origin.place.name), dst, **options)


def _named(hardware: str) -> Hardware:
    return next(kind for kind in HARDWARE if kind == hardware)


def _as_dcp(
    origin: Origin, seen: HuggingFaceTag, terms: HuggingFaceTerms, dst: StrPath, step: int, chosen: MigrateOptions
) -> tuple[str, int]:
    return _written(origin, seen, DcpState(seen, WholeTag(seen), ToDcpOptions().names), dst, chosen)


def _as_torchtitan(
    origin: Origin, seen: HuggingFaceTag, terms: HuggingFaceTerms, dst: StrPath, step: int, chosen: MigrateOptions
) -> tuple[str, int]:
    # From step 0 TorchTitan loads only the model, from any other step everything.
    is_model_only = seen.parts.optimizer is None
    assert terms.torchtitan is not None
    scheduler = terms.torchtitan.scheduler(step, seen.param_groups)
    train_state = {"step": step, "ntokens_seen": origin.tokens}
    content = None if is_model_only else {"train_state": train_state, "lr_scheduler": scheduler}
    tag = HuggingFaceTag(origin.opened, replace(terms, scheduler=None, content=content))
    state = DcpState(tag, WholeTag(tag), _TORCHTITAN)
    return _written(origin, tag, state, join(os.fspath(dst), f"step-{0 if is_model_only else step}"), chosen)


def _written(
    origin: Origin, seen: HuggingFaceTag, state: DcpState, dst: StrPath, chosen: MigrateOptions
) -> tuple[str, int]:
    target = locate_apart(dst, origin.place, chosen.written_with)
    output = Output(target, overwrite=chosen.overwrite, durable=chosen.durable, kind=TORCH_DCP)
    done = write_dcp(seen, state, output, origin.place, chosen)
    return done.target, done.nbytes


def _as_tag(
    origin: Origin, seen: HuggingFaceTag, terms: HuggingFaceTerms, dst: StrPath, step: int, chosen: MigrateOptions
) -> tuple[str, int]:
    target = locate_output(dst, origin.place, chosen.overwrite, chosen.written_with)
    what = HuggingFaceTarget(Topology(), terms=terms, imported=origin.imported)
    job = Job(
        origin.place,
        target,
        what,
        seen.parts,
        durable=chosen.durable,
        overwrite=chosen.overwrite,
        save=origin.opened.save,
        metrics=metrics_of(origin.opened),
    )
    execution = ExecutionOptions(dry_run=chosen.dry_run, progress=chosen.progress)
    done = convert(lambda process, processes: job, execution)
    return done.target, done.nbytes


_TORCHTITAN = DcpNames(model="", optim="optimizer", flat_optimizer=True, content="")
"""Names of the state dict that TorchTitan's trainer saves."""

_WRITERS = {"hf": _as_hugging_face, "dcp": _as_dcp, "torchtitan": _as_torchtitan, "tag": _as_tag}
