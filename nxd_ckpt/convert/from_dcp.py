"""``from_dcp``: a torch DCP directory as a tag of a job of given sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nxd_ckpt.convert.conversion import ExecutionOptions, convert
from nxd_ckpt.convert.inputs import open_dcp
from nxd_ckpt.convert.job import Converted, DcpTarget, Job
from nxd_ckpt.convert.locations import Options, StrPath, locate_output, location_of, written_with
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import InvalidArgument, PartNotFound, as_checkpoint_errors
from nxd_ckpt.runtime.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.runtime.tag.opening import OpenTag

OPTIMIZERS = ("zero1", "plain")


@as_checkpoint_errors()
def from_dcp(
    dcp_directory: StrPath,
    tag: StrPath,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    optimizer: str = "zero1",
    partitions: Mapping[str, Partition] | None = None,
    stages: Sequence[Sequence[str]] | None = None,
    use_xser: bool = False,
    model_key: str = "model",
    optim_key: str = "optim",
    num_workers: int = 1,
    all_ranks: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    storage_options: Options | None = None,
    output_options: Options | None = None,
    durable: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
    progress: bool = False,
) -> Converted:
    """Make ``tag`` of what ``torch.distributed.checkpoint.save`` or OLMo-core's ``save_model_and_optim_state`` wrote.

    As a job of the given sizes would have saved it, bit for bit: model, optimizer with its param groups and steps; what
    is under "scheduler" becomes the scheduler, everything else the user content. The directory is only read, as data:
    no class in it is ever imported. Otherwise as :func:`nxd_ckpt.convert.reshard`.

    Args:
        dcp_directory: the directory, or its URL, that holds ``.metadata``.
        tag: the tag's directory or URL that is made.
        dp, tp, pp, ep: the sizes. ``ep`` must divide ``dp``.
        optimizer: "zero1", NxD's sharded form, or "plain".
        partitions: how parameters are cut, by name: ``Partition(partition_dim=0)`` over all tensor-parallel ranks,
            ``expert=True`` over expert-parallel ones; what is not named is whole on each.
        stages: the names of each pipeline stage; by default layers are spread evenly, in their order.
        use_xser: write xser files.
        model_key, optim_key: the keys of model and optimizer in the state dict; "" for the state dict itself.
        num_workers, all_ranks, overwrite, dry_run, storage_options, output_options, durable, timeout, progress: as for
            ``reshard``.

    Raises:
        CheckpointNotFound: no ``.metadata`` there.
        MalformedFile: a file is missing or damaged, or chunks of a tensor are.
        UnsafePickle: the metadata or a value holds more than plain data.
        KeyMismatch: a parameter with state is in no param group, or in two.
        PartNotFound: neither model nor optimizer is under these keys.
        InvalidArgument, TopologyMismatch: as for ``reshard``.
    """
    execution = ExecutionOptions(num_workers, all_ranks, timeout, progress, dry_run)
    names = DcpNames(model_key, optim_key)
    if optimizer not in OPTIMIZERS:
        raise InvalidArgument(f"optimizer must be one of {', '.join(OPTIMIZERS)}, found {optimizer!r}")

    def prepare(process: int, processes: int) -> Job:
        execution.validate()
        topology = Topology(dp, tp, pp, ep)
        source = location_of(dcp_directory, "input", storage_options)
        target = locate_output(tag, source, overwrite, written_with(storage_options, output_options))
        opened = open_dcp(source, names)
        if not opened.parts.model and opened.parts.optimizer is None:
            raise PartNotFound(
                f"{opened.where} holds nothing under {model_key!r} and {optim_key!r}; pass the keys of model and "
                "optimizer in the state dict that was saved (model_key=, optim_key=)"
            )
        _refuse_unknown(partitions or {}, opened)
        kind = None if opened.parts.optimizer is None else optimizer
        what = DcpTarget(
            topology, optimizer=kind, use_xser=use_xser, partitions=partitions, stages=stages, names=names
        )
        return Job(source, target, what, _parts(opened, what), durable=durable, overwrite=overwrite)

    return convert(prepare, execution)


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
