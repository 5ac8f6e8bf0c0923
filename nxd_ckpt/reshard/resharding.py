"""Resharding of one parameter: what a rank of the loading job reads from ranks of the saving job. Pure.

There are two cases. If both jobs cut it alike over tensor-parallel (and for experts, expert-parallel) ranks, only the
rank's own tensor matters: ZeRO-1 shards are recut along its rows, and its place in the whole need not be known.
Otherwise both cuts must be known, and reads are planned through the whole tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition, Piece, Section, zero1_pieces
from nxd_ckpt.core.reads import Cut, CutIndex, Read, holders, plan_reads
from nxd_ckpt.core.suggestions import SIZE_ADVICE, listed
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument, ShapeMismatch, TopologyMismatch

_PASS_PARTITIONS = "pass partitions= with its cut, which no file and no attribute tells, or keep the sizes of the save"


def plan_parameter(
    name: str, saved: ParameterSpec, saved_cut: Cut, live: ParameterSpec, live_cut: Cut, at: CutIndex
) -> list[Read[CutIndex]]:
    """Plan the reads of the live rank at ``at``: each element of its tensor once, padding left out.

    ``shape`` of both specs is the tensor's on each rank of its job, before ZeRO-1. Boxes of the reads count from the
    holder's ZeRO-1 shard (``source``) and from this rank's (``target``).

    Raises:
        ShapeMismatch: saved and live parameter differ in shape.
        TopologyMismatch: a cut is not known, or irregular.
        IncompatibleState: no saving rank holds a part of the tensor.
    """
    saved, live = _experts_on_both(saved, saved_cut, live, live_cut)
    if _cut_alike(saved, saved_cut, live, live_cut):
        if saved.shape != live.shape:
            raise ShapeMismatch(f"{name}: saved with shape {saved.shape}, the live one has {live.shape}; {SIZE_ADVICE}")
        whole = Box.whole(live.shape)
        pieces_here = _shard([Piece(whole, whole)], live.shape, live_cut.shards, at.shard)
        cut = Cut(shards=saved_cut.shards)
        reads = _reads(name, pieces_here, Partition(), saved.shape, cut, CutIndex())
        same = CutIndex(at.tp_rank, at.ep_rank if saved_cut.ep == live_cut.ep else 0)
        return [replace(read, holder=replace(same, shard=read.holder.shard)) for read in reads]
    _check_wholes(name, saved, saved_cut, live, live_cut)
    ep_rank = at.ep_rank if live.partition.expert else 0
    pieces = live.partition.pieces(live.shape, at.tp_rank, live_cut.tp, ep_rank)
    if pieces is None:
        raise TopologyMismatch(
            f"{name}: the live parameter has shape {live.shape}, which cannot be cut as {live.partition} over "
            f"{live_cut.tp} tensor-parallel ranks; {_PASS_PARTITIONS}"
        )
    pieces_here = _shard(pieces, live.shape, live_cut.shards, at.shard)
    return _reads(name, pieces_here, saved.partition, saved.shape, saved_cut, at)


def checked_partitions(partitions: Mapping[str, Partition] | None, tp: int) -> Mapping[str, Partition]:
    """Return a caller's partitions. Raises InvalidArgument for a cut into one partition, where there are ``tp`` ranks.

    Taken as it stands, it would make copies of what ranks hold parts of: all but one would be lost.
    """
    for name, partition in (partitions or {}).items():
        if tp > 1 and partition.partition_dim is not None and partition.replicated_over_tp and not partition.fused:
            raise InvalidArgument(
                f"partitions= says that {name} is cut along dimension {partition.partition_dim}, but into one "
                f"partition; expected num_partitions={tp} if each of {tp} tensor-parallel ranks holds another part of "
                "it, fewer if some hold the same one, and Partition() ({} in JSON) if each rank holds the whole"
            )
    return partitions or {}


def refuse_unknown(partitions: Iterable[str], parameters: Collection[str], where: str = "the model") -> None:
    """Raise InvalidArgument for names in a caller's partitions that are no parameters."""
    unknown = [name for name in partitions if name not in parameters]
    if unknown:
        raise InvalidArgument(f"partitions= names {listed(unknown, parameters)}, which {where} does not have")


def check_partitions(
    partitions: Mapping[str, Partition], parameters: Mapping[str, ParameterSpec], topology: Topology
) -> None:
    """Raise InvalidArgument for partitions that a rank with these ``parameters`` cannot have."""
    if topology.pp == 1:  # else it may be on another stage
        refuse_unknown(partitions, parameters)
    for name, partition in partitions.items():
        parameter = parameters.get(name)
        if parameter is not None:
            partition.check_shape(f"partitions= of {name}", parameter.shape)
        if parameter is None or not partition.known:
            continue
        if partition.section_layouts(parameter.shape, topology.tp, topology.ep_rank) is None:
            raise InvalidArgument(
                f"partitions= says that {name} is cut as {partition}, but then {topology.tp} tensor-parallel ranks "
                f"cannot each hold shape {parameter.shape}; pass the cut of the whole parameter"
            )


def rescaled(name: str, partition: Partition, tp: int, new_tp: int) -> Partition:
    """Return the cut over ``new_tp`` ranks of a parameter that ``tp`` ranks cut in this way, by NxD's conventions.

    If there were as many partitions as ranks, there are again. Fewer partitions (the replicated heads of grouped-query
    attention) keep their number, as long as there are ranks for them.

    Raises:
        TopologyMismatch: no convention applies.
    """
    if tp == new_tp or partition.partition_dim is None or not partition.known:
        return partition
    if partition.fused:
        return replace(
            partition, fused=tuple(_rescaled_section(name, section, tp, new_tp) for section in partition.fused)
        )
    if partition.rank_ordering is not None and partition.num_partitions > 1 and new_tp > 1:
        raise _no_convention(name, f"rank_ordering={partition.rank_ordering}", tp, new_tp)
    count = _rescaled_count(name, partition.num_partitions, tp, new_tp)
    return replace(partition, num_partitions=count, rank_ordering=None)


def respecified(name: str, spec: ParameterSpec, cut: Cut, new: Cut) -> ParameterSpec:
    """Return the parameter as each rank of a job of sizes ``new`` holds it, before ZeRO-1, cut as by `rescaled`.

    Raises:
        TopologyMismatch: the sizes do not divide it, or its cut is not known.
    """
    is_same_cut = (cut.tp, cut.ep if spec.partition.expert else 0) == (new.tp, new.ep if spec.partition.expert else 0)
    if is_same_cut:
        return spec
    if not spec.partition.known:
        raise TopologyMismatch(f"{name}: its cut over {cut.tp} tensor-parallel ranks is not known; {_PASS_PARTITIONS}")
    partition = rescaled(name, spec.partition, cut.tp, new.tp)
    whole = _whole(spec, cut)
    if whole is None:
        raise TopologyMismatch(f"{name}: shape {spec.shape} cannot be cut as {spec.partition}; {_PASS_PARTITIONS}")
    shape = list(whole)
    if partition.expert:
        shape[0] = _divided(name, shape[0], new.ep, f"experts, over ep={new.ep} ranks")
    dim = partition.partition_dim
    if partition.fused and dim is not None:
        shape[dim] = sum(section.block for section in partition.fused)
    elif dim is not None:
        blocks = partition.num_partitions * partition.partition_stride
        what = f"elements of dimension {dim}, over tp={new.tp} ranks ({blocks} blocks)"
        shape[dim] = _divided(name, shape[dim], blocks, what) * partition.partition_stride
    return ParameterSpec(spec.dtype, tuple(shape), partition, spec.trainable)


def derived(name: str, shape: tuple[int, ...], cut: Cut, live: ParameterSpec, live_cut: Cut) -> ParameterSpec:
    """Return a saved parameter, of ``shape`` on each rank, whose cut was not recorded: cut like the live one.

    The number of partitions follows from the shapes, where it can.
    """
    partition = rescaled(name, live.partition, live_cut.tp, cut.tp)
    dim = partition.partition_dim
    whole = _whole(live, live_cut)
    if dim is not None and not partition.fused and whole is not None and len(shape) == len(whole):
        count, rest = divmod(whole[dim], max(shape[dim], 1))
        if shape[dim] and not rest and count >= 1 and cut.tp % count == 0:
            partition = replace(partition, num_partitions=count)
    return ParameterSpec(live.dtype, shape, partition, live.trainable)


def _divided(name: str, size: int, parts: int, what: str) -> int:
    if size % parts:
        raise TopologyMismatch(f"{name}: {size} {what}, cannot be divided equally; choose sizes that divide it")
    return size // parts


def _rescaled_section(name: str, section: Section, tp: int, new_tp: int) -> Section:
    if section.rank_ordering is not None and section.num_partitions > 1 and new_tp > 1:
        raise _no_convention(name, f"rank_ordering={section.rank_ordering}", tp, new_tp)
    try:
        return Section(section.size, _rescaled_count(name, section.num_partitions, tp, new_tp))
    except InvalidArgument as error:
        raise TopologyMismatch(f"{name}: cannot be cut over {new_tp} tensor-parallel ranks: {error}") from error


def _rescaled_count(name: str, count: int, tp: int, new_tp: int) -> int:
    if count == tp:
        return new_tp
    if new_tp % count == 0:
        return count
    if count % new_tp == 0:
        return new_tp
    raise _no_convention(name, f"{count} partitions", tp, new_tp)


def _no_convention(name: str, what: str, tp: int, new_tp: int) -> TopologyMismatch:
    return TopologyMismatch(
        f"{name}: cut over {tp} tensor-parallel ranks with {what}, from which the cut over {new_tp} ranks does not "
        "follow; pass partitions= with that cut"
    )


def _experts_on_both(
    saved: ParameterSpec, saved_cut: Cut, live: ParameterSpec, live_cut: Cut
) -> tuple[ParameterSpec, ParameterSpec]:
    """Complete the expert flag of either side: NxD marks experts only if expert parallelism cuts them."""
    if saved_cut.ep == 1:
        saved = replace(saved, partition=replace(saved.partition, expert=live.partition.expert))
    elif live_cut.ep == 1:
        live = replace(live, partition=replace(live.partition, expert=saved.partition.expert))
    return saved, live


def _cut_alike(saved: ParameterSpec, saved_cut: Cut, live: ParameterSpec, live_cut: Cut) -> bool:
    """Return whether a live rank's tensor, before ZeRO-1, equals that of the saving rank with its tp (and ep) rank."""
    expert = saved.partition.expert or live.partition.expert
    if saved_cut.tp != live_cut.tp or (expert and saved_cut.ep != live_cut.ep):
        return False
    if saved.shape != live.shape and saved.partition.known and live.partition.known:
        return False
    # On equal sizes an unknown cut does not matter, on either side; two different cuts do.
    explicit = [spec.partition.known and not spec.partition.replicated_over_tp for spec in (saved, live)]
    return not all(explicit) or saved.partition == live.partition


def _check_wholes(name: str, saved: ParameterSpec, saved_cut: Cut, live: ParameterSpec, live_cut: Cut) -> None:
    """Raise unless both sides are known cuts of whole tensors of one shape."""
    if not saved.partition.known:
        raise TopologyMismatch(
            f"{name}: the cut over {saved_cut.tp} tensor-parallel ranks is not known: ranks held different values, but "
            f"no partition attributes; {_PASS_PARTITIONS}"
        )
    if not live.partition.known:
        raise TopologyMismatch(f"{name}: the live parameter has no known cut; {_PASS_PARTITIONS}")
    if saved.partition.expert != live.partition.expert:
        kinds = ("an ordinary parameter", "an expert's")
        raise TopologyMismatch(
            f"{name}: saved as {kinds[saved.partition.expert]}, but the live one is {kinds[live.partition.expert]} "
            f"(attribute expert_model_parallel); {_PASS_PARTITIONS}"
        )
    wholes = [_whole(spec, cut) for spec, cut in ((saved, saved_cut), (live, live_cut))]
    if wholes[0] != wholes[1]:
        if (saved_cut.tp, saved_cut.ep) == (live_cut.tp, live_cut.ep) == (1, 1):
            raise ShapeMismatch(f"{name}: saved with shape {saved.shape}, the live one has {live.shape}; {SIZE_ADVICE}")
        raise ShapeMismatch(
            f"{name}: the whole tensor was saved with shape {wholes[0]} (each rank {saved.shape}, "
            f"{_sizes(saved_cut)}), the live one has {wholes[1]} (each rank {live.shape}, {_sizes(live_cut)}). If it "
            f"is the same model, {_PASS_PARTITIONS}; if not, {SIZE_ADVICE}"
        )


def _whole(spec: ParameterSpec, cut: Cut) -> tuple[int, ...] | None:
    dim = spec.partition.partition_dim
    if dim is not None and dim >= len(spec.shape):
        return None
    return spec.partition.global_shape(spec.shape, cut.ep)


def _sizes(cut: Cut) -> str:
    return f"tp={cut.tp} ep={cut.ep}"


def _shard(pieces: Sequence[Piece], local_shape: tuple[int, ...], shards: int, shard: int) -> Sequence[Piece]:
    return pieces if shards == 1 else zero1_pieces(pieces, local_shape, shards, shard)


def _reads(
    name: str, targets: Sequence[Piece], partition: Partition, shape: tuple[int, ...], cut: Cut, near: CutIndex
) -> list[Read[CutIndex]]:
    sources: dict[tuple[CutIndex, Piece], None] = {}
    for target in targets:
        owners = holders(partition, shape, target.box, cut, near)
        if owners is None:
            raise TopologyMismatch(
                f"{name}: saved with shape {shape}, which cannot be cut as {partition} over {cut.tp} tensor-parallel "
                "ranks; pass partitions= with its cut"
            )
        sources.update(dict.fromkeys(owners))
    return plan_reads(targets, list(sources), name)
