"""Everything that ``nxd-ckpt inspect`` says of one tag, as a JSON document."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nxd_ckpt.cli.optimizer import optimizer
from nxd_ckpt.cli.parameters import parameters
from nxd_ckpt.cli.prefixes import prefixes
from nxd_ckpt.cli.tensors import tensors
from nxd_ckpt.cli.values import content_document
from nxd_ckpt.core import names
from nxd_ckpt.core.tags import TagInfo, latest
from nxd_ckpt.errors import CheckpointError, TagReplaced, UnsafePickle
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.choosing import choose_tag
from nxd_ckpt.tag.directory import is_whole_without_marks, list_tags
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.identity import of_latest
from nxd_ckpt.tag.listing import locate, summary
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.opening import open_complete_tag
from nxd_ckpt.tag.verify import files_of

_PART_OF = {
    names.MODEL_DIR: "model",
    names.OPTIMIZER_DIR: "optimizer",
    names.SCHEDULER: "scheduler",
    names.USER_CONTENT: "user_content",
    names.RANK_CONTENT_DIR: "rank_content",
    names.INDEX_DIR: "index",
    names.MANIFEST: "index",
}


def inspection(
    path: str,
    tag: str | None,
    *,
    rank: int = 0,
    pattern: str | None = None,
    depth: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One complete tag, by default the latest of the directory ``path``, which may also be the tag itself.

    What a rank holds is said of ``rank``; its tensors are listed if there is a ``pattern``. With a
    ``depth`` the global tensors are told by prefix. What cannot be read is
    None, and ``problems`` says why.

    Raises:
        CheckpointNotFound: no such tag, or it is incomplete.
        MalformedFile: its manifest is damaged.
        InvalidArgument: no such rank.
    """
    directory, tag = locate(path, tag, options)
    storage = open_storage(directory, storage_options=options)

    def read() -> dict[str, Any]:
        opened = open_complete_tag(storage, choose_tag(storage, tag))
        with opened.kept():
            found = _document(opened, rank, pattern, depth)
            if found["problems"]:
                opened.require_kept()
        return found

    return of_latest(tag is None, read)


def _document(opened: OpenTag, rank: int, pattern: str | None, depth: int | None) -> dict[str, Any]:
    storage = opened.storage
    at = opened.topology.coordinates_of(rank)
    tags = list_tags(storage)
    info = next((info for info in tags if info.tag == opened.tag), None)
    if info is None and is_whole_without_marks(storage, opened.tag):
        info = TagInfo(opened.tag, math.inf, complete=True, ours=False)  # no marker tells when it was written
    if info is None:
        raise TagReplaced(f"{opened.where} was removed while it was read")
    problems: list[str] = []
    document: dict[str, Any] = {
        "directory": storage.url,
        **summary(opened, info),
        "latest": info == latest(tags),
        **_of_manifest(opened),
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
    with _noting(problems):
        document["meshes"] = _meshes(opened)
    with _noting(problems):
        document["parameters"] = parameters(opened)
    with _noting(problems):
        document["optimizer"] = optimizer(opened, at)
    with _noting(problems):
        document["user_content"] = _user_content(opened)
    if pattern is not None:
        with _noting(problems):
            document["tensors"] = tensors(opened, at, pattern)
    if depth is not None:
        with _noting(problems):
            document["prefixes"] = prefixes(opened, depth)
    return document


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """A part that cannot be read is a problem, and no reason to say nothing of the others."""
    try:
        yield
    except CheckpointError as error:
        if str(error) not in problems:
            problems.append(str(error))


def _of_manifest(opened: OpenTag) -> dict[str, Any]:
    """What only a manifest knows; with the same keys for tags without one."""
    manifest = opened.manifest
    return {
        "attempt": None if manifest is None else manifest.attempt,
        "world_size": None if manifest is None else opened.topology.world_size,
        "standard_rank_order": None if manifest is None else opened.topology.rank_map is None,
        "versions": {} if manifest is None else dict(manifest.versions),
        "timings": {} if manifest is None else dict(manifest.timings),
    }


def _meshes(opened: OpenTag) -> list[dict[str, Any]] | None:
    """The device meshes of a mesh job, how many there are of each form: stages and replicas may have their own."""
    if opened.mesh is None:
        return None
    counts: Counter[tuple[Any, Any]] = Counter()
    for mesh in opened.mesh.meshes():
        count, *shape = mesh.shape
        counts[mesh.names[1:], tuple(shape)] += count
    return [{"names": list(names), "shape": list(shape), "count": n} for (names, shape), n in counts.items()]


def _sizes(opened: OpenTag) -> dict[str, dict[str, int]]:
    """Files and bytes of each part that has any; ``other`` is what no version writes there, or an older layout."""
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
    except UnsafePickle as error:  # whoever saved it asked for that: trust_pickle=True
        return {"type": None, "entries": [], "refused": str(error)}
