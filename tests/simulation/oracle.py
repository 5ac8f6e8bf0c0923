"""What is on a simulated disk or store, without a line of the code that is tested."""

from __future__ import annotations

import json
import zlib
from array import array

from nxd_ckpt.storage.base import Storage


def visible(storage: Storage) -> dict[str, int]:
    """The number of the save that each visible tag holds.

    Raises AssertionError for a tag that claims more than is there: a file that is missing, short or damaged, or parts
    of several saves.
    """
    tags = [entry.name for entry in storage.list() if entry.is_dir and entry.name[0] != "."]
    return {tag: _value(storage, tag) for tag in tags if storage.is_file(f"{tag}/done")}


def _value(storage: Storage, tag: str) -> int:
    listed = {entry.name for entry in storage.list(tag)}
    assert {"checkpoint", "manifest.json", "index", "model", "user_content.pt"} <= listed, f"{tag} has only {listed}"
    manifest = json.loads(storage.read(f"{tag}/manifest.json"))
    assert manifest["tag"] == tag
    values = set()
    for rank, (nbytes, digest) in enumerate(manifest["ranks"]):
        document = storage.read(f"{tag}/index/dp_rank_00_tp_rank_{rank:02}_pp_rank_00.json")
        assert (nbytes, digest) == (len(document), zlib.crc32(document)), f"{tag}: index of rank {rank}"
        index = json.loads(document)
        for name, (size, crc) in index["files"].items():
            data = storage.read(f"{tag}/{name}")
            assert (size, crc) == (len(data), zlib.crc32(data)), f"{tag}/{name} is not what its index says"
        (weight,) = (tensor for tensor in index["tensors"] if tensor["name"] == "model/weight")
        data = storage.read(f"{tag}/{weight['file']}")
        (number,) = set(array("f", data[weight["offset"] : weight["offset"] + weight["nbytes"]]))
        assert number % 10 == rank, f"{tag}: the part of rank {rank} is that of rank {number % 10:.0f}"
        values.add(int(number) // 10)
    assert len(values) == 1, f"{tag} mixes the saves {values}"
    return values.pop()
