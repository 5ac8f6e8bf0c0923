"""Optimum-neuron's files of the model beside a tag, compared with the tag."""

from __future__ import annotations

from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.migrate.optimum_metadata import TIED_HEAD, OptimumMetadata, read_metadata, read_pickled_metadata
from nxd_ckpt.reshard.optimizer_names import COMPUTED
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign.recognise import STAGE_METADATA
from nxd_ckpt.tag.opened import OpenTag

_SHOWN = 4
_PICKLED = ".pt"


def stage_metadata(files: TagFiles, opened: OpenTag, adapter: str | None = None) -> OptimumMetadata:
    """Read the metadata of all stages of the tag ``opened``; with ``adapter``, of that adapter of the model.

    Raises:
        PartNotFound: a stage has no metadata.
        MalformedFile: it belongs to another tag, or is no such metadata.
        UnsupportedState: no rule can describe the model.
        UnsafePickle: a pickle has more than plain data.
    """
    matches = map(STAGE_METADATA.fullmatch, files.names())
    by_stage = {int(match[1]): match[0] for match in matches if match is not None}
    missing = [number for number in range(opened.topology.pp) if number not in by_stage]
    if missing or len(by_stage) > opened.topology.pp:
        raise PartNotFound(
            f"{opened.where}: files of {opened.topology.pp} pipeline stages, but metadata "
            f"(mp_metadata_pp_rank_P.json, or .pt) of stages {sorted(by_stage)}; files are missing, or of two saves"
        )
    metadata = _read(files, [by_stage[stage] for stage in sorted(by_stage)], opened, adapter)
    if metadata.tp not in (None, opened.topology.tp):
        raise MalformedFile(
            f"{opened.where}: its metadata is of {metadata.tp} tensor-parallel ranks, its files are of "
            f"{opened.topology.tp}; files of ranks are missing, or of two saves"
        )
    _refuse_other_names(metadata, opened)
    return metadata


def refuse_other_model(metadata: OptimumMetadata, beside: TagFiles, opened: OpenTag) -> None:
    """Raise MalformedFile if config.json belongs to another model."""
    config = json_object(beside, "config.json")
    for key, expected in (("num_attention_heads", metadata.heads), ("num_key_value_heads", metadata.kv_heads)):
        if expected is not None and config.get(key, expected) != expected:
            raise MalformedFile(
                f"{beside.where('config.json')} has {key}={config[key]}, but the metadata of "
                f"{opened.where} has {expected}; they belong to two models"
            )


def json_object(files: TagFiles, file: str) -> dict[str, Any]:
    """Read the JSON object in the file; empty without one."""
    if not files.has(file):
        return {}
    return document.small(files.storage.read(files.key(file)), files.where(file))


def _read(files: TagFiles, names: list[str], opened: OpenTag, adapter: str | None) -> OptimumMetadata:
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if not pickled:
        return read_metadata({files.where(name): json_object(files, name) for name in names}, adapter)
    if len(pickled) < len(names):
        raise MalformedFile(
            f"{files.where(pickled[0])}: stages have metadata of two versions of optimum-neuron; files of two saves "
            "are mixed"
        )
    metadata = read_pickled_metadata({files.where(name): files.object(name) for name in names}, adapter)
    if opened.parts.model:
        metadata.stages = _of_each_stage(metadata, opened)
    return metadata


def _of_each_stage(metadata: OptimumMetadata, opened: OpenTag) -> list[list[str]]:
    """Return the names of each stage, without names of other stages, which the older form lists too."""
    names_by_stage = [set(opened.model_tree(Coordinates(stage))) for stage in range(opened.topology.pp)]
    anywhere = set().union(*names_by_stage)
    return [
        [name for name in names if name in own or name not in anywhere]
        for names, own in zip(metadata.stages, names_by_stage, strict=True)
    ]


def _refuse_other_names(metadata: OptimumMetadata, opened: OpenTag) -> None:
    for stage, names in enumerate(metadata.stages if opened.parts.model else []):
        tree = opened.model_tree(Coordinates(stage))
        absent = [name for name in names if name not in tree]
        unlisted = [name for name in tree if name not in {*names, TIED_HEAD} and not name.endswith(COMPUTED)]
        if metadata.adapter is not None:  # biases are listed with the base
            unlisted = []
        if absent or unlisted:
            raise MalformedFile(
                f"{opened.where}: metadata of stage {stage} lists {', '.join(absent[:_SHOWN]) or 'nothing'} that the "
                f"model's files do not have, and the files have {', '.join(unlisted[:_SHOWN]) or 'nothing'} that it "
                "does not list; files of two saves are mixed"
            )
