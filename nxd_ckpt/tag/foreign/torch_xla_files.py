"""Checkpoints that torch-xla's scripts save with ``xm.save``: one file, or with FSDP one of each rank.

transformers' trainer saves two of each, model and optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.limits import RANKS, check_count
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import CheckpointNotFound, MalformedFile, PartNotFound
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign.fsdp import METADATA, FsdpFiles
from nxd_ckpt.tag.payload import Payload, PayloadFile, payload_of

RANDOM_STATES = re.compile(r"rng_state(?:_\d+)?\.pth")
"""Random states that transformers' trainer, and so optimum-neuron's, saves beside the model, for each rank."""

_TRAINERS = re.compile(r"(rank\d+-of-\d+-)pytorch_model\.bin")
_OPTIMIZER = "optimizer.pt"
_RANK, _WORLD_SIZE = "rank", "world_size"


def is_present(names: Iterable[str]) -> bool:
    """Return whether a directory of these files holds such a checkpoint."""
    return any(map(_is_payload, names))


def is_trainers(names: Iterable[str]) -> bool:
    """Return whether transformers' trainer wrote it, which keeps the whole model beside the ranks' files."""
    return any(map(_TRAINERS.fullmatch, names))


def open_files(files: TagFiles, file: str | None = None) -> PayloadFile:
    """Open the checkpoint in the directory, or in one ``file`` of it.

    Raises:
        CheckpointNotFound: several files, each a checkpoint of its own.
        PartNotFound: ranks' files are missing.
        MalformedFile: no such files, or of two saves.
    """
    names = sorted(filter(_is_payload, files.names())) if file is None else [file]
    payloads = {name: _payload(files, name) for name in names}
    sharded = {name: payload for name, payload in payloads.items() if METADATA in payload.content}
    where = files.directory
    single = [name for name in names if name not in sharded]
    if sharded and single:
        raise MalformedFile(
            f"{where} has files of FSDP's ranks, {first_of(sharded)}, and {first_of(single)}, which is none; pass "
            "the one that is meant, or move it away"
        )
    if len(single) > 1:
        raise CheckpointNotFound(f"{where} holds several checkpoints; pass one of the files {first_of(single)}")
    if single:
        return PayloadFile(files, single[0], payloads[single[0]])
    with parsing(where, "a checkpoint of torch-xla's FSDP"):
        ordered = _by_rank(sharded, where)
    without = [name for name, payload in sharded.items() if payload.optimizer is None]
    if 0 < len(without) < len(sharded):
        raise PartNotFound(f"{where}: no optimizer is beside {first_of(without)}, and one beside others")
    return FsdpFiles(files, ordered, [sharded[name] for name in ordered])


def _is_payload(name: str) -> bool:
    return _TRAINERS.fullmatch(name) is not None or (name.endswith(".pth") and not RANDOM_STATES.fullmatch(name))


def _payload(files: TagFiles, name: str) -> Payload:
    content = payload_of(files.tree(name), files.where(name)).content
    of_trainer = _TRAINERS.fullmatch(name)
    beside = f"{of_trainer[1]}{_OPTIMIZER}" if of_trainer is not None else ""
    if of_trainer is None or not files.has(beside):
        return Payload(content)
    optimizer = payload_of(files.tree(beside), files.where(beside)).content
    if optimizer.get(METADATA) != content.get(METADATA):
        raise MalformedFile(
            f"{files.where(name)} and {beside} have different shard_metadata; files of two saves are mixed"
        )
    return Payload({**optimizer, **content})


def _by_rank(sharded: Mapping[str, Payload], where: str) -> list[str]:
    """Return the names of the files of ranks 0, 1 and so on, all of one save."""
    about = {name: payload.content[METADATA] for name, payload in sharded.items()}
    first = next(iter(about))
    for name, metadata in about.items():
        if _of_all_ranks(metadata) != _of_all_ranks(about[first]):
            raise MalformedFile(
                f"{where}: {name} and {first} have different shard_metadata; files of two saves are mixed: move those "
                "of one to a place of their own"
            )
    world_size, ranks = about[first][_WORLD_SIZE], [metadata[_RANK] for metadata in about.values()]
    check_count(world_size, RANKS, f"{where}: the ranks that shard_metadata says")
    twice = [name for name, metadata in about.items() if ranks.count(metadata[_RANK]) > 1]
    if twice:
        raise MalformedFile(
            f"{where}: several files of one rank, {first_of(twice)}; they are of two saves: move those of one to a "
            "place of their own"
        )
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing or len(ranks) != world_size:
        raise PartNotFound(
            f"{where}: FSDP saved a file for each of {world_size} ranks; those of ranks {first_of(map(str, missing))} "
            f"are not there, found {first_of(about)}"
        )
    return sorted(about, key=lambda name: int(about[name][_RANK]))


def _of_all_ranks(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != _RANK}
