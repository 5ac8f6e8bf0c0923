"""Unfinished checkpoints that transformers 5 makes at SIGTERM (``enable_jit_checkpoint``).

transformers makes the directory ``checkpoint-N`` with a sentinel in it, saves, and removes the sentinel. It never looks
for one afterwards: `last_complete` and `refuse_interrupted` do.
"""

from __future__ import annotations

import os
import re

from nxd_ckpt.errors import CheckpointNotFound
from nxd_ckpt.integrations.sealed import is_sealed

SENTINEL = "checkpoint-is-incomplete.txt"

_NUMBERED = re.compile(r"checkpoint-(\d+)")


def make_way(directory: str, tag: str) -> None:
    """Remove transformers' directory for a checkpoint that is now written out of sight; never a checkpoint."""
    if not os.path.isfile(sentinel := os.path.join(directory, SENTINEL)):
        return
    if os.listdir(directory) == [SENTINEL]:
        os.remove(sentinel)
        os.rmdir(directory)
    elif is_sealed(directory, tag):
        os.remove(sentinel)


def last_complete(run: str, tag: str) -> str | None:
    """Return the directory of the highest number in ``run`` that is not interrupted; None if there is no directory.

    Raises:
        CheckpointNotFound: all of them are interrupted.
    """
    names = [name for name in os.listdir(run) if _NUMBERED.fullmatch(name)] if os.path.isdir(run) else []
    paths = [os.path.join(run, name) for name in names if os.path.isdir(os.path.join(run, name))]
    paths.sort(key=lambda path: int(path.rpartition("-")[2]))
    complete = [path for path in paths if not _is_interrupted(path, tag)]
    if paths and not complete:
        refuse_interrupted(paths[-1], tag)
    return complete[-1] if complete else None


def refuse_interrupted(directory: str, tag: str) -> None:
    """Raise CheckpointNotFound for a directory whose save was interrupted."""
    if _is_interrupted(directory, tag):
        raise CheckpointNotFound(
            f"{directory} holds {SENTINEL}: transformers began to save it at SIGTERM, and was ended before it was "
            "complete. Remove the directory, and resume from the checkpoint before it"
        )


def _is_interrupted(directory: str, tag: str) -> bool:
    """Return whether the save was interrupted. A checkpoint of ours is complete, whatever other files are in it."""
    return os.path.isfile(os.path.join(directory, SENTINEL)) and not is_sealed(directory, tag)
