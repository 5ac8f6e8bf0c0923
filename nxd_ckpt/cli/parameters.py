"""Parameters and buffers of a tag's model: shapes, and how they are partitioned over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nxd_ckpt.core.manifest import Manifest, ParameterSpec
from nxd_ckpt.core.mesh import Layout
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.formats.tensors import Assembly, TensorStub, iter_tensors
from nxd_ckpt.reshard.resharded_state import recorded_parameters
from nxd_ckpt.tag.files import MissingTensor
from nxd_ckpt.tag.opened import OpenTag


def parameters(opened: OpenTag, rank: int = 0) -> list[dict[str, Any]]:
    """Describe every parameter and buffer, of all pipeline stages; of a mesh job, what ``rank`` held of each.

    Facts that a tag does not record are None.
    """
    if not opened.parts.model:
        return []
    if opened.manifest is None:
        return list(_from_files(opened).values())
    knows = _knows_trained(opened.manifest)
    described = [_from_spec(name, spec, opened.topology, knows) for name, spec in opened.manifest.parameters.items()]
    layouts = {} if opened.mesh is None else opened.mesh.layouts("model/")
    return [parameter | _on_mesh(layouts.get(parameter["name"]), parameter["shape"], rank) for parameter in described]


def _knows_trained(manifest: Manifest) -> bool:
    """Return whether the save told parameters that are trained from others.

    A state dict does not: all of its tensors count as untrained. A conversion takes it over, or counts all as trained.
    """
    kinds = {spec.trainable for spec in manifest.parameters.values()}
    return len(kinds) == 2 or (kinds == {True} and not manifest.is_converted)


def _on_mesh(layout: Layout | None, shape: Sequence[int], rank: int) -> dict[str, Any]:
    """Return the shape that a rank of a mesh held, and how the tensor was placed; nothing if it was whole there."""
    if layout is None:
        return {}
    coordinate = layout.mesh.coordinate_of(rank)
    if coordinate is None:
        return {"shape": None, "cut": f"not on rank {rank}"}
    dimensions = zip(layout.mesh.names, layout.mesh.shape, layout.placements, strict=True)
    cuts = [
        f"dim {placement.dim} in {size} ({name or 'unnamed'})"
        for name, size, placement in dimensions
        if placement is not None
    ]
    return {"shape": list(layout.local_shape(tuple(shape), coordinate)), "cut": ", ".join(cuts) or "whole"}


def describe_partition(partition: Partition, topology: Topology) -> str:
    """Return the partition as text: ``whole``, ``dim 0 in 4``, ``dim 0 over 2 ep ranks, dim 1 in 4``."""
    if not partition.known:
        return "unknown"
    cuts = []
    if partition.expert:
        cuts.append(f"dim 0 over {topology.ep} ep ranks")
    if partition.fused:
        sections = " + ".join(f"{section.size} in {section.num_partitions}" for section in partition.fused)
        cuts.append(f"dim {partition.partition_dim} of {sections}")
    elif not partition.replicated_over_tp:
        cuts.append(_plain_cut(partition, topology.tp))
    return ", ".join(cuts) or "whole"


def _plain_cut(partition: Partition, tp: int) -> str:
    cut = f"dim {partition.partition_dim} in {partition.num_partitions}"
    if partition.partition_stride > 1:
        cut += f", {partition.partition_stride} blocks each"
    if partition.num_partitions < tp:
        cut += f", each on {tp // partition.num_partitions} ranks"
    if partition.rank_ordering is not None:
        cut += f", by rank {' '.join(map(str, partition.rank_ordering))}"
    return cut


def _from_spec(name: str, spec: ParameterSpec, topology: Topology, knows_trained: bool) -> dict[str, Any]:
    partition = spec.partition
    return {
        "name": name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "global_shape": list(partition.global_shape(spec.shape, topology.ep)) if partition.known else None,
        "partition": partition.to_json(),
        "cut": describe_partition(partition, topology),
        "trainable": spec.trainable if knows_trained else None,
    }


def _from_files(opened: OpenTag) -> dict[str, dict[str, Any]]:
    """Describe parameters from NxD's files.

    They hold local tensors without their partition. What ranks hold alike is whole, and everything if tp and ep are 1.
    """
    topology, recorded = opened.topology, recorded_parameters(opened, {})
    alone = topology.tp == topology.ep == 1
    parameters: dict[str, dict[str, Any]] = {}
    for pp_rank in range(topology.pp):
        tree = opened.model_tree(Coordinates(pp_rank=pp_rank))
        for path, leaf in iter_tensors(tree, (TensorStub, Assembly, MissingTensor)):
            name, shape = ".".join(map(str, path)), None if leaf.shape is None else list(leaf.shape)
            whole = alone or (name in recorded and recorded[name].partition.known)
            parameters.setdefault(
                name,
                {
                    "name": name,
                    "dtype": leaf.dtype,
                    "shape": shape,
                    "global_shape": shape if whole else None,
                    "partition": Partition().to_json() if whole else None,
                    "cut": "whole" if whole else "unknown",
                    "trainable": None,
                },
            )
    return parameters
