"""The source of a conversion: any checkpoint, checked to be complete and from one save before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import starmap
from typing import Any

from nxd_ckpt.core import names
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.names import describe, holes
from nxd_ckpt.core.partition import zero1_shape
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import CheckpointNotFound, MalformedFile, PartNotFound
from nxd_ckpt.formats.optimizer_trees import STEP
from nxd_ckpt.formats.tensors import Assembly, TensorStub, is_tensor
from nxd_ckpt.hugging_face.imported_model import ImportedFiles, ImportedModel, ImportTarget
from nxd_ckpt.layouts.dcp_directory import DcpDirectory, entries_of
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.hugging_face_directory import HuggingFaceDirectory, open_weights
from nxd_ckpt.layouts.whole_files import OPTIMIZER_DOCUMENT
from nxd_ckpt.output.locations import Location, own_location, settled_input
from nxd_ckpt.storage.urls import StorageOptions, StrPath, absolute, join
from nxd_ckpt.tag.choosing import ByPath, choose_tag, settle_swap
from nxd_ckpt.tag.opened import OpenTag, open_complete_tag
from nxd_ckpt.tag.recognise import Program, recognise
from nxd_ckpt.tag.verify import guests_in

OF_THE_RUN: Mapping[str, str] = {
    **dict.fromkeys(("optimizer.pt", "optimizer.bin", OPTIMIZER_DOCUMENT), "optimizer"),
    **dict.fromkeys((names.SCHEDULER, "scheduler.bin"), "scheduler"),
    "trainer_state.json": "user_content",
    "training_args.bin": "",
}
"""Files of transformers' trainer, of accelerate and of our exports beside a model, each with the part that it holds."""

_EQUAL_ON_A_STAGE = ("param_groups", "shape_info")


@dataclass(frozen=True)
class Source:
    """A checkpoint of ``writer`` at ``place``. Plain data, because it is sent to worker processes.

    Attributes:
        place: location of the tag, or of what is no tag.
        writer: the program that wrote it.
        beside: key of the directory with the writer's other files, in the storage of ``root``.
        root: location of the path that was passed.
        keys: keys of "model" and "optimizer" in its state dict, as far as they are given.
        optimizer: False to read it without its optimizer, True if it must have one.
    """

    place: Location
    writer: Program
    beside: str
    root: Location
    keys: Mapping[str, str] = field(default_factory=dict)
    optimizer: bool | None = None

    @property
    def is_tag(self) -> bool:
        """True if it is a tag of nxd_ckpt, NxD or NxDT."""
        return self.writer.writes_tags

    def left_out(self, saved: Parts, kept: Parts, *, in_tag: bool = False) -> tuple[str, ...]:
        """Return in words what the source has, and a result with the ``kept`` ones of its ``saved`` parts lacks."""
        if self.is_tag:
            others = [] if in_tag else self.guests()
        else:
            beside = TagFiles(self.root.open(), self.beside)
            # Other layouts have an optimizer and content of their own.
            read = saved if self.writer is Program.HUGGING_FACE else Parts(scheduler=saved.scheduler)
            others = [file for file, part in OF_THE_RUN.items() if beside.has(file) and not getattr(read, part, None)]
        return (*saved.lacking_in(kept), *others)

    def guests(self) -> list[str]:
        """Return in words the files of others in a tag, which pass through to another tag alone."""
        files = guests_in(TagFiles(self.place.open(), self.place.name))
        return [f"files of others ({first_of(files)})"] if files else []

    def open(self) -> OpenTag:
        """Open it.

        Raises:
            CheckpointNotFound, PartNotFound: an incomplete one, or ranks' files are missing; or no model or optimizer.
            TagReplaced: it was removed, or saved again, meanwhile.
            MalformedFile, UnsupportedState: errors of opening its layout.
        """
        if self.keys and self.writer is not Program.TORCH_XLA:
            opened = _open_dcp(self.place, self.keys)
        elif self.is_tag or self.writer in (Program.OPTIMUM, Program.OPTIMUM_ADAPTER):
            opened = open_source(self.place)
        else:
            what = ByPath(self.place.name, self.writer.value)
            opened = what.open(self.place.open(), self.place.name, part_keys=self.keys)
        if self.optimizer and opened.parts.optimizer is None:
            raise PartNotFound(f"{opened.where} was saved without an optimizer; leave out optimizer=True")
        if self.optimizer is False:
            opened.parts = replace(opened.parts, optimizer=None)
        if not opened.parts.model and opened.parts.optimizer is None:
            raise PartNotFound(
                f"{opened.where} holds neither model nor optimizer to include, so there is nothing to convert; if they "
                "are in a state dict under keys of its own, pass model_key= and optim_key= with to='tag' or 'files'"
            )
        return opened


def find_source(path: StrPath, options: StorageOptions | None) -> Source:
    """Recognise the checkpoint that ``path`` names: the newest tag of a directory or archive, else what it is itself.

    Raises:
        CheckpointNotFound: no checkpoint, an incomplete one, or several.
        MalformedFile: it has two layouts at once.
        UnsupportedState: a file with a part of a model.
    """
    whole = absolute(path)
    options = settled_input(path, options).options
    place = own_location(whole, options)
    storage = place.open()
    settle_swap(storage)
    layout = recognise(storage, place.name)
    if layout is None or layout.writer is Program.HUGGING_FACE:  # in which tags may lie, which count first
        try:
            newest = choose_tag(Location(whole, "", options).open(), None)
        except CheckpointNotFound:
            if layout is None:
                raise
        else:
            place = Location(whole, newest, options)
            layout = recognise(place.open(), newest)
    if layout is None:
        raise CheckpointNotFound(f"{place.path} was removed while it was looked at")
    tag = place
    if layout.writer in (Program.TIERED, Program.NEMO):
        tag = Location(place.directory, layout.tag, place.options)
    elif layout.tag != place.name:
        above, _, name = layout.tag.rpartition("/")
        tag = Location(join(place.directory, above), name, place.options)
    return Source(tag, layout.writer, layout.beside, place)


def _open_dcp(place: Location, keys: Mapping[str, str]) -> OpenTag:
    """Open a directory of torch DCP or torch_checkpointing as a tag of one rank. Raises the errors of opening it."""
    storage = place.open()
    files = TagFiles(storage, place.name)
    names_of_parts = DcpNames(keys.get("model", DcpNames.model), keys.get("optimizer", DcpNames.optim))
    return OpenTag(storage, place.name, DcpDirectory(files, entries_of(files), names_of_parts), None)


def open_imported(place: Location, what: ImportTarget) -> HuggingFaceDirectory:
    """Open the input of an import, with plain numbers of quantized weights. Raises the errors of opening it."""
    directory = open_weights(place.open(), place.name, what.model_key)
    directory.dequantize(what.quantization)
    return directory


def open_as_tag(place: Location, what: ImportTarget) -> tuple[OpenTag, ImportedModel]:
    """Open a Hugging Face directory as the tag that its import on one rank would be. Raises the errors of both."""
    layout = ImportedFiles(open_imported(place, what), what)
    return OpenTag(layout.files.storage, place.name, layout, None), layout.model


def open_source(place: Location) -> OpenTag:
    """Open a tag of nxd_ckpt, NxD, or NxD's converter (``optim/`` without any marker).

    Raises:
        CheckpointNotFound: no tag, or an incomplete one: its save was interrupted, or ranks' files are missing.
        TagReplaced: it was removed, or saved again, meanwhile.
    """
    storage = place.open()
    settle_swap(storage)
    _refuse_incomplete(place, {entry.name for entry in storage.list(place.name)})
    opened = open_complete_tag(storage, place.name)
    if opened.manifest is None:
        with opened.guarded():
            _refuse_missing_ranks(opened)
    return opened


def _refuse_incomplete(place: Location, listing: Set[str]) -> None:
    if names.DONE not in listing and listing & {names.MARKER, names.MANIFEST}:
        raise CheckpointNotFound(
            f"{place.path} is incomplete: it has no {names.DONE!r} marker, because its save was interrupted; choose "
            "another tag"
        )
    if not listing & {names.MODEL_DIR, names.OPTIMIZER_DIR, names.DONE}:
        storage = place.open()
        tags = [name for name in sorted(listing) if storage.is_file(f"{place.name}/{name}/{names.DONE}")]
        if tags:
            raise CheckpointNotFound(
                f"{place.path} is a directory of checkpoints, expected one of them: {', '.join(tags[:8])}"
            )


def refuse_mixed_ranks(opened: OpenTag, process: int, processes: int) -> None:
    """Raise MalformedFile if a rank's optimizer file is from another save; each process checks its share of ranks.

    A manifest covers the files of our tags. Other tags are checked by what must agree: the size of ZeRO-1's shards
    follows from the number of ranks; param groups are equal on all ranks of a stage; steps, and the parameters with
    state, are equal on ranks with the same experts.
    """
    if opened.manifest is not None or opened.parts.optimizer is None:
        return
    # Most ranks are compared with the first ones of their stage.
    comparable = lru_cache(maxsize=8)(partial(_comparable, opened))
    with opened.guarded():
        for rank in range(process, opened.topology.world_size, processes):
            at = opened.topology.coordinates_of(rank)
            _refuse_other_shards(opened, at)
            peer = Coordinates(at.pp_rank, at.dp_rank % opened.topology.ep)
            first = Coordinates(at.pp_rank)
            mine = comparable(at)
            for reference, what in [(peer, name) for name in mine] + [(first, name) for name in _EQUAL_ON_A_STAGE]:
                expected = comparable(reference)[what]
                if mine[what] != expected:
                    own_text, expected_text = map(_value_text, _difference(mine[what], expected))
                    raise MalformedFile(
                        f"{opened.where}: the optimizer files of {_rank(at)} and of {_rank(reference)} have different "
                        f"{what}: {own_text} and {expected_text}; the directory mixes files of two saves"
                    )


def _refuse_other_shards(opened: OpenTag, at: Coordinates) -> None:
    if opened.parts.optimizer != "zero1":
        return
    tree = opened.optimizer_tree(at)
    sizes = opened.topology
    first_expert = tree.get("ep_base_state_offset")
    behind = tree.get("ep_shape_info_offset", 0)
    for index, entries in tree.get("base_state", {}).items():
        expert = first_expert is not None and index >= first_expert
        shards = sizes.expert_dp if expert else sizes.dp
        whole = tuple(tree.get("shape_info", {}).get(index - first_expert + behind if expert else index, ()))
        expected = zero1_shape(whole, shards)
        for name, leaf in entries.items():
            if isinstance(leaf, TensorStub) and 0 < len(leaf.shape) == len(whole) and leaf.shape != expected:
                raise MalformedFile(
                    f"{opened.where}/{leaf.file}: {name} of parameter {index} has shape {leaf.shape}, expected "
                    f"{expected}, a shard of {whole} over {shards} ranks; files of ranks are missing, or of two saves"
                )


def _refuse_missing_ranks(opened: OpenTag) -> None:
    parts = {}
    for part in (names.MODEL_DIR, names.OPTIMIZER_DIR):
        listed = (entry.name for entry in opened.storage.list(f"{opened.tag}/{part}"))
        parts[part] = [ranks for name in listed if (ranks := names.parse(name) or names.parse_full(name)) is not None]
        missing = holes(parts[part])
        if missing:
            raise PartNotFound(
                f"{opened.where}/{part} holds {describe(parts[part])}: the files of dp {missing[0].dp} tp "
                f"{missing[0].tp} pp {missing[0].pp} are not there; restore them, or convert another tag"
            )
    places = [{(ranks.tp, ranks.pp) for ranks in part} for part in parts.values() if part]
    if len(places) == 2 and places[0] != places[1]:
        raise PartNotFound(
            f"{opened.where}: model/ holds {describe(parts[names.MODEL_DIR])}, optim/ "
            f"{describe(parts[names.OPTIMIZER_DIR])}; files of ranks are missing from one of them"
        )


def _comparable(opened: OpenTag, at: Coordinates) -> dict[str, Any]:
    """Return the values of a rank's optimizer file that must agree with other ranks of its save."""
    tree = opened.optimizer_tree(at)

    def value(leaf: Any) -> Any:
        return opened.read(leaf).tolist() if isinstance(leaf, (TensorStub, Assembly)) else leaf

    state: Mapping[Any, Any] = tree.get("base_state", tree.get("state", {}))
    state = {index: entries for index, entries in state.items() if isinstance(index, int)}
    groups = [{name: value(option) for name, option in group.items()} for group in tree.get("param_groups", ())]
    return {
        "param_groups": groups,
        "shape_info": tree.get("shape_info"),
        "state": {index: sorted(starmap(_entry_text, entries.items())) for index, entries in state.items()},
        "steps": {index: value(entries[STEP]) for index, entries in state.items() if STEP in entries},
    }


def _entry_text(name: Any, value: Any) -> str:
    """Return the name, with the type of a value that is no tensor, since ranks may differ in the value."""
    is_plain = name != STEP and value is not None and not is_tensor(value)
    return f"{name} ({type(value).__name__})" if is_plain else str(name)


def _difference(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the first entry in which two dicts differ, or two other values unchanged."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return a, b
    key = next(key for key in {**a, **b} if a.get(key) != b.get(key))
    return {key: a.get(key)}, {key: b.get(key)}


def _rank(at: Coordinates) -> str:
    return f"dp {at.dp_rank} tp {at.tp_rank} pp {at.pp_rank}"


def _value_text(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
