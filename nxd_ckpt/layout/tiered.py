"""SageMaker's tiered storage: torch DCP's save with a directory of each rank, ``rank_R/step_N`` or ``step_N/rank_R``.
Finds saves by their names."""

from __future__ import annotations

import re

from nxd_ckpt.layout.torch_dcp import TIERED_DATA, TIERED_METADATA
from nxd_ckpt.storage.base import Storage

_RANK, _STEP = re.compile(r"rank_(\d+)"), re.compile(r"step_\d+")
_FIRST = "rank_0"


def saves(storage: Storage, folder: str) -> list[str]:
    """The first rank's directory, a key of the storage, of each save in the directory, or of the one that it is of."""
    if _is_ranks(storage, folder):
        return [_of_first_rank(folder)]
    inside = [f"{folder}/{name}" if folder else name for name in _below(storage, folder)]
    found = [key for key in inside if _is_ranks(storage, key)]
    found += [below for key in inside if key not in found for below in _inside(storage, key)]
    return sorted({_of_first_rank(key) for key in found})


def holds_ranks(directory: str) -> bool:
    """Whether the directory of that name is one rank's, of all steps."""
    return _RANK.fullmatch(directory) is not None


def _inside(storage: Storage, folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in _below(storage, folder) if _is_ranks(storage, f"{folder}/{name}")]


def _below(storage: Storage, folder: str) -> list[str]:
    """The steps there, and one rank."""
    names = [entry.name for entry in storage.list(folder) if entry.is_dir]
    ranks = sorted((int(match[1]), match[0]) for match in map(_RANK.fullmatch, names) if match is not None)
    return [*(name for _, name in ranks[:1]), *(name for name in names if _STEP.fullmatch(name))]


def _is_ranks(storage: Storage, folder: str) -> bool:
    """Whether it has one rank's files of one step."""
    parts = folder.split("/")
    named = any(_RANK.fullmatch(name) for name in parts[-2:]) or _STEP.fullmatch(parts[-1]) is not None
    return named and any(storage.is_file(f"{folder}/{name}") for name in (TIERED_DATA, TIERED_METADATA))


def _of_first_rank(folder: str) -> str:
    return "/".join(_FIRST if _RANK.fullmatch(name) else name for name in folder.split("/"))
