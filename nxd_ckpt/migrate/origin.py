"""Facts that a writer's files tell of a checkpoint: its mapping, its optimizer's names, steps, and other contents."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nxd_ckpt.conversion.to_tag import import_target, outside
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import InvalidArgument, PartNotFound, UnsafePickle
from nxd_ckpt.formats.tensors import is_tensor
from nxd_ckpt.hugging_face.imported_model import ImportTarget
from nxd_ckpt.hugging_face.mappings import NEMO, own_names
from nxd_ckpt.layouts import legacy
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.hugging_face_directory import CONFIG
from nxd_ckpt.layouts.torch_xla_files import RANDOM_STATES, is_trainers
from nxd_ckpt.loading.load_attempt import unwrapped
from nxd_ckpt.migrate.optimum_metadata import (
    SHARDED_METADATA,
    json_object,
    old_mapping,
    refuse_other_model,
    stage_metadata,
)
from nxd_ckpt.options.conversion import ConvertOptions, MappingSpec
from nxd_ckpt.options.execution import SavedNames
from nxd_ckpt.output.locations import Location
from nxd_ckpt.output.source import OF_THE_RUN, Source, open_as_tag
from nxd_ckpt.reshard.saved_optimizer import COMPUTED, group_names
from nxd_ckpt.storage.urls import directory_and_name, join
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.recognise import Program

_OF_A_JOB = ("kv_size_multiplier", "hardware", "saved_param_names")
"""Options with facts that a job's checkpoint does not record."""
_STEP = re.compile(r"step=(\d+)")


@dataclass(frozen=True)
class Origin:
    """A checkpoint to be translated.

    Attributes:
        writer: the program that wrote it.
        place: location of its tag.
        opened: its tag, without names of wrappers.
        saved: its tag under the names in the files.
        config: directory of config.json, or None.
        mapping: the mapping from a Hugging Face model, or None if not recorded.
        kv_size_multiplier: copies of each key-value head, or None if not recorded.
        param_names: names of the optimizer's parameters, if the tag has none.
        step: number of steps of the run, or None if not recorded.
        tokens: number of tokens of the run, 0 if not recorded.
        scheduler: the scheduler's state dict, or None.
        content: other saved values, or None.
        left_out: descriptions of parts that cannot be converted.
        imported: how the tag's tensors are made of a Hugging Face directory; None for all other inputs.
    """

    writer: Program
    place: Location
    opened: OpenTag
    saved: OpenTag
    config: str | None = None
    mapping: MappingSpec = None
    kv_size_multiplier: int | None = None
    param_names: SavedNames | None = None
    step: int | None = None
    tokens: int = 0
    scheduler: Any = field(default=None, repr=False)
    content: Mapping[str, Any] | None = field(default=None, repr=False)
    left_out: tuple[str, ...] = ()
    imported: ImportTarget | None = None


def find_origin(source: Source, chosen: ConvertOptions) -> Origin:
    """Read the description of the source.

    If its optimizer is converted, names are derived where it has none.

    Raises:
        InvalidArgument: ``chosen`` has options for another kind of checkpoint.
        PartNotFound, MalformedFile: files are missing, or contradict each other.
        UnsupportedState: the message says what to do instead.
        OptimizerMismatch: names of the optimizer's parameters cannot be derived.
    """
    is_hf = chosen.to == "hf"
    beside = TagFiles(source.root.open(), source.beside)
    if source.writer is Program.HUGGING_FACE:
        return _hugging_face(source, beside, chosen)
    if chosen.renaming and not is_hf:
        raise InvalidArgument(
            f"{source.root.path} was written by {source.writer.value}: leave out prefix= and key_mapping=, which are "
            "for a Hugging Face directory"
        )
    opened = source.open()
    optimizer = (chosen.optimizer or chosen.master_weights) if is_hf else chosen.optimizer is not False
    with opened.guarded():
        needs_names = optimizer and chosen.saved_param_names is None
        origin = Origin(source.writer, source.place, unwrapped(opened), opened)
        files = TagFiles(source.place.open(), source.place.name)
        return _DESCRIBERS[source.writer](_Source(origin, files, beside, needs_names, not is_hf))


class _Source(NamedTuple):
    """A tag with its ``files`` and those ``beside`` it.

    ``needs_names``: for the optimizer's parameters; ``needs_rest``: scheduler and user content.
    """

    origin: Origin
    files: TagFiles
    beside: TagFiles
    needs_names: bool
    needs_rest: bool

    @property
    def opened(self) -> OpenTag:
        return self.origin.opened

    def param_names(self, stages: Sequence[Sequence[str]] | None = None) -> SavedNames | None:
        return group_names(self.opened, stages) if self.needs_names else None


def _hugging_face(source: Source, files: TagFiles, chosen: ConvertOptions) -> Origin:
    """Describe a model in Hugging Face's ``files``, or in one of them, read as its import on one rank would be."""
    place = source.place
    wrong = [name for name in _OF_A_JOB if getattr(chosen, name) is not None]
    if wrong:
        raise InvalidArgument(
            f"{place.path} is a Hugging Face model, not a job's checkpoint: leave out {wrong[0]}="
        )
    what = import_target(place, chosen)
    opened, model = open_as_tag(place, what)
    beside = filter(files.has, OF_THE_RUN)
    folder = place.directory if opened.storage.is_file(place.name) else join(place.directory, place.name)
    config = folder if files.has(CONFIG) else None
    left_out = (*outside(model), *beside)
    return Origin(Program.HUGGING_FACE, place, opened, opened, config, left_out=left_out, imported=what)


def _tag(source: _Source) -> Origin:
    """Describe a tag of NxD or nxd_ckpt, which holds everything."""
    opened = source.opened
    parts = source.opened.parts
    rest = ("rank content",) * parts.rank_content
    if not source.needs_rest:
        lost = ("scheduler",) * parts.scheduler + ("user content",) * parts.user_content
        return replace(source.origin, left_out=(*lost, *rest))
    content, left_out = _content(opened)
    scheduler = opened.scheduler() if parts.scheduler else None
    return replace(source.origin, scheduler=scheduler, content=content, left_out=(*left_out, *rest))


def _lightning(source: _Source) -> Origin:
    """Describe a tag of NxDT: the user content is Lightning's dict, without model and optimizer."""
    content, left_out = _content(source.opened)
    rest = dict(content or {})
    schedulers = rest.get("lr_schedulers")
    is_single = isinstance(schedulers, list) and len(schedulers) == 1
    scheduler = rest.pop("lr_schedulers")[0] if is_single else None
    config = _inside(rest, "hyper_parameters", "cfg") or _inside(rest, "hyper_parameters")
    match = _STEP.search(source.origin.place.name)
    step = rest.get("global_step", int(match[1]) if match else None)
    copies = _inside(config, "distributed_strategy").get("kv_replicator")
    return replace(
        source.origin,
        mapping="megatron_llama" if config.get("model_source") == "megatron" else None,
        kv_size_multiplier=copies if isinstance(copies, int) else None,
        param_names=source.param_names(),
        step=step if isinstance(step, int) else None,
        scheduler=scheduler,
        content=rest or None,
        left_out=left_out,
    )


def _nemo(source: _Source) -> Origin:
    """Describe a checkpoint of neuronx-nemo-megatron: Lightning's dict, with a separate scheduler."""
    described = _tag(source._replace(needs_rest=True))
    content = described.content or {}
    step = content.get("global_step")
    has_zero1 = _inside(content, "hyper_parameters", "cfg").get("wrap_with_zero") is True
    is_missing = has_zero1 and source.opened.parts.optimizer is None
    missing = ["the ZeRO-1 optimizer, whose files are missing"] if is_missing else []
    return replace(
        described,
        mapping=NEMO,
        left_out=(*described.left_out, *missing),
        kv_size_multiplier=1,
        param_names=source.param_names(),
        step=step if isinstance(step, int) else None,
    )


def _optimum(source: _Source) -> Origin:
    """Describe a checkpoint of optimum-neuron.

    Metadata of each stage is in the tag; config.json, trainer_state.json and scheduler.pt are beside it.
    """
    metadata = stage_metadata(source.files, source.opened)
    refuse_other_model(metadata, source.beside, source.opened)
    return replace(
        _with_trainer(source.origin, source.beside, source.origin.place.directory),
        mapping=metadata.document,
        kv_size_multiplier=metadata.kv_size_multiplier or 1,
        param_names=source.param_names(metadata.stages),
    )


def _with_trainer(origin: Origin, beside: TagFiles, folder: str) -> Origin:
    """Add the files of transformers' trainer in ``folder``."""
    state = json_object(beside, "trainer_state.json")
    step = state.get("global_step")
    tokens = state.get("num_input_tokens_seen")
    scheduler, left_out = _plain(beside, "scheduler.pt")
    if origin.opened.parts.optimizer is not None and not beside.has("scheduler.pt"):
        left_out.append("the scheduler, whose scheduler.pt is missing")
    if beside.has("optimizer.pt"):
        left_out.append("the optimizer in optimizer.pt, of a run without tensor and pipeline parallelism")
    if beside.has("training_args.bin"):
        left_out.append("training_args.bin (a pickled object of transformers)")
    if any(map(RANDOM_STATES.fullmatch, beside.names())):
        left_out.append("the ranks' state of random numbers (rng_state*.pth)")
    return replace(
        origin,
        config=folder if beside.has("config.json") else None,
        step=step if isinstance(step, int) else None,
        tokens=tokens if isinstance(tokens, int) else 0,
        scheduler=scheduler,
        content={"trainer_state": state} if state else None,
        left_out=tuple(left_out),
    )


def _adapter(source: _Source) -> Origin:
    """Describe an adapter of optimum-neuron: a tag without an optimizer; other files belong to the whole run."""
    name = directory_and_name(source.origin.place.directory)[1].partition("_")[2]
    metadata = stage_metadata(source.files, source.opened, adapter=name)
    return replace(
        source.origin,
        mapping=metadata.document,
        kv_size_multiplier=metadata.kv_size_multiplier or 1,
        left_out=tuple(filter(source.beside.has, OF_THE_RUN)),
    )


def _old_optimum(source: _Source) -> Origin:
    """Describe a checkpoint of optimum-neuron before 0.0.22.

    NxD's files of ranks have the dimension along which each parameter is cut; config.json and the trainer's files are
    beside them.
    """
    described = _tag(source._replace(needs_rest=True))
    files = source.files
    cuts: dict[str, Any] = {}
    computed: list[str] = []
    for rank in legacy.first_of_stages(files):
        content = files.tree(rank)
        cuts |= _inside(content, SHARDED_METADATA)
        computed += [name for name in _inside(content, "model") if name.endswith(COMPUTED)]
    return replace(
        _with_trainer(described, source.beside, source.origin.place.directory),
        mapping=old_mapping(cuts, computed, source.opened.where),
        kv_size_multiplier=1,
        param_names=source.param_names(),
    )


def _script(source: _Source) -> Origin:
    """Describe a script's own dict, saved by torch-xla or torch DCP, with the names of its own model."""
    described = _tag(source._replace(needs_rest=True))
    opened = source.opened
    writer = source.origin.writer
    place = source.origin.place
    if writer is Program.TORCH_XLA and source.files.tag == source.beside.tag and is_trainers(source.beside.names()):
        described = _with_trainer(described, source.beside, join(place.directory, place.name))
    model = opened.model_tree(Coordinates()) if opened.parts.model else {}
    if not model or (_TORCHTITAN in model and writer is Program.TORCH_DCP):
        raise PartNotFound(f"{opened.where} has no model under the usual keys; {_HINTS[writer]}")
    first: dict[Any, str] = {}  # a tied parameter has several names, but one entry in the optimizer
    for name, leaf in model.items():
        if is_tensor(leaf):
            first.setdefault(leaf, name)
    steps = (value for key in ("step", "global_step") if type(value := (described.content or {}).get(key)) is int)
    return replace(
        described,
        step=described.step if described.step is not None else next(steps, None),
        mapping=own_names({name: None for name, leaf in model.items() if is_tensor(leaf)}),
        kv_size_multiplier=1,
        param_names=source.param_names([list(first.values())]),
    )


_DESCRIBERS: Mapping[Program, Callable[[_Source], Origin]] = {
    Program.NXD_CKPT: _tag,
    Program.NXD: _tag,
    Program.NXD_LEGACY: _tag,
    Program.NXDT: _lightning,
    Program.TORCH_XLA: _script,
    Program.TORCH_DCP: _script,
    Program.TORCH_CHECKPOINTING: _script,
    Program.WHOLE_FILES: _script,
    Program.TIERED: _script,
    Program.OPTIMUM: _optimum,
    Program.OPTIMUM_ADAPTER: _adapter,
    Program.OPTIMUM_OLD: _old_optimum,
    Program.NEMO: _nemo,
}
_TORCHTITAN = "tok_embeddings.weight"
"""A name by which a state dict of TorchTitan's is told from one whose names a target may keep."""
_OTHER_KEYS = "pass the keys of model and optimizer (model_key=, optim_key=), and names='own'"
_HINTS: Mapping[Program, str] = {
    Program.TORCH_XLA: "expected it under model, model_state_dict or state_dict",
    Program.WHOLE_FILES: "expected model.pt, or a directory model or modeling",
    Program.TORCH_DCP: _OTHER_KEYS,
    Program.TORCH_CHECKPOINTING: _OTHER_KEYS,
    Program.TIERED: f"load it with its StorageReader, save it with torch DCP, then {_OTHER_KEYS}",
}


def _content(opened: OpenTag) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the user content, and descriptions of parts that cannot be converted."""
    if not opened.parts.user_content:
        return None, ()
    try:
        content = opened.user_content()
    except UnsafePickle as error:
        return None, (f"user content ({error})",)
    return content if isinstance(content, dict) else {"user_content": content}, ()


def _plain(files: TagFiles, file: str) -> tuple[Any, list[str]]:
    """Return the content of a file, None without one, and descriptions of parts that cannot be converted."""
    if not files.has(file):
        return None, []
    try:
        return files.object(file), []
    except UnsafePickle as error:
        return None, [f"{file} ({error})"]


def _inside(content: Any, *keys: str) -> dict[str, Any]:
    """Return the dict below these keys; empty without one."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}
