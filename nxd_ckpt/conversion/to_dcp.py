"""Form "dcp": a torch DCP directory.

Every entry of a directory is a ``torch.save`` file. A large tensor has its own, as with ``single_file_per_rank=False``
of torch's writer. Values and small tensors share files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nxd_ckpt.conversion.result import Converted
from nxd_ckpt.core.dcp_names import DcpChunk
from nxd_ckpt.core.units import neighbours
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import TopologyMismatch
from nxd_ckpt.formats.torch_zip_writer import JoinedImage
from nxd_ckpt.layouts.dcp_metadata import dump_metadata
from nxd_ckpt.layouts.torch_dcp import METADATA
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.output.image_writer import write_images
from nxd_ckpt.output.locations import locate_apart
from nxd_ckpt.output.output import TORCH_DCP, Output
from nxd_ckpt.output.source import Source
from nxd_ckpt.reshard.dcp_state import DcpState
from nxd_ckpt.reshard.resharded_state import checked_facts
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.saving.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.surroundings import gc_paused
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import refuse_per_rank

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
    ordered = sorted(entries, key=lambda entry: entry.nbytes >= _LARGE)
    groups = neighbours(ordered, lambda entry: entry.nbytes, _LARGE)
    return [_file(f"__0_{number}.distcp", group) for number, group in enumerate(groups)]


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


def to_dcp(source: Source, dst: StrPath, chosen: ConvertOptions) -> Converted:
    """Make the torch DCP directory ``dst``, under the source's own names.

    ``torch.distributed.checkpoint.load`` and OLMo-core's ``load_model_and_optim_state`` read it. All contents except
    rank content are converted bit for bit, with whole tensors.

    Raises:
        TopologyMismatch, OptimizerMismatch: a tensor's cut is not known.
        PartNotFound: neither model nor optimizer, or files were lost.
    """
    target = locate_apart(dst, source.place, chosen.written_with)
    opened = source.open()
    refuse_per_rank(opened, "model", "optim", "scheduler")
    with opened.guarded():
        state = _state(opened, chosen)
        output = Output(target, chosen, TORCH_DCP)
    left_out = source.left_out(opened.parts, replace(opened.parts, rank_content=False))
    return replace(write_dcp(state, output, source, chosen), left_out=left_out)


def write_dcp(state: DcpState, output: Output, source: Source, chosen: ConvertOptions) -> Converted:
    """Write ``state`` as ``output``. Errors of reading its tensors pass."""
    opened = state.opened
    with opened.guarded(), gc_paused():
        files = plan_files(state)
    nbytes = sum(tensor.nbytes for tensor in state.tensors.values())
    done = Converted(source.root.path, output.place.path, chosen.to or "dcp", source.writer.value, nbytes)
    if chosen.dry_run:
        return done
    with output.filled(source, opened, sum(file.image.nbytes for file in files), chosen.progress) as written:
        with opened.reader() as reader:
            [writer] = write_images(reader, output.storage, output.folder, [files], written.add)
        output.write(METADATA, dump_metadata(writer.chunks()))
    return done


def _state(opened: OpenTag, chosen: ConvertOptions) -> DcpState:
    """Return the tag as DCP's state dict, and warn of parts for which DCP has no names."""
    cuts = checked_facts(opened, chosen.partitions, chosen.saved_param_names)
    whole = WholeTag(opened, partitions=cuts, saved_param_names=chosen.saved_param_names)
    state = DcpState(whole, chosen.keys)
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
            chosen.keys.optim,
        )
    if whole.general_state:
        logger.warning(
            "%s: torch DCP has no names for optimizer state that belongs to no parameter; left out: %s",
            opened.where,
            ", ".join(whole.general_state),
        )
    return state
