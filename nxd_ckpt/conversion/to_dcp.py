"""``to_dcp``: a tag as a torch DCP directory."""

from __future__ import annotations

import logging
import time

from typing_extensions import Unpack

from nxd_ckpt.conversion.job import Converted
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.errors import PartNotFound, TopologyMismatch, as_checkpoint_errors
from nxd_ckpt.keywords import ToDcpKeywords
from nxd_ckpt.options.execution import OutputOptions
from nxd_ckpt.options.torch_forms import ToDcpOptions
from nxd_ckpt.output.dcp_files import plan_files
from nxd_ckpt.output.image_writer import write_images
from nxd_ckpt.output.locations import Location, locate_apart, locate_input
from nxd_ckpt.output.output import TORCH_DCP, Output
from nxd_ckpt.output.source import open_source
from nxd_ckpt.reshard.dcp_state import DcpState
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.storage.progress import Counter, report, watched
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.foreign.dcp_metadata import dump_metadata
from nxd_ckpt.tag.foreign.torch_dcp import METADATA
from nxd_ckpt.tag.opened import OpenTag

logger = logging.getLogger("nxd_ckpt")


@as_checkpoint_errors()
@takes(ToDcpOptions)
def to_dcp(tag: StrPath, dcp_directory: StrPath, **options: Unpack[ToDcpKeywords]) -> Converted:
    """Make ``dcp_directory``, a torch DCP directory, from a tag.

    ``torch.distributed.checkpoint.load`` and OLMo-core's ``load_model_and_optim_state`` read it. The tag may be of
    nxd_ckpt or NxD, of any sizes. All contents except rank content are converted bit for bit, with whole tensors. The
    tag is only read, and its digests are verified; the directory appears when all of it is written. Extra memory: about
    100 MiB, for models of any size. Keywords are the fields of `nxd_ckpt.options.torch_forms.ToDcpOptions`.

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
    chosen = ToDcpOptions(**options)
    source = locate_input(tag, chosen.storage_options)
    target = locate_apart(dcp_directory, source, chosen.written_with)
    opened = open_source(source)
    with opened.guarded():
        state = _state(opened, chosen)
        output = Output(target, overwrite=chosen.overwrite, durable=chosen.durable, kind=TORCH_DCP)
    return write_dcp(opened, state, output, source, chosen)


def write_dcp(opened: OpenTag, state: DcpState, output: Output, source: Location, chosen: OutputOptions) -> Converted:
    """Write ``state``, which ``opened`` reads, as ``output``. Errors of reading its tensors pass."""
    started = time.monotonic()
    with opened.guarded():
        files = plan_files(state)
    nbytes = sum(tensor.nbytes for tensor in state.tensors.values())
    done = Converted(source.path, output.place.path, None, nbytes)
    if chosen.dry_run:
        return done
    written = Counter()
    planned = sum(file.image.nbytes for file in files)
    with output.writing():
        with (
            opened.guarded(),
            watched("convert", planned, lambda: written.nbytes, chosen.progress),
            opened.reader() as reader,
        ):
            [writer] = write_images(reader, output.storage, output.folder, [files], written.add)
        output.storage.write(f"{output.folder}/{METADATA}", dump_metadata(writer.chunks()))
    report("converted", f"{source.path} to {output.place.path}", nbytes, started)
    return done


def _state(opened: OpenTag, chosen: ToDcpOptions) -> DcpState:
    """Return the tag as DCP's state dict, and warn of parts for which DCP has no names."""
    if not opened.parts.model and opened.parts.optimizer is None:
        raise PartNotFound(f"{opened.where} holds neither model nor optimizer, so there is nothing to convert")
    whole = WholeTag(opened, partitions=chosen.partitions, saved_param_names=chosen.saved_param_names)
    state = DcpState(opened, whole, chosen.names)
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
