"""One or more valid files for each reader: what damaged ones are made of."""

import io
import json
import struct
import tarfile
import zlib
from collections import Counter, OrderedDict
from dataclasses import replace
from importlib import resources
from typing import Any

import torch

from nxd_ckpt.core.dcp_names import DcpChunk, DcpNames
from nxd_ckpt.core.manifest import FileEntry, dump_index, dump_manifest
from nxd_ckpt.core.votes import Verdict, Vote, dump
from nxd_ckpt.formats.tensors import TensorReference
from nxd_ckpt.storage.archive_storage import END, MEMBER_LIST, dump_members
from tests.core.documents import INDEX, LEADERS_INDEX, MANIFEST, MESH_MANIFEST, METRICS, as_before, sealed
from tests.formats.helpers import saved
from tests.formats.pickles import named, text

INDEXES = [dump_index(INDEX), dump_index(LEADERS_INDEX)]
INDEXES += [json.dumps(as_before(json.loads(one))).encode() for one in INDEXES]
MANIFESTS = [*map(dump_manifest, (MANIFEST, MESH_MANIFEST, replace(MANIFEST, metrics=METRICS)))]
MANIFESTS += [sealed(as_before(json.loads(one))) for one in MANIFESTS[:2]]

_CHUNK = DcpChunk(("model", 0), "float32", (4, 2), (0, 0), (2, 2), "__0_0.distcp", 0, 16)
_PLAN = {"tag": "step_3", "topology": "dp=4", "model": True}
VOTES = [
    dump(Vote(3, plan=_PLAN, replica="ab", index=FileEntry(120, 9), replicated=7, nbytes=5, seconds=0.5)),
    dump(Vote(0, plan=_PLAN, chunks=(_CHUNK,))),
    dump(Vote(0, error=("OSError", "disk full"))),
]
VERDICTS = [dump(Verdict()), dump(Verdict(("SaveFailed", "rank 3 failed"), 3, "step_3"))]

LEASES = [json.dumps({"run_id": "run", "host": "a/b/c", "pid": 7, "born": "12", "beat": 3}).encode()]
JOURNALS = [json.dumps({"attempt": "run-1", "tag": "step_3"}).encode()]
INTENTS = [json.dumps({"tag": "step_3"}).encode()]
DONES = [b"1", b"1700000000 run-1"]
NEWESTS = [b"step_1\nstep_3\n", b"step_3"]

STATE: dict[str, Any] = {  # each tensor in a storage of four bytes
    "model": OrderedDict(weight=torch.ones(1, 1), step=torch.zeros(())),
    "content": {"order": [1, 2, 3], "at": (1.5, None, True), "size": torch.Size([2]), "counts": Counter("aab"), 7: {1}},
}
TORCH_FILES = [saved(STATE), saved({"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0]}]})]

REFERENCES = {"weight": TensorReference(0), "bias": {"x": TensorReference(1)}}
INFO = {tid: {"dtype": torch.float32, "shape": torch.Size([2]), "expert_model_parallel": False} for tid in (0, 1)}

SEALED = ("model.bin", b"abcd")
"""A file beside a tag in a directory that is sealed, and its bytes."""
DIGESTS = [json.dumps({SEALED[0]: [len(SEALED[1]), zlib.crc32(SEALED[1])]}, indent=1).encode()]
DCP_NAMES = [DcpNames().to_json()]

_FUSED = {
    **{"fused_linear_name": "gate_up_proj", "linear_names": ["gate_proj", "up_proj"], "fuse_axis": 0},
    **{"original_dims": [8, 8], "bias": False, "tp_size": 2, "peft_type": None},
}
_CUT = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2, "num_partitions": 2}
OPTIMUMS = [
    json.dumps(
        {
            "parameters": {
                "model.layers.0.mlp.gate_up_proj.weight": _CUT,
                "model.norm.weight": {"tensor_model_parallel": False},
                "lm_head.weight": {**_CUT, "partition_stride": 1},
            },
            "model_weight_transformation_specs": [
                {"module_fully_qualified_name": "model.layers.0.mlp", "specs": [["FusedLinearsSpec", _FUSED]]}
            ],
        }
    ).encode()
]

CONFIGS = [
    json.dumps(
        {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "vocab_size": 16}
    ).encode()
]
MAPPINGS = [(resources.files("nxd_ckpt") / "mappings" / f"{name}.json").read_bytes() for name in ("llama", "mixtral")]


def _safetensors(*names: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for at, name in enumerate(names):
        header[name] = {"dtype": "F32", "shape": [2], "data_offsets": [8 * at, 8 * at + 8]}
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(8 * len(names))


TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
SAFETENSORS = [_safetensors(*TENSORS)]
_PLACES = dict.fromkeys(TENSORS, "a.safetensors")
WEIGHT_MAPS = [json.dumps({"metadata": {"total_size": 16}, "weight_map": _PLACES}).encode()]


def _archive(listed: bool) -> bytes:
    files = {"one/checkpoint": b"1", "one/model/x.pt": bytes(700), "one/done": b"1"}
    at, lines = 0, []
    for name, content in files.items():
        lines.append((name, at + tarfile.BLOCKSIZE, len(content), 0.0))
        at += tarfile.BLOCKSIZE + len(content) + -len(content) % tarfile.BLOCKSIZE
    head = {MEMBER_LIST: dump_members(lines)} if listed else {}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in {**head, **files}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        end = tar.offset
    return out.getvalue()[: end + END]


ARCHIVES = [_archive(listed=True), _archive(listed=False)]


def _record(module: str, name: str, **fields: bytes) -> bytes:
    """An object as torch DCP's metadata holds it: of a class by name, with its fields."""
    state = b"".join(text(field) + value for field, value in fields.items())
    return named(f"torch.distributed.{module}", name) + b")\x81}(" + state + b"ub"


def _numbers(*values: int) -> bytes:
    size = b"(" + b"".join(b"K" + bytes([value]) for value in values) + b"t"
    return named("torch", "Size") + size + b"\x85R"


def _metadata() -> bytes:
    about = "checkpoint.metadata"
    properties = named(f"torch.distributed.{about}", "TensorProperties") + b")\x81(" + named("torch", "float32") + b"tb"
    chunk = _record(about, "ChunkStorageMetadata", offsets=_numbers(0), sizes=_numbers(2))
    tensor = _record(
        about, "TensorStorageMetadata", properties=properties, size=_numbers(2), chunks=b"](" + chunk + b"e"
    )
    index = _record(about, "MetadataIndex", fqn=text("model.a"), offset=_numbers(0), index=b"K\x00")
    place = _record(
        "checkpoint.filesystem", "_StorageInfo", relative_path=text("__0_0.distcp"), offset=b"K\x00", length=b"K\x08"
    )
    whole = _record(
        about,
        "Metadata",
        state_dict_metadata=b"}" + text("model.a") + tensor + b"s",
        planner_data=b"}" + text("model.a") + text("model") + text("a") + b"\x86s",
        storage_data=b"}" + index + place + b"s",
    )
    return b"\x80\x04" + whole + b"."


METADATA = [_metadata()]
