"""What is on a simulated disk or store, without a line of the code that is tested."""

import json
import zlib
from array import array
from collections.abc import Iterable, Iterator
from io import BytesIO

import torch

from nxd_ckpt.storage.base import Storage

HIDDEN = ".nxd_ckpt"


def visible(storage: Storage, late: bool = False) -> dict[str, int]:
    """The number of the save that each visible tag holds, and each directory with an unsharded model.

    ``late`` says that requests may happen after whoever made them has given them up: where they bring back the manifest
    and ``done`` of a tag that was removed, these alone are passed over.

    Raises AssertionError for a tag that claims more than is there: a file that is missing, short or damaged, or parts
    of several saves.
    """
    folders = [entry.name for entry in storage.list() if entry.is_dir and entry.name[0] != "."]
    tags = {folder: value_of(storage, folder) for folder in folders if _claims(storage, folder, late)}
    return tags | {folder: _unsharded(storage, folder) for folder in folders if storage.is_file(f"{folder}/model.pt")}


def order_times(storage: Storage, tags: Iterable[str]) -> dict[str, tuple[float, float]]:
    """When each tag was saved, as its manifest and its ``done`` say, by which NxD orders tags."""
    return {tag: (_order_time(storage, tag), storage.time(f"{tag}/done")) for tag in tags}


def _order_time(storage: Storage, tag: str) -> float:
    return float(json.loads(storage.read(f"{tag}/manifest.json"))["order_time"])


def _claims(storage: Storage, folder: str, late: bool) -> bool:
    """Whether it says that it is a tag: it has ``done``, and not ``done`` alone, in which no reader sees a tag."""
    passed_over = {"done", "manifest.json"} if late else {"done"}
    return storage.is_file(f"{folder}/done") and not {entry.name for entry in storage.list(folder)} <= passed_over


def strays(storage: Storage) -> list[str]:
    """The files that no visible tag names, but for those that jobs leave for others to find."""
    named = {f"{tag}/{name}" for tag in visible(storage) for name in _names(storage, tag)}
    below = [entry.name for entry in storage.list() if entry.is_dir and entry.name != HIDDEN]
    folders = [*below, f"{HIDDEN}/staging", f"{HIDDEN}/trash"]
    return [key for folder in folders for key in _files(storage, folder) if key not in named]


def _files(storage: Storage, folder: str) -> Iterator[str]:
    for entry in storage.list(folder):
        key = f"{folder}/{entry.name}"
        yield from _files(storage, key) if entry.is_dir else [key]


def _names(storage: Storage, tag: str) -> set[str]:
    """The files of a tag."""
    indexes = [f"index/{entry.name}" for entry in storage.list(f"{tag}/index")]
    data = [name for index in indexes for name in json.loads(storage.read(f"{tag}/{index}"))["files"]]
    return {"checkpoint", "done", "manifest.json", *indexes, *data}


def value_of(storage: Storage, tag: str) -> int:
    listed = {entry.name for entry in storage.list(tag)}
    assert {"checkpoint", "manifest.json", "index", "model", "user_content.pt"} <= listed, f"{tag} has only {listed}"
    manifest = json.loads(storage.read(f"{tag}/manifest.json"))
    values = set[int]()
    for rank, (nbytes, digest) in enumerate(manifest["ranks"]):
        document = storage.read(f"{tag}/index/dp_rank_00_tp_rank_{rank:02}_pp_rank_00.json")
        assert (nbytes, digest) == (len(document), zlib.crc32(document)), f"{tag}: index of rank {rank}"
        index = json.loads(document)
        for name, (size, crc) in index["files"].items():
            data = storage.read(f"{tag}/{name}")
            assert (size, crc) == (len(data), zlib.crc32(data)), f"{tag}/{name} is not what its index says"
        tensors = index["tensors"]
        at = tensors["name"].index("model/weight")
        data = storage.read(f"{tag}/{tensors['files'][tensors['file'][at]]}")
        offset, nbytes = tensors["offset"][at], tensors["forms"][tensors["form"][at]][0]
        numbers = set(array("f", data[offset : offset + nbytes]))
        parts = {rank} if len(manifest["ranks"]) == 2 else {0, 1}  # of one rank: it holds both parts
        assert {number % 10 for number in numbers} == parts, f"{tag}: rank {rank} has {numbers}, expected {parts}"
        values.update(int(number) // 10 for number in numbers)
    assert len(values) == 1, f"{tag} mixes the saves {values}"
    return values.pop()


def _unsharded(storage: Storage, folder: str) -> int:
    weight = torch.load(BytesIO(storage.read(f"{folder}/model.pt")), weights_only=True)["weight"]
    numbers = weight.tolist()
    value = int(numbers[0]) // 10
    assert numbers == [10.0 * value] * 3 + [10.0 * value + 1] * 3, f"{folder} holds {numbers}"
    return value
