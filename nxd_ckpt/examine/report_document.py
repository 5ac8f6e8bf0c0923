"""Everything that ``nxd-ckpt report`` shows of a directory, as a JSON document."""

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
"""Ranks at most whose bytes are told: an index is read for each."""
_SAVES = 3
"""In how many saves, at least, what is always so is said to be."""

_ADAM = (("model", ""), ("optim", "/exp_avg"), ("optim", "/exp_avg_sq"))
"""Where a weight is, and its moments: what stands before and after its name."""

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
    """The tags of a directory, the latest one in detail, and the health of their tensors.

    Tensors are read of the ``count`` latest tags at most; of the others what is kept beside them is shown. With
    ``doctor`` the latest tag is examined after the one before it, with ``diff`` compared with it. The ``tiers`` are
    asked which of the tags they have.

    Raises:
        CheckpointNotFound: there is nothing of which a report could be made.
    """
    hugging_face = _hugging_face(path, options)
    if hugging_face is not None:
        return hugging_face
    directory, only = locate(path, None, options)
    listing, held = opened_document(directory, only, options)
    tags = listing["tags"]
    document: dict[str, Any] = {"directory": listing["directory"], "kind": "tags", "tags": tags, "problems": []}
    opened = {
        tag["tag"]: checkpoint_of(held[tag["tag"]], directory, options)
        for tag in tags
        if tag["tag"] in held and not tag["problems"]
    }
    if not opened:
        held_there = describe_incomplete(open_storage(directory, storage_options=options))
        raise CheckpointNotFound(f"{listing['directory']}: no complete checkpoint to report on; {held_there}")
    statistics = _statistics(opened, count, document["problems"], progress)
    newest = next(reversed(opened.values()))
    for tag in tags:
        manifest = opened[tag["tag"]].manifest if tag["tag"] in opened else None
        tag["timings"] = {} if manifest is None else dict(manifest.timings)
    document |= {"ranks": [], "modules": [], "health": _health(statistics, {}), "findings": [], "differences": None}
    document["timeline"] = timeline(newest)
    document["tiers"] = tiers_of(tiers, _saves(opened, tags), options)
    with _telling_damage(newest.tag, document["problems"]):
        document["health"] = _health(statistics, _options(newest))
    with _telling_damage(newest.tag, document["problems"]):
        document["ranks"] = _ranks(newest)
    with _telling_damage(newest.tag, document["problems"]):
        document["modules"] = _modules({name: told.nbytes for name, told in newest.metadata.items()})
    with _telling_damage(newest.tag, document["problems"]):
        document["findings"] = _examined(list(opened.values())[-2:], progress) if doctor else []
    with _telling_damage(newest.tag, document["problems"]):
        if diff and len(opened) > 1:
            before, after = list(opened.values())[-2:]
            document["differences"] = differences(before, after, progress)
    document["problems"] += [*_of_listing(tags), *_of_values(statistics), *_unchanged(statistics)]
    document["problems"] += _failed(newest) if only is None else []
    document["problems"] += [_problem(*late) for late in stragglers(list(opened.values()))]
    document["problems"] += [_problem(*late) for late in late_tiers(document["tiers"])]
    return document


def _hugging_face(path: str, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of a directory of Hugging Face's: which tensors it holds. None for anything else, tags above all."""
    storage = open_storage(path, storage_options=options)
    require_directory(storage)
    if not any(entry.name.endswith(".safetensors") for entry in storage.list()):
        return None
    if holds_tags(storage) or locate(path, None, options)[1] is not None:
        return None
    found = HuggingFaceDirectory(storage, "")
    sizes = {f"model/{name}": _nbytes(found.stub(name)) for name in found.names}
    document: dict[str, Any] = {"directory": storage.url, "kind": "Hugging Face", "modules": _modules(sizes)}
    document |= {name: [] for name in ("tags", "ranks", "timeline", "findings", "problems", "tiers")}
    return document | {"differences": None, "health": {"tags": [], "tensors": []}}


def _nbytes(stub: TensorStub) -> int:
    return math.prod(stub.shape) * itemsize(stub.dtype)


def _saves(opened: Mapping[str, Checkpoint], tags: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """Order time and bytes of each tag that a tier may get: one with a manifest."""
    sizes = {tag["tag"]: tag["nbytes"] for tag in tags}
    manifests = {tag: one.manifest for tag, one in opened.items()}
    return {tag: (one.order_time, sizes[tag]) for tag, one in manifests.items() if one is not None}


def _statistics(
    opened: Mapping[str, Checkpoint], count: int, problems: list[dict[str, Any]], progress: bool
) -> dict[str, Statistics]:
    found: dict[str, Statistics] = {}
    latest = list(opened)[max(0, len(opened) - count) :]
    for tag, checkpoint in opened.items():
        if tag in latest:
            with _telling_damage(tag, problems):
                found[tag] = checkpoint_statistics(checkpoint, progress=progress).tensors
        elif (kept := read_statistics(checkpoint.opened)) is not None:
            found[tag] = kept
    return found


@contextmanager
def _telling_damage(tag: str, problems: list[dict[str, Any]]) -> Iterator[None]:
    """What keeps the tag from being read becomes one of the ``problems``; that it was replaced is raised."""
    try:
        yield
    except TagReplaced:
        raise
    except CheckpointError as error:
        damage = _problem(tag, str(error))
        if damage not in problems:
            problems.append(damage)


def _ranks(tag: Checkpoint) -> list[dict[str, Any]]:
    """Who wrote how much of the latest tag."""
    if tag.manifest is None or tag.topology.world_size > _RANKS:
        return []
    with tag.opened.kept(verified=True):
        return [_rank(tag, rank) for rank in range(tag.topology.world_size)]


def _rank(tag: Checkpoint, rank: int) -> dict[str, Any]:
    at = tag.topology.coordinates_of(rank)
    files = tag.opened.index(at).files
    nbytes = sum(entry.nbytes for entry in files.values())
    sizes = {"pp": at.pp_rank, "dp": at.dp_rank, "tp": at.tp_rank}
    return {"rank": rank, **sizes, "place": _place(tag, rank), "files": len(files), "nbytes": nbytes}


def _place(tag: Checkpoint, rank: int) -> dict[str, int]:
    """Where a rank is: in its mesh of most dimensions, or in dp, tp and, with experts, ep; stages are told apart."""
    at, sizes = tag.topology.coordinates_of(rank), tag.topology
    meshes = () if tag.opened.mesh is None else tag.opened.mesh.meshes()
    found = [(mesh.names, place) for mesh in meshes if (place := mesh.coordinate_of(rank)) is not None]
    if found:
        names, place = max(found, key=lambda one: len(one[0]))
        return {name or f"dim{dim}": index for dim, (name, index) in enumerate(zip(names, place, strict=True)) if dim}
    experts = {"ep": at.dp_rank % sizes.ep} if sizes.ep > 1 else {}
    return {"dp": at.dp_rank, "tp": at.tp_rank, **experts}


def _modules(sizes: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """Bytes of whole tensors by module, the first parts of a name, and by part: weights, master weights, the rest."""
    found: dict[str, dict[str, int]] = {}
    for name, nbytes in sizes.items():
        kind, _, rest = name.partition("/")
        part = "weights" if kind == "model" else "master weights" if name.endswith("/master_weights") else "moments"
        module = _module(rest if kind == "model" else rest.rpartition("/")[0])
        parts = found.setdefault(module, {"weights": 0, "master weights": 0, "moments": 0})
        parts[part] += nbytes or 0
    largest = sorted(found.items(), key=lambda item: -sum(item[1].values()))
    return [{"module": module, **parts} for module, parts in largest]


def _module(name: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp.up.weight``: up to the first number, else all but the last part."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match[1] if match else name.rpartition(".")[0] or name


def _options(tag: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """The options of each parameter's group."""
    return {name: group for group in tag.param_groups for name in group["params"]}


def _health(statistics: Mapping[str, Statistics], options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each tensor of the latest tag that was counted, with its norms in the others."""
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


def _step(name: str, told: Statistics, options: Mapping[str, Mapping[str, Any]]) -> float | None:
    """How far Adam moves a weight in a step, as a share of the weight: from the root mean squares of both."""
    weight, first, second = (told.get(f"{part}/{name}{key}") for part, key in _ADAM)
    rate, small = (options.get(name, {}).get(key) for key in ("lr", "eps"))
    if weight is None or first is None or second is None or rate is None or not second.mean >= 0 or not weight.rms:
        return None
    divisor = math.sqrt(second.mean) + float(small or 0)
    share = float(rate) * first.rms / divisor / weight.rms if divisor else math.nan
    return share if math.isfinite(share) else None


def _failed(newest: Checkpoint) -> list[dict[str, Any]]:
    """Saves that ended with their process."""
    return [
        _problem(
            one.tag or f"attempt {one.attempt}",
            "its save failed: the process is gone"
            + (f", {size(one.nbytes)} are left, which the next job removes" if one.nbytes else ""),
        )
        for one in saves_in_flight(newest.opened.storage)
        if one.is_dead
    ]


def _examined(tags: list[Checkpoint], progress: bool) -> list[dict[str, str]]:
    before = tags[0] if len(tags) > 1 else None
    found = examine_checkpoint(tags[-1], before, progress=progress)
    return [
        {"severity": one.severity, "kind": one.kind, "what": one.what, "message": one.message}
        for one in found.findings
    ]


def _problem(where: str, what: str) -> dict[str, Any]:
    return {"where": where, "what": what}


def _of_listing(tags: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [_problem(tag["tag"], problem) for tag in tags for problem in tag["problems"]]
    return found + [_problem(tag["tag"], f"incomplete: it lacks {what}") for tag in tags for what in tag["lacks"]]


def _of_values(statistics: Mapping[str, Statistics]) -> list[dict[str, Any]]:
    """NaN, infinities, and weights that are all zero."""
    found = []
    for tag, tensors in statistics.items():
        bad = [f"{name} ({one.nans} NaN, {one.infs} infinite)" for name, one in tensors.items() if one.nans + one.infs]
        if bad:
            found.append(_problem(tag, f"not finite: {first_of(bad)}"))
    if statistics:
        tag, tensors = list(statistics.items())[-1]
        dead = [name for name, one in tensors.items() if name.endswith(".weight") and one.zeros == one.numel > 1]
        found += [_problem(tag, f"{name} is all zero") for name in dead if name.startswith("model/")]
    return found


def _unchanged(statistics: Mapping[str, Statistics]) -> list[dict[str, Any]]:
    """Weights with the same numbers in all tags, where others changed."""
    if len(statistics) < _SAVES:
        return []
    first, *others = statistics.values()
    weights = {name for name in first if name.startswith("model/") and all(name in other for other in others)}
    still = sorted(name for name in weights if all(first[name] == other[name] for other in others))
    if not still or len(still) == len(weights):
        return []
    return [_problem("all tags", f"weights that never changed (frozen?): {first_of(still)}")]
