"""The JSON document behind ``nxd-ckpt inspect``."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from nxd_ckpt.cli.name_patterns import group_names
from nxd_ckpt.cli.parameters import describe_partition, parameters
from nxd_ckpt.cli.tensors import tensors
from nxd_ckpt.cli.values import content_document, plain
from nxd_ckpt.core import names
from nxd_ckpt.core.tags import TagInfo, latest
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import CheckpointError, InvalidArgument, TagReplaced, UnsafePickle
from nxd_ckpt.live.optimizer_state import OPTIMIZER_NAME
from nxd_ckpt.output.locations import Location, locate_input
from nxd_ckpt.output.source import open_any
from nxd_ckpt.reshard.unrecorded import names_template, partitions_template
from nxd_ckpt.reshard.whole_tag import GlobalTensor, WholeTag
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.choosing import choose_tag
from nxd_ckpt.tag.directory import is_whole_without_marks, list_tags
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign.recognise import recognise
from nxd_ckpt.tag.foreign.untagged import is_untagged
from nxd_ckpt.tag.identity import of_latest
from nxd_ckpt.tag.listing import locate, summary
from nxd_ckpt.tag.opened import OpenTag, open_complete_tag
from nxd_ckpt.tag.verify import files_of

_Answer = TypeVar("_Answer")

_PART_OF = {
    names.MODEL_DIR: "model",
    names.OPTIMIZER_DIR: "optimizer",
    names.SCHEDULER: "scheduler",
    names.USER_CONTENT: "user_content",
    names.RANK_CONTENT_DIR: "rank_content",
    names.INDEX_DIR: "index",
    names.MANIFEST: "index",
}


_UNMARKED = TagInfo("", math.inf, complete=True, ours=False)
"""A checkpoint of which no marker tells when it was written."""


def inspection(
    path: str,
    tag: str | None,
    *,
    rank: int = 0,
    pattern: str | None = None,
    depth: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe one complete tag, by default the latest of the directory ``path``, which may also be the tag itself.

    ``rank`` is the rank whose contents are shown; ``pattern`` lists its tensors, ``depth`` groups the global tensors by
    prefix. Parts that cannot be read are None, and ``problems`` says why.

    Raises:
        CheckpointNotFound: no such tag, or it is incomplete.
        MalformedFile: its manifest is damaged.
        InvalidArgument: no such rank.

    A directory without tags, of torch DCP or torch_checkpointing, is described as a tag of one rank.
    """
    directory, tag = locate(path, tag, options)
    storage = open_storage(directory, storage_options=options)
    if tag is None and is_untagged(entry.name for entry in storage.list()):
        return _untagged(locate_input(path, options), rank, pattern, depth)

    def read(opened: OpenTag) -> dict[str, Any]:
        document = _document(opened, _info(opened), rank, pattern, depth)
        if document["problems"]:
            opened.require_unchanged()
        return document

    return _of_tag(storage, tag, read)


def template(path: str, tag: str | None, kind: str, options: Mapping[str, Any] | None) -> str:
    """Return the JSON of a template of "partitions" or "saved-param-names", with an entry in each line.

    Raises InvalidArgument if the tag records all of it.
    """
    directory, tag = locate(path, tag, options)
    storage = open_storage(directory, storage_options=options)

    def read(opened: OpenTag) -> str:
        facts = partitions_template(opened) if kind == "partitions" else names_template(opened)
        if not facts:
            raise InvalidArgument(f"{opened.where} records all that --{kind} could say, or has no such part")
        if isinstance(facts, dict):
            return _by_line(facts)
        return json.dumps(facts, indent=1)

    return _of_tag(storage, tag, read)


def _by_line(entries: Mapping[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    return f"{{\n{lines}\n}}"


def _of_tag(storage: Storage, tag: str | None, read: Callable[[OpenTag], _Answer]) -> _Answer:
    def opened() -> _Answer:
        tag_read = open_complete_tag(storage, choose_tag(storage, tag))
        with tag_read.guarded():
            return read(tag_read)

    return of_latest(tag is None, opened)


def _untagged(place: Location, rank: int, pattern: str | None, depth: int | None) -> dict[str, Any]:
    opened = open_any(place)
    with opened.guarded():
        document = _document(opened, replace(_UNMARKED, tag=place.name), rank, pattern, depth)
    return {**document, "written_by": recognise(place.open(), place.name).writer.value}


def _info(opened: OpenTag) -> TagInfo:
    """Return the entry of the tag in its directory."""
    info = next((info for info in list_tags(opened.storage) if info.tag == opened.tag), None)
    if info is None and is_whole_without_marks(opened.storage, opened.tag):
        info = replace(_UNMARKED, tag=opened.tag)
    if info is None:
        raise TagReplaced(f"{opened.where} was removed while it was read")
    return info


def _document(opened: OpenTag, info: TagInfo, rank: int, pattern: str | None, depth: int | None) -> dict[str, Any]:
    at = opened.topology.coordinates_of(rank)
    problems: list[str] = []
    document: dict[str, Any] = {
        "directory": opened.storage.url,
        **summary(opened, info),
        "latest": info == latest(list_tags(opened.storage)),
        **_manifest_fields(opened),
        "sizes": _sizes(opened),
        "meshes": None,
        "parameters": None,
        "optimizer": None,
        "user_content": None,
        "rank": rank,
        "tensors": None,
        "prefixes": None,
        "problems": problems,
    }
    with _collect_problems(problems):
        document["meshes"] = _meshes(opened)
    with _collect_problems(problems):
        document["parameters"] = parameters(opened, rank)
    with _collect_problems(problems):
        document["optimizer"] = optimizer(opened, at)
    with _collect_problems(problems):
        document["user_content"] = _user_content(opened)
    if pattern is not None:
        with _collect_problems(problems):
            document["tensors"] = tensors(opened, at, pattern, problems)
    if depth is not None:
        with _collect_problems(problems):
            document["prefixes"] = prefixes(opened, depth)
    return document


@contextmanager
def _collect_problems(problems: list[str]) -> Iterator[None]:
    """Turn errors of one part into ``problems``, so that the other parts are shown."""
    try:
        yield
    except CheckpointError as error:
        if str(error) not in problems:
            problems.append(str(error))


def _manifest_fields(opened: OpenTag) -> dict[str, Any]:
    """Return the facts that only a manifest records; tags without one have the same keys."""
    manifest = opened.manifest
    return {
        "attempt": None if manifest is None else manifest.attempt,
        "world_size": None if manifest is None else opened.topology.world_size,
        "standard_rank_order": None if manifest is None else opened.topology.rank_map is None,
        "versions": {} if manifest is None else dict(manifest.versions),
        "timings": {} if manifest is None else dict(manifest.timings),
    }


def _meshes(opened: OpenTag) -> list[dict[str, Any]] | None:
    """Return the device meshes of a mesh job, with the number of each form: stages and replicas may have their own."""
    if opened.mesh is None:
        return None
    counts: Counter[tuple[Any, Any]] = Counter()
    for mesh in opened.mesh.meshes():
        count, *shape = mesh.shape
        counts[mesh.names[1:], tuple(shape)] += count
    return [{"names": list(names), "shape": list(shape), "count": n} for (names, shape), n in counts.items()]


def _sizes(opened: OpenTag) -> dict[str, dict[str, int]]:
    """Return files and bytes of each part; ``other`` is unknown, or from an older layout."""
    sizes: dict[str, dict[str, int]] = {}
    files = TagFiles(opened.storage, opened.tag)
    for file in files_of(files):
        part = sizes.setdefault(_PART_OF.get(file.partition("/")[0], "other"), {"files": 0, "nbytes": 0})
        part["files"] += 1
        part["nbytes"] += opened.storage.size(files.key(file))
    return sizes


def _user_content(opened: OpenTag) -> dict[str, Any] | None:
    if not opened.parts.user_content:
        return None
    try:
        return {**content_document(opened.user_content()), "refused": None}
    except UnsafePickle as error:  # it was saved with trust_pickle=True
        return {"type": None, "entries": [], "refused": str(error)}


def optimizer(opened: OpenTag, at: Coordinates) -> dict[str, Any] | None:
    """Return kind, groups, and state entries of a tag's optimizer as one rank sees it; None if none was saved."""
    kind = opened.parts.optimizer
    if kind is None:
        return None
    tree = opened.optimizer_tree(at)
    state = _dict(tree.get("base_state")) or _dict(tree.get("state"))
    groups = [group for group in _list(tree.get("param_groups")) if isinstance(group, dict)]
    return {
        "kind": kind,
        "rank": opened.topology.rank_of(at),
        "parameters": sum(len(_list(group.get("params"))) for group in groups),
        "parameters_with_state": len(state),
        "entries": list(dict.fromkeys(str(name) for entries in state.values() for name in _dict(entries))),
        "master_weights": opened.parts.master_weights,
        "names_known": opened.optimizer_names(at) is not None,
        "param_groups": [
            {
                "parameters": len(_list(group.get("params"))),
                "optimizer": group.get(OPTIMIZER_NAME),
                "options": {str(key): plain(value) for key, value in group.items() if key not in _NO_OPTIONS},
            }
            for group in groups
        ],
    }


_NO_OPTIONS = ("params", OPTIMIZER_NAME)


def _dict(value: Any) -> dict[Any, Any]:
    """Return ``value`` if it is a dict, else an empty one, so that a malformed file can be shown."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_PART = re.compile(r"[^./]+[./]?")


def prefixes(opened: OpenTag, depth: int) -> list[dict[str, Any]]:
    """Describe the tensors that share the first ``depth`` parts of their names; parts end with a dot or slash.

    With 0, names that differ only in numbers and have one form are one group, and the prefix is their whole name.
    """
    if depth < 0:
        raise InvalidArgument(f"--by-prefix must be a number of parts, from 0 on, found {depth}")
    tensors = WholeTag(opened).tensors
    groups: dict[str, list[GlobalTensor]] = {}
    if depth > 0:
        for name, tensor in tensors.items():
            groups.setdefault("".join(_PART.findall(name)[:depth]), []).append(tensor)
        return [_of_group(prefix, members, opened.topology) for prefix, members in groups.items()]
    forms = ((name, (tensor.dtype, tensor.shape, tensor.partition)) for name, tensor in tensors.items())
    return [
        _of_group(name, [GlobalTensor(name, form[0], form[1], None, form[2])] * count, opened.topology)
        for name, count, form in group_names(forms)
    ]


def _of_group(prefix: str, members: list[GlobalTensor], topology: Topology) -> dict[str, Any]:
    shapes = dict.fromkeys(member.shape for member in members)
    sizes = [member.nbytes for member in members]
    known_sizes = [nbytes for nbytes in sizes if nbytes is not None]
    first = members[0].shape
    return {
        "prefix": prefix,
        "tensors": len(members),
        "dtypes": list(dict.fromkeys(member.dtype for member in members)),
        "shapes": len(shapes),
        "shape": None if len(shapes) > 1 or first is None else list(first),
        "nbytes": sum(known_sizes) if len(known_sizes) == len(sizes) else None,
        "cuts": list(
            dict.fromkeys(
                describe_partition(member.partition, topology) for member in members if member.partition is not None
            )
        ),
    }
