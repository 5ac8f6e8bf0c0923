"""The JSON document behind ``nxd-ckpt report``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median_low
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.commit.voting import saves_in_flight
from nxd_ckpt.core import units
from nxd_ckpt.core.findings import Finding, collect_problems
from nxd_ckpt.core.manifest import Manifest, RankPhases, straggler
from nxd_ckpt.core.mesh import Mesh
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import step_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.units import size
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
from nxd_ckpt.examine.stored_statistics import StatisticsByName, not_finite, read_statistics
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import describe_incomplete
from nxd_ckpt.tag.listing import locate, opened_document, time_text
from nxd_ckpt.tag.opened import OpenTag

_SAVES = 3
"""Number of saves from which on a constant weight is reported."""


def report_document(
    path: str,
    options: Mapping[str, Any] | None,
    *,
    count: int,
    doctor: bool,
    progress: bool,
) -> dict[str, Any]:
    """Describe the tags of a directory, the latest one in detail, and the health of their tensors.

    Only where values are read does it need torch: not where all statistics are stored, without ``doctor``.

    The tensors of the ``count`` latest tags are read, unless their statistics are stored; older tags appear with stored
    ones. ``doctor`` examines the latest tag after the one before it.
    ``note`` says it if there is nothing to report on.
    """
    directory, only = locate(path, None, options)
    listing, open_tags = opened_document(directory, only, options)
    tags = listing["tags"]
    storage = open_storage(directory, storage_options=options)
    document: dict[str, Any] = {"directory": listing["directory"], "tags": tags, **_nothing()}
    opened = {
        tag["tag"]: open_tags[tag["tag"]] for tag in tags if tag["tag"] in open_tags and not tag["problems"]
    }

    def counted(tag: OpenTag) -> StatisticsByName:
        from nxd_ckpt.checkpoint import checkpoint_of
        from nxd_ckpt.examine.statistics import count_anew

        return count_anew(checkpoint_of(tag, directory, options), progress).tensors

    def examined(tag: OpenTag, before: OpenTag | None) -> Sequence[Finding]:
        from nxd_ckpt.checkpoint import checkpoint_of
        from nxd_ckpt.examine.doctor import examine_checkpoint

        older = None if before is None else checkpoint_of(before, directory, options)
        return examine_checkpoint(checkpoint_of(tag, directory, options), before=older, progress=progress).findings

    damage = {tag["tag"]: tag["problems"] for tag in tags}
    _add_facts(tags, opened)
    statistics = _statistics(opened, counted, count, damage)
    for tag in tags:
        tag["not_finite"] = len(not_finite(statistics[tag["tag"]])) if tag["tag"] in statistics else None
    still = _still(statistics)
    if not opened:
        document["note"] = f"no complete checkpoint to report on; {describe_incomplete(storage)}"
    else:
        document |= _details(list(opened.values()), statistics, set(still), damage, examined if doctor else None)
    in_flight = [] if only is not None else [asdict(save) for save in saves_in_flight(storage)]
    document["problems"] = list(_problems(document, list(opened.values()), statistics, in_flight))
    if still:
        frozen = units.count(len(still), "weight")
        document["notes"] = [_problem("frozen", f"{frozen} never changed: {first_of(still)}")]
    document["head"] = [line._asdict() for line in _head(document, opened, statistics, in_flight)]
    return document


def _add_facts(tags: list[dict[str, Any]], opened: Mapping[str, OpenTag]) -> None:
    """Add the step, the sizes and the timings to each tag of a listing."""
    newest = [*opened][-1] if opened else None
    for tag in tags:
        tag["step"], tag["sizes"], tag["timings"] = step_of(tag["tag"]), units.short_topology(tag["topology"]), {}
        open_tag = opened.get(tag["tag"])
        if open_tag is not None:
            tag["timings"] = timings(open_tag.manifest)
            with collect_problems(tag["problems"]):
                tag["sizes"] = _sizes(open_tag, tag["tag"] == newest) or tag["sizes"]


def _problems(
    document: Mapping[str, Any],
    opened: Sequence[OpenTag],
    statistics: Mapping[str, StatisticsByName],
    saves: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield the problems of all tags, of values, of ``saves`` that died and of slow ranks."""
    tags = document["tags"]
    yield from (_problem(tag["tag"], problem) for tag in tags for problem in tag["problems"])
    yield from (_problem(tag["tag"], f"incomplete: it lacks {what}") for tag in tags for what in tag["lacks"])
    yield from _value_problems(statistics, {finding["what"] for finding in document["findings"]})
    yield from (_problem(name_of(save), failed_text(save)) for save in saves if save["is_dead"])
    yield from _stragglers(opened)


def _details(
    opened: list[OpenTag],
    statistics: Mapping[str, StatisticsByName],
    still: Collection[str],
    damage: Mapping[str, list[str]],
    examined: Callable[[OpenTag, OpenTag | None], Sequence[Finding]] | None,
) -> dict[str, Any]:
    """Return all parts of the document about the newest tag that can be read; add what cannot be to ``damage``.

    It is compared with the last tag before it in which no damage is known.
    """
    newest = opened[-1]
    before = next((tag for tag in reversed(opened[:-1]) if not damage[tag.tag]), None)
    document: dict[str, Any] = {"health": _health(statistics, still), "findings": []}
    errors: list[str] = []
    with collect_problems(errors):
        document["ranks"] = _ranks(newest)
    with collect_problems(errors):
        if examined is not None:
            document["findings"] = [asdict(finding) for finding in examined(newest, before)]
    errors += [finding["message"] for finding in document["findings"] if finding["kind"] in _DAMAGE]
    document["findings"] = [finding for finding in document["findings"] if finding["kind"] not in _DAMAGE]
    for error in dict.fromkeys(errors):
        is_before = before is not None and f"{before.where}/" in error
        problems = damage[before.tag if before is not None and is_before else newest.tag]
        problems += [] if error in problems else [error]
    return document


_DAMAGE = ("files", "before")
"""Kinds of findings of the doctor that are damage, of the tag or of the one before it."""


def _head(
    document: Mapping[str, Any],
    opened: Mapping[str, OpenTag],
    statistics: Mapping[str, StatisticsByName],
    saves: Sequence[Mapping[str, Any]],
) -> Iterator[StateLine]:
    """Yield the lines that say whether the run is healthy, and what can be resumed."""
    tags = document["tags"]
    if tags:
        yield _health_line(document, len(statistics))
    unfit = unsound({tag: not_finite(tensors) for tag, tensors in statistics.items()})
    yield resume_line(tags, unfit, statistics, document["note"])
    age = age_line(tags, saves)
    if age is not None:
        yield age
    if opened:
        manifests = {tag: open_tag.manifest for tag, open_tag in opened.items()}
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


def _nothing() -> dict[str, Any]:
    """Return a document's parts about a directory in which nothing can be opened."""
    parts: dict[str, Any] = {name: [] for name in ("ranks", "findings", "problems", "notes")}
    parts |= {"note": None, "health": {"tags": [], "tensors": []}}
    return {**parts, "made": time_text(effects.time())}


def _statistics(
    opened: Mapping[str, OpenTag],
    counted: Callable[[OpenTag], StatisticsByName],
    count: int,
    damage: Mapping[str, list[str]],
) -> dict[str, StatisticsByName]:
    """Return those of the ``count`` latest tags, stored ones of others, and all from the newest back to a sound one."""
    statistics: dict[str, StatisticsByName] = {}
    latest = list(opened)[max(0, len(opened) - count) :]
    is_found = count == 0
    for tag, open_tag in reversed(list(opened.items())):
        is_latest = tag in latest
        stored = read_statistics(open_tag)
        if is_latest:
            open_tag.require_unchanged()
        if stored is not None:
            statistics[tag] = stored
        elif is_latest or not is_found:
            with collect_problems(damage[tag]):
                statistics[tag] = counted(open_tag)
        is_found |= tag in statistics and not not_finite(statistics[tag])
    return dict(reversed(list(statistics.items())))


def _sizes(tag: OpenTag, look: bool) -> str | None:
    """Return a mesh job's ranks, or with ``look`` the dimensions of its largest mesh, for which an index is read."""
    if tag.manifest is None or tag.manifest.leaders is None:
        return None
    meshes = tag.mesh.meshes() if look and tag.mesh is not None else []
    largest = max(meshes, key=lambda mesh: len(mesh.shape), default=None)
    if largest is None:
        return units.count(tag.topology.world_size, "rank")
    return Mesh(largest.names[1:], largest.shape[1:], ()).describe()


def _place(topology: Topology, meshes: Sequence[Mesh], rank: int) -> dict[str, int]:
    """Return a rank's coordinates in its largest mesh; without a mesh in dp, tp and, with experts, ep, but not pp."""
    at = topology.coordinates_of(rank)
    coordinates = [(mesh.names, place) for mesh in meshes if (place := mesh.coordinate_of(rank)) is not None]
    if coordinates:
        names, place = max(coordinates, key=lambda coordinate: len(coordinate[0]))
        return {name or f"dim{dim}": index for dim, (name, index) in enumerate(zip(names, place, strict=True)) if dim}
    experts = {"ep": at.dp_rank % topology.ep} if topology.ep > 1 else {}
    return {"dp": at.dp_rank, "tp": at.tp_rank, **experts}


def module_and_leaf(name: str) -> tuple[str, str]:
    """Split a name after the number of its layer (``model.layers.3`` and ``mlp.up.weight``), else at its last dot."""
    match = re.match(r"(.*?\.\d+)\.(.*)", name)
    module, _, leaf = name.rpartition(".")
    return (match[1], match[2]) if match else (module, leaf)


def _health(statistics: Mapping[str, StatisticsByName], still: Collection[str]) -> dict[str, Any]:
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
                "frozen": name in still,
                "norms": norms,
            }
        )
    rows.sort(key=lambda row: not (row["nans"] or row["infs"]))
    return {"tags": tags, "tensors": rows}


def _problem(where: str, what: str) -> dict[str, Any]:
    return {"where": where, "what": what}


def _value_problems(statistics: Mapping[str, StatisticsByName], reported: Collection[str]) -> list[dict[str, Any]]:
    """Report weights that are all zero, and NaN and infinities: in the first tag that has some, and in the last one.

    Those ``reported`` already of the newest tag are left out.
    """
    problems = []
    newest = [*statistics][-1] if statistics else None
    bad = {tag: names for tag, tensors in statistics.items() if (names := not_finite(tensors))}
    between = f"; so are {len(bad) - 2} tags between" if len(bad) > 2 else ""
    first = next(iter(bad), None)
    for tag in dict.fromkeys([*bad][:1] + [*bad][-1:]):
        names = [name for name in bad[tag] if tag != newest or name not in reported]
        counts = (f"{name} ({statistics[tag][name].nans} NaN, {statistics[tag][name].infs} infinite)" for name in names)
        if names:
            problems.append(_problem(tag, f"not finite: {first_of(counts)}{between if tag == first else ''}"))
    if newest is not None:
        weights = {name: counts for name, counts in statistics[newest].items() if name.endswith(".weight")}
        dead = [name for name, counts in weights.items() if counts.zeros == counts.numel > 1]
        problems += [_problem(newest, f"{name} is all zero") for name in dead if name.startswith("model/")]
    return problems


def _still(statistics: Mapping[str, StatisticsByName]) -> list[str]:
    """Return the names of weights with equal statistics in all tags; none if no weight changed."""
    if len(statistics) < _SAVES:
        return []
    first, *later_tags = statistics.values()
    weights = {name for name in first if name.startswith("model/") and all(name in later for later in later_tags)}
    still = sorted(name for name in weights if all(first[name] == later[name] for later in later_tags))
    return [] if len(still) == len(weights) else still


_ALWAYS = 3
"""Number of consecutive saves a rank must be late in to be called always late."""


def timings(manifest: Manifest | None) -> dict[str, float]:
    """Return a save's recorded timings, and what rank 0's commit took without its wait for the slowest rank.

    Rank 0 begins to commit when it has written its own part, so ``commit_seconds`` has that wait in it. It is taken as
    the time by which the slowest rank staged and wrote for longer than rank 0.
    """
    recorded = {} if manifest is None else dict(manifest.timings)
    if manifest is not None and "commit_seconds" in recorded:
        done = [phase.stage_seconds + phase.write_seconds for phase in manifest.phases]
        wait = max(done) - done[0] if done else 0.0
        recorded["commit_alone_seconds"] = round(max(0.0, recorded["commit_seconds"] - wait), 6)
    return recorded


def _ranks(tag: OpenTag) -> list[dict[str, Any]]:
    """Return each rank's place and its part in the save of a tag; empty where that was not recorded."""
    phases = _phases(tag)
    late = straggler(phases)
    with tag.guarded(verified=True):
        meshes = [] if tag.mesh is None else tag.mesh.meshes()
    return [
        {"rank": rank, "place": _place(tag.topology, meshes, rank), **asdict(phase), "straggler": rank == late}
        for rank, phase in enumerate(phases)
    ]


def _stragglers(tags: Sequence[OpenTag]) -> Iterator[dict[str, Any]]:
    """Report the rank that the latest save waited for, "always" if it was late in each of the last saves."""
    late = [straggler(phases) for tag in tags if (phases := _phases(tag))]
    phases = _phases(tags[-1]) if tags else ()
    if not phases or late[-1] is None:
        return
    rank = late[-1]
    median = median_low(phase.write_seconds for phase in phases)
    phase = phases[rank]
    always = len(late) >= _ALWAYS and set(late[-_ALWAYS:]) == {rank}
    yield _problem(
        f"the last {_ALWAYS} saves" if always else tags[-1].tag,
        f"{'always ' if always else ''}waited for rank {rank} on {phase.host}: it wrote {size(phase.nbytes)} in "
        f"{phase.write_seconds:.1f} s, half of the ranks in {median:.1f} s or less",
    )


def _phases(tag: OpenTag) -> Sequence[RankPhases]:
    return () if tag.manifest is None else tag.manifest.phases
