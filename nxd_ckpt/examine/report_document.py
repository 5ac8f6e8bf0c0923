"""The JSON document behind ``nxd-ckpt report``."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.checkpoint import Checkpoint, checkpoint_of
from nxd_ckpt.commit.voting import saves_in_flight
from nxd_ckpt.core import units
from nxd_ckpt.core.mesh import Mesh
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import step_of
from nxd_ckpt.errors import CheckpointError, TagReplaced
from nxd_ckpt.examine.doctor import examine_checkpoint
from nxd_ckpt.examine.report_saves import differences, stragglers, timeline, timings
from nxd_ckpt.examine.report_tiers import late_tiers, tiers_of
from nxd_ckpt.examine.run_state import (
    StateLine,
    age_line,
    failed_text,
    failure_line,
    last_restart,
    name_of,
    resume_line,
    unsound,
)
from nxd_ckpt.examine.statistics import checkpoint_statistics
from nxd_ckpt.examine.statistics_cache import read_statistics
from nxd_ckpt.formats.tensors import TensorStub, itemsize
from nxd_ckpt.reshard.summary import TensorStatistics
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import describe_incomplete, holds_tags, require_directory
from nxd_ckpt.tag.foreign.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.tag.listing import locate, opened_document, time_text

_RANKS = 1024
"""Up to this many ranks, each rank's bytes are shown: that reads an index per rank."""
_SAVES = 3
"""Number of saves from which on a constant weight is reported."""

_ADAM = (("model", ""), ("optim", "/exp_avg"), ("optim", "/exp_avg_sq"))
"""Prefix and suffix of the names of a weight and its Adam moments."""

Statistics = Mapping[str, TensorStatistics]


def report_document(
    path: str,
    options: Mapping[str, Any] | None,
    *,
    count: int,
    doctor: bool,
    diff: bool,
    progress: bool,
    tiers: Sequence[str] = (),
) -> dict[str, Any]:
    """Describe the tags of a directory, the latest one in detail, and the health of their tensors.

    The tensors of the ``count`` latest tags are read; older tags appear with their cached statistics. ``doctor``
    examines the latest tag after the one before it, ``diff`` compares the two. ``tiers`` are searched for the tags.
    ``note`` says it if there is nothing to report on.
    """
    hugging_face = _hugging_face(path, options)
    if hugging_face is not None:
        return hugging_face
    directory, only = locate(path, None, options)
    listing, open_tags = opened_document(directory, only, options)
    tags, storage = listing["tags"], open_storage(directory, storage_options=options)
    document: dict[str, Any] = {"directory": listing["directory"], "kind": "tags", "tags": tags, **_nothing()}
    opened = {
        tag["tag"]: checkpoint_of(open_tags[tag["tag"]], directory, options)
        for tag in tags
        if tag["tag"] in open_tags and not tag["problems"]
    }
    damage = {tag["tag"]: tag["problems"] for tag in tags}
    newest = [*opened][-1] if opened else None
    for tag in tags:
        tag["step"], tag["sizes"] = step_of(tag["tag"]), units.short_topology(tag["topology"])
        if tag["tag"] in opened:
            with _collect_damage(tag["problems"]):
                tag["sizes"] = _sizes(opened[tag["tag"]], tag["tag"] == newest) or tag["sizes"]
        tag["timings"] = timings(opened[tag["tag"]].manifest) if tag["tag"] in opened else {}
    statistics = _statistics(opened, count, damage, progress)
    for tag in tags:
        tag["not_finite"] = len(_not_finite(statistics[tag["tag"]])) if tag["tag"] in statistics else None
    document["tiers"] = tiers_of(tiers, _saves(opened, tags), options)
    still = _still(statistics)
    if not opened:
        document["note"] = f"no complete checkpoint to report on; {describe_incomplete(storage)}"
    else:
        document |= _details(list(opened.values()), statistics, set(still), damage, doctor, diff, progress)
    problems, notes = document["problems"], document["notes"]
    problems += _listing_problems(tags)
    reported = {finding["what"] for finding in document["findings"]}
    problems += _value_problems(statistics, reported)
    saves = [] if only is not None else [asdict(save) for save in saves_in_flight(storage)]
    problems += [_problem(name_of(save), failed_text(save)) for save in saves if save["is_dead"]]
    problems += [_problem(*late) for late in stragglers(list(opened.values()))]
    problems += [_problem(*late) for late in late_tiers(document["tiers"])]
    if still:
        frozen = units.count(len(still), "weight")
        notes.append(_problem("frozen", f"{frozen} never changed: {_by_module(still, statistics)}"))
    document["head"] = [line._asdict() for line in _head(document, opened, statistics, saves)]
    return document


def _details(
    opened: list[Checkpoint],
    statistics: Mapping[str, Statistics],
    still: Collection[str],
    damage: Mapping[str, list[str]],
    doctor: bool,
    diff: bool,
    progress: bool,
) -> dict[str, Any]:
    """Return all parts of the document about the newest tag that can be read; add what cannot be to ``damage``.

    It is compared with the last tag before it in which no damage is known.
    """
    newest = opened[-1]
    before = next((tag for tag in reversed(opened[:-1]) if not damage[tag.tag]), None)
    parts: dict[str, Callable[[], Any]] = {
        "ranks": lambda: _ranks(newest),
        "modules": lambda: _modules({name: tensor.nbytes for name, tensor in newest.metadata.items()}),
        "findings": lambda: _doctor_findings(before, newest, progress) if doctor else [],
        "differences": lambda: differences(before, newest, progress) if diff and before is not None else None,
    }
    document: dict[str, Any] = {"timeline": timeline(newest), "findings": []}
    errors: list[str] = []
    options: dict[str, Mapping[str, Any]] = {}
    with _collect_damage(errors):
        options = _options(newest)
    document["health"] = _health(statistics, still, options)
    for name, part in parts.items():
        with _collect_damage(errors):
            document[name] = part()
    errors += [finding["message"] for finding in document["findings"] if finding["kind"] == "files"]
    document["findings"] = [finding for finding in document["findings"] if finding["kind"] != "files"]
    for error in dict.fromkeys(errors):
        is_before = before is not None and f"{before.opened.where}/" in error
        problems = damage[before.tag if before is not None and is_before else newest.tag]
        problems += [] if error in problems else [error]
    return document


def _head(
    document: Mapping[str, Any],
    opened: Mapping[str, Checkpoint],
    statistics: Mapping[str, Statistics],
    saves: Sequence[Mapping[str, Any]],
) -> Iterator[StateLine]:
    """Yield the lines that say whether the run is healthy, and what can be resumed."""
    tags = document["tags"]
    yield from (_health_line(document, len(statistics)),) if tags else ()
    unfit = unsound({tag: _not_finite(tensors) for tag, tensors in statistics.items()})
    yield resume_line(tags, unfit, document["note"])
    age = age_line(tags, saves)
    yield from () if age is None else (age,)
    if opened:
        manifests = {tag: checkpoint.manifest for tag, checkpoint in opened.items()}
        live = {tag: one for tag, one in manifests.items() if one is not None and not one.is_converted}
        runs = {tag: one.attempt.rpartition("-")[0] for tag, one in live.items()}
        if runs or saves:
            yield failure_line(last_restart(tags, runs), saves, [*opened][-1])


def _health_line(document: Mapping[str, Any], counted: int) -> StateLine:
    doubts = [one for one in document["findings"] if one["severity"] != "problem"]
    count = len(document["problems"]) + len(document["findings"]) - len(doubts)
    scope = f"tensors of {counted} of {units.count(len(document['tags']), 'tag')} were counted"
    if count:
        return StateLine("bad", units.count(count, "problem"), f"see below; {scope}")
    if doubts:
        return StateLine("warning", units.count(len(doubts), "doubt"), f"see below; {scope}")
    return StateLine("good", "No problem found", scope)


def _hugging_face(path: str, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the report of a Hugging Face directory; None for anything else, in particular for tags."""
    storage = open_storage(path, storage_options=options)
    require_directory(storage)
    if not any(entry.name.endswith(".safetensors") for entry in storage.list()):
        return None
    if holds_tags(storage) or locate(path, None, options)[1] is not None:
        return None
    directory = HuggingFaceDirectory(storage, "")
    sizes = {f"model/{name}": _nbytes(directory.stub(name)) for name in directory.names}
    text = f"{units.count(len(sizes), 'tensor')}; their values were not read"
    head = [StateLine("good", "A Hugging Face directory", text)._asdict()]
    document: dict[str, Any] = {"directory": storage.url, "kind": "Hugging Face", "tags": [], "tiers": [], **_nothing()}
    return document | {"modules": _modules(sizes), "head": head}


def _nothing() -> dict[str, Any]:
    """Return a document's parts about a directory in which nothing can be opened."""
    parts: dict[str, Any] = {name: [] for name in ("ranks", "timeline", "modules", "findings", "problems", "notes")}
    parts |= {"note": None, "differences": None, "health": {"tags": [], "tensors": []}}
    return {**parts, "made": time_text(effects.time())}


def _nbytes(stub: TensorStub) -> int:
    return math.prod(stub.shape) * itemsize(stub.dtype)


def _saves(opened: Mapping[str, Checkpoint], tags: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """Return order time and bytes of each tag that can be copied to a tier: those with a manifest."""
    sizes = {tag["tag"]: tag["nbytes"] for tag in tags}
    manifests = {tag: checkpoint.manifest for tag, checkpoint in opened.items()}
    return {tag: (manifest.order_time, sizes[tag]) for tag, manifest in manifests.items() if manifest is not None}


def _statistics(
    opened: Mapping[str, Checkpoint], count: int, damage: Mapping[str, list[str]], progress: bool
) -> dict[str, Statistics]:
    statistics: dict[str, Statistics] = {}
    latest = list(opened)[max(0, len(opened) - count) :]
    for tag, checkpoint in opened.items():
        if tag in latest:
            with _collect_damage(damage[tag]):
                statistics[tag] = checkpoint_statistics(checkpoint, progress=progress).tensors
        elif (cached := read_statistics(checkpoint.opened)) is not None:
            statistics[tag] = cached
    return statistics


@contextmanager
def _collect_damage(problems: list[str]) -> Iterator[None]:
    """Turn errors of a tag into ``problems``, each once; TagReplaced is raised."""
    try:
        yield
    except TagReplaced:
        raise
    except CheckpointError as error:
        if str(error) not in problems:
            problems.append(str(error))


def _ranks(tag: Checkpoint) -> list[dict[str, Any]]:
    """Return files and bytes that each rank wrote of the tag."""
    if tag.manifest is None or tag.topology.world_size > _RANKS:
        return []
    with tag.opened.guarded(verified=True):
        return [_rank(tag, rank) for rank in range(tag.topology.world_size)]


def _rank(tag: Checkpoint, rank: int) -> dict[str, Any]:
    at = tag.topology.coordinates_of(rank)
    files = tag.opened.index(at).files
    nbytes = sum(entry.nbytes for entry in files.values())
    sizes = {"pp": at.pp_rank, "dp": at.dp_rank, "tp": at.tp_rank}
    return {"rank": rank, **sizes, "place": _place(tag, rank), "files": len(files), "nbytes": nbytes}


def _sizes(tag: Checkpoint, look: bool) -> str | None:
    """Return a mesh job's ranks, or with ``look`` the dimensions of its largest mesh, for which an index is read."""
    if tag.manifest is None or tag.manifest.leaders is None:
        return None
    meshes = tag.opened.mesh.meshes() if look and tag.opened.mesh is not None else []
    largest = max(meshes, key=lambda mesh: len(mesh.shape), default=None)
    if largest is None:
        return units.count(tag.topology.world_size, "rank")
    return Mesh(largest.names[1:], largest.shape[1:], ()).describe()


def _place(tag: Checkpoint, rank: int) -> dict[str, int]:
    """Return a rank's coordinates in its largest mesh; without a mesh in dp, tp and, with experts, ep.

    The pipeline stage is not part of it.
    """
    at, sizes = tag.topology.coordinates_of(rank), tag.topology
    meshes = () if tag.opened.mesh is None else tag.opened.mesh.meshes()
    coordinates = [(mesh.names, place) for mesh in meshes if (place := mesh.coordinate_of(rank)) is not None]
    if coordinates:
        names, place = max(coordinates, key=lambda coordinate: len(coordinate[0]))
        return {name or f"dim{dim}": index for dim, (name, index) in enumerate(zip(names, place, strict=True)) if dim}
    experts = {"ep": at.dp_rank % sizes.ep} if sizes.ep > 1 else {}
    return {"dp": at.dp_rank, "tp": at.tp_rank, **experts}


def _modules(sizes: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """Return bytes of whole tensors by module (the first parts of a name) and by kind.

    Weights, master weights, moments.
    """
    bytes_by_module: dict[str, dict[str, int]] = {}
    for name, nbytes in sizes.items():
        kind, _, rest = name.partition("/")
        part = "weights" if kind == "model" else "master weights" if name.endswith("/master_weights") else "moments"
        module = _module(rest if kind == "model" else rest.rpartition("/")[0])
        parts = bytes_by_module.setdefault(module, {"weights": 0, "master weights": 0, "moments": 0})
        parts[part] += nbytes or 0
    largest = sorted(bytes_by_module.items(), key=lambda item: -sum(item[1].values()))
    return [{"module": module, **parts} for module, parts in largest]


def _module(name: str) -> str:
    """Return the name up to its first number (``model.layers.3``), else all but its last part."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match[1] if match else name.rpartition(".")[0] or name


def _options(tag: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """Return the options of each parameter's group."""
    return {name: group for group in tag.param_groups for name in group["params"]}


def _health(
    statistics: Mapping[str, Statistics], still: Collection[str], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a row for each counted tensor of the latest tag, with its norms in the other tags."""
    tags = list(statistics)
    newest = statistics[tags[-1]] if tags else {}
    before = statistics[tags[-2]] if len(tags) > 1 else {}
    rows = []
    for name, now in newest.items():
        was = before.get(name)
        change = math.nan if was is None or not was.norm else (now.norm - was.norm) / was.norm
        norms = [statistics[tag][name].norm if name in statistics[tag] else None for tag in tags]
        rows.append(
            {
                "name": name,
                "numbers": now.numel,
                "norm": now.norm,
                "mean": now.mean if math.isfinite(now.mean) else None,
                "absmax": now.absmax,
                "nans": now.nans,
                "infs": now.infs,
                "zeros": now.zero_share,
                "change": change if math.isfinite(change) else None,
                "step": _step(name.removeprefix("model/"), newest, options) if name.startswith("model/") else None,
                "frozen": name in still,
                "norms": norms,
            }
        )
    rows.sort(key=lambda row: not (row["nans"] or row["infs"]))
    return {"tags": tags, "tensors": rows}


def _step(name: str, statistics: Statistics, options: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return Adam's relative step of a weight, estimated from the root mean squares of weight and moments."""
    weight, first, second = (statistics.get(f"{part}/{name}{key}") for part, key in _ADAM)
    rate, eps = (options.get(name, {}).get(key) for key in ("lr", "eps"))
    if weight is None or first is None or second is None or rate is None or not second.mean >= 0 or not weight.rms:
        return None
    divisor = math.sqrt(second.mean) + float(eps or 0)
    share = float(rate) * first.rms / divisor / weight.rms if divisor else math.nan
    return share if math.isfinite(share) else None


def _doctor_findings(before: Checkpoint | None, newest: Checkpoint, progress: bool) -> list[dict[str, str]]:
    examination = examine_checkpoint(newest, before=before, progress=progress)
    return [
        {"severity": finding.severity, "kind": finding.kind, "what": finding.what, "message": finding.message}
        for finding in examination.findings
    ]


def _problem(where: str, what: str) -> dict[str, Any]:
    return {"where": where, "what": what}


def _listing_problems(tags: list[dict[str, Any]]) -> list[dict[str, Any]]:
    problems = [_problem(tag["tag"], problem) for tag in tags for problem in tag["problems"]]
    return problems + [_problem(tag["tag"], f"incomplete: it lacks {what}") for tag in tags for what in tag["lacks"]]


def _value_problems(statistics: Mapping[str, Statistics], told: Collection[str]) -> list[dict[str, Any]]:
    """Report weights that are all zero, and NaN and infinities: in the first tag that has some, and in the last one.

    Those ``told`` already of the newest tag are left out.
    """
    problems, newest = [], [*statistics][-1] if statistics else None
    bad = {tag: names for tag, tensors in statistics.items() if (names := _not_finite(tensors))}
    between = f"; so are {len(bad) - 2} tags between" if len(bad) > 2 else ""
    first = next(iter(bad), None)
    for tag in dict.fromkeys([*bad][:1] + [*bad][-1:]):
        names = [name for name in bad[tag] if tag != newest or name not in told]
        counts = (f"{name} ({statistics[tag][name].nans} NaN, {statistics[tag][name].infs} infinite)" for name in names)
        if names:
            problems.append(_problem(tag, f"not finite: {first_of(counts)}{between if tag == first else ''}"))
    if newest is not None:
        weights = {name: counts for name, counts in statistics[newest].items() if name.endswith(".weight")}
        dead = [name for name, counts in weights.items() if counts.zeros == counts.numel > 1]
        problems += [_problem(newest, f"{name} is all zero") for name in dead if name.startswith("model/")]
    return problems


def _not_finite(tensors: Statistics) -> list[str]:
    return [name for name, counts in tensors.items() if counts.nans + counts.infs]


def _by_module(still: Collection[str], statistics: Mapping[str, Statistics]) -> str:
    """Return the first of the names; a module of which all weights are ``still`` is one name."""
    weights = Counter(_module(name) for name in [*statistics.values()][-1] if name.startswith("model/"))
    of_module = Counter(map(_module, still))
    whole = {module for module, count in of_module.items() if count == weights[module] > 1}
    names = dict.fromkeys(f"all of {_module(name)}" if _module(name) in whole else name for name in still)
    return first_of(names)


def _still(statistics: Mapping[str, Statistics]) -> list[str]:
    """Return the names of weights with equal statistics in all tags; none if no weight changed."""
    if len(statistics) < _SAVES:
        return []
    first, *later_tags = statistics.values()
    weights = {name for name in first if name.startswith("model/") and all(name in later for later in later_tags)}
    still = sorted(name for name in weights if all(first[name] == later[name] for later in later_tags))
    return [] if len(still) == len(weights) else still
