"""A model in the form that NxD inference loads: a safetensors file of each tensor-parallel rank. Only read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from nxd_ckpt.core.limits import RANKS, check_count
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.nxd_tag import ModelOnly
from nxd_ckpt.tag.state_dicts import reading

_NAME = re.compile(r"tp(\d+)_sharded_checkpoint\.safetensors")


def file_name(tp_rank: int) -> str:
    """Return the name of the rank's file."""
    return f"tp{tp_rank}_sharded_checkpoint.safetensors"


def is_present(names: Iterable[str]) -> bool:
    """Return whether a directory of these files holds such a model."""
    return any(map(_NAME.fullmatch, names))


class PreshardedFiles(ModelOnly):
    """Layout (`TagLayout`) of such a model.

    Raises PartNotFound if a rank's file is missing, MalformedFile for too many.
    """

    def __init__(self, files: TagFiles) -> None:
        self.files = files
        ranks = {int(match[1]) for match in map(_NAME.fullmatch, files.names()) if match is not None}
        check_count(max(ranks) + 1, RANKS, f"{files.directory}: the ranks that names of files say")
        missing = sorted(set(range(max(ranks) + 1)) - ranks)
        if missing:
            raise PartNotFound(f"{files.where(file_name(missing[0]))} is missing: there is a file of rank {max(ranks)}")
        self._tp = len(ranks)

    def topology(self) -> Topology:
        return Topology(tp=self._tp)

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        return dict(self.files.safetensors(file_name(at.tp_rank)))
