"""What optimum-neuron wrote of the model beside a tag, compared with the tag."""

from __future__ import annotations

from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.migrate.optimum_metadata import TIED_HEAD, OptimumMetadata, read_metadata, read_pickled_metadata
from nxd_ckpt.reshard.group_names import COMPUTED
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign.recognise import STAGE_METADATA
from nxd_ckpt.tag.opened import OpenTag

_SHOWN = 4
_PICKLED = ".pt"


def stage_metadata(files: TagFiles, opened: OpenTag, adapter: str | None = None) -> OptimumMetadata:
    """What ``files`` of the tag ``opened`` say of its stages; with ``adapter``, of that one of the model.

    Raises:
        PartNotFound: a stage has none.
        MalformedFile: it is not of this tag, or not such metadata.
        UnsupportedState: it describes what no rule can.
        UnsafePickle: a pickle with more than plain data.
    """
    found = {int(match[1]): match[0] for match in map(STAGE_METADATA.fullmatch, files.names()) if match is not None}
    missing = [number for number in range(opened.topology.pp) if number not in found]
    if missing or len(found) > opened.topology.pp:
        raise PartNotFound(
            f"{opened.where}: files of {opened.topology.pp} pipeline stages, but metadata "
            f"(mp_metadata_pp_rank_P.json, or .pt) of stages {sorted(found)}; files are missing, or of two saves"
        )
    metadata = _read(files, [found[stage] for stage in sorted(found)], opened, adapter)
    if metadata.tp not in (None, opened.topology.tp):
        raise MalformedFile(
            f"{opened.where}: its metadata is of {metadata.tp} tensor-parallel ranks, its files are of "
            f"{opened.topology.tp}; files of ranks are missing, or of two saves"
        )
    _refuse_other_names(metadata, opened)
    return metadata


def refuse_other_model(metadata: OptimumMetadata, beside: TagFiles, opened: OpenTag) -> None:
    """Raise MalformedFile where config.json is of another model."""
    config = json_object(beside, "config.json")
    for key, said in (("num_attention_heads", metadata.heads), ("num_key_value_heads", metadata.kv_heads)):
        if said is not None and config.get(key, said) != said:
            raise MalformedFile(
                f"{beside.where('config.json')} says {key}={config[key]}, but the metadata of {opened.where} {said}; "
                "they are of two models"
            )


def json_object(files: TagFiles, file: str) -> dict[str, Any]:
    """The JSON object in the file; empty without one."""
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
    """The names without those of other stages, which the older form lists too."""
    held = [set(opened.model_tree(Coordinates(stage))) for stage in range(opened.topology.pp)]
    anywhere = set().union(*held)
    return [
        [name for name in names if name in own or name not in anywhere]
        for names, own in zip(metadata.stages, held, strict=True)
    ]


def _refuse_other_names(metadata: OptimumMetadata, opened: OpenTag) -> None:
    for stage, names in enumerate(metadata.stages if opened.parts.model else []):
        held = opened.model_tree(Coordinates(stage))
        absent = [name for name in names if name not in held]
        unlisted = [name for name in held if name not in {*names, TIED_HEAD} and not name.endswith(COMPUTED)]
        if metadata.adapter is not None:  # biases are listed as the base's
            unlisted = []
        if absent or unlisted:
            raise MalformedFile(
                f"{opened.where}: metadata of stage {stage} lists {', '.join(absent[:_SHOWN]) or 'nothing'} that the "
                f"model's files do not have, and the files have {', '.join(unlisted[:_SHOWN]) or 'nothing'} that it "
                "does not list; files of two saves are mixed"
            )
