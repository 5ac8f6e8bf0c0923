"""What an import makes of a Hugging Face directory, tensor by tensor, and what hinders it. Reads headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nxd_ckpt.conversion.inputs import open_model
from nxd_ckpt.hugging_face.imported_model import ImportedModel, ImportTarget
from nxd_ckpt.hugging_face.selection import closest
from nxd_ckpt.output.locations import Location


@dataclass(frozen=True)
class ImportedTensor:
    """An NxD tensor, the shape that each rank of pipeline stage ``pp_rank`` holds of it, and the Hugging Face tensors
    ``members`` that it is made of."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pp_rank: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Import:
    """What was imported, or would be.

    Attributes:
        source, target: as given.
        mapping: the mapping's name.
        tensors: what the tag holds.
        unknown: names in the directory that no rule maps, each with the closest rules. Empty unless nothing was
            written.
        missing: tensors that the model should have and the directory does not. Empty unless nothing was written.
    """

    source: str
    target: str
    mapping: str
    tensors: tuple[ImportedTensor, ...]
    unknown: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]


def import_plan(source: Location, target: Location, what: ImportTarget) -> Import:
    """Raises what :meth:`ImportedModel.state` raises, but for names that are unknown or missing."""
    model = ImportedModel(open_model(source, what.model_key), what)
    found, sizes = model.selection, what.sizes
    members = {
        match.name: tuple(what.mapping.in_files(match.rule.names(match.numbers, sizes))) for match in found.matches
    }
    whole = {match.name: match for match in found.matches if not set(members[match.name]) & set(found.missing)}
    hindered = bool(found.unknown or found.missing)
    stages = model.staged(list(whole)) if hindered else model.stages
    tensors = []
    for pp_rank, names in enumerate(stages):
        for name in names:
            spec = model.spec(whole[name], what.topology)
            tensors.append(ImportedTensor(name, spec.dtype, spec.shape, pp_rank, members[name]))
    unknown = {name: tuple(closest(what.mapping, name)) for name in found.unknown}
    return Import(source.path, target.path, what.mapping.name, tuple(tensors), unknown, found.missing)
