"""The description of one conversion, equal in each of its processes, and its result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.core.data_position import Position
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.retention import Metrics
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTerms
from nxd_ckpt.hugging_face.imported_model import ImportTarget
from nxd_ckpt.load.parts import positions_together
from nxd_ckpt.output.locations import Location
from nxd_ckpt.reshard.target import Target
from nxd_ckpt.tag.opened import OpenTag

logger = logging.getLogger("nxd_ckpt")


@dataclass(frozen=True)
class DcpTarget(Target):
    """A target made from a torch DCP directory; ``names`` are the directory's names."""

    names: DcpNames = field(default_factory=DcpNames)


@dataclass(frozen=True)
class HuggingFaceTarget(Target):
    """A target made from a tag that is translated by Hugging Face ``terms``.

    With ``imported`` it is made from a Hugging Face directory, as from its import.
    """

    terms: HuggingFaceTerms | None = None
    imported: ImportTarget | None = None


@dataclass(frozen=True)
class Converted:
    """The result of a conversion, or of a dry run.

    Attributes:
        source: path of the input.
        target: path of the result.
        topology: the sizes dp, tp, pp and ep of the result; None if it has no ranks.
        nbytes: bytes that are written; files that pass through unchanged do not count.
    """

    source: str
    target: str
    topology: Mapping[str, int] | None
    nbytes: int


@dataclass(frozen=True)
class Job:
    """The conversion of ``source`` to ``target``. Plain data, because it is sent to worker processes.

    Attributes:
        source: the input.
        target: the result.
        what: the form of each rank of the result; the rank of its ``topology`` does not matter.
        parts: parts of the result, for its manifest.
        keeps_model: True if the model's files pass through unchanged, from equal ranks of the input.
        durable: True to fsync everything before the result becomes visible.
        overwrite: True to replace an existing checkpoint, even one completed after the target was checked.
        save: identity of the tag's save (see tag.identity), because workers open the tag again; None for other inputs.
        metrics: metrics of the tag's save, which the result keeps.
        positions: data positions for each rank of a result whose ranks differ from the input's.
    """

    source: Location
    target: Location
    what: Target | ImportTarget
    parts: Parts
    keeps_model: bool = False
    durable: bool = True
    overwrite: bool = False
    save: str | None = None
    metrics: Metrics = field(default_factory=dict)
    positions: Mapping[Any, Position] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        return self.what.topology


def positions_for(topology: Topology, opened: OpenTag, process: int) -> dict[Any, Position]:
    """Return the merged data positions of the tag, for each rank of another ``topology``; empty for its own.

    The first process logs positions that cannot be read or split again.
    """
    if topology == opened.topology:
        return {}
    merged, problems = positions_together(opened)
    for problem in problems if process == 0 else ():
        logger.warning("not taken over: %s", problem)
    return merged


def metrics_of(opened: OpenTag) -> Metrics:
    """Return the metrics of the tag's save."""
    return {} if opened.manifest is None else opened.manifest.metrics
