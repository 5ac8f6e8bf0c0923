"""The manifest of a tag, the index of each rank, and their JSON.

The size of the manifest is O(parameters + ranks), that of an index O(tensors of one rank). Both have a
``format_version`` and are validated when read. docs/format.md describes the JSON for other implementers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.entries import (
    CRC_BLOCK,
    FileEntry,
    Makers,
    ParameterSpec,
    TensorEntry,
    checked,
    integers,
    parameters_text,
    tensor_text,
)
from nxd_ckpt.core.limits import checked_key, checked_name, checked_text, shown
from nxd_ckpt.core.mesh import MeshRecord
from nxd_ckpt.core.phases import RankPhases, phases_of, phases_text
from nxd_ckpt.core.retention import Metrics
from nxd_ckpt.core.tags import LATEST, validate_tag
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile

__all__ = [
    "CRC_BLOCK",
    "FORMAT_VERSION",
    "FileEntry",
    "Manifest",
    "ParameterSpec",
    "Parts",
    "RankIndex",
    "RankLine",
    "TensorEntry",
    "dump_index",
    "dump_manifest",
    "is_manifest",
    "load_index",
    "load_manifest",
    "load_parameters",
]

FORMAT_VERSION = 1
MESH_VERSION = 2
"""Version of documents of a mesh job that have a key more."""
METRICS_VERSION = 3
"""Version of a manifest with metrics, of a mesh job or not."""
PHASES_VERSION = 4
"""Version of a manifest with phases by rank, with metrics or not, of a mesh job or not."""

_VERSIONS = {
    "manifest": (FORMAT_VERSION, MESH_VERSION, METRICS_VERSION, PHASES_VERSION),
    "rank_index": (FORMAT_VERSION, MESH_VERSION),
}
_HEADS = tuple(b'{"format_version":%d,"kind":"manifest",' % version for version in _VERSIONS["manifest"])
_SEAL = b',"crc32":'

_Maker = Callable[[Any], Any]


@dataclass(frozen=True)
class RankIndex:
    """Everything that the rank at ``coordinates`` wrote into a tag. ``parameters`` are the parameters it *holds*.

    Only leaders of a mesh job have ``mesh``: the tensors that the ranks of the group wrote together.
    """

    coordinates: Coordinates
    files: Mapping[str, FileEntry]
    tensors: tuple[TensorEntry, ...]
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)
    optimizer_names: tuple[str, ...] | None = None
    mesh: MeshRecord | None = None


@dataclass(frozen=True)
class RankLine:
    """One rank's entry in the manifest: size in bytes and CRC-32 of its index file."""

    nbytes: int
    crc32: int


OPTIMIZERS = ("plain", "zero1", "zero1_full", "zero1_dcp")


@dataclass(frozen=True)
class Parts:
    """The parts that a tag has.

    ``optimizer`` is ``"plain"``, ``"zero1"`` (a shard for every rank), ``"zero1_full"`` (the same unsharded, a file for
    each tp, pp and ep rank; written by the converter), ``"zero1_dcp"`` or None.
    """

    model: bool = False
    optimizer: str | None = None
    scheduler: bool = False
    user_content: bool = False
    rank_content: bool = False
    use_xser: bool = False
    master_weights: bool = False
    lower_precision_weights: bool = True


@dataclass(frozen=True)
class Manifest:
    """One complete tag. ``order_time`` is in seconds since the epoch; ``ranks`` are by global rank, in order.

    ``leaders`` are the first ranks of a mesh job's groups, whose indexes describe the tensors; None for other jobs.
    ``metrics`` are the training's, None for values that were not finite. ``phases`` are by global rank; empty if they
    were not recorded.
    """

    tag: str
    attempt: str
    order_time: float
    topology: Topology
    parts: Parts
    ranks: tuple[RankLine, ...]
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    leaders: tuple[int, ...] | None = None
    metrics: Metrics = field(default_factory=dict)
    phases: tuple[RankPhases, ...] = ()

    @property
    def is_converted(self) -> bool:
        """True if a tool made it from another checkpoint's files: nothing live was staged for it."""
        return "stage_seconds" not in self.timings


def dump_index(index: RankIndex) -> bytes:
    """Return the JSON of an index file."""
    at = index.coordinates
    mesh = {} if index.mesh is None else {"mesh": index.mesh.text()}
    return document.members(
        {
            "format_version": str(MESH_VERSION if mesh else FORMAT_VERSION),
            "kind": '"rank_index"',
            "coordinates": document.integers((at.pp_rank, at.dp_rank, at.tp_rank)),
            "files": document.members({key: document.integers(entry) for key, entry in index.files.items()}),
            "tensors": document.array(map(tensor_text, index.tensors)),
            "parameters": parameters_text(index.parameters),
            "optimizer_names": document.plain(index.optimizer_names),
            **mesh,
        }
    ).encode()


def load_index(data: bytes, where: str) -> RankIndex:
    """Parse an index file. Raises MalformedFile, naming ``where``, for anything but a valid one."""
    make = Makers()
    with _naming(where):
        fields = _read(data, "rank_index", {"files": make.file, "tensors": make.tensor, "parameters": make.spec})
        names = fields["optimizer_names"]
        return RankIndex(
            coordinates=Coordinates(*integers(fields["coordinates"], 3)),
            files=_named(checked_key, fields["files"]),
            tensors=tuple(checked(list, fields["tensors"])),
            parameters=_named(checked_text, fields["parameters"]),
            optimizer_names=None if names is None else tuple(map(checked_text, checked(list, names))),
            mesh=MeshRecord.from_json(fields["mesh"]) if _is_of_mesh(fields) else None,
        )


def load_parameters(data: bytes, where: str) -> Mapping[str, ParameterSpec]:
    """Return only the ``parameters`` of an index file: its tensors are parsed, but not kept.

    Raises MalformedFile, naming ``where``, for anything but a valid index.
    """
    with _naming(where):
        makers: dict[str, _Maker] = {"files": bool, "tensors": bool, "parameters": Makers().spec}
        return _named(checked_text, _read(data, "rank_index", makers)["parameters"])


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the JSON of a manifest, with a digest of itself at its end."""
    topology = manifest.topology
    rank_map = topology.rank_map
    places = None if rank_map is None else [[at.pp_rank, at.dp_rank, at.tp_rank] for at in rank_map]
    leaders = {} if manifest.leaders is None else {"leaders": document.integers(manifest.leaders)}
    metrics = {"metrics": document.plain(dict(manifest.metrics))} if manifest.metrics else {}
    phases = phases_text(manifest.phases) if manifest.phases else {}
    version = METRICS_VERSION if metrics else MESH_VERSION if leaders else FORMAT_VERSION
    text = document.members(
        {
            "format_version": str(PHASES_VERSION if phases else version),
            "kind": '"manifest"',
            "tag": document.plain(manifest.tag),
            "attempt": document.plain(manifest.attempt),
            "order_time": document.plain(manifest.order_time),
            "topology": document.plain({**topology.sizes, "rank_map": places}),
            **leaders,
            "parts": document.plain(asdict(manifest.parts)),
            "ranks": document.array(document.integers((line.nbytes, line.crc32)) for line in manifest.ranks),
            "parameters": parameters_text(manifest.parameters),
            "timings": document.plain(dict(manifest.timings)),
            "versions": document.plain(dict(manifest.versions)),
            **metrics,
            **phases,
        }
    )
    # The manifest verifies the indexes, but no other file verifies it. So it ends with a digest of its own bytes.
    unsealed = text[:-1].encode()
    return unsealed + _seal(unsealed)


def load_manifest(data: bytes, where: str) -> Manifest:
    """Parse a manifest. Raises MalformedFile, naming ``where``, for anything but a valid one."""
    with _naming(where):
        fields = _read(data, "manifest", {"parameters": Makers().spec})
        crc32 = zlib.crc32(data.rpartition(_SEAL)[0])
        if fields.get("crc32") != crc32:
            raise MalformedFile(f"expected CRC-32 {fields.get('crc32')}, found {crc32}: its bytes changed")
        topology = _topology(fields["topology"])
        version = fields["format_version"]
        ranks = tuple(RankLine(*integers(line, 2)) for line in fields["ranks"])
        if len(ranks) != topology.world_size:
            raise ValueError(f"{len(ranks)} ranks, expected the {topology.world_size} of {topology.describe()}")
        return Manifest(
            tag=validate_tag(fields["tag"]),
            attempt=checked_name(fields["attempt"]),
            order_time=float(_number(fields["order_time"], 2 * LATEST)),
            topology=topology,
            parts=_parts(fields["parts"]),
            ranks=ranks,
            parameters=_named(checked_text, fields["parameters"]),
            timings={name: _number(value) for name, value in _named(checked_text, fields["timings"]).items()},
            versions={name: checked_text(value) for name, value in _named(checked_text, fields["versions"]).items()},
            leaders=_leaders(fields["leaders"], topology) if _has_leaders(fields) else None,
            metrics=_metrics(fields["metrics"]) if version == METRICS_VERSION or "metrics" in fields else {},
            phases=phases_of(fields, len(ranks)) if version == PHASES_VERSION else (),
        )


def is_manifest(data: bytes) -> bool:
    """Return whether these bytes are a manifest of `dump_manifest`, by their beginning and digest alone."""
    return data.startswith(_HEADS) and data.endswith(_seal(data.rpartition(_SEAL)[0]))


def _topology(fields: Any) -> Topology:
    sizes = dict(checked(dict, fields))
    places = sizes.pop("rank_map")
    rank_map = None if places is None else [Coordinates(*integers(place, 3)) for place in places]
    return Topology(**sizes, rank=0, rank_map=rank_map)


def _leaders(ranks: Any, topology: Topology) -> tuple[int, ...]:
    leaders = tuple(integers(checked(list, ranks)))
    if not leaders or topology.sizes != Topology(topology.dp).sizes or max(leaders) >= topology.world_size:
        raise ValueError(f"a mesh job on {topology.describe()}, led by ranks {leaders[:8]}")
    return leaders


def _parts(fields: Any) -> Parts:
    parts = Parts(**checked(dict, fields))
    if parts.optimizer not in (None, *OPTIMIZERS):
        raise ValueError(f"expected an optimizer of {', '.join(OPTIMIZERS)}, found {parts.optimizer!r:.80}")
    for name, value in asdict(parts).items():
        if name != "optimizer":
            checked(bool, value)
    return parts


def _metrics(fields: Any) -> Metrics:
    for value in _named(checked_text, fields).values():
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ValueError(f"expected metrics to be finite numbers or null, found {value!r:.80}")
    return {name: None if value is None else float(value) for name, value in fields.items()}


def _number(value: Any, limit: float = float(2**63)) -> Any:
    """Return ``value`` unchanged; raise ValueError unless it is an int or a float from 0 to ``limit``."""
    if type(value) not in (int, float) or not 0 <= value <= limit:
        raise ValueError(f"expected a number from 0 to {limit}, found {value!r:.80}")
    return value


def _named(check: Callable[[Any], str], fields: Any) -> dict[str, Any]:
    """Return ``fields``, an object all of whose names pass ``check``."""
    for name in checked(dict, fields):
        check(name)
    return fields  # type: ignore[no-any-return]


def _seal(data: bytes) -> bytes:
    return _SEAL + b"%d}" % zlib.crc32(data)


def _read(data: bytes, kind: str, makers: Mapping[str, _Maker]) -> dict[str, Any]:
    try:
        fields = document.read(data.decode(), makers)
    except Exception:
        _check_kind(_parsed(data), kind)  # another kind or version is the more useful error
        raise
    _check_kind(fields, kind)
    return fields


def _parsed(data: bytes) -> Any:
    try:
        return document.whole(data)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"not valid JSON ({error}); the file was damaged or cut off") from error


def _check_kind(fields: Any, kind: str) -> None:
    if not isinstance(fields, dict) or fields.get("kind") != kind:
        actual = f"the kind {shown(fields.get('kind'))}" if isinstance(fields, dict) else shown(fields)
        raise MalformedFile(f"expected a JSON object of kind {kind!r}, found {actual}")
    if fields.get("format_version") not in _VERSIONS[kind]:
        versions = ", ".join(map(str, _VERSIONS[kind]))
        raise MalformedFile(
            f"format_version {shown(fields.get('format_version'))}, this nxd_ckpt reads {versions}; use the version of "
            "nxd_ckpt that wrote it, or a newer one"
        )


def _has_leaders(fields: Mapping[str, Any]) -> bool:
    return _is_of_mesh(fields) or (fields["format_version"] > MESH_VERSION and "leaders" in fields)


def _is_of_mesh(fields: Mapping[str, Any]) -> bool:
    return bool(fields["format_version"] == MESH_VERSION)


class _naming:
    """A context that turns every error of parsing a malformed document into a MalformedFile that names the file."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MalformedFile):  # raised by a parser of a part, which does not know the file
            raise MalformedFile(f"{self.where}: {error}") from error
        if isinstance(error, (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)):
            raise MalformedFile(f"{self.where}: malformed ({type(error).__name__}: {error})") from error
