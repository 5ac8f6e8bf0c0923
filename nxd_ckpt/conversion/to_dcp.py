"""``to_dcp`` and ``from_dcp``: a tag as a torch DCP directory, and a torch DCP directory as a tag.

Every entry of a directory is a ``torch.save`` file. A large tensor has its own, as with ``single_file_per_rank=False``
of torch's writer. Values and small tensors share files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import Unpack

from nxd_ckpt.conversion.conversion import convert
from nxd_ckpt.conversion.inputs import open_dcp
from nxd_ckpt.conversion.job import Converted, DcpTarget, Job
from nxd_ckpt.core.dcp_names import DcpChunk
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.option_classes import options_of, takes
from nxd_ckpt.errors import PartNotFound, TopologyMismatch, as_checkpoint_errors
from nxd_ckpt.formats.torch_zip_writer import JoinedImage
from nxd_ckpt.gc_paused import gc_paused
from nxd_ckpt.keywords import FromDcpKeywords, ToDcpKeywords
from nxd_ckpt.options.execution import OutputOptions
from nxd_ckpt.options.tags import FromDcpOptions, ToDcpOptions
from nxd_ckpt.output.image_writer import write_images
from nxd_ckpt.output.locations import Location, locate_apart, locate_existing, locate_input, locate_output
from nxd_ckpt.output.output import TORCH_DCP, Output
from nxd_ckpt.output.source import open_source
from nxd_ckpt.reshard.dcp_state import DcpState
from nxd_ckpt.reshard.resharding import refuse_unknown
from nxd_ckpt.reshard.unrecorded import checked_facts
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.storage.progress import Counter, report, watched
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.directory import require_directory
from nxd_ckpt.tag.foreign.dcp_metadata import dump_metadata
from nxd_ckpt.tag.foreign.torch_dcp import METADATA
from nxd_ckpt.tag.opened import OpenTag

logger = logging.getLogger("nxd_ckpt")


_LARGE = 32 * 2**20
"""Size in bytes below which a tensor shares a file with others, and of such a file.

A tensor of an expert has about a MiB, and there are thousands: a file takes longer to open and to sync than that.
"""


class _Entry(NamedTuple):
    """An entry at ``position`` of the state dict: a value, or a leaf that stands for a tensor of ``nbytes`` bytes."""

    position: int
    value: Any
    chunk: DcpChunk
    nbytes: int = 0


def plan_files(state: DcpState) -> list[PlannedFile]:
    """Return the files of ``state``, each with its chunks in the directory's metadata.

    Raises the errors of `DcpState.leaf`, and UnsafePickle for values that cannot be pickled.
    """
    entries = [_Entry(position, value, DcpChunk(path)) for position, (path, value) in enumerate(state.values.values())]
    for position, (name, tensor) in enumerate(state.tensors.items(), len(entries)):
        chunk = DcpChunk(tensor.path, tensor.dtype, tensor.shape, (0,) * len(tensor.shape), tensor.shape)
        entries.append(_Entry(position, state.leaf(name), chunk, tensor.nbytes))
    large = ([entry] for entry in entries if entry.nbytes >= _LARGE)
    groups = [*_grouped(entry for entry in entries if entry.nbytes < _LARGE), *large]
    return [_file(f"__0_{number}.distcp", group) for number, group in enumerate(groups)]


def _grouped(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Yield groups of neighbours of about `_LARGE` bytes."""
    group: list[_Entry] = []
    nbytes = 0
    for entry in entries:
        group.append(entry)
        nbytes += entry.nbytes
        if nbytes >= _LARGE:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _file(key: str, entries: Sequence[_Entry]) -> PlannedFile:
    image = JoinedImage.of([entry.value for entry in entries])
    named = {id(entry.value): entry.chunk for entry in entries if entry.chunk.dtype is not None}
    tensors = tuple(
        NamedTensor(chunk.name, number, chunk.dtype or "", chunk.shape, None)
        for number, leaf in enumerate(image.tensors)
        if (chunk := named.get(id(leaf))) is not None
    )
    chunks = tuple((entry.position, entry.chunk._replace(file=key)) for entry in entries)
    return PlannedFile(key, image, tensors, chunks=chunks)


@as_checkpoint_errors()
@takes(ToDcpOptions)
def to_dcp(tag: StrPath, dcp_directory: StrPath, **options: Unpack[ToDcpKeywords]) -> Converted:
    """Make ``dcp_directory``, a torch DCP directory, from a tag.

    ``torch.distributed.checkpoint.load`` and OLMo-core's ``load_model_and_optim_state`` read it. The tag may be of
    nxd_ckpt or NxD, of any sizes. All contents except rank content are converted bit for bit, with whole tensors. The
    tag is only read, and its digests are verified; the directory appears when all of it is written. Extra memory: about
    100 MiB, for models of any size. Keywords are the fields of `nxd_ckpt.options.tags.ToDcpOptions`.

    Args:
        tag: a tag's directory or URL.
        dcp_directory: directory or URL of the result.

    Raises:
        TopologyMismatch, OptimizerMismatch: a tensor's cut is not known.
        PartNotFound: the tag holds neither model nor optimizer, or lost files.
        InvalidArgument: ``dcp_directory`` may not be replaced.
        CheckpointNotFound: no such tag, an incomplete one, or ranks' files are missing.
        CorruptCheckpoint: its files are damaged, or from two saves.
    """
    chosen = options_of(ToDcpOptions, options)
    source = locate_input(tag, chosen.storage_options)
    target = locate_apart(dcp_directory, source, chosen.written_with)
    opened = open_source(source)
    opened.refuse_per_rank("model", "optim", "scheduler")
    with opened.guarded():
        state = _state(opened, chosen)
        output = Output(target, overwrite=chosen.overwrite, durable=chosen.durable, kind=TORCH_DCP)
    return write_dcp(state, output, source, chosen)


def write_dcp(state: DcpState, output: Output, source: Location, chosen: OutputOptions) -> Converted:
    """Write ``state`` as ``output``. Errors of reading its tensors pass."""
    started, opened = time.monotonic(), state.opened
    with opened.guarded(), gc_paused():
        files = plan_files(state)
    nbytes = sum(tensor.nbytes for tensor in state.tensors.values())
    done = Converted(source.path, output.place.path, None, nbytes)
    if chosen.dry_run:
        return done
    written = Counter()
    planned = sum(file.image.nbytes for file in files)
    with output.writing(planned):
        with (
            opened.guarded(),
            watched("convert", planned, lambda: written.nbytes, chosen.progress),
            opened.reader() as reader,
        ):
            [writer] = write_images(reader, output.storage, output.folder, [files], written.add)
        output.write(METADATA, dump_metadata(writer.chunks()))
    report("converted", f"{source.path} to {output.place.path}", nbytes, started)
    return done


def _state(opened: OpenTag, chosen: ToDcpOptions) -> DcpState:
    """Return the tag as DCP's state dict, and warn of parts for which DCP has no names."""
    if not opened.parts.model and opened.parts.optimizer is None:
        raise PartNotFound(f"{opened.where} holds neither model nor optimizer, so there is nothing to convert")
    cuts = checked_facts(opened, chosen.partitions, chosen.saved_param_names)
    whole = WholeTag(opened, partitions=cuts, saved_param_names=chosen.saved_param_names)
    state = DcpState(whole, chosen.names)
    if state.unknown:
        raise TopologyMismatch(
            f"{opened.where}: the cut of {', '.join(state.unknown[:5])} over ranks is not known; pass partitions= with "
            "the cut of each, by name"
        )
    if any(name.startswith("optim/#") for name in whole.tensors):
        logger.warning(
            "%s does not name the parameters of its optimizer, so their states are called %s.state.#0 and so on, which "
            "no optimizer loads; pass saved_param_names=",
            opened.where,
            chosen.optim_key,
        )
    if whole.general_state:
        logger.warning(
            "%s: torch DCP has no names for optimizer state that belongs to no parameter; left out: %s",
            opened.where,
            ", ".join(whole.general_state),
        )
    return state


@as_checkpoint_errors()
@takes(FromDcpOptions)
def from_dcp(dcp_directory: StrPath, tag: StrPath, **options: Unpack[FromDcpKeywords]) -> Converted:
    """Make ``tag`` from a directory of ``torch.distributed.checkpoint.save`` or OLMo-core's training.

    The tag is as a job of the given sizes would have saved it, bit for bit: model, optimizer with its param groups and
    steps. The key "scheduler" becomes the scheduler, all other keys the user content. The directory is only read, as
    plain data: no class in it is imported. The tag appears at once, when all of it is durable. Extra memory: about
    100 MiB for each worker. Keywords are the fields of `nxd_ckpt.options.tags.FromDcpOptions`.

    Args:
        dcp_directory: directory or URL that holds ``.metadata``.
        tag: directory or URL of the new tag.

    Raises:
        CheckpointNotFound: there is no ``.metadata``.
        MalformedFile: a file is missing or damaged, or chunks of a tensor are.
        UnsafePickle: the metadata or a value holds more than plain data.
        KeyMismatch: a parameter with state is in no param group, or in several.
        PartNotFound: neither model nor optimizer is under these keys.
        InvalidArgument: sizes contradict each other, or ``tag`` may not be replaced.
        TopologyMismatch: the sizes do not divide a tensor.
    """
    chosen = options_of(FromDcpOptions, options)

    def prepare(process: int, processes: int) -> Job:
        source = locate_existing(dcp_directory, chosen.storage_options)
        require_directory(source.open(), source.name, "input")
        target = locate_output(tag, source, chosen.overwrite, chosen.written_with)
        opened = open_dcp(source, chosen.names)
        if not opened.parts.model and opened.parts.optimizer is None:
            raise PartNotFound(
                f"{opened.where} holds nothing under {chosen.model_key!r} and {chosen.optim_key!r}; pass the keys of "
                "model and optimizer in the state dict that was saved (model_key=, optim_key=)"
            )
        refuse_unknown(chosen.partitions or {}, opened.model_names(), opened.where)
        what = DcpTarget(
            chosen.topology,
            optimizer=_optimizer_form(chosen, opened.parts),
            use_xser=chosen.use_xser,
            partitions=chosen.partitions,
            stages=chosen.stages,
            names=chosen.names,
        )
        return Job(source, target, what, _parts(opened, what), durable=chosen.durable, overwrite=chosen.overwrite)

    return convert(prepare, chosen)


def _optimizer_form(chosen: FromDcpOptions, parts: Parts) -> str | None:
    if parts.optimizer is None:
        return None
    return chosen.optimizer or ("zero1" if parts.master_weights else "plain")


def _parts(opened: OpenTag, what: DcpTarget) -> Parts:
    parts = opened.parts
    return Parts(
        model=parts.model,
        optimizer=what.optimizer,
        scheduler=parts.scheduler,
        user_content=parts.user_content,
        use_xser=bool(what.use_xser),
        master_weights=parts.master_weights and what.optimizer == "zero1",
    )
