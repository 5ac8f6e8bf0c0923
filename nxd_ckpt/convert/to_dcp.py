"""``to_dcp``: a tag as a torch DCP directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from nxd_ckpt.convert.dcp_writer import DcpWriter
from nxd_ckpt.convert.job import Converted
from nxd_ckpt.convert.locations import Options, StrPath, locate_apart, locate_input, written_with
from nxd_ckpt.convert.output import TORCH_DCP, Output
from nxd_ckpt.convert.source import open_source
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import PartNotFound, TopologyMismatch, as_checkpoint_errors
from nxd_ckpt.layout.torch_dcp import METADATA
from nxd_ckpt.runtime.progress import report, watched
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.views.dcp_state import DcpState
from nxd_ckpt.runtime.views.whole_tag import WholeTag

logger = logging.getLogger("nxd_ckpt")


@as_checkpoint_errors()
def to_dcp(
    tag: StrPath,
    dcp_directory: StrPath,
    *,
    model_key: str = "model",
    optim_key: str = "optim",
    flatten_optimizer_state: bool = False,
    partitions: Mapping[str, Partition] | None = None,
    saved_param_names: Sequence[Sequence[Sequence[str]]] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    storage_options: Options | None = None,
    output_options: Options | None = None,
    durable: bool = True,
    progress: bool = False,
) -> Converted:
    """Make ``dcp_directory``, which ``torch.distributed.checkpoint.load`` and OLMo-core's
    ``load_model_and_optim_state`` read, of a tag.

    Any tag, of nxd_ckpt or NxD, of any sizes, with all that it holds but rank content: bit for bit, tensors whole. The
    tag is only read and its digests are verified on the way; the directory appears when all of it is written. Extra
    memory: about 100 MiB, whatever the size of the model.

    Args:
        tag: a tag's directory or URL.
        dcp_directory: the directory or URL that is made.
        model_key, optim_key: the keys of model and optimizer in the state dict; "" for the state dict itself.
        flatten_optimizer_state: param groups by parameter, as with torch's ``flatten_optimizer_state_dict=True``.
        partitions: how parameters were cut, by name, where the tag does not say (NxD's do not, with tp or ep).
        saved_param_names: the optimizer's parameter names as saved, for each pipeline stage, for each param group,
            where the tag does not say (NxD's do not).
        overwrite: replace an existing torch DCP directory.
        dry_run: plan everything, and write nothing.
        storage_options, output_options, durable, progress: as for ``reshard``.

    Raises:
        TopologyMismatch, OptimizerMismatch: how a tensor was cut is not known.
        PartNotFound: the tag holds neither model nor optimizer, or lost files.
        InvalidArgument: a ``dcp_directory`` that must not be touched.
        CheckpointNotFound, CorruptCheckpoint: as for ``reshard``.
    """
    started = time.monotonic()
    source = locate_input(tag, storage_options)
    target = locate_apart(dcp_directory, source, written_with(storage_options, output_options))
    opened = open_source(source)
    with opened.kept():
        state = _state(opened, DcpNames(model_key, optim_key, flatten_optimizer_state), partitions, saved_param_names)
        output = Output(target, overwrite=overwrite, durable=durable, kind=TORCH_DCP)
        writer = DcpWriter(opened, state, output.storage, output.folder)
    done = Converted(source.path, target.path, None, writer.nbytes)
    if dry_run:
        return done
    try:
        output.begin()
        with opened.kept(), watched("convert", writer.nbytes, lambda: writer.written, progress):
            metadata = writer.write()
        output.storage.write(f"{output.folder}/{METADATA}", metadata)
        output.publish()
    except BaseException:
        output.discard()
        raise
    report("converted", f"{source.path} to {target.path}", writer.written, started)
    return done


def _state(
    opened: OpenTag,
    names: DcpNames,
    partitions: Mapping[str, Partition] | None,
    saved_param_names: Sequence[Sequence[Sequence[str]]] | None,
) -> DcpState:
    """The tag as DCP's state dict, with warnings of what that has no names for. Raises as :func:`to_dcp`."""
    if not opened.parts.model and opened.parts.optimizer is None:
        raise PartNotFound(f"{opened.where} holds neither model nor optimizer: there is nothing to convert")
    whole = WholeTag(opened, partitions=partitions, saved_param_names=saved_param_names)
    state = DcpState(opened, whole, names)
    if state.unknown:
        raise TopologyMismatch(
            f"{opened.where}: how {', '.join(state.unknown[:5])} are cut over ranks is not known; pass partitions= "
            "with the cut of each, by name"
        )
    if any(name.startswith("optim/#") for name in whole.tensors):
        logger.warning(
            "%s does not say whose state the entries of its optimizer are: they are called %s.state.#0 and so on, "
            "which no optimizer looks for; pass saved_param_names=",
            opened.where,
            names.optim,
        )
    if whole.general_state:
        logger.warning(
            "%s: torch DCP has no names for optimizer state that is no parameter's; left out: %s",
            opened.where,
            ", ".join(whole.general_state),
        )
    return state
