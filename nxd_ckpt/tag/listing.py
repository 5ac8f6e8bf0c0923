"""Tags of a directory: finding the one that is meant, facts about each without reading tensors, steps and metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from math import inf, prod
from typing import Any, Literal, NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.coordination.control_files import pinned
from nxd_ckpt.coordination.guests import given_entries
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import Manifest
from nxd_ckpt.core.names import describe, holes
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.retention_rules import Best, Metrics
from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.core.tags import TagInfo, in_order, latest, step_of
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidArgument,
    TagReplaced,
    as_checkpoint_errors,
)
from nxd_ckpt.layouts import legacy
from nxd_ckpt.layouts.files import TagFiles, require_directory
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import absolute, open_storage
from nxd_ckpt.tag.choosing import around, choose, find_by_path, open_complete_tag, settled_tags, tag_meant
from nxd_ckpt.tag.directory import (
    NO_TAG,
    describe_incomplete,
    holds_tags,
    is_tag,
)
from nxd_ckpt.tag.identity import Identity, manifest_of, of_latest
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.range_reader import in_parallel
from nxd_ckpt.tag.verify import files_of

_LAST = datetime(9999, 1, 1, tzinfo=timezone.utc).timestamp()
"""Latest time that can be written as a date."""

Options = Mapping[str, Any] | None

Summarize = Callable[[TagInfo, TagInfo | None], dict[str, Any]]
"""Returns the summary of a tag, given the newest one."""


@dataclass(frozen=True)
class ListedTag:
    """One tag of a directory.

    Attributes:
        tag: its name; empty for the directory itself, of NxD 0.1 to 0.5.
        saved: its time; None if unknown.
        complete, latest, pinned: it can be loaded; a load takes it by default; retention never removes it.
        nbytes: bytes of its files.
        topology: the sizes it was saved on, by name, None for an unknown one; None for an incomplete tag.
        written_by: "nxd_ckpt" or "neuronx_distributed".
        problems: missing parts, and other problems.
        metrics: numbers that were passed to the save; None for one that was not finite.
        guests: files and folders of others directly in the tag, which carry no digest.
    """

    tag: str
    saved: datetime | None
    complete: bool
    latest: bool
    pinned: bool
    nbytes: int
    topology: Mapping[str, int | None] | None
    written_by: str
    problems: tuple[str, ...]
    metrics: Metrics = field(default_factory=dict)
    guests: tuple[str, ...] = ()


_SAME = ("complete", "latest", "pinned", "nbytes", "topology", "written_by", "metrics")


@as_checkpoint_errors
@takes()
def list_checkpoints(path: str | os.PathLike[str], *, storage_options: Options = None) -> tuple[ListedTag, ...]:
    """Return the tags of a directory, complete or not, in the order in which they became visible. Reads no tensor.

    Raises:
        CheckpointNotFound: no such directory, or ``path`` is itself a tag.
    """
    tags = directory_document(os.fspath(path), storage_options)["tags"]
    return tuple(
        ListedTag(
            tag=tag["tag"],
            saved=_time_of(tag["order_time"]),
            problems=(*(f"it lacks {what}" for what in tag["lacks"]), *tag["problems"]),
            guests=tuple(tag["guests"]),
            **{key: tag[key] for key in _SAME},
        )
        for tag in tags
    )


def locate(path: str, tag: str | None, options: Options = None) -> tuple[str, str | None]:
    """Return directory (or URL) and tag: ``path`` is the directory, or (without ``tag``) one of its tags.

    What `find_by_path` finds counts as a tag too. A number that is no tag is the step of one.

    Raises:
        CheckpointNotFound: no such directory, or several tags of that step.
    """
    whole = absolute(path)
    if tag is not None:
        return whole, tag_meant(_open(whole, options), tag)
    storage = open_storage(whole, storage_options=options)
    if not (storage.is_dir("") and holds_tags(storage)):
        above, key = around(storage, None, (whole, options))
        if key and find_by_path(above, key) is not None:
            return above.url, key
        require_directory(storage)
    return whole, None


def tags_to_verify(path: str, options: Options = None) -> list[str | None]:
    """Return the complete tags in a directory, oldest first, and those that are incomplete because of damage.

    None stands for the directory itself, of NxD 0.1 to 0.5.

    Raises:
        CheckpointNotFound: no such directory, or no complete tag in it.
    """
    storage = _open(path, options)
    tags = [info.tag or None for info in in_order(settled_tags(storage)) if info.complete or info.damage]
    if not tags:
        raise CheckpointNotFound(f"{storage.url}: no complete checkpoint; {describe_incomplete(storage)}")
    return tags


def tag_before(opened: OpenTag) -> str | None:
    """Return the complete tag that became visible last before this one; None if there is none."""
    older = None
    for info in in_order(settled_tags(opened.storage)):
        if info.tag == opened.tag:
            return older
        older = info.tag if info.complete and info.tag != NO_TAG else older
    return None


def directory_document(path: str, options: Options = None, *, only_look: bool = False) -> dict[str, Any]:
    """Describe every tag in a directory, in the order in which they became visible.

    With ``only_look`` a replacement that a dead job left half done stays as it is.

    Raises:
        CheckpointNotFound: no such directory, or ``path`` is itself a tag.
    """
    storage = _open(path, options)
    describe = partial(_describe_tag, storage)
    return of_latest(True, lambda: _listing(storage, path, options, describe, only_look=only_look))


def opened_document(path: str, only: str | None, options: Options) -> tuple[dict[str, Any], dict[str, OpenTag]]:
    """Describe one tag of a directory or all, and return the complete ones that can be opened, by name.

    Raises:
        TagReplaced: one was removed, or saved again, meanwhile.
    """
    storage = _open(path, options)
    opened: dict[str, OpenTag] = {}

    def summarize(info: TagInfo, newest: TagInfo | None) -> dict[str, Any]:
        return _describe_tag(storage, info, newest, opened)

    document = _listing(storage, path, options, summarize, only)
    return document, {tag["tag"]: opened[tag["tag"]] for tag in document["tags"] if tag["tag"] in opened}


def _listing(
    storage: Storage,
    path: str,
    options: Options,
    summarize: Summarize,
    only: str | None = None,
    *,
    only_look: bool = False,
) -> dict[str, Any]:
    tags = in_order(settled_tags(storage, only_look=only_look))
    if not tags and is_tag(storage):
        raise CheckpointNotFound(f"{storage.url}: no checkpoints; {describe_incomplete(storage)}")
    newest = latest(tags)
    if only is not None and all(info.tag != only for info in tags):
        tags = [replace(choose(storage, only), order_time=inf)]  # without markers: it has no time
    try:
        pins = pinned(storage)
    except (OSError, CheckpointError):  # tags are shown without their pins then
        pins = set()
    listed = [info for info in tags if only in (None, info.tag)]
    summaries = in_parallel(storage, listed, lambda info: summarize(info, newest))
    return {
        "directory": storage.url,
        "latest": None if newest is None else newest.tag,
        "tags": [{**tag, "pinned": tag["tag"] in pins, "guests": _guests(storage, tag["tag"])} for tag in summaries],
        "note": None if tags else f"no checkpoints; {describe_incomplete(storage)}",
    }


def _guests(storage: Storage, tag: str) -> list[str]:
    entries = storage.list(tag) if tag != NO_TAG else []
    guests = [name for name, is_dir in entries if not (names.is_own_folder(name) if is_dir else names.is_own(name))]
    given = given_entries(storage, tag) if guests else ()
    return [name for name in guests if name not in given]


def summary(opened: OpenTag, info: TagInfo) -> dict[str, Any]:
    """Return the facts that a listing has on a complete tag. Raises the errors of opening its first files."""
    return {
        **_name_and_time(info),
        "complete": True,
        "written_by": "nxd_ckpt" if opened.manifest is not None else "neuronx_distributed",
        "topology": _sizes(opened),
        "parts": asdict(opened.parts),
        "metrics": {} if opened.manifest is None else dict(opened.manifest.metrics),
    }


def _open(path: str, options: Options) -> Storage:
    storage = open_storage(path, storage_options=options)
    require_directory(storage)
    return storage


def _describe_tag(
    storage: Storage, info: TagInfo, newest: TagInfo | None, keep: dict[str, OpenTag] | None = None
) -> dict[str, Any]:
    """Describe a tag; if it can be opened, add it to ``keep``."""
    document: dict[str, Any] = {
        **_name_and_time(info),
        "complete": info.complete,
        "written_by": "nxd_ckpt" if info.ours else "neuronx_distributed",
        "topology": None,
        "parts": None,
        "metrics": {},
        "nbytes": 0,
        "latest": info == newest,
        "lacks": [],
        "problems": [],
    }
    manifest = None
    identity = Identity(storage, info.tag)
    with identity.guarded():
        try:
            if info.damage is not None:
                raise CorruptCheckpoint(info.damage)
            if not info.complete:
                document["lacks"] = list(_lacking(storage, info.tag))
            else:
                opened = open_complete_tag(storage, info.tag)
                manifest = opened.manifest
                document |= summary(opened, info)
                if keep is not None:
                    keep[info.tag] = opened
            document["nbytes"] = _nbytes(storage, info.tag, manifest)
        except TagReplaced:
            raise
        except (CheckpointError, FileNotFoundError) as error:  # one damaged tag never hides the others
            document["problems"].append(str(error))
            identity.require()
    return document


def _name_and_time(info: TagInfo) -> dict[str, Any]:
    if info.tag == NO_TAG or info.damage is not None or info.order_time > _LAST:  # no marker has a time there
        return {"tag": info.tag, "order_time": None, "age_seconds": None}
    # A save's order time may lie a second or two ahead of the clock.
    age = max(0.0, round(effects.time() - info.order_time, 1))
    return {"tag": info.tag, "order_time": time_text(info.order_time), "age_seconds": age}


def time_text(seconds: float) -> str:
    """Return ``2025-11-21T13:51:02.250000Z`` for seconds since the epoch."""
    return datetime.fromtimestamp(seconds, timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _time_of(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text.removesuffix("Z")).replace(tzinfo=timezone.utc)


def _sizes(opened: OpenTag) -> dict[str, int | None]:
    """Return the sizes of the parallel dimensions, by name; of a mesh job those of the mesh of all its ranks."""
    meshes = [] if opened.mesh is None else opened.mesh.meshes()
    shapes = {(mesh.names[1:], mesh.shape[1:]) for mesh in meshes if all(mesh.names[1:])}
    whole = [shape for shape in shapes if prod(shape[1]) == opened.topology.world_size]
    if len(whole) == 1:
        return dict(zip(*whole[0], strict=True))
    sizes: dict[str, int | None] = {**opened.topology.sizes}
    dp_is_recorded = opened.manifest is not None or opened.parts.optimizer in ("zero1", "zero1_dcp")
    if not dp_is_recorded and opened.topology.dp == opened.topology.ep:
        sizes["dp"] = None  # data-parallel replicas leave no trace in NxD's files
    return sizes


def _nbytes(storage: Storage, tag: str, manifest: Manifest | None) -> int:
    """Return bytes of a tag's files, without markers. Our manifest records them, which saves a request per file."""
    if manifest is not None and "bytes" in manifest.timings:
        others = sum(line.nbytes for line in (*manifest.ranks, *manifest.guests.values()))
        return int(manifest.timings["bytes"]) + others + storage.size(f"{tag}/{names.MANIFEST}")
    files = TagFiles(storage, tag)
    total = 0
    for file in files_of(files):
        with suppress(FileNotFoundError):  # it is being saved over, or removed
            total += storage.size(files.key(file))
    return total


def _lacking(storage: Storage, tag: str) -> Iterator[str]:
    """Yield a phrase for each thing a tag lacks to be complete."""
    listing = {entry.name: entry.is_dir for entry in storage.list(tag)}
    if tag == NO_TAG:
        yield from _missing_ranks("", [name for file in listing if (name := legacy.parse(file)) is not None])
        return
    if names.MARKER in listing or names.MANIFEST in listing:  # else it is of NxD 0.6, which wrote no markers
        yield f"its {names.DONE!r} marker"
    ranks_by_part = {
        part: [name for entry in storage.list(f"{tag}/{part}") if (name := names.parse(entry.name)) is not None]
        for part in (names.MODEL_DIR, names.OPTIMIZER_DIR)
    }
    for part, ranks in ranks_by_part.items():
        yield from _missing_ranks(f" in {part}/", ranks)
    if not any(ranks_by_part.values()):
        yield "all files of model and optimizer"


def _missing_ranks(where: str, ranks: list[names.ParsedName]) -> Iterator[str]:
    missing = holes(ranks)
    if missing:
        yield f"{len(missing)} of {len(missing) + len(set(ranks))} ranks' files{where}; there are {describe(ranks)}"


class StepTag(NamedTuple):
    """The newest complete tag of a step, and a storage that has it."""

    step: int
    info: TagInfo
    storage: Storage


def steps_of(storages: Sequence[Storage]) -> list[StepTag]:
    """Return the newest complete tag of each step in any of ``storages``, oldest save first.

    Tags without a number in their names have no step. Storages that cannot be read are passed over, with a warning;
    raises the error of the first if that is all of them.
    """
    return _steps(_complete_tags(storages))


def _complete_tags(storages: Sequence[Storage]) -> dict[TagInfo, Storage]:
    """Return the complete tags, each with the first storage that has it."""
    places: dict[TagInfo, Storage] = {}
    failed: list[Exception] = []
    for storage in storages:
        try:
            for info in settled_tags(storage):
                if info.complete:
                    places.setdefault(info, storage)
        except (CheckpointError, OSError) as error:
            failed.append(error)
            logger.warning("%s is passed over: %s: %s", storage.url, type(error).__name__, error)
    if len(failed) == len(storages):
        raise failed[0]
    return places


def _steps(places: Mapping[TagInfo, Storage]) -> list[StepTag]:
    steps: dict[int, StepTag] = {}
    for info in in_order(places):
        step = step_of(info.tag)
        if step is not None:
            steps.pop(step, None)
            steps[step] = StepTag(step, info, places[info])
    return list(steps.values())


def best_of(storages: Sequence[Storage], metric: str, mode: Literal["min", "max"]) -> int | None:
    """Return the step whose save has the lowest ``metric``, or with "max" the highest; of equal ones the newest.

    None if no save has metrics, or none a finite one of that name. Raises InvalidArgument if saves have metrics, but
    none of that name, or only tags without a step have it.
    """
    places = _complete_tags(storages)
    tags = _steps(places)
    rule = Best(metric, mode=mode)
    sign = 1 if mode == "min" else -1
    metrics = [metrics_of(tag.storage, tag.info) for tag in tags]
    if not any(metric in each for each in metrics):
        others = {info: metrics_of(places[info], info) for info in places if step_of(info.tag) is None}
        named = [info.tag for info, own in others.items() if metric in own]
        if named:
            raise InvalidArgument(
                f"the metric {metric!r} is that of tags without a step in their names, {first_of(named)}: load one by "
                "its name"
            )
        recorded = {name for each in [*metrics, *others.values()] for name in each}
        if recorded:
            raise InvalidArgument(
                f"no tag has the metric {listed([metric], recorded)}; tags have {first_of(sorted(recorded))}"
            )
    values = [(rule.value(each), tag.step) for each, tag in zip(metrics, tags, strict=True)]
    ranked = [(sign * value, step) for value, step in reversed(values) if value is not None]
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def metrics_of(storage: Storage, info: TagInfo) -> Metrics:
    """Return the metrics of a tag's save; none if it is not ours."""
    if not info.ours:
        return {}
    return manifest_of(storage, info.tag).metrics
