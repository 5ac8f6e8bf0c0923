"""The description of one conversion, equal in each of its processes, and its result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.core.data_position import Position
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.retention_rules import Metrics
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTerms
from nxd_ckpt.hugging_face.imported_model import ImportTarget
from nxd_ckpt.loading.parts import positions_together
from nxd_ckpt.output.locations import Location
from nxd_ckpt.output.source import Source
from nxd_ckpt.reshard.target import Target
from nxd_ckpt.tag.opened import OpenTag

logger = logging.getLogger("nxd_ckpt")


@dataclass(frozen=True)
class HuggingFaceTarget(Target):
    """A target made from a tag that is translated by Hugging Face ``terms``.

    With ``imported`` it is made from a Hugging Face directory, as from its import.
    """

    terms: HuggingFaceTerms | None = None
    imported: ImportTarget | None = None


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of the result.

    Attributes:
        name: its name there.
        dtype: torch's name.
        shape: its shape there; in a tag, on each rank of its pipeline stage.
        made_of: the source's tensors that it is made of.
        source_shape: whole shape of the one that it is made of; empty if there are several.
        pp_rank: its pipeline stage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    made_of: tuple[str, ...]
    source_shape: tuple[int, ...] = ()
    pp_rank: int = 0


@dataclass(frozen=True)
class Converted:
    """The result of a conversion, or of a dry run.

    Attributes:
        source: path of the source.
        target: path of what is made.
        form: its form.
        writer: the program that wrote the source.
        nbytes: bytes of tensors that are written; of an archive, its bytes. Files that pass through unchanged do not
            count.
        topology: sizes dp, tp, pp and ep of a tag; None for other forms.
        files: bytes of each file, by name; empty for a tag and torch DCP.
        mapping: name of the mapping by which names were translated; None if they were not.
        step: number of steps of the run; None if it was not looked for, or not recorded.
        tensors: tensors of the result, where a mapping made them: "hf", and names="nxd".
        unknown: names in the source that no rule maps, each with the closest rules. Empty unless nothing was written.
        missing: tensors that the model should have but the source lacks. Empty unless nothing was written.
        left_out: descriptions of parts of the source that the result lacks.
    """

    source: str
    target: str
    form: str
    writer: str
    nbytes: int
    topology: Mapping[str, int] | None = None
    files: Mapping[str, int] = field(default_factory=dict, repr=False)
    mapping: str | None = None
    step: int | None = None
    tensors: tuple[ConvertedTensor, ...] = field(default=(), repr=False)
    unknown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


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

    source: Source
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
