"""The manifest of a tag, the index of each rank, and their JSON.

The size of the manifest is O(parameters + ranks), that of an index O(tensors of one rank). Both have a
``format_version`` and are validated when read. docs/format.md describes the JSON for other implementers.
"""

from __future__ import annotations

import marshal
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from nxd_ckpt.core import document
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.document import as_written, instead_of_json
from nxd_ckpt.core.limits import checked, checked_key, checked_name, checked_text, integers, shown
from nxd_ckpt.core.mesh import MeshRecord
from nxd_ckpt.core.partition import Partition, Piece
from nxd_ckpt.core.retention_rules import Metrics
from nxd_ckpt.core.tags import LATEST, validate_tag
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import CheckpointError, MalformedFile, SaveFailed
from nxd_ckpt.surroundings import gc_paused

CRC_BLOCK = 4 * 2**20
"""Bytes that one block digest covers; a slice is verified by the blocks it touches, not the whole tensor."""

_BY_VALUE = 2
"""Marshal's version whose bytes depend on values alone: unlike equality, they distinguish 1, True and 1.0."""


class TensorEntry(NamedTuple):
    """One tensor that one rank wrote: the place of its bytes, and its part of a global tensor.

    ``offset`` and ``nbytes`` count bytes in ``file`` (a key relative to the tag); the bytes are contiguous and little
    endian. ``crc32`` holds a CRC-32 per `CRC_BLOCK` bytes. ``pieces`` is None if the cut is unknown.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    crc32: tuple[int, ...]
    pieces: tuple[Piece, ...] | None = None


class FileEntry(NamedTuple):
    """One file that one rank wrote, or its index: its size in bytes, and the CRC-32 over all of them."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter or buffer of the model, with its shape on every rank of its pipeline stage.

    ``tie`` is equal for all names of one tensor, and None if it has only one name. ``explicit`` is True if attributes
    or the caller say that it is cut into ``partition.num_partitions``: then equal values on two ranks do not mean that
    they share it.
    """

    dtype: str
    shape: tuple[int, ...]
    partition: Partition
    trainable: bool = True
    tie: str | None = None
    explicit: bool = False


def _table(values: Collection[Any]) -> tuple[list[Any], list[int]]:
    """Return the different ones among JSON values, and for each value its number in that list."""
    marks = {key: marshal.dumps(value, _BY_VALUE) for key, value in {id(value): value for value in values}.items()}
    numbers = {mark: number for number, mark in enumerate(dict.fromkeys(marks.values()))}
    return [marshal.loads(mark) for mark in numbers], [numbers[marks[id(value)]] for value in values]


def _columns(rows: Collection[Sequence[Any]]) -> dict[str, Any]:
    """Return the JSON of tensors: an item for each in every column, and what many have in common in tables.

    ``rows`` have the JSON of the fields of `TensorEntry`.
    """
    lists = map(list, zip(*rows, strict=True)) if rows else [[]] * 8
    names, files, offsets, nbytes, dtypes, shapes, crcs, pieces = lists
    paths, file_of = _table(files)
    forms, form_of = _table([*map(list, zip(nbytes, dtypes, shapes, pieces, strict=True))])
    columns = {"name": names, "file": file_of, "form": form_of, "offset": offsets, "crc32": crcs}
    return {"files": paths, "forms": forms, **columns}


def _tensor_rows(entries: Sequence[TensorEntry]) -> list[Sequence[Any]]:
    cuts = {id(entry.pieces): entry.pieces for entry in entries}
    parts = {key: cut and [_rectangle(each) for each in cut] for key, cut in cuts.items()}
    return [(*entry[:-1], parts[id(entry.pieces)]) for entry in entries]


def _rectangle(piece: Piece) -> Sequence[Any]:
    return piece.local.offset, piece.box.offset, piece.box.size


def _in_table(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of parameters, of which each has the JSON of its specification."""
    table, numbers = _table(parameters.values())
    return {"specifications": table, "parameters": dict(zip(parameters, numbers, strict=True))}


def _parameter_fields(parameters: Mapping[str, ParameterSpec]) -> dict[str, dict[str, Any]]:
    """Return the JSON of all parameters, by name, as plain values: one for all that share a specification."""
    shared = {id(spec): spec for spec in parameters.values()}
    specs = {number: {**vars(spec), "partition": spec.partition.to_json()} for number, spec in shared.items()}
    for fields in specs.values():
        if not fields["explicit"]:
            del fields["explicit"]
    return {name: specs[id(spec)] for name, spec in parameters.items()}


def _as_now(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an older document as it would be written now; in it each tensor and parameter was an object."""
    now = fields | _in_table(checked(dict, fields["parameters"]))
    if fields["kind"] == "rank_index":
        now["tensors"] = _columns([[entry[key] for key in TensorEntry._fields] for entry in fields["tensors"]])
    return now


def _file(entry: Any) -> FileEntry:
    return FileEntry(*integers(entry, 2))


def _tensors(fields: Any) -> Iterator[TensorEntry]:
    """Yield the tensors of an index."""
    files = list(map(checked_key, checked(list, fields["files"])))
    forms = list(map(_form, checked(list, fields["forms"])))
    places, numbers, offsets = (integers(checked(list, fields[key])) for key in ("file", "form", "offset"))
    integers([*chain.from_iterable(fields["crc32"])])
    rows = zip(_texts(fields["name"]), places, numbers, offsets, map(tuple, fields["crc32"]), strict=True)
    for name, place, number, offset, crcs in rows:
        nbytes, dtype, shape, pieces = forms[number]
        if len(crcs) != -(-nbytes // CRC_BLOCK):
            raise ValueError(f"{name}: {nbytes} bytes with {len(crcs)} digests")
        yield TensorEntry(name, files[place], offset, nbytes, dtype, shape, crcs, pieces)


def _form(fields: Any) -> tuple[int, str, tuple[int, ...], tuple[Piece, ...] | None]:
    """Return the bytes, dtype, shape and pieces that tensors have in common."""
    nbytes, dtype, sizes, raw = checked(list, fields)
    shape = tuple(integers(checked(list, sizes)))
    integers([nbytes])
    checked(str, dtype)
    if raw is None:
        return nbytes, dtype, shape, None
    triples = [[tuple(integers(part)) for part in triple] for triple in raw]
    pieces = tuple(Piece(Box(local, size), Box(offset, size)) for local, offset, size in triples)
    outside = [piece.local for piece in pieces if not Box.whole(shape).contains(piece.local)]
    if outside:
        raise ValueError(f"a piece at {outside[0]} is not inside shape {shape}")
    return nbytes, dtype, shape, pieces


def _specs(document: Any) -> dict[str, ParameterSpec]:
    """Return the specifications of the parameters in an index or a manifest, by name."""
    table = list(map(_spec, checked(list, document["specifications"])))
    numbers = document["parameters"]
    integers(checked(dict, numbers).values())
    return dict(zip(_texts([*numbers]), [table[number] for number in numbers.values()], strict=True))


def _spec(fields: Any) -> ParameterSpec:
    partition = Partition.from_json(fields["partition"])
    shape = tuple(integers(fields["shape"]))
    tie = fields["tie"]
    partition.check_shape("a parameter", shape)
    trainable = checked(bool, fields["trainable"])
    explicit = checked(bool, fields.get("explicit", False))
    tie = None if tie is None else checked(str, tie)
    return ParameterSpec(checked(str, fields["dtype"]), shape, partition, trainable, tie, explicit)


NAMED_VERSION = 6
"""Version of a manifest whose attempt ``done`` names, on file systems too."""

_VERSIONS = {"manifest": range(1, 8), "rank_index": range(1, 4)}
"""By kind; the last is written now, with tables of what many tensors, or parameters, have in common."""
_SEAL = b',"crc32":'


@dataclass(frozen=True)
class RankIndex:
    """Everything that the rank at ``coordinates`` wrote into a tag. ``parameters`` are the parameters it *holds*.

    Only leaders of a mesh job have ``mesh``: the tensors that the ranks of the group wrote together. ``trees`` are what
    files hold beside their tensors, as JSON values (`formats.recorded_tree`): these files need not be parsed.
    """

    coordinates: Coordinates
    files: Mapping[str, FileEntry]
    tensors: tuple[TensorEntry, ...]
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)
    optimizer_names: tuple[str, ...] | None = None
    mesh: MeshRecord | None = None
    trees: Mapping[str, Any] = field(default_factory=dict)


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

    def lacking_in(self, other: Parts) -> list[str]:
        """Return the parts that these are and ``other`` lacks, in words."""
        parts = ("model", "optimizer", "scheduler", "user_content", "rank_content")
        return [part.replace("_", " ") for part in parts if getattr(self, part) and not getattr(other, part)]


@dataclass(frozen=True)
class Manifest:
    """One complete tag. ``order_time`` is in seconds since the epoch; ``ranks`` are the index files, by global rank.

    ``leaders`` are the first ranks of a mesh job's groups, whose indexes describe the tensors; None for other jobs.
    ``metrics`` are the training's, None for values that were not finite. ``phases`` are by global rank; empty if they
    were not recorded. ``per_rank`` are names of what ranks saved for themselves, because their values differ.
    ``guests`` are files of others that the save was given, by their paths in the tag.
    ``is_named_by_done``: ``done`` holds the order time and the attempt, unless another program wrote it again.
    """

    tag: str
    attempt: str
    order_time: float
    topology: Topology
    parts: Parts
    ranks: tuple[FileEntry, ...]
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    leaders: tuple[int, ...] | None = None
    metrics: Metrics = field(default_factory=dict)
    phases: tuple[RankPhases, ...] = ()
    per_rank: tuple[str, ...] = ()
    guests: Mapping[str, FileEntry] = field(default_factory=dict)
    is_named_by_done: bool = field(default=True, compare=False)

    @property
    def is_converted(self) -> bool:
        """True if a tool made it from another checkpoint's files: nothing live was staged for it."""
        return "stage_seconds" not in self.timings


def dump_index(index: RankIndex) -> bytes:
    """Return the JSON of an index file. Raises SaveFailed if no load would read it."""
    with gc_paused():  # it would visit the plain values of thousands of tensors again and again
        data = document.plain(_index_fields(index)).encode()
    _require_readable(lambda: load_index(data, "its index"))
    return data


def _index_fields(index: RankIndex) -> dict[str, Any]:
    return {
        "format_version": _VERSIONS["rank_index"][-1],
        "kind": "rank_index",
        "coordinates": astuple(index.coordinates),
        "files": index.files,
        "tensors": _columns(_tensor_rows(index.tensors)),
        **_in_table(_parameter_fields(index.parameters)),
        "optimizer_names": index.optimizer_names,
        **({} if index.mesh is None else {"mesh": index.mesh.to_json()}),
        **({"trees": index.trees} if index.trees else {}),
    }


def load_index(data: bytes, where: str) -> RankIndex:
    """Parse an index file. Raises MalformedFile, naming ``where``, for anything but a valid one."""
    with _naming(where):
        fields = _read(data, "rank_index")
        names = fields["optimizer_names"]
        return RankIndex(
            coordinates=Coordinates(*integers(fields["coordinates"], 3)),
            files=_files(fields["files"]),
            tensors=tuple(_tensors(fields["tensors"])),
            parameters=_specs(fields),
            optimizer_names=None if names is None else _texts(names),
            mesh=MeshRecord.from_json(fields["mesh"]) if "mesh" in fields else None,
            trees=_named(checked_key, fields.get("trees", {})),
        )


def load_parameters(data: bytes, where: str) -> Mapping[str, ParameterSpec]:
    """Return only the ``parameters`` of an index file.

    Raises MalformedFile, naming ``where``, for anything but a valid index.
    """
    with _naming(where):
        return _specs(_read(data, "rank_index"))


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the JSON of a manifest, with a digest of itself at its end. Raises SaveFailed if no load would read it."""
    with gc_paused():
        text = document.plain(_manifest_fields(manifest))
    # The manifest verifies the indexes, but no other file verifies it. So it ends with a digest of its own bytes.
    unsealed = text[:-1].encode()
    data = unsealed + _seal(unsealed)
    _require_readable(lambda: load_manifest(data, "its manifest"))
    return data


def _manifest_fields(manifest: Manifest) -> dict[str, Any]:
    topology = manifest.topology
    rank_map = topology.rank_map
    optional = {
        "metrics": manifest.metrics,
        **(phases_fields(manifest.phases) if manifest.phases else {}),
        "per_rank": manifest.per_rank,
        "guests": manifest.guests,
    }
    return {
        "format_version": _VERSIONS["manifest"][-1],
        "kind": "manifest",
        "tag": manifest.tag,
        "attempt": manifest.attempt,
        "order_time": manifest.order_time,
        "topology": {**topology.sizes, "rank_map": rank_map and list(map(astuple, rank_map))},
        **({} if manifest.leaders is None else {"leaders": manifest.leaders}),
        "parts": asdict(manifest.parts),
        "ranks": manifest.ranks,
        **_in_table(_parameter_fields(manifest.parameters)),
        "timings": manifest.timings,
        "versions": manifest.versions,
        **{name: value for name, value in optional.items() if value},
    }


def _require_readable(read: Callable[[], object]) -> None:
    """Raise SaveFailed if ``read`` refuses a document before it is written: what is reported as saved can be loaded."""
    try:
        read()
    except CheckpointError as error:
        raise SaveFailed(
            f"no load would read this save, so it is not made, and earlier tags stay: {error}. Correct that value"
        ) from error


def load_manifest(data: bytes, where: str) -> Manifest:
    """Parse a manifest.

    Raises MalformedFile, naming ``where``, for anything but a manifest; UnreadableFormat for one of another version.
    """
    with as_written() if _is_sealed(data) else nullcontext(), _naming(where):
        fields = _read(data, "manifest")
        if not _is_sealed(data):
            crc32 = zlib.crc32(data.rpartition(_SEAL)[0])
            raise MalformedFile(
                f"expected CRC-32 {fields.get('crc32')} and nothing behind it, found {crc32}: its bytes changed"
            )
        topology = _topology(fields["topology"])
        ranks = tuple(map(_file, fields["ranks"]))
        if len(ranks) != topology.world_size:
            raise ValueError(f"{len(ranks)} ranks, expected the {topology.world_size} of {topology.describe()}")
        return Manifest(
            tag=validate_tag(fields["tag"]),
            attempt=checked_name(fields["attempt"]),
            order_time=float(_number(fields["order_time"], 2 * LATEST)),
            topology=topology,
            parts=_parts(fields["parts"]),
            ranks=ranks,
            parameters=_specs(fields),
            timings={name: _number(value) for name, value in _named(checked_text, fields["timings"]).items()},
            versions={name: checked_text(value) for name, value in _named(checked_text, fields["versions"]).items()},
            leaders=_leaders(fields["leaders"], topology) if "leaders" in fields else None,
            metrics=_metrics(fields.get("metrics", {})),
            phases=phases_of(fields, len(ranks)) if "phases" in fields else (),
            per_rank=_texts(fields.get("per_rank", [])),
            is_named_by_done=fields["format_version"] >= NAMED_VERSION,
            guests=_files(fields.get("guests", {})),
        )


def _is_sealed(data: bytes) -> bool:
    return data.endswith(_seal(data.rpartition(_SEAL)[0]))


def _topology(fields: Any) -> Topology:
    sizes = dict(checked(dict, fields))
    places = sizes.pop("rank_map")
    rank_map = None if places is None else [Coordinates(*integers(place, 3)) for place in places]
    integers(list(sizes.values()))
    return Topology(**sizes, rank=0, rank_map=rank_map)


def _leaders(ranks: Any, topology: Topology) -> tuple[int, ...]:
    leaders = tuple(integers(checked(list, ranks)))
    if not leaders or topology.sizes != Topology(topology.dp).sizes or max(leaders) >= topology.world_size:
        raise ValueError(f"a mesh job on {topology.describe()}, led by ranks {leaders[:8]}")
    return leaders


def _files(raw: Any) -> dict[str, FileEntry]:
    return {name: _file(entry) for name, entry in _named(checked_key, raw).items()}


def _texts(raw: Any) -> tuple[str, ...]:
    texts = tuple(checked(list, raw))
    if not "".join(texts).isascii():
        for text in texts:
            checked_text(text)
    return texts


def _parts(fields: Any) -> Parts:
    parts = Parts(**checked(dict, fields))
    if type(parts.use_xser) in (int, str, type(None)):  # as a caller of version 0.1 passed it, and as it was heeded
        parts = replace(parts, use_xser=bool(parts.use_xser))
    if parts.optimizer not in (None, *OPTIMIZERS):
        raise ValueError(f"expected an optimizer of {', '.join(OPTIMIZERS)}, found {parts.optimizer!r:.80}")
    for name, value in vars(parts).items():
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


def _read(data: bytes, kind: str) -> dict[str, Any]:
    try:
        fields = document.whole(data)
    except (ValueError, RecursionError) as error:
        other = instead_of_json(data)
        fault = f"({error}); the file was damaged or cut off" if other is None else f"but {other}"
        raise MalformedFile(f"not valid JSON {fault}") from error
    _check_kind(fields, kind)
    return fields if fields["format_version"] == _VERSIONS[kind][-1] else _as_now(fields)


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


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turn every error of parsing a malformed document into a MalformedFile that names the file."""
    try:
        with gc_paused():
            yield
    except MalformedFile as error:  # raised by a parser of a part, which does not know the file
        raise MalformedFile(f"{where}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise MalformedFile(f"{where}: malformed ({type(error).__name__}: {error})") from error


_LATE = 1.5
"""A straggler writes for this many times the median rank's time."""
_WORTH_TELLING = 1.0
"""A straggler writes for this many seconds longer than the median rank."""


@dataclass(frozen=True)
class RankPhases:
    """One rank's phases: seconds on its calling thread, seconds of writing, bytes written, and its host's name."""

    stage_seconds: float
    write_seconds: float
    nbytes: int
    host: str


def straggler(phases: Sequence[RankPhases]) -> int | None:
    """Return the rank that all others waited for; None if none was much slower than most."""
    if len(phases) < 2:
        return None
    median = sorted(each.write_seconds for each in phases)[(len(phases) - 1) // 2]
    rank = max(range(len(phases)), key=lambda rank: phases[rank].write_seconds)
    slowest = phases[rank].write_seconds
    return rank if slowest > _LATE * median and slowest - median > _WORTH_TELLING else None


def phases_fields(phases: Sequence[RankPhases]) -> dict[str, list[Any]]:
    """Return the manifest's members, with each host's name once."""
    hosts = {name: number for number, name in enumerate(dict.fromkeys(each.host for each in phases))}
    lines = [[each.stage_seconds, each.write_seconds, each.nbytes, hosts[each.host]] for each in phases]
    return {"hosts": list(hosts), "phases": lines}


def phases_of(fields: Mapping[str, Any], ranks: int) -> tuple[RankPhases, ...]:
    """Parse the manifest's members. Raises ValueError, TypeError or LookupError if they are malformed."""
    hosts = [checked_text(name) for name in checked(list, fields["hosts"])]
    phases = []
    for stage, write, nbytes, host in checked(list, fields["phases"]):
        if not all(type(seconds) in (int, float) and 0 <= seconds < 2**63 for seconds in (stage, write)):
            raise ValueError(f"expected seconds, found {[stage, write]!r:.80}")
        size, place = integers([nbytes, host])
        phases.append(RankPhases(float(stage), float(write), size, hosts[place]))
    if len(phases) != ranks:
        raise ValueError(f"phases of {len(phases)} ranks, expected {ranks}")
    return tuple(phases)
