"""``migrate``: a checkpoint of training on Neuron, in a form that training on plain torch continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

from typing_extensions import Unpack

from nxd_ckpt.conversion.conversion import convert
from nxd_ckpt.conversion.export import Export, are_converted, export_checkpoint
from nxd_ckpt.conversion.job import Converted, HuggingFaceTarget, Job, metrics_of
from nxd_ckpt.conversion.to_dcp import write_dcp
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.heads import HARDWARE
from nxd_ckpt.core.mapping import ModelMapping
from nxd_ckpt.core.option_classes import options_of, takes
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.torchtitan_names import TorchTitanNames
from nxd_ckpt.errors import InvalidArgument, TopologyMismatch, UnsupportedState, as_checkpoint_errors
from nxd_ckpt.gc_paused import gc_paused
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag, HuggingFaceTerms
from nxd_ckpt.hugging_face.mapped_tag import MappedTag
from nxd_ckpt.keywords import ExportKeywords, MigrateKeywords
from nxd_ckpt.load.attempt import RenamedTag
from nxd_ckpt.migrate.family import completed, refuse_other_model
from nxd_ckpt.migrate.source import Origin, find_origin
from nxd_ckpt.options.execution import ExecutionOptions, OutputOptions
from nxd_ckpt.options.hugging_face import MigrateOptions
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
    chosen = options_of(MigrateOptions, options)
    origin = find_origin(src, chosen)
    # Ranks' files may be below ``src``, and the rest of the checkpoint beside them.
    refuse_inside(locate_any(src, chosen.storage_options), location_of(dst, "output", chosen.written_with))
    job = _Job(origin, dst, chosen)
    if origin.writer is Writer.OPTIMUM_ADAPTER:
        export = job.export_adapter()
        fields = (export.target, origin.writer.value, chosen.to, export.mapping, None, export.nbytes, origin.left_out)
        return Migration(os.fspath(src), *fields)
    with origin.opened.guarded(), gc_paused():
        job.check()
    done = _WRITERS[chosen.to](job)
    return Migration(
        os.fspath(src),
        done.target,
        origin.writer.value,
        chosen.to,
        job.terms.mapping.name,
        job.step,
        done.nbytes,
        job.left_out,
    )


class _Job:
    """One migration of ``origin`` to ``dst``."""

    def __init__(self, origin: Origin, dst: StrPath, chosen: MigrateOptions) -> None:
        self._origin, self._dst, self._chosen = origin, dst, chosen
        self._config = origin.config if chosen.config is None else os.fspath(chosen.config)
        self._mapping = origin.mapping if chosen.mapping is None else chosen.mapping

    def check(self) -> None:
        """Raise unless all of it can be migrated."""
        self._tag.require_all()
        if self._origin.imported is None:
            refuse_other_model(self._origin.opened, self.terms)
        if self._chosen.to == "torchtitan" and self.step is None and self._tag.parts.optimizer is not None:
            raise UnsupportedState(
                f"{self._origin.place.path} has an optimizer without a count of steps, but TorchTitan continues at a "
                "step; pass model_only= to begin at step 0, or migrate it to another form"
            )

    @cached_property
    def step(self) -> int | None:
        return self._tag.steps if self._origin.step is None else self._origin.step

    @property
    def left_out(self) -> tuple[str, ...]:
        origin, model_only = self._origin, self._chosen.model_only
        without_rest = model_only or self._chosen.to in ("hf", "torchtitan")
        missing = {
            "optimizer": model_only and origin.opened.parts.optimizer is not None,
            "optimizer state that belongs to no parameter": self._tag.general,
            "scheduler": without_rest and bool(origin.scheduler),
            "user content": without_rest and bool(origin.content),
        }
        return (*origin.left_out, *(what for what, is_missing in missing.items() if is_missing))

    @cached_property
    def terms(self) -> HuggingFaceTerms:
        origin, chosen = self._origin, self._chosen
        files = [] if self._config is None else read_config(self._config, chosen.storage_options)
        config = text_config(config_in(files))
        mapping = completed(find_mapping(self._mapping, config), config)
        names = origin.param_names if chosen.saved_param_names is None else chosen.saved_param_names
        if names is not None and isinstance(origin.opened, RenamedTag):
            names = origin.opened.live_names(names)
        whole = not chosen.model_only
        sizes = self._sizes(mapping, config)
        titan = TorchTitanNames(config, chosen.torchtitan_release) if chosen.to == "torchtitan" else None
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

    @cached_property
    def _tag(self) -> HuggingFaceTag:
        return HuggingFaceTag(self._origin.opened, self.terms)

    def _sizes(self, mapping: ModelMapping, config: Mapping[str, Any]) -> Sizes:
        """Return the sizes of the model, with the order of key-value heads in which their copies are equal."""
        opened, where = self._origin.opened, self._origin.place.path
        recorded, requested = self._origin.kv_size_multiplier, self._chosen.kv_size_multiplier
        if None not in (recorded, requested) and recorded != requested:
            raise InvalidArgument(f"kv_size_multiplier={requested}, but {where} has {recorded}; leave it out")
        if mapping.name == INFERENCE:
            return inference_sizes(mapping, config, opened.topology.tp)
        copies, hardware = requested or recorded or 1, self._chosen.hardware
        if copies == 1:
            return mapping.sizes(config, copies, hardware or "trn1")
        fitting: list[Sizes] = []
        for kind in HARDWARE if hardware is None else (hardware,):
            sizes = mapping.sizes(config, copies, kind)
            converted = replace(sizes, converted=True)
            by_converter = partial(MappedTag, opened, mapping, converted)
            try:
                is_converted = are_converted(opened, MappedTag(opened, mapping, sizes), by_converter)
            except TopologyMismatch as error:
                reason = error
            else:
                fitting.append(converted if is_converted else sizes)
        if not fitting:
            raise reason
        if len(fitting) == 1:
            return fitting[0]
        raise InvalidArgument(
            f"{where} does not show the order of copies of key-value heads; pass hardware=, the kind of accelerator "
            f"that the job ran on: {' or '.join(HARDWARE)}"
        )

    def export(self) -> Export:
        sizes, optimizer = self.terms.sizes, self._tag.parts.optimizer is not None
        return self._exported(
            kv_size_multiplier=sizes.kv_size_multiplier,
            hardware=sizes.hardware,
            optimizer=optimizer,
            saved_param_names=self.terms.param_names,
        )

    def export_adapter(self) -> Export:
        if self._chosen.to != "hf":
            raise UnsupportedState(
                f"{self._origin.place.path} is an adapter without its base model, but training needs both; migrate it "
                "to the form hf, which peft loads onto the base"
            )
        return self._exported(kv_size_multiplier=self._origin.kv_size_multiplier or 1)

    def _exported(self, **facts: Unpack[ExportKeywords]) -> Export:
        place = self._origin.place
        facts |= {"config": self._config, "mapping": self._mapping}
        options: dict[str, Any] = {name: getattr(self._chosen, name) for name in _EXPORTED}
        return export_checkpoint(join(place.directory, place.name), self._dst, **facts, **options)

    def to_dcp(self) -> Converted:
        return self._written(self._tag, ToDcpOptions().names, self._dst)

    def to_torchtitan(self) -> Converted:
        # From step 0 TorchTitan loads only the model, from any other step everything.
        is_model_only, step = self._tag.parts.optimizer is None, self.step or 0
        assert self.terms.torchtitan is not None
        scheduler = self.terms.torchtitan.scheduler(step, self._tag.param_groups)
        train_state = {"step": step, "ntokens_seen": self._origin.tokens}
        content = None if is_model_only else {"train_state": train_state, "lr_scheduler": scheduler}
        tag = HuggingFaceTag(self._origin.opened, replace(self.terms, scheduler=None, content=content))
        return self._written(tag, _TORCHTITAN, join(os.fspath(self._dst), f"step-{0 if is_model_only else step}"))

    def _written(self, tag: HuggingFaceTag, names: DcpNames, dst: StrPath) -> Converted:
        chosen, place = self._chosen, self._origin.place
        state, target = DcpState(WholeTag(tag), names), locate_apart(dst, place, chosen.written_with)
        output = Output(target, overwrite=chosen.overwrite, durable=chosen.durable, kind=TORCH_DCP)
        return write_dcp(state, output, place, chosen)

    def to_tag(self) -> Converted:
        origin, chosen = self._origin, self._chosen
        job = Job(
            origin.place,
            locate_output(self._dst, origin.place, chosen.overwrite, chosen.written_with),
            HuggingFaceTarget(Topology(), terms=self.terms, imported=origin.imported),
            self._tag.parts,
            durable=chosen.durable,
            overwrite=chosen.overwrite,
            save=origin.opened.save,
            metrics=metrics_of(origin.opened),
        )
        execution = ExecutionOptions(dry_run=chosen.dry_run, progress=chosen.progress)
        return convert(lambda process, processes: job, execution)


_EXPORTED = ("dtype", "size_per_shard", *(each.name for each in fields(OutputOptions)))
"""Options of a migration that are an export's too."""

_TORCHTITAN = DcpNames(model="", optim="optimizer", flat_optimizer=True, content="")
"""Names of the state dict that TorchTitan's trainer saves."""

_WRITERS: Mapping[str, Callable[[_Job], Converted | Export]] = {
    "hf": _Job.export,
    "dcp": _Job.to_dcp,
    "torchtitan": _Job.to_torchtitan,
    "tag": _Job.to_tag,
}
