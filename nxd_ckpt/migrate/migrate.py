"""A checkpoint of any trainer in Hugging Face's names, in a form that training on plain torch continues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from nxd_ckpt.conversion.result import Converted
from nxd_ckpt.conversion.tag_writer import Job, write_tag
from nxd_ckpt.conversion.to_dcp import write_dcp
from nxd_ckpt.conversion.to_files import to_files
from nxd_ckpt.conversion.to_hf import Export, are_converted, settings_of, write_hf
from nxd_ckpt.coordination.agreement import decided_by_rank0, on_all
from nxd_ckpt.coordination.rendezvous import joint_agreement
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.heads import HARDWARE, Hardware
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import InvalidArgument, KeyMismatch, TopologyMismatch, UnsupportedState
from nxd_ckpt.formats.tensors import StorageSpan, TensorStub, contiguous_stride, form_of
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag, HuggingFaceTerms
from nxd_ckpt.hugging_face.imported_model import ImportedModel, ImportTarget
from nxd_ckpt.hugging_face.mapped_tag import MappedTag
from nxd_ckpt.hugging_face.mapping import ModelMapping
from nxd_ckpt.hugging_face.mappings import adapter_mapping, find_mapping, shipped_mappings, text_config, with_head_of
from nxd_ckpt.hugging_face.sizes import Sizes
from nxd_ckpt.hugging_face.torchtitan_names import TorchTitanNames
from nxd_ckpt.loading.load_attempt import OneModelTag, RenamedTag, unwrapped
from nxd_ckpt.migrate.origin import Origin, find_origin
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.output.locations import locate_apart, locate_output
from nxd_ckpt.output.model_files import ModelFile, config_in, read_config, read_tokenizer, with_config
from nxd_ckpt.output.output import TORCH_DCP, Output
from nxd_ckpt.output.source import Source
from nxd_ckpt.reshard.dcp_state import DcpState
from nxd_ckpt.reshard.target import Target
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.storage.urls import StrPath, join
from nxd_ckpt.surroundings import gc_paused
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import refuse_per_rank
from nxd_ckpt.tag.recognise import Program


class Translation:
    """A source in the terms of Hugging Face, or of TorchTitan: as files of a model, or as a tag of one rank.

    If NxD's optimizer kept master weights, they are that tag's model.
    """

    def __init__(self, source: Source, chosen: ConvertOptions) -> None:
        # Whether an optimizer was saved tells the order of copies of key-value heads, though it is left out.
        self._source = source if source.optimizer else replace(source, optimizer=None)
        self._chosen = chosen
        self._to_files = chosen.to == "hf"

    @cached_property
    def _origin(self) -> Origin:
        return find_origin(self._source, self._chosen)

    @cached_property
    def _files(self) -> list[ModelFile]:
        chosen = self._chosen
        config = self._origin.config if chosen.config is None else os.fspath(chosen.config)
        return [] if config is None else read_config(config, chosen.storage_options)

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return text_config(config_in(self._files))

    def _check(self) -> None:
        """Raise unless all of it can be translated."""
        self._tag.require_all()
        if not self._lacks_rest:
            refuse_per_rank(self._origin.opened, "scheduler")
        if self._origin.imported is None:
            refuse_other_model(self._opened, self.terms)
        if self._chosen.to == "torchtitan" and self.step is None and self._tag.parts.optimizer is not None:
            raise UnsupportedState(
                f"{self._origin.place.path} has an optimizer without a count of steps, but TorchTitan continues at a "
                "step; pass optimizer=False to begin at step 0, or choose another form"
            )

    @cached_property
    def step(self) -> int | None:
        return self._tag.steps if self._origin.step is None else self._origin.step

    @property
    def _lacks_rest(self) -> bool:
        """True if the form has neither scheduler nor user content."""
        return self._chosen.optimizer is False or self._chosen.to in ("hf", "torchtitan", "files")

    @property
    def left_out(self) -> tuple[str, ...]:
        origin = self._origin
        form = self._chosen.to
        model_only = self._chosen.optimizer is False
        has_optimizer = origin.opened.parts.optimizer is not None
        missing = {
            "optimizer": has_optimizer and (not self._chosen.optimizer if form == "hf" else model_only),
            "optimizer state that belongs to no parameter": form != "hf" and self._tag.general,
            "scheduler": self._lacks_rest and bool(origin.scheduler),
            "user content": self._lacks_rest and bool(origin.content),
        }
        guests = self._source.guests() if self._source.is_tag and form != "tag" else []
        return (*origin.left_out, *(what for what, is_missing in missing.items() if is_missing), *guests)

    @cached_property
    def terms(self) -> HuggingFaceTerms:
        origin = self._origin
        chosen = self._chosen
        mapping = self._mapping
        names = origin.param_names if chosen.saved_param_names is None else chosen.saved_param_names
        if names is not None and isinstance(self._opened, RenamedTag):
            names = self._opened.live_names(names)
        whole = chosen.optimizer is not False and not self._to_files
        hardware, converted = self._order
        titan = TorchTitanNames(self._config, chosen.torchtitan_release) if chosen.to == "torchtitan" else None
        return HuggingFaceTerms(
            mapping if titan is None else replace(mapping, packed=mapping.packed + titan.packed),
            replace(self._sizes(hardware), converted=converted),
            names,
            torchtitan=titan,
            both_names=chosen.to in ("dcp", "torchtitan"),  # torch DCP asks for all names of a live module
            dtype=chosen.dtype,
            optimizer=whole or chosen.optimizer is True,
            master_weights=whole or chosen.master_weights,
            scheduler=origin.scheduler if whole else None,
            content=origin.content if whole else None,
        )

    @cached_property
    def _tag(self) -> HuggingFaceTag:
        return HuggingFaceTag(self._opened, self.terms)

    @cached_property
    def _base(self) -> ModelMapping:
        """The mapping of the model, whatever it has for a head."""
        spec = self._origin.mapping if self._chosen.mapping is None else self._chosen.mapping
        return completed(find_mapping(spec, self._config), self._config)

    @cached_property
    def _opened(self) -> OpenTag:
        """The source under the names for which the mapping has rules, of one of several models if it is chosen."""
        if self._origin.imported is not None:
            return self._origin.opened
        saved = self._origin.saved
        model = self._chosen.model
        return unwrapped(saved, self._base) if model is None else OneModelTag(saved, model)

    @cached_property
    def _mapping(self) -> ModelMapping:
        if not self._to_files:
            return self._base
        mapping = with_head_of(self._base, self._config, self._opened.model_names())
        settings = settings_of(self._opened)
        if settings is None:
            return mapping
        if self._chosen.renaming:
            raise InvalidArgument("an adapter has the names of its base: leave out prefix= and key_mapping=")
        return adapter_mapping(mapping, settings)

    @property
    def _copies(self) -> int:
        """Number of copies of each key-value head."""
        recorded = self._origin.kv_size_multiplier
        requested = self._chosen.kv_size_multiplier
        if None not in (recorded, requested) and recorded != requested:
            where = self._origin.place.path
            raise InvalidArgument(f"kv_size_multiplier={requested}, but {where} has {recorded}; leave it out")
        return requested or recorded or 1

    def _sizes(self, hardware: Hardware) -> Sizes:
        heads_of = self._opened.topology.tp if self._chosen.pad_attn_heads else 1
        return replace(self._mapping.sizes(self._config, self._copies, hardware), heads_of=heads_of)

    @cached_property
    def _order(self) -> tuple[Hardware, bool]:
        """The order of key-value heads in which their copies are equal: of what hardware, and if its converter's."""
        opened = self._opened
        hardware = self._chosen.hardware
        # Adapters alone have nothing that tells the order.
        any_kind = HARDWARE[:1] if self._origin.writer is Program.OPTIMUM_ADAPTER else HARDWARE
        kinds = any_kind if hardware is None else (hardware,)
        if self._copies == 1 or (self._chosen.dry_run and hardware is not None):
            return kinds[0], False
        fitting: list[tuple[Hardware, bool]] = []
        for kind in kinds:
            sizes = self._sizes(kind)
            by_converter = partial(MappedTag, opened, self._mapping, replace(sizes, converted=True))
            try:
                is_converted = are_converted(opened, MappedTag(opened, self._mapping, sizes), by_converter)
            except TopologyMismatch as error:
                reason = error
            else:
                fitting.append((kind, is_converted))
        if not fitting:
            raise reason
        if len(fitting) == 1:
            return fitting[0]
        raise InvalidArgument(
            f"{self._origin.place.path} does not show the order of copies of key-value heads; pass hardware=, the kind "
            f"of accelerator that the job ran on: {' or '.join(HARDWARE)}"
        )

    def to_hf(self, dst: StrPath) -> Converted:
        """Make the Hugging Face directory ``dst``, or of an adapter PEFT's. Each rank writes some of its files."""
        with joint_agreement(self._chosen.all_ranks, self._chosen.timeout) as agreement:
            on_all(agreement, self._refuse_hugging_face)
            self._order = decided_by_rank0(agreement, lambda: self._order)
            export = on_all(agreement, lambda: self._export(dst))
            return self._described(write_hf(export, agreement, self._chosen))

    def _refuse_hugging_face(self) -> None:
        if self._origin.imported is not None:
            raise UnsupportedState(
                f"{self._source.root.path} has Hugging Face's form already: copy it, or choose another form "
                "(torchtitan, dcp, tag or files)"
            )

    def _export(self, dst: StrPath) -> Export:
        chosen = self._chosen
        opened = self._opened
        files = self._files
        target = locate_apart(dst, self._source.place, chosen.written_with)
        chosen.renaming.validate()
        if not chosen.renaming and self._config != config_in(files):
            files = with_config(files, self._config)
        if chosen.tokenizer is not None:
            others = read_tokenizer(os.fspath(chosen.tokenizer), chosen.storage_options)
            files = list({file.name: file for file in (*others, *files)}.values())
        with opened.guarded():
            if not self._source.is_tag and self._origin.writer is not Program.OPTIMUM_ADAPTER:
                refuse_other_model(opened, self.terms)
            return Export(self._source, target, self._tag, files, chosen.size_per_shard, chosen.renaming)

    def to_dcp(self, dst: StrPath) -> Converted:
        """Make the torch DCP directory ``dst``."""
        return self._written(self.tag, self._chosen.keys, dst)

    def to_torchtitan(self, dst: StrPath) -> Converted:
        """Make ``step-N`` in ``dst``."""
        # From step 0 TorchTitan loads only the model, from any other step everything.
        tag = self.tag
        is_model_only = tag.parts.optimizer is None
        step = self.step or 0
        assert self.terms.torchtitan is not None
        scheduler = self.terms.torchtitan.scheduler(step, tag.param_groups)
        train_state = {"step": step, "ntokens_seen": self._origin.tokens}
        content = None if is_model_only else {"train_state": train_state, "lr_scheduler": scheduler}
        whole = HuggingFaceTag(self._opened, replace(self.terms, scheduler=None, content=content))
        return self._written(whole, _TORCHTITAN, join(os.fspath(dst), f"step-{0 if is_model_only else step}"))

    def to_files(self, dst: StrPath) -> Converted:
        """Make plain files in ``dst``."""
        chosen = replace(self._chosen, saved_param_names=None)
        return self._described(to_files(self._source, dst, chosen, self.tag))

    def to_tag(self, dst: StrPath) -> Converted:
        """Make the tag ``dst``. Each rank writes some of its files."""
        return self._described(write_tag(lambda process, processes: self._job(dst), self._chosen))

    def _job(self, dst: StrPath) -> Job:
        chosen = self._chosen
        tag = self.tag
        form = "plain" if chosen.optimizer_form is None else chosen.optimizer_form
        optimizer = None if tag.parts.optimizer is None else form
        use_xser = bool(chosen.use_xser)
        return Job(
            self._source,
            locate_output(dst, self._source.place, chosen.overwrite, chosen.written_with),
            Target(chosen.topology, optimizer, use_xser, partitions=chosen.partitions, stages=chosen.stages),
            replace(tag.parts, optimizer=optimizer, use_xser=use_xser),
            imported=self._origin.imported,
            terms=self.terms,
        ).of(self._opened, chosen)

    @cached_property
    def tag(self) -> HuggingFaceTag:
        """The translated tag, all of which is there. Raises the errors of its checks."""
        if self._origin.writer is Program.OPTIMUM_ADAPTER:
            raise UnsupportedState(
                f"{self._origin.place.path} is an adapter without its base model, but training needs both; convert it "
                "to the form hf, which peft loads onto the base"
            )
        with self._opened.guarded(), gc_paused():
            self._check()
        return self._tag

    def _written(self, tag: HuggingFaceTag, names: DcpNames, dst: StrPath) -> Converted:
        chosen = self._chosen
        state = DcpState(WholeTag(tag), names)
        target = locate_apart(dst, self._source.place, chosen.written_with)
        output = Output(target, chosen, TORCH_DCP)
        return self._described(write_dcp(state, output, self._source, chosen))

    def _described(self, done: Converted) -> Converted:
        return replace(done, mapping=self.terms.mapping.name, step=self.step, left_out=self.left_out)


_TORCHTITAN = DcpNames(model="", optim="optimizer", flat_optimizer=True, content="")
"""Names of the state dict that TorchTitan's trainer saves."""


def completed(mapping: ModelMapping, config: Mapping[str, Any]) -> ModelMapping:
    """Return a checkpoint's own ``mapping`` with ties, and names of sizes, of the family of config.json."""
    family = _family(mapping, config)
    if family is None:
        return mapping
    keys = {**family.keys, **mapping.keys}
    tied = {**family.tied, **mapping.tied}
    return replace(mapping, keys=keys, tied=tied, ties=family.ties)


def refuse_other_model(opened: OpenTag, terms: HuggingFaceTerms) -> None:
    """Check a checkpoint whose own names are Hugging Face's by the shipped mapping for its config.json.

    Nothing but the number of layers and experts is checked of a model with tensors that this mapping lacks, such as a
    classifier.

    Raises the errors of `ImportedModel.state`.
    """
    family = _family(terms.mapping, terms.sizes.config)
    if family is None:
        return
    packed = () if terms.torchtitan is None else terms.torchtitan.packed
    own = replace(terms.mapping, packed=tuple(each for each in terms.mapping.packed if each not in packed))
    tag = HuggingFaceTag(opened, HuggingFaceTerms(own, terms.sizes, optimizer=False))
    sizes = family.sizes(terms.sizes.config, 1, "trn1")
    model = ImportedModel(_Forms(tag), ImportTarget(Topology(), family, sizes))
    if not model.selection.unknown:
        model.state(Topology())


def _family(mapping: ModelMapping, config: Mapping[str, Any]) -> ModelMapping | None:
    """Return the shipped mapping for config.json; None without, and if ``mapping`` is shipped itself."""
    shipped = shipped_mappings()
    if mapping.name in shipped:
        return None
    return next((each for each in shipped.values() if config.get("model_type") in each.model_types), None)


class _Forms:
    """The tag's tensors as those of a Hugging Face directory; only names, shapes and dtypes are true."""

    def __init__(self, tag: HuggingFaceTag) -> None:
        self.where: str = tag.where
        self._tree = tag.model_tree(Coordinates())

    @property
    def names(self) -> list[str]:
        return sorted(self._tree)

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub:
        saved = name if name in self._tree else (tied or {}).get(name, name)
        if saved not in self._tree:
            raise KeyMismatch(f"{self.where} has no tensor {name}; pass the config.json of its own model")
        dtype, shape = form_of(self._tree[saved])
        return TensorStub("", 0, dtype, shape, contiguous_stride(shape), StorageSpan(name, 0, 0, None))
