"""What one conversion is to do, as each of its processes knows it; and what it did."""

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
    """A target that is made of a torch DCP directory; ``names`` are what that calls things."""

    names: DcpNames = field(default_factory=DcpNames)


@dataclass(frozen=True)
class HuggingFaceTarget(Target):
    """The same for a tag that is seen in Hugging Face's ``terms``."""

    terms: HuggingFaceTerms | None = None


@dataclass(frozen=True)
class Converted:
    """What was converted, or would be.

    Attributes:
        source, target: as given.
        topology: the sizes dp, tp, pp and ep of the result; None where it has no ranks.
        nbytes: bytes of what is written anew; files that are taken over as they are do not count.
    """

    source: str
    target: str
    topology: Mapping[str, int] | None
    nbytes: int


@dataclass(frozen=True)
class Job:
    """Make ``target`` out of ``source``. Plain data: it is handed to worker processes.

    Attributes:
        what: what each rank of the result holds; its ``topology`` is seen from any rank.
        parts: what the result holds, as its manifest will say.
        keeps_model: the model's files are taken over as they are: the result's ranks have the input's.
        durable: fsync everything before the result becomes visible.
        overwrite: replace a checkpoint that is there, even one that was completed since the target was looked at.
        save: of a tag, which save it is that is converted: workers open it anew (see tag.identity).
        metrics: of a tag, what its save was told of the training, which the result keeps.
        positions: data positions that each rank of the result holds, as it has other ranks than the input.
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
    """The data positions of the tag, for each rank of a ``topology`` that is not its own. What cannot be read or
    re-split is named in the log, by the first process."""
    if topology == opened.topology:
        return {}
    together, alone = positions_together(opened)
    for why in alone if process == 0 else ():
        logger.warning("not taken over: %s", why)
    return together


def metrics_of(opened: OpenTag) -> Metrics:
    """What the save of the tag was told of the training."""
    return {} if opened.manifest is None else opened.manifest.metrics
