"""How the parameters of a tag were cut, as far as it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import TopologyMismatch
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.tensors import digest_of
from nxd_ckpt.live.parameters import form_of, is_tensor
from nxd_ckpt.tag.opened import OpenTag


def recorded_parameters(opened: OpenTag, partitions: Mapping[str, Partition]) -> dict[str, ParameterSpec]:
    """How every parameter of the tag was cut, as far as manifest, files and ``partitions`` tell.

    In a tag without a manifest, tensors with equal digests on two tensor-parallel (and expert-parallel) ranks count as
    replicated. The others count as cut in an unknown way, and so do those that are all zero, whose digests say nothing.
    """
    known = {} if opened.manifest is None else opened.manifest.parameters
    recorded = known or _synthesised(opened)
    return {
        name: _repartitioned(name, spec, partitions[name], opened.topology.ep) if name in partitions else spec
        for name, spec in recorded.items()
    }


def _repartitioned(name: str, spec: ParameterSpec, partition: Partition, ep: int) -> ParameterSpec:
    """The parameter as the caller says that it was cut. Raises TopologyMismatch where the save said another size."""
    recorded, wanted = (cut.global_shape(spec.shape, ep) for cut in (spec.partition, partition))
    if spec.explicit and partition.known and recorded != wanted:
        raise TopologyMismatch(
            f"model/{name}: the save says that all ranks together hold {recorded}, partitions= makes it {wanted} "
            f"({partition}); leave {name} out of partitions=, or pass the cut of {recorded} on these sizes"
        )
    return replace(spec, partition=partition, explicit=True)


def _synthesised(opened: OpenTag) -> dict[str, ParameterSpec]:
    sizes = opened.topology
    found: dict[str, ParameterSpec] = {}
    for pp_rank in range(sizes.pp if opened.parts.model else 0):
        first, *others = [
            opened.model_tree(Coordinates(pp_rank, ep_rank, tp_rank))
            for ep_rank in range(min(sizes.ep, 2))
            for tp_rank in range(min(sizes.tp, 2))
        ]
        for name, leaf in first.items():
            if is_tensor(leaf):
                known = all(_same_bytes(leaf, tree.get(name)) for tree in others)
                found[name] = ParameterSpec(*form_of(leaf), Partition(known=known))
    return found


def _same_bytes(one: Any, other: Any) -> bool:
    digest = digest_of(one)
    return digest is not None and digest == digest_of(other) and digest[-1] != crc32.zeros(one.storage.nbytes)
