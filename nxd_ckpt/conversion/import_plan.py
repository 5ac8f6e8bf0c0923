"""The plan of an import: the tensors that a Hugging Face directory becomes, and obstacles. Reads headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nxd_ckpt.conversion.inputs import open_imported
from nxd_ckpt.hugging_face.imported_model import ImportedModel, ImportTarget
from nxd_ckpt.hugging_face.selection import closest
from nxd_ckpt.output.locations import Location


@dataclass(frozen=True)
class ImportedTensor:
    """An NxD tensor of an import.

    Attributes:
        name: its name in the tag.
        dtype: torch's name.
        shape: shape on each rank of its pipeline stage.
        pp_rank: the pipeline stage.
        members: the Hugging Face tensors that it is made of.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pp_rank: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Import:
    """The result of an import, or of a dry run.

    Attributes:
        source: path of the Hugging Face directory.
        target: path of the tag.
        mapping: the mapping's name.
        tensors: tensors of the tag.
        unknown: names in the directory that no rule maps, each with the closest rules. Empty unless nothing was
            written.
        missing: tensors that the model should have but the directory lacks. Empty unless nothing was written.
    """

    source: str
    target: str
    mapping: str
    tensors: tuple[ImportedTensor, ...]
    unknown: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def import_plan(source: Location, target: Location, what: ImportTarget) -> Import:
    """Plan an import. Raises the errors of `ImportedModel.state`, except for unknown and missing names."""
    model = ImportedModel(open_imported(source, what), what)
    selection, sizes = model.selection, what.sizes
    members = {
        match.name: tuple(what.mapping.in_files(match.rule.names(match.numbers, sizes))) for match in selection.matches
    }
    whole = {match.name: match for match in selection.matches if not set(members[match.name]) & set(selection.missing)}
    is_blocked = bool(selection.unknown or selection.missing)
    stages = model.staged(list(whole)) if is_blocked else model.stages
    tensors = []
    for pp_rank, names in enumerate(stages):
        for name in names:
            spec = model.spec(whole[name], what.topology)
            tensors.append(ImportedTensor(name, spec.dtype, spec.shape, pp_rank, members[name]))
    unknown = {name: tuple(closest(what.mapping, name)) for name in selection.unknown}
    whole_tag, missing = tuple(tensors), selection.missing
    return Import(source.path, target.path, what.mapping.name, whole_tag, unknown, missing, model.left_out)
