"""The source of a conversion: any checkpoint, checked to be complete and from one save before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.names import describe, holes
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import CheckpointNotFound, PartNotFound
from nxd_ckpt.hugging_face.imported_model import ImportedFiles, ImportedModel, ImportTarget
from nxd_ckpt.layouts.files import TagFiles, require_directory
from nxd_ckpt.layouts.hugging_face_directory import HuggingFaceDirectory, open_weights
from nxd_ckpt.layouts.whole_files import OPTIMIZER_DOCUMENT
from nxd_ckpt.output.locations import Location, own_location, settled_input
from nxd_ckpt.storage.urls import StorageOptions, StrPath, absolute, join
from nxd_ckpt.tag.choosing import ByPath, choose_tag, open_complete_tag, settle_swap
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.recognise import Program, recognise
from nxd_ckpt.tag.verify import guests_in

OF_THE_RUN: Mapping[str, str] = {
    **dict.fromkeys(("optimizer.pt", "optimizer.bin", OPTIMIZER_DOCUMENT), "optimizer"),
    **dict.fromkeys((names.SCHEDULER, "scheduler.bin"), "scheduler"),
    "trainer_state.json": "user_content",
    "training_args.bin": "",
}
"""Files of transformers' trainer, of accelerate and of our exports beside a model, each with the part that it holds."""


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
        if self.is_tag or self.writer in (Program.OPTIMUM, Program.OPTIMUM_ADAPTER):
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
    require_directory(storage, place.name, "input")
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
