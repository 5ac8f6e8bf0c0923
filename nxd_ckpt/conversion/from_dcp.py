"""``from_dcp``: a torch DCP directory as a tag of a job of given sizes."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import Unpack

from nxd_ckpt.conversion.conversion import convert
from nxd_ckpt.conversion.inputs import open_dcp
from nxd_ckpt.conversion.job import Converted, DcpTarget, Job
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import InvalidArgument, PartNotFound, as_checkpoint_errors
from nxd_ckpt.options.torch_forms import FromDcpKeywords, FromDcpOptions
from nxd_ckpt.output.locations import locate_made, locate_output
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.opened import OpenTag


@as_checkpoint_errors()
@takes(FromDcpOptions)
def from_dcp(dcp_directory: StrPath, tag: StrPath, **options: Unpack[FromDcpKeywords]) -> Converted:
    """Make ``tag`` of what ``torch.distributed.checkpoint.save`` or OLMo-core's ``save_model_and_optim_state`` wrote.

    As a job of the given sizes would have saved it, bit for bit: model, optimizer with its param groups and steps; what
    is under "scheduler" becomes the scheduler, everything else the user content. The directory is only read, as data:
    no class in it is ever imported. Otherwise as :func:`nxd_ckpt.convert.reshard`. Keywords are the
    fields of :class:`~nxd_ckpt.options.torch_forms.FromDcpOptions`.

    Args:
        dcp_directory: the directory, or its URL, that holds ``.metadata``.
        tag: the tag's directory or URL that is made.

    Raises:
        CheckpointNotFound: no ``.metadata`` there.
        MalformedFile: a file is missing or damaged, or chunks of a tensor are.
        UnsafePickle: the metadata or a value holds more than plain data.
        KeyMismatch: a parameter with state is in no param group, or in two.
        PartNotFound: neither model nor optimizer is under these keys.
        InvalidArgument, TopologyMismatch: as for ``reshard``.
    """
    chosen = FromDcpOptions(**options)

    def prepare(process: int, processes: int) -> Job:
        chosen.validate()
        source = locate_made(dcp_directory, chosen.storage_options)
        target = locate_output(tag, source, chosen.overwrite, chosen.written_with)
        opened = open_dcp(source, chosen.names)
        if not opened.parts.model and opened.parts.optimizer is None:
            raise PartNotFound(
                f"{opened.where} holds nothing under {chosen.model_key!r} and {chosen.optim_key!r}; pass the keys of "
                "model and optimizer in the state dict that was saved (model_key=, optim_key=)"
            )
        _refuse_unknown(chosen.partitions or {}, opened)
        what = DcpTarget(
            chosen.topology,
            optimizer=None if opened.parts.optimizer is None else chosen.optimizer,
            use_xser=chosen.use_xser,
            partitions=chosen.partitions,
            stages=chosen.stages,
            names=chosen.names,
        )
        return Job(source, target, what, _parts(opened, what), durable=chosen.durable, overwrite=chosen.overwrite)

    return convert(prepare, chosen)


def _refuse_unknown(partitions: Mapping[str, Partition], opened: OpenTag) -> None:
    unknown = sorted(partitions.keys() - opened.model_tree(Coordinates()).keys())
    if unknown:
        raise InvalidArgument(f"partitions= names {', '.join(unknown[:5])}, which {opened.where} does not have")


def _parts(opened: OpenTag, what: DcpTarget) -> Parts:
    found = opened.parts
    return Parts(
        model=found.model,
        optimizer=what.optimizer,
        scheduler=found.scheduler,
        user_content=found.user_content,
        use_xser=bool(what.use_xser),
        master_weights=found.master_weights and what.optimizer == "zero1",
    )
