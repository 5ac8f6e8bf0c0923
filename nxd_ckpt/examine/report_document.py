"""The JSON document behind ``nxd-ckpt report``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nxd_ckpt.checkpoint import Checkpoint, checkpoint_of
from nxd_ckpt.commit.observed_saves import saves_in_flight
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.units import size
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, TagReplaced
from nxd_ckpt.examine.doctor import examine_checkpoint
from nxd_ckpt.examine.report_saves import differences, stragglers, timeline
from nxd_ckpt.examine.report_tiers import late_tiers, tiers_of
from nxd_ckpt.examine.statistics import checkpoint_statistics
from nxd_ckpt.examine.statistics_cache import read_statistics
from nxd_ckpt.formats.tensors import TensorStub, itemsize
from nxd_ckpt.reshard.summary import TensorStatistics
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import describe_incomplete, holds_tags, require_directory
from nxd_ckpt.tag.foreign.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.tag.listing import locate, opened_document

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
    examines
    the latest tag after the one before it, ``diff`` compares the two. ``tiers`` are searched for the tags.

    Raises:
        CheckpointNotFound: there is nothing to report on.
    """
    hugging_face = _hugging_face(path, options)
    if hugging_face is not None:
        return hugging_face
    directory, only = locate(path, None, options)
    listing, open_tags = opened_document(directory, only, options)
    tags = listing["tags"]
    document: dict[str, Any] = {"directory": listing["directory"], "kind": "tags", "tags": tags, "problems": []}
    opened = {
        tag["tag"]: checkpoint_of(open_tags[tag["tag"]], directory, options)
        for tag in tags
        if tag["tag"] in open_tags and not tag["problems"]
    }
    if not opened:
        content = describe_incomplete(open_storage(directory, storage_options=options))
        raise CheckpointNotFound(f"{listing['directory']}: no complete checkpoint to report on; {content}")
    statistics = _statistics(opened, count, document["problems"], progress)
    newest = next(reversed(opened.values()))
    for tag in tags:
        manifest = opened[tag["tag"]].manifest if tag["tag"] in opened else None
        tag["timings"] = {} if manifest is None else dict(manifest.timings)
    document |= {"ranks": [], "modules": [], "health": _health(statistics, {}), "findings": [], "differences": None}
    document["timeline"] = timeline(newest)
    document["tiers"] = tiers_of(tiers, _saves(opened, tags), options)
    with _collect_damage(newest.tag, document["problems"]):
        document["health"] = _health(statistics, _options(newest))
    with _collect_damage(newest.tag, document["problems"]):
        document["ranks"] = _ranks(newest)
    with _collect_damage(newest.tag, document["problems"]):
        document["modules"] = _modules({name: tensor.nbytes for name, tensor in newest.metadata.items()})
    with _collect_damage(newest.tag, document["problems"]):
        document["findings"] = _doctor_findings(list(opened.values())[-2:], progress) if doctor else []
    with _collect_damage(newest.tag, document["problems"]):
        if diff and len(opened) > 1:
            before, after = list(opened.values())[-2:]
            document["differences"] = differences(before, after, progress)
    document["problems"] += [*_listing_problems(tags), *_value_problems(statistics), *_unchanged_weights(statistics)]
    document["problems"] += _failed_saves(newest) if only is None else []
    document["problems"] += [_problem(*late) for late in stragglers(list(opened.values()))]
    document["problems"] += [_problem(*late) for late in late_tiers(document["tiers"])]
    return document


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
    document: dict[str, Any] = {"directory": storage.url, "kind": "Hugging Face", "modules": _modules(sizes)}
    document |= {name: [] for name in ("tags", "ranks", "timeline", "findings", "problems", "tiers")}
    return document | {"differences": None, "health": {"tags": [], "tensors": []}}


def _nbytes(stub: TensorStub) -> int:
    return math.prod(stub.shape) * itemsize(stub.dtype)


def _saves(opened: Mapping[str, Checkpoint], tags: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """Return order time and bytes of each tag that can be copied to a tier: those with a manifest."""
    sizes = {tag["tag"]: tag["nbytes"] for tag in tags}
    manifests = {tag: checkpoint.manifest for tag, checkpoint in opened.items()}
    return {tag: (manifest.order_time, sizes[tag]) for tag, manifest in manifests.items() if manifest is not None}


def _statistics(
    opened: Mapping[str, Checkpoint], count: int, problems: list[dict[str, Any]], progress: bool
) -> dict[str, Statistics]:
    statistics: dict[str, Statistics] = {}
    latest = list(opened)[max(0, len(opened) - count) :]
    for tag, checkpoint in opened.items():
        if tag in latest:
            with _collect_damage(tag, problems):
                statistics[tag] = checkpoint_statistics(checkpoint, progress=progress).tensors
        elif (cached := read_statistics(checkpoint.opened)) is not None:
            statistics[tag] = cached
    return statistics


@contextmanager
def _collect_damage(tag: str, problems: list[dict[str, Any]]) -> Iterator[None]:
    """Turn errors of a tag into ``problems``; TagReplaced is raised."""
    try:
        yield
    except TagReplaced:
        raise
    except CheckpointError as error:
        damage = _problem(tag, str(error))
        if damage not in problems:
            problems.append(damage)


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


def _health(statistics: Mapping[str, Statistics], options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
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


def _failed_saves(newest: Checkpoint) -> list[dict[str, Any]]:
    """Return a problem for each save whose process died."""
    return [
        _problem(
            save.tag or f"attempt {save.attempt}",
            "its save failed: the process is gone"
            + (f", {size(save.nbytes)} are left, which the next job removes" if save.nbytes else ""),
        )
        for save in saves_in_flight(newest.opened.storage)
        if save.is_dead
    ]


def _doctor_findings(tags: list[Checkpoint], progress: bool) -> list[dict[str, str]]:
    before = tags[0] if len(tags) > 1 else None
    examination = examine_checkpoint(tags[-1], before, progress=progress)
    return [
        {"severity": finding.severity, "kind": finding.kind, "what": finding.what, "message": finding.message}
        for finding in examination.findings
    ]


def _problem(where: str, what: str) -> dict[str, Any]:
    return {"where": where, "what": what}


def _listing_problems(tags: list[dict[str, Any]]) -> list[dict[str, Any]]:
    problems = [_problem(tag["tag"], problem) for tag in tags for problem in tag["problems"]]
    return problems + [_problem(tag["tag"], f"incomplete: it lacks {what}") for tag in tags for what in tag["lacks"]]


def _value_problems(statistics: Mapping[str, Statistics]) -> list[dict[str, Any]]:
    """Report NaN, infinities, and weights that are all zero."""
    problems = []
    for tag, tensors in statistics.items():
        infinite = {name: counts for name, counts in tensors.items() if counts.nans + counts.infs}
        bad = [f"{name} ({counts.nans} NaN, {counts.infs} infinite)" for name, counts in infinite.items()]
        if bad:
            problems.append(_problem(tag, f"not finite: {first_of(bad)}"))
    if statistics:
        tag, tensors = list(statistics.items())[-1]
        weights = {name: counts for name, counts in tensors.items() if name.endswith(".weight")}
        dead = [name for name, counts in weights.items() if counts.zeros == counts.numel > 1]
        problems += [_problem(tag, f"{name} is all zero") for name in dead if name.startswith("model/")]
    return problems


def _unchanged_weights(statistics: Mapping[str, Statistics]) -> list[dict[str, Any]]:
    """Report weights with equal statistics in all tags, if others changed."""
    if len(statistics) < _SAVES:
        return []
    first, *later_tags = statistics.values()
    weights = {name for name in first if name.startswith("model/") and all(name in later for later in later_tags)}
    still = sorted(name for name in weights if all(first[name] == later[name] for later in later_tags))
    if not still or len(still) == len(weights):
        return []
    return [_problem("all tags", f"weights that never changed (frozen?): {first_of(still)}")]
