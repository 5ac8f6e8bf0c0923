"""Form "hf": the model of a tag as a Hugging Face directory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from nxd_ckpt.conversion.result import Converted, ConvertedTensor
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, in_turns, on_all
from nxd_ckpt.core import document
from nxd_ckpt.core.name_patterns import Renaming
from nxd_ckpt.core.parameter_names import CONFIG, is_adapter
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    PartNotFound,
    TopologyMismatch,
    UnsupportedState,
)
from nxd_ckpt.formats.safetensors import TensorForm
from nxd_ckpt.formats.tensors import cast_dtype
from nxd_ckpt.hugging_face.hf_slice import HfTensor
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag
from nxd_ckpt.hugging_face.mapped_tag import MappedTag
from nxd_ckpt.hugging_face.mapping import ModelMapping
from nxd_ckpt.hugging_face.mappings import (
    PREFIX,
    AdapterMapping,
)
from nxd_ckpt.hugging_face.packed_tensors import PackedTensor
from nxd_ckpt.layouts.weight_files import INDEX
from nxd_ckpt.layouts.whole_files import OPTIMIZER, OPTIMIZER_DOCUMENT, OPTIMIZER_INDEX
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.output.image_writer import write_images
from nxd_ckpt.output.locations import Location
from nxd_ckpt.output.model_files import (
    ModelFile,
    WeightFile,
    config_in,
    index_of,
    json_file,
    plan_weight_files,
    with_dtype,
)
from nxd_ckpt.output.output import Output
from nxd_ckpt.output.source import Source
from nxd_ckpt.saving.planned_file import PlannedFile
from nxd_ckpt.storage.progress import Counter, report, watched
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.recognise import ADAPTER_SHARDS
from nxd_ckpt.tag.side_by_side import Matched, windows


def are_converted(opened: OpenTag, mapped: MappedTag, otherwise: Callable[[], MappedTag]) -> bool:
    """Return whether the copies in the tag have the order of NxD's converter for trn2, not that of its layers.

    No file records the order, and a wrong one, or a wrong ``kv_size_multiplier``, would export one head as another.
    ``mapped`` reads the tag in the layers' order, ``otherwise()`` in the converter's. If both fit, as with equal heads,
    the layers' order counts. The converter's order is possible only for a tag without optimizer and without our
    manifest; in any other tag, copies in that order mean that the job ran on trn1. Reads all copies, in bounded memory.

    Raises:
        TopologyMismatch: copies differ in both orders; the message names the tensor.
        CorruptCheckpoint: bytes changed since they were written.
    """
    unequal = _unequal(opened, mapped)
    sizes = mapped.sizes
    if unequal is None:
        return False
    may_be_converted = sizes.hardware == "trn2" and opened.manifest is None and opened.parts.optimizer is None
    if may_be_converted and _unequal(opened, otherwise()) is None:
        logger.warning(
            "%s: key-value heads and their copies are in the order of NxD's converter for trn2, so query heads are "
            "expected in order. If the tag is of a job on trn1, export it with hardware='trn1'",
            opened.where,
        )
        return True
    neither = "neither as NxD's layers keep them nor as its converter writes them"
    orders = neither if may_be_converted else "not as NxD keeps them"
    raise TopologyMismatch(
        f"{opened.where}: copies of a key-value head in {unequal} differ, so they lie {orders} with "
        f"kv_size_multiplier={sizes.kv_size_multiplier}, hardware={sizes.hardware!r} and this mapping; pass those of "
        "the job that saved it"
    )


def _unequal(opened: OpenTag, mapped: MappedTag) -> str | None:
    """Return a tensor of the tag with copies that differ, or None."""
    for window in windows([opened], _pairs(mapped)):
        for name, (first, copy) in window:
            if not torch.equal(first.view(torch.uint8), copy.view(torch.uint8)):
                return name
    return None


def _pairs(mapped: MappedTag) -> Iterator[Matched[str]]:
    for tensor in mapped.tensors:
        cut = tensor.hf_slice
        copies = (replace(tensor, hf_slice=replace(cut, pieces=pieces)) for pieces in cut.copies)
        first, *others = map(mapped.assembly, copies)
        for other in others:
            yield Matched(tensor.source.name, tensor.source.name, ((0, first), (0, other)))


def write_hf(export: Export, agreement: Agreement, chosen: ConvertOptions) -> Converted:
    """Write a directory that ``transformers.AutoModelForCausalLM.from_pretrained`` loads. Collective.

    With an optimizer its state is beside the model, without a cast: ``optimizer.safetensors`` (or shards), with tensors
    ``NAME/exp_avg`` and so on, and optimizer.json with param groups, steps and all other values. An adapter becomes
    PEFT's files.

    Raises:
        KeyMismatch: no rule maps a name (with the closest rules), or the tag lacks tensors. Not in a dry run.
        ShapeMismatch, TopologyMismatch: tensors or sizes do not fit this config.json and mapping.
        DtypeMismatch: a value does not fit into ``dtype``.
        PartNotFound, OptimizerMismatch: the optimizer was not saved, or its parameters have no names.
        UnsupportedState, IncompatibleState: the optimizer has state of another kind, or ranks differ in it.
    """
    started = time.monotonic()
    save = agreement.broadcast(export.tag.save)
    on_all(agreement, lambda: export.tag.require_save(save))
    if chosen.dry_run:
        return on_all(agreement, export.summary)
    output = on_all(agreement, lambda: _ready(export, chosen))
    done = export.summary(_write(export, output, agreement, chosen.progress))
    if agreement.rank == 0:
        report("converted", f"{export.source.root.path} to {export.target.path}", done.nbytes, started)
    return done


@dataclass(frozen=True)
class Export:
    """One export, in each of its processes: of the translated ``tag``, with these small ``files``.

    ``size`` is that of a weight file, in bytes.
    """

    source: Source
    target: Location
    tag: HuggingFaceTag
    files: Sequence[ModelFile]
    size: int
    renaming: Renaming

    @property
    def mapping(self) -> ModelMapping:
        return self.tag.terms.mapping

    def _name(self, tensor: HfTensor | PackedTensor) -> str:
        """Return the name of a tensor, or of state of the optimizer, in the output."""
        name = self.renaming.saved(tensor.weight)
        return name if tensor.entry is None else f"{name}/{tensor.entry}"

    @cached_property
    def _forms(self) -> list[TensorForm]:
        tensors = self.tag.mapped.file_tensors
        dtype = self.tag.terms.dtype
        return [TensorForm(self._name(each), cast_dtype(each.dtype, dtype), each.shape) for each in tensors]

    @cached_property
    def _state(self) -> list[TensorForm]:
        return [TensorForm(self._name(entry), entry.dtype, entry.shape) for entry in self.tag.state_tensors]

    @cached_property
    def _weights(self) -> list[WeightFile]:
        if isinstance(self.mapping, AdapterMapping):
            return [WeightFile(ADAPTER_MODEL, tuple(self._forms))]
        return plan_weight_files(self._forms, self.size)

    @cached_property
    def _moments(self) -> list[WeightFile]:
        return plan_weight_files(self._state, self.size, OPTIMIZER) if self._state else []

    @cached_property
    def weight_files(self) -> list[WeightFile]:
        return [*self._weights, *self._moments]

    @cached_property
    def tensors(self) -> dict[str, HfTensor | PackedTensor]:
        return {self._name(tensor): tensor for tensor in (*self.tag.mapped.file_tensors, *self.tag.state_tensors)}

    def planned(self, file: WeightFile) -> PlannedFile:
        """Return the file with a leaf for each of its tensors."""
        return file.planned(lambda name: self.tag.mapped.assembly(self.tensors[name]))

    def summary(self, others: Mapping[str, int] | None = None) -> Converted:
        """Return the result, with the bytes of the files beside the weights once they are written."""
        tensors = tuple(
            ConvertedTensor(form.name, form.dtype, form.shape, (tensor.source_name,), tensor.source.shape)
            for form, tensor in zip([*self._forms, *self._state], self.tensors.values(), strict=True)
        )
        files = {file.name: file.image.nbytes for file in self.weight_files}
        if others is None:
            others = {file.name: len(file.content) for file in self.files} if self._is_whole else {}
        return Converted(
            self.source.root.path,
            self.target.path,
            "hf",
            self.source.writer.value,
            sum(files.values()),
            files=files | dict(others),
            tensors=tensors,
            unknown={name: tuple(self.mapping.closest(name)) for name in self.tag.mapped.unknown},
            missing=tuple(self.tag.mapped.missing),
        )

    @property
    def _is_whole(self) -> bool:
        """True if the output is a model with all its files, not an adapter."""
        return not isinstance(self.mapping, AdapterMapping)

    def last_files(self) -> Iterator[ModelFile]:
        """Yield the files that are written after all weight files."""
        adapters = self.mapping if isinstance(self.mapping, AdapterMapping) else None
        if adapters is None:
            sizes: dict[str, int] = {}
            for form in self._forms:
                sizes[form.dtype] = sizes.get(form.dtype, 0) + form.nbytes
            yield from with_dtype(self.files, max(sizes, key=sizes.__getitem__))
        else:
            base_model = config_in(self.files).get("_name_or_path")
            yield adapter_config(adapters.settings, [form.name for form in self._forms], base_model)
        if self.tag.optimizer is not None:
            rest = self.tag.optimizer.renamed(self.renaming.saved)
            yield ModelFile(OPTIMIZER_DOCUMENT, json_file({**rest, "files": len(self._moments)}))
        if len(self._moments) > 1:
            yield ModelFile(OPTIMIZER_INDEX, index_of(self._moments))
        # Without an index some readers take every safetensors file for the model's.
        if len(self.weight_files) > 1 and adapters is None:
            yield ModelFile(INDEX, index_of(self._weights))


def _ready(export: Export, chosen: ConvertOptions) -> Output:
    """Return the output, after checking that everything can be exported."""
    export.tag.require_all()
    for file in export.weight_files:
        _ = file.image  # raises here if it cannot be planned
    return Output(export.target, chosen)


def _write(export: Export, output: Output, agreement: Agreement, progress: bool) -> Mapping[str, int]:
    """Write the output, and return the bytes of the files beside the weights."""
    decided_by_rank0(agreement, output.begin)
    mine = export.weight_files[agreement.rank :: agreement.world_size]
    nbytes = sum(file.image.nbytes for file in mine)
    written = Counter()
    try:
        with watched("export", nbytes, lambda: written.nbytes, progress and agreement.rank == 0):
            in_turns(agreement, [partial(_write_file, export, output, file, written) for file in mine])
        return decided_by_rank0(agreement, lambda: _finish(export, output))
    except BaseException:
        if agreement.rank == 0:
            output.discard()
        raise


def _write_file(export: Export, output: Output, file: WeightFile, written: Counter) -> None:
    with export.tag.guarded(), export.tag.reader() as reader:
        write_images(reader, output.storage, output.folder, [[export.planned(file)]], written.add)


def _finish(export: Export, output: Output) -> dict[str, int]:
    sizes = {}
    for file in export.last_files():
        sizes[file.name] = len(file.content)
        folder, _, _ = file.name.rpartition("/")
        if folder:
            output.storage.make_dir(f"{output.folder}/{folder}")
        output.write(file.name, file.content)
        if folder:
            output.storage.sync_dir(f"{output.folder}/{folder}")
    output.publish()
    return sizes


ADAPTER_MODEL = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_PEFT_TYPE = "peft_type"
_OF_PEFT = re.compile(r"\.lora_[AB]\.(?!weight$)\w+\.weight$")
"""Names in a live model of PEFT's, where each adapter has a name of its own."""
_AS_IN_NXD = ("lora_alpha", "lora_dropout", "bias", "use_rslora")


def settings_of(opened: OpenTag) -> Mapping[str, Any] | None:
    """Return NxD's ``LoraConfig`` of the adapters in the tag, or PEFT's config beside optimum-neuron's adapter tag.

    None for a tag without adapters. Raises PartNotFound for adapters without either: their factor is not known.
    """
    if not opened.parts.model or not any(map(is_adapter, opened.model_names())):
        return None
    for stage in range(opened.topology.pp):
        config = opened.model_tree(Coordinates(stage)).get(CONFIG)
        if isinstance(config, Mapping):
            return config
    # Beside other tags it may belong to any adapter.
    if opened.tag == ADAPTER_SHARDS and opened.storage.is_file(_ADAPTER_CONFIG):
        return _peft_config(opened)
    if any(_OF_PEFT.search(name) for name in opened.model_names()):
        raise UnsupportedState(
            f"{opened.where} holds PEFT's adapters, whose configuration is no part of the model's state: load this tag "
            "into the live PEFT model, and call its save_pretrained(), or merge_and_unload() and export a tag of the "
            "merged model"
        )
    raise PartNotFound(
        f"{opened.where} holds LoRA adapters, but not the factor that they are multiplied by: neuronx_distributed "
        f"keeps it only in tags with save_lora_config_adapter=True, optimum-neuron in {_ADAPTER_CONFIG} beside the "
        "shards; restore that file, or load this tag into the live model, and save that with nxd_ckpt"
    )


def _peft_config(opened: OpenTag) -> Mapping[str, Any]:
    where = f"{opened.storage.url}/{_ADAPTER_CONFIG}"
    config = document.small(opened.storage.read(_ADAPTER_CONFIG), where)
    if config.get(_PEFT_TYPE) != "LORA":
        raise UnsupportedState(f"{where} has {_PEFT_TYPE}={config.get(_PEFT_TYPE)!r}; only LORA adapters are supported")
    return config


def adapter_config(settings: Mapping[str, Any], names: Iterable[str], base_model: Any) -> ModelFile:
    """Return PEFT's adapter_config.json, for adapters with these ``names`` in its file."""
    if _PEFT_TYPE in settings:  # already PEFT's config
        return ModelFile(_ADAPTER_CONFIG, json_file(settings))
    names = [name.removeprefix(PREFIX) for name in names]
    layers = dict.fromkeys(name.partition(".lora_")[0] for name in names if is_adapter(name))
    others = dict.fromkeys(
        name.rpartition(".")[0] for name in names if not is_adapter(name) and not name.endswith(".bias")
    )
    config = {
        _PEFT_TYPE: "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": settings.get("lora_rank", settings.get("r")),
        **{key: settings[key] for key in _AS_IN_NXD if key in settings},
        "target_modules": list(layers),
        "modules_to_save": list(others) or None,
    }
    return ModelFile(_ADAPTER_CONFIG, json_file(config))
