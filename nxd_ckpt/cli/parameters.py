"""The parameters and buffers of a tag's model: shapes, and how they are cut over ranks."""

from __future__ import annotations

from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.formats.tensors import TensorStub, iter_tensors
from nxd_ckpt.tag.files import MissingTensor
from nxd_ckpt.tag.opened import OpenTag


def parameters(opened: OpenTag) -> list[dict[str, Any]]:
    """Every parameter and buffer, those of all pipeline stages. Where only files tell: None for what they do not."""
    if not opened.parts.model:
        return []
    if opened.manifest is None:
        return list(_of_files(opened).values())
    return [_of_spec(name, spec, opened.topology) for name, spec in opened.manifest.parameters.items()]


def in_words(partition: Partition, topology: Topology) -> str:
    """How a parameter is cut: ``whole``, ``dim 0 in 4``, ``dim 0 over 2 ep ranks, dim 1 in 4``."""
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
    words = f"dim {partition.partition_dim} in {partition.num_partitions}"
    if partition.partition_stride > 1:
        words += f", {partition.partition_stride} blocks each"
    if partition.num_partitions < tp:
        words += f", each on {tp // partition.num_partitions} ranks"
    if partition.rank_ordering is not None:
        words += f", by rank {' '.join(map(str, partition.rank_ordering))}"
    return words


def _of_spec(name: str, spec: ParameterSpec, topology: Topology) -> dict[str, Any]:
    partition = spec.partition
    return {
        "name": name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "global_shape": list(partition.global_shape(spec.shape, topology.ep)) if partition.known else None,
        "partition": partition.to_json(),
        "cut": in_words(partition, topology),
        "trainable": spec.trainable,
    }


def _of_files(opened: OpenTag) -> dict[str, dict[str, Any]]:
    """NxD's files keep local tensors and nothing of how they were cut; alone on tp and ep, nothing was."""
    topology = opened.topology
    whole = topology.tp == topology.ep == 1
    found: dict[str, dict[str, Any]] = {}
    for pp_rank in range(topology.pp):
        tree = opened.model_tree(Coordinates(pp_rank=pp_rank))
        for path, leaf in iter_tensors(tree, (TensorStub, MissingTensor)):
            name, shape = ".".join(map(str, path)), None if leaf.shape is None else list(leaf.shape)
            found.setdefault(
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
    return found
