"""Cuts of the parameters of a tag, as recorded or derived."""

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
    """Return the specification of every parameter of the tag, from manifest, files and ``partitions``.

    In a tag without a manifest, tensors with equal digests on two tensor-parallel (and expert-parallel) ranks count as
    replicated. All other cuts are unknown, also of tensors that are all zero: equal digests prove nothing there.
    """
    recorded = (opened.manifest.parameters if opened.manifest is not None else {}) or _synthesised(opened)
    return {
        name: _repartitioned(name, spec, partitions[name], opened.topology.ep) if name in partitions else spec
        for name, spec in recorded.items()
    }


def _repartitioned(name: str, spec: ParameterSpec, partition: Partition, ep: int) -> ParameterSpec:
    """Return the parameter with the caller's cut. Raises TopologyMismatch if the save recorded another whole shape."""
    recorded, expected = (cut.global_shape(spec.shape, ep) for cut in (spec.partition, partition))
    if spec.explicit and partition.known and recorded != expected:
        raise TopologyMismatch(
            f"model/{name}: the save recorded the whole shape {recorded}, but partitions= makes it {expected} "
            f"({partition}); leave {name} out of partitions=, or pass the cut of {recorded} on these sizes"
        )
    return replace(spec, partition=partition, explicit=True)


def _synthesised(opened: OpenTag) -> dict[str, ParameterSpec]:
    sizes = opened.topology
    parameters: dict[str, ParameterSpec] = {}
    for pp_rank in range(sizes.pp if opened.parts.model else 0):
        first, *others = [
            opened.model_tree(Coordinates(pp_rank, ep_rank, tp_rank))
            for ep_rank in range(min(sizes.ep, 2))
            for tp_rank in range(min(sizes.tp, 2))
        ]
        for name, leaf in first.items():
            if is_tensor(leaf):
                replicated = all(_same_bytes(leaf, tree.get(name)) for tree in others)
                parameters[name] = ParameterSpec(*form_of(leaf), Partition(known=replicated))
    return parameters


def _same_bytes(a: Any, b: Any) -> bool:
    digest = digest_of(a)
    return digest is not None and digest == digest_of(b) and digest[-1] != crc32.zeros(a.storage.nbytes)
