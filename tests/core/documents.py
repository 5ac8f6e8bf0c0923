"""An index, manifests, and what they are of."""

import json
import zlib
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import (
    CRC_BLOCK,
    FileEntry,
    Manifest,
    ParameterSpec,
    Parts,
    RankIndex,
    TensorEntry,
)
from nxd_ckpt.core.mesh import Layout, Mesh, MeshRecord, Shard, WholeTensor
from nxd_ckpt.core.partition import Partition, Piece
from nxd_ckpt.core.topology import Coordinates, Topology

SPECS = {
    "embed.weight": ParameterSpec("bfloat16", (4, 3), Partition(0, num_partitions=2)),
    "tokens": ParameterSpec("int64", (), Partition(), trainable=False),
}
SHARD = TensorEntry(
    name="optim/embed.weight/exp_avg",
    file="optim/dp_rank_01_tp_rank_01_pp_rank_00.pt",
    offset=4096,
    nbytes=CRC_BLOCK + 4,
    dtype="float32",
    shape=(3, 3),
    crc32=(7, 2**32 - 1),
    pieces=(Piece(Box((0, 0), (2, 3)), Box((6, 0), (2, 3))),),
)
STEP = TensorEntry("optim/embed.weight/step", "optim/x.pt", 0, 0, "float32", (0,), (), None)
INDEX = RankIndex(
    coordinates=Coordinates(0, 1, 1),
    files={"optim/x.pt": FileEntry(5000, 12), "done": FileEntry(1, 0)},
    tensors=(SHARD, STEP),
    parameters=SPECS,
    optimizer_names=("embed.weight",),
)
RANK_MAP = [Coordinates(0, dp_rank, tp_rank) for tp_rank in range(2) for dp_rank in range(2)]
MANIFEST = Manifest(
    tag="step_3",
    attempt="run-1",
    order_time=1_700_000_000.25,
    topology=Topology(dp=2, tp=2, ep=2, rank_map=RANK_MAP),
    parts=Parts(model=True, optimizer="zero1", use_xser=True),
    ranks=tuple(FileEntry(100 + rank, rank) for rank in range(4)),
    parameters=SPECS,
    timings={"staged": 0.5},
    versions={"torch": "2.9.0"},
)

TWO_BY_TWO = Mesh(("fsdp", "tp"), (2, 2), (0, 2, 1, 3))
RECORD = MeshRecord(
    layouts=(Layout(TWO_BY_TWO, (Shard(0, 2), Shard(0))), Layout(Mesh(("",), (4,), (0, 1, 2, 3)), (None,))),
    tensors=(
        WholeTensor("model/embed.weight", "bfloat16", (8, 3), 0),
        WholeTensor("model/tokens", "int64", (), 1, replica=3),
        WholeTensor("optim/embed.weight/exp_avg", "float32", (8, 3), None, ranks=(1, 2)),
    ),
)
LEADERS_INDEX = replace(INDEX, mesh=RECORD)
MESH_MANIFEST = replace(MANIFEST, topology=Topology(dp=4), leaders=(0, 2))
METRICS = {"loss": 2.25, "accuracy": None, "bits": -3.0}
"""What tells of the training: any finite numbers, and None for one that was not."""


def as_before(document: dict[str, Any]) -> dict[str, Any]:
    """An index of version 3 as version 1 or 2 had it, or a manifest of version 7 as version 6: without tables."""
    fields = dict(document)
    table = fields.pop("specifications")
    fields["parameters"] = {name: table[number] for name, number in fields["parameters"].items()}
    if fields["kind"] == "manifest":
        return {**fields, "format_version": 6}
    columns = fields["tensors"]
    fields["tensors"] = [
        {
            "name": name, "file": columns["files"][file], "offset": offset, "crc32": crc32,
            **dict(zip(("nbytes", "dtype", "shape", "pieces"), columns["forms"][form], strict=True)),
        }
        for name, file, form, offset, crc32 in zip(
            *(columns[key] for key in ("name", "file", "form", "offset", "crc32")), strict=True
        )
    ]
    return {**fields, "format_version": 2 if "mesh" in fields else 1}


def sealed(document: dict[str, Any]) -> bytes:
    """A manifest with a valid digest, whatever else it says."""
    fields = {key: value for key, value in document.items() if key != "crc32"}
    body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return body + b',"crc32":%d}' % zlib.crc32(body)
