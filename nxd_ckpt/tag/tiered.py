"""SageMaker's tiered storage: torch DCP's save with a directory per rank, ``rank_R/step_N`` or ``step_N/rank_R``.

Finds saves by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.foreign.torch_dcp import TIERED_DATA, TIERED_METADATA, TIERED_RANK, of_rank

_STEP = re.compile(r"step_\d+")


def saves(storage: Storage, folder: str) -> list[str]:
    """Return the first rank's directory (a key of the storage) of each save in the directory, or of its own save."""
    if is_of_rank(storage, folder):
        return [of_rank(folder, 0)]
    inside = [f"{folder}/{name}" if folder else name for name in _below(storage, folder)]
    rank_dirs = [key for key in inside if is_of_rank(storage, key)]
    rank_dirs += [below for key in inside if key not in rank_dirs for below in _inside(storage, key)]
    return sorted({of_rank(key, 0) for key in rank_dirs})


def holds_ranks(directory: str) -> bool:
    """Return whether a directory of that name belongs to one rank, with all its steps."""
    return TIERED_RANK.fullmatch(directory) is not None


def is_of_rank(storage: Storage, folder: str) -> bool:
    """Return whether it has one rank's files of one step.

    A script may use such names itself: some rank must have the metadata of all.
    """
    parts = folder.split("/")
    named = any(TIERED_RANK.fullmatch(name) for name in parts[-2:]) or _STEP.fullmatch(parts[-1]) is not None
    has_files = named and any(storage.is_file(f"{folder}/{name}") for name in (TIERED_DATA, TIERED_METADATA))
    return has_files and any(storage.is_file(f"{key}/{TIERED_METADATA}") for key in _of_all_ranks(storage, folder))


def _of_all_ranks(storage: Storage, folder: str) -> Iterator[str]:
    """Yield the directories of all ranks for the step of ``folder``.

    The first rank's, which should have the metadata, comes first.
    """
    yield of_rank(folder, 0)
    parts = folder.split("/")
    for at in range(max(len(parts) - 2, 0), len(parts)):
        if TIERED_RANK.fullmatch(parts[at]):
            matches = (TIERED_RANK.fullmatch(entry.name) for entry in storage.list("/".join(parts[:at])))
            yield from ("/".join((*parts[:at], match[0], *parts[at + 1 :])) for match in matches if match)


def _inside(storage: Storage, folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in _below(storage, folder) if is_of_rank(storage, f"{folder}/{name}")]


def _below(storage: Storage, folder: str) -> list[str]:
    """Return the steps there, and one rank."""
    names = [entry.name for entry in storage.list(folder) if entry.is_dir]
    ranks = sorted((int(match[1]), match[0]) for match in map(TIERED_RANK.fullmatch, names) if match is not None)
    return [*(name for _, name in ranks[:1]), *(name for name in names if _STEP.fullmatch(name))]
