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
from nxd_ckpt.keywords import FromDcpKeywords
from nxd_ckpt.options.torch_forms import FromDcpOptions
from nxd_ckpt.output.locations import locate_existing, locate_output
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.opened import OpenTag


@as_checkpoint_errors()
@takes(FromDcpOptions)
def from_dcp(dcp_directory: StrPath, tag: StrPath, **options: Unpack[FromDcpKeywords]) -> Converted:
    """Make ``tag`` from a directory of ``torch.distributed.checkpoint.save`` or OLMo-core's training.

    The tag is as a job of the given sizes would have saved it, bit for bit: model, optimizer with its param groups and
    steps. The key "scheduler" becomes the scheduler, all other keys the user content. The directory is only read, as
    plain data: no class in it is imported. The tag appears at once, when all of it is durable. Extra memory: about
    100 MiB for each worker. Keywords are the fields of `nxd_ckpt.options.torch_forms.FromDcpOptions`.

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
    chosen = FromDcpOptions(**options)

    def prepare(process: int, processes: int) -> Job:
        chosen.validate()
        source = locate_existing(dcp_directory, chosen.storage_options)
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
    parts = opened.parts
    return Parts(
        model=parts.model,
        optimizer=what.optimizer,
        scheduler=parts.scheduler,
        user_content=parts.user_content,
        use_xser=bool(what.use_xser),
        master_weights=parts.master_weights and what.optimizer == "zero1",
    )
